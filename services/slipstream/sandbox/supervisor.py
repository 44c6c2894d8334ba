"""Runs one program in a jail and holds it to its limits, on the calling thread, until nothing of it is left.

One poll loop: the gate, bubblewrap's status, the two outputs, its end, the kill switch, and a tick at which usage is
compared with limits. The kernel enforces what it can (cgroup, rlimits, size of /tmp); the tick finds which limit was
hit and ends what a limit alone would only slow down.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import resource
import select
import signal
import socket
import time
from contextlib import ExitStack, suppress

from slipstream.common.disk import no_file
from slipstream.sandbox.cgroup import PlaceGroup, Usage
from slipstream.sandbox.jail import FIRST_FILE_FD, GATE_FD, STATUS_FD, Jail
from slipstream.sandbox.processes import children, tree_usage
from slipstream.sandbox.program import Ended, KillSwitch, Outcome, Output, Program
from slipstream.sandbox.warden import Warden

START_TIMEOUT_S = 10.0
TICK_S = 0.05
TICK_WITHOUT_CGROUP_S = 0.02
KILL_GRACE_S = 2.0
READ_BYTES = 65536
MESSAGE_BYTES = 1000
MAX_OPEN_FILES = 256
FILES_SLACK_BYTES = 2**20
# Without a cgroup one process must not outrun the tick; with one, address space may well exceed memory.
ADDRESS_SPACE_FACTOR = 2
# The tick kills beyond the limit, so a program must be able to get there: rlimits lie just above it.
PROCESS_SLACK = 2
CPU_SLACK_S = 1


class SupervisionFailed(Exception):
    """A program did not end although it was killed; the machine is in trouble."""


class Supervision:
    """One program on its way from start to end. `run` once."""

    def __init__(
        self,
        jail: Jail,
        program: Program,
        group: PlaceGroup | None,
        warden: Warden,
        kill: KillSwitch,
        output: Output,
    ) -> None:
        self._warden = warden
        self._jail = jail
        self._program = program
        self._limits = program.limits
        self._group = group
        self._switch = kill
        self._output = output
        self._before = Usage()
        self._reason: Outcome | None = None
        self._status = b""
        self._counts = {"stdout": 0, "stderr": 0}
        self._truncated = False
        self._stderr_head = b""
        self._monitor = -1
        self._inner = -1  # pidfd of the program, process 1 of its namespace; -1 before "ready"
        self._inner_pid = 0
        self._started_s = 0.0
        self._cpu_s = 0.0
        self._peak_bytes = 0
        self._killed_s = 0.0
        self._killed_all = False

    def run(self) -> Ended:
        with ExitStack() as stack:
            try:
                return self._run(stack)
            finally:
                if self._monitor > 0:  # something unexpected: leave nothing behind
                    self._kill_all()
                    os.waitpid(self._monitor, 0)
                self._warden.ended(abs(self._monitor))

    # --- start

    def _run(self, stack: ExitStack) -> Ended:
        try:
            if self._group is not None:
                self._group.limit(self._limits.memory_bytes, self._limits.process_count)
                self._before = self._group.usage()
            self._started_s = time.monotonic()
            with ExitStack() as theirs:
                self._gate = self._spawn(stack, theirs)
        except OSError as error:  # less memory than a start takes, or more arguments than the kernel passes on
            if no_file(error):  # says nothing of the program
                raise
            return Ended(Outcome.NOT_STARTED, message=f"the jail did not start: {error.strerror}")
        self._ended = _keep(stack, os.pidfd_open(self._monitor))
        self._readers = {self._stdout: "stdout", self._stderr: "stderr"}
        poll = select.poll()
        for descriptor in (self._ended, self._gate, self._status_end, self._switch.descriptor, *self._readers):
            poll.register(descriptor, select.POLLIN)
        usage = self._loop(poll, stack)
        for descriptor in self._readers:
            while self._read_output(descriptor):
                pass
        self._read_status()
        return self._end(usage)

    def _spawn(self, stack: ExitStack, theirs: ExitStack) -> int:
        """Start bubblewrap. Descriptors of its side close when `theirs` does."""
        floor = FIRST_FILE_FD + len(self._program.files)  # below lie the numbers that the child wants
        self._stdout, stdout = _pipe(stack, theirs, floor)
        self._stderr, stderr = _pipe(stack, theirs, floor)
        self._status_end, status = _pipe(stack, theirs, floor)
        ours, gate = socket.socketpair()
        ours.setblocking(False)
        gate_end = _keep(stack, ours.detach())
        wanted = [
            (_keep(theirs, _input(self._program.stdin, floor)), 0),
            (stdout, 1),
            (stderr, 2),
            (_keep(theirs, _above(gate.detach(), floor)), GATE_FD),
            (status, STATUS_FD),
        ]
        for index, data in enumerate(self._program.files.values()):
            wanted.append((_keep(theirs, _above(_memory_file(data), floor)), FIRST_FILE_FD + index))
        files_bytes = sum(len(data) for data in self._program.files.values()) + FILES_SLACK_BYTES
        command = self._jail.command(
            self._program.argv, self._program.env, self._program.files, self._limits.tmp_bytes, files_bytes
        )
        self._monitor = os.posix_spawn(
            self._jail.program,
            command,
            self._jail.environment(),
            file_actions=[(os.POSIX_SPAWN_DUP2, source, target) for source, target in wanted],
            setpgroup=0,
            setsigmask=[],
            setsigdef=[signal.SIGPIPE, signal.SIGINT, signal.SIGTERM],
        )
        self._warden.started(self._monitor)
        return gate_end

    def _open_gate(self, stack: ExitStack) -> None:
        """The gate is ready: bound its process, then let it become the program."""
        self._read_status()
        try:
            self._inner_pid = int(json.loads(self._status.partition(b"}")[0] + b"}")["child-pid"])
            self._inner = _keep(stack, os.pidfd_open(self._inner_pid))
            self._set_rlimits(self._inner_pid)
            if self._group is not None:
                self._group.add(self._inner_pid)
        except ProcessLookupError:
            return  # it died meanwhile; the loop will see
        if self._reason is None:
            self._started_s = time.monotonic()
            os.write(self._gate, b"go\n")
        else:
            self._kill_inner()

    def _set_rlimits(self, pid: int) -> None:
        limits = self._limits
        values = {
            resource.RLIMIT_CORE: 0,
            resource.RLIMIT_CPU: math.ceil(limits.cpu_s) + CPU_SLACK_S,
            resource.RLIMIT_FSIZE: limits.tmp_bytes,
            resource.RLIMIT_NOFILE: MAX_OPEN_FILES,
            resource.RLIMIT_NPROC: limits.process_count + PROCESS_SLACK,
            resource.RLIMIT_MEMLOCK: 0,
        }
        if self._group is None:
            values[resource.RLIMIT_AS] = limits.memory_bytes * ADDRESS_SPACE_FACTOR
        for kind, value in values.items():
            hard = resource.prlimit(pid, kind)[1]
            value = value if hard == resource.RLIM_INFINITY else min(value, hard)
            resource.prlimit(pid, kind, (value, value))

    # --- while it runs

    def _loop(self, poll: select.poll, stack: ExitStack) -> resource.struct_rusage:
        """Until bubblewrap has ended, and with it, as process 1 is gone, all of the sandbox."""
        tick_s = TICK_S if self._group is not None else TICK_WITHOUT_CGROUP_S
        next_tick_s = self._started_s + tick_s
        while True:
            now_s = time.monotonic()
            for descriptor, _ in poll.poll(max(0.0, min(next_tick_s, self._deadline_s()) - now_s) * 1000):
                if descriptor == self._ended:
                    pid, _, usage = os.wait4(self._monitor, 0)
                    self._monitor = -pid
                    return usage
                if descriptor == self._switch.descriptor:
                    poll.unregister(descriptor)
                    self._kill(self._switch.reason or Outcome.CANCELLED)
                elif descriptor == self._gate:
                    poll.unregister(descriptor)
                    if _received(descriptor):
                        self._open_gate(stack)
                elif descriptor == self._status_end:
                    if not self._read_status():
                        poll.unregister(descriptor)
                elif not self._read_output(descriptor):
                    poll.unregister(descriptor)
            now_s = time.monotonic()
            if now_s >= next_tick_s:
                next_tick_s = now_s + tick_s
                self._tick()
                self._output.flush()
            if now_s >= self._deadline_s():
                self._overdue(now_s)

    def _deadline_s(self) -> float:
        if self._killed_s:
            return self._killed_s + KILL_GRACE_S
        return self._started_s + (self._limits.wall_s if self._inner >= 0 else START_TIMEOUT_S)

    def _overdue(self, now_s: float) -> None:
        if not self._killed_s:
            self._kill(Outcome.WALL_LIMIT if self._inner >= 0 else Outcome.NOT_STARTED)
        elif not self._killed_all:
            self._killed_all, self._killed_s = True, now_s
            self._kill_all()
        else:
            raise SupervisionFailed(f"process {self._monitor} did not end {KILL_GRACE_S} s after SIGKILL")

    def _tick(self) -> None:
        """Compare usage with limits; the first that is passed is the outcome."""
        if self._inner < 0 or self._reason is not None:
            return
        if self._group is not None:
            now = self._group.usage()
            self._note(now)
            out_of_memory = now.out_of_memory_count > self._before.out_of_memory_count
            too_many = now.process_limit_count > self._before.process_limit_count
        else:
            tree = tree_usage(self._inner_pid)
            self._peak_bytes = max(self._peak_bytes, tree.memory_bytes)
            out_of_memory = tree.memory_bytes > self._limits.memory_bytes
            too_many = tree.task_count > self._limits.process_count
            self._cpu_s = max(self._cpu_s, tree.cpu_s)
        if out_of_memory:
            self._kill(Outcome.MEMORY_LIMIT)
        elif too_many:
            self._kill(Outcome.PROCESS_LIMIT)
        elif self._cpu_s > self._limits.cpu_s:
            self._kill(Outcome.CPU_LIMIT)

    def _note(self, now: Usage) -> None:
        self._cpu_s = now.cpu_s - self._before.cpu_s
        used_bytes = max(now.memory_bytes, now.memory_peak_bytes)
        self._peak_bytes = max(self._peak_bytes, used_bytes - self._before.memory_bytes)

    def _kill(self, reason: Outcome) -> None:
        """Kill the program, which takes all of the sandbox along. The first reason stays.

        One that has not begun ends at the gate: killed earlier, bubblewrap could leave its inner process behind.
        """
        if self._reason is None:
            self._reason = reason
            self._killed_s = time.monotonic()
            if self._inner >= 0:
                self._kill_inner()

    def _kill_inner(self) -> None:
        with suppress(ProcessLookupError):  # it has just ended by itself
            signal.pidfd_send_signal(self._inner, signal.SIGKILL)

    def _kill_all(self) -> None:
        """When killing the program did not help: what bubblewrap started, then itself."""
        for pid in [*children(self._monitor), self._monitor]:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)

    def _read_status(self) -> bool:
        data = _received(self._status_end)
        self._status += data
        return bool(data)

    def _read_output(self, descriptor: int) -> bool:
        """Pass on what is there, up to the limit. False at the end of the stream, or when nothing is there."""
        data = _received(descriptor)
        if not data:
            return False
        stream = self._readers[descriptor]
        room = self._limits.output_bytes - sum(self._counts.values())
        self._counts[stream] += len(data)
        if stream == "stderr" and len(self._stderr_head) < MESSAGE_BYTES:
            self._stderr_head += data[:MESSAGE_BYTES]
        if len(data) > room:
            self._truncated = True
            self._kill(Outcome.OUTPUT_LIMIT)
            data = data[: max(0, room)]
        if data:
            self._output.write(stream, data)
        return True

    # --- afterwards

    def _end(self, usage: resource.struct_rusage) -> Ended:
        wall_s = time.monotonic() - self._started_s
        # Children that the kernel reaped, since nobody waited for them, are in no rusage.
        exit_code = self._exit_code()
        outcome, message = self._reason, ""
        if self._group is not None:
            now = self._group.usage()
            self._note(now)
            if outcome in (None, Outcome.WALL_LIMIT) and now.out_of_memory_count > self._before.out_of_memory_count:
                outcome = Outcome.MEMORY_LIMIT
        cpu_s = max(self._cpu_s, usage.ru_utime + usage.ru_stime)
        if outcome is None and exit_code is None:
            outcome = Outcome.NOT_STARTED
        if outcome is Outcome.NOT_STARTED:
            message = self._stderr_head[:MESSAGE_BYTES].decode(errors="replace").strip() or "the jail did not start"
        exit_code = exit_code or 0
        signum = exit_code - 128 if 128 < exit_code <= 128 + signal.NSIG else 0
        if outcome is None and signum in (signal.SIGKILL, signal.SIGXCPU) and cpu_s >= self._limits.cpu_s:
            outcome = Outcome.CPU_LIMIT
        if outcome is None:
            outcome = Outcome.SIGNALED if signum else Outcome.EXITED
        return Ended(
            outcome=outcome,
            exit_code=exit_code,
            signal=signum,
            cpu_s=cpu_s,
            wall_s=wall_s,
            max_memory_bytes=self._peak_bytes,  # not ru_maxrss: that starts from ours, through vfork
            stdout_bytes=self._counts["stdout"],
            stderr_bytes=self._counts["stderr"],
            truncated=self._truncated,
            message=message,
        )

    def _exit_code(self) -> int | None:
        """From bubblewrap's last status line; there is none when the jail was not finished."""
        _, found, rest = self._status.rpartition(b'"exit-code":')
        return int(rest.partition(b"}")[0]) if found else None


def _keep(stack: ExitStack, descriptor: int) -> int:
    stack.callback(os.close, descriptor)
    return descriptor


def _above(descriptor: int, floor: int) -> int:
    """The same file under a number of at least `floor`."""
    if descriptor >= floor:
        return descriptor
    moved = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, floor)
    os.close(descriptor)
    return moved


def _pipe(stack: ExitStack, theirs: ExitStack, floor: int) -> tuple[int, int]:
    """(our reading end, which does not block; their writing end)."""
    reader, writer = os.pipe2(os.O_CLOEXEC)
    os.set_blocking(reader, False)
    return _keep(stack, reader), _keep(theirs, _above(writer, floor))


def _input(data: bytes, floor: int) -> int:
    descriptor = _memory_file(data) if data else os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    return _above(descriptor, floor)


def _memory_file(data: bytes) -> int:
    """A file of `data` that nobody can change, at its beginning."""
    descriptor = os.memfd_create("sandbox", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]
    os.lseek(descriptor, 0, os.SEEK_SET)
    seals = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    return descriptor


def _received(descriptor: int) -> bytes:
    """What can be read now; nothing also at the end of the stream."""
    try:
        return os.read(descriptor, READ_BYTES)
    except (BlockingIOError, ConnectionResetError):
        return b""
