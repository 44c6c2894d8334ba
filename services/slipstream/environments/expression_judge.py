"""Runs inside the sandbox: evaluates each expression in a child with limits of its own. Standard library only.

Reads {"targets", "cpu_s", "memory_bytes", "expressions"} as a Python literal and prints one JSON line a sample. One
child judges them all; where it dies, the sample it was at has failed and another child goes on with the next.

Only modules that are built in are imported: `ast` and `json` would double the time of a run.
"""

import _ast
import os
import resource
import signal
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

CHARACTERS = frozenset("0123456789+-*/%() ")
NODES = (_ast.Expression, _ast.BinOp, _ast.UnaryOp, _ast.Constant, _ast.operator, _ast.unaryop)
SYNTAX_TREE_ONLY = 0x400
"""The flag that `ast.parse` hands to `compile`."""


def judge(text: str | None, target: int) -> tuple[str, bool, int | None]:
    """Outcome, whether it is right, and a small whole value. Raises whatever evaluating it raises."""
    if text is None:
        return "no end token", False, None
    if not text or not CHARACTERS.issuperset(text):
        return "not an expression", False, None
    # As `eval` does: a leading space is no indentation.
    tree: Any = compile(text.lstrip(" "), "expression", "eval", SYNTAX_TREE_ONLY)
    operators = 0
    nodes = [tree]
    while nodes:
        node = nodes.pop()
        if not isinstance(node, NODES):
            return "not an expression", False, None
        if isinstance(node, _ast.Constant):
            if not (type(node.value) is int and 0 <= node.value <= 9):
                return "a literal has more than one digit", False, None
            continue
        operators += isinstance(node, _ast.BinOp)
        nodes += [getattr(node, field) for field in node._fields]
    if not operators:
        return "no operator", False, None
    value = eval(compile(tree, "expression", "eval"), {"__builtins__": {}})
    correct = not isinstance(value, complex) and value == target
    if isinstance(value, int) and abs(value) < 10**9:
        return "evaluated", correct, value
    return type(value).__name__, correct, None


def line(sample: int, outcome: str, correct: bool = False, value: int | None = None) -> bytes:
    """One verdict as JSON; outcomes are our own words and need no escapes."""
    right = "true" if correct else "false"
    shown = "null" if value is None else int(value)
    return f'{{"sample": {sample}, "outcome": "{outcome}", "correct": {right}, "value": {shown}}}\n'.encode()


def child(write_fd: int, request: dict, first: int) -> None:
    """Judge from `first` on; a line goes out before the next sample begins."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (request["memory_bytes"],) * 2)
    for sample in range(first, len(request["expressions"])):
        # Processor time, not the clock: a busy machine changes no verdict. The signal's own action ends the child.
        signal.setitimer(signal.ITIMER_PROF, request["cpu_s"])
        try:
            verdict = line(sample, *judge(request["expressions"][sample], request["targets"][sample]))
        except (ArithmeticError, SyntaxError, ValueError, MemoryError, RecursionError, TypeError) as error:
            verdict = line(sample, type(error).__name__)
        os.write(write_fd, verdict)


def main() -> None:
    request = eval(sys.stdin.read(), {"__builtins__": {}})
    first = 0
    while first < len(request["expressions"]):
        read_fd, write_fd = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(read_fd)
            try:
                child(write_fd, request, first)
            finally:
                os._exit(0)
        os.close(write_fd)
        with os.fdopen(read_fd, "rb") as verdicts:
            for verdict in verdicts:
                sys.stdout.write(verdict.decode())
                first += 1
        os.waitpid(pid, 0)
        if first < len(request["expressions"]):
            sys.stdout.write(line(first, "killed").decode())
            first += 1


if __name__ == "__main__":
    main()
