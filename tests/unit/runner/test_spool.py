"""The spool: rows and reports outlive the process, whatever of a file a crash or a bad disk leaves."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from slipstream.api.rollout.v1 import runner_pb2
from slipstream.common.errors import TooManyFiles
from slipstream.runner import spool_file
from slipstream.runner.spool import BLOCK_BYTES, Rows, Spool

Start = Callable[..., Spool]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts processes of one runner one after another, in the life of this one: `start(epoch="2")`."""
    started: list[Spool] = []

    def make(epoch: str = "1", limit_bytes: int = 1 << 20, directory: Path = tmp_path / "spool") -> Spool:
        if started:
            started[-1].close()
        started.append(Spool(directory, limit_bytes, epoch))
        return started[-1]

    yield make
    started[-1].close()


def report(group_id: str, attempt: int = 1) -> runner_pb2.GroupReport:
    return runner_pb2.GroupReport(
        group=runner_pb2.GroupAttempt(group_id=group_id, attempt=attempt), outcome=runner_pb2.GROUP_OUTCOME_FINISHED
    )


def rows(name: str, data: bytes = b"01234567") -> dict[str, Rows]:
    return {f"t/{name}.0": Rows(data), f"l/{name}.0": Rows(data[::-1], 2)}


def held(spool: Spool, key: str, epoch: str = "") -> bytes | None:
    found = spool.get(key, epoch)
    return None if found is None else found.data


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while True:
            if condition():
                return
            await asyncio.sleep(0.01)


def files(spool: Spool) -> list[Path]:
    return sorted(spool._directory.iterdir())


async def test_rows_and_reports_are_served_by_the_process_that_comes_after(start: Start) -> None:
    before = start("1")
    for name in ("a", "b"):
        await before.keep(name, report(name), rows(name))
    assert held(before, "l/a.0", "1") == b"76543210"
    spool = start("2")
    assert [each.group.group_id for each in spool.reports()] == ["a", "b"]
    found = spool.get("l/b.0", "1")
    assert found is not None
    assert (found.data, found.first_position) == (b"76543210", 2)
    assert spool.size_bytes == before.size_bytes == 2 * BLOCK_BYTES


async def test_references_of_another_epoch_get_nothing(start: Start) -> None:
    await start("1").keep("a", report("a"), rows("a"))
    spool = start("2")
    assert [held(spool, "t/a.0", epoch) for epoch in ("", "1", "2")] == [b"01234567", b"01234567", None]


async def test_what_is_kept_under_a_name_replaces_what_was(start: Start) -> None:
    await start("1").keep("a", report("a"), {**rows("a"), "t/a.1": Rows(b"gone")})
    spool = start("2")
    await spool.keep("a", report("a"), rows("a", b"later"))
    await spool.sweep()
    assert [held(spool, "t/a.0", "1"), held(spool, "t/a.0", "2"), held(spool, "t/a.1")] == [None, b"later", None]
    assert (len(files(spool)), spool.size_bytes) == (1, BLOCK_BYTES)


async def test_a_name_that_is_given_out_again_is_not_reported_as_what_it_was(start: Start) -> None:
    """The orchestrator's journal lost its end with the machine, and counts attempts from before."""
    await start("1").keep("a", report("a"), rows("a"))
    spool = start("2")
    reports = spool.reports()
    spool.begin("a", runner_pb2.GroupAssignment(group_id="a", attempt=1))
    assert list(reports) == []
    assert (held(spool, "t/a.0"), spool.size_bytes) == (None, BLOCK_BYTES)
    await spool.keep("a", report("a"), rows("a", b"later"))
    await spool.sweep()
    assert [held(spool, "t/a.0", "1"), held(spool, "t/a.0", "2")] == [None, b"later"]
    assert [path.suffix for path in files(spool)] == [".rows"]


async def test_of_two_files_of_one_group_under_way_the_later_is_taken_up_once(start: Start) -> None:
    before = start("1")
    for task in (1, 2):  # the file of the first is not removed yet when the process dies
        before.begin("a", runner_pb2.GroupAssignment(group_id="a", attempt=1, task_index=task))
    assert len(files(before)) == 2
    spool = start("2")
    assert [(each.name, each.assignment.task_index) for each in spool.unfinished] == [("a", 2)]
    await spool.sweep()
    assert len(files(spool)) == 1


async def test_a_report_that_cannot_be_read_is_left_out(start: Start) -> None:
    spool = start("1")
    for name in ("a", "b"):
        await spool.keep(name, report(name), rows(name))
    files(spool)[0].unlink()
    assert [each.group.group_id for each in spool.reports()] == ["b"]


async def test_a_full_spool_says_so_and_drops_nothing(start: Start) -> None:
    spool = start(limit_bytes=2 * BLOCK_BYTES)
    await spool.keep("a", report("a"), rows("a"))
    assert not spool.full
    await spool.keep("b", report("b"), rows("b"))
    assert spool.full
    assert held(spool, "t/a.0") == b"01234567"
    spool.release("t/a.0")
    assert spool.full
    spool.release("l/a.0")
    assert not spool.full


async def test_a_file_goes_with_its_last_row_and_a_key_is_released_once(start: Start) -> None:
    spool = start()
    await spool.keep("a", report("a"), rows("a"))
    assert held(spool, "t/a.0") == b"01234567"
    assert [spool.release(key) for key in ("t/a.0", "t/a.0", "never")] == [True, False, False]
    assert (held(spool, "t/a.0"), held(spool, "l/a.0")) == (None, b"76543210")
    assert spool.release("l/a.0")
    await spool.sweep()
    assert (files(spool), spool.size_bytes, list(spool.reports())) == ([], 0, [])


async def test_a_group_that_was_cut_off_while_it_was_written_is_one_that_never_finished(start: Start) -> None:
    before = start("1")
    before.begin("a", runner_pb2.GroupAssignment(group_id="a", attempt=3))
    unfinished = files(before)[0].read_bytes()
    await before.keep("a", report("a", 3), rows("a"))
    await before.sweep()
    (file,) = files(before)
    whole = file.read_bytes()
    for cut in range(len(whole)):
        file.write_bytes(whole[:cut])
        file.with_suffix(".turns").write_bytes(unfinished)
        spool = start("2")
        assert held(spool, "t/a.0") is None
        assert [(each.name, each.assignment.attempt) for each in spool.unfinished] == [("a", 3)]
        await spool.sweep()
        assert [path.suffix for path in files(spool)] == [".turns"]


async def test_a_changed_byte_is_never_served_and_costs_no_more_than_it_must(start: Start) -> None:
    before = start("1")
    await before.keep("a", report("a"), rows("a"))
    (file,) = files(before)
    whole = file.read_bytes()
    expected = {"t/a.0": b"01234567", "l/a.0": b"76543210", "report": b"a"}
    for index in range(len(whole)):
        file.write_bytes(whole[:index] + bytes([whole[index] ^ 0x10]) + whole[index + 1 :])
        spool = start("2")
        found = {key: data for key in ("t/a.0", "l/a.0") if (data := held(spool, key)) is not None}
        for again in spool.reports():
            found["report"] = again.group.group_id.encode()
        assert found.items() < expected.items()
        for key in ("t/a.0", "l/a.0"):
            if 0 <= index - whole.index(expected[key]) < 8:
                assert expected.keys() - found.keys() == {key}


async def test_groups_under_way_are_found_with_what_was_appended_last_left_out_if_torn(start: Start) -> None:
    before = start("1")
    for name in ("a", "b", "c"):
        before.begin(name, runner_pb2.GroupAssignment(group_id=name, attempt=1))
    before.drop("b")
    await before.sweep()
    with files(before)[0].open("ab") as file:
        file.write(b"".join(spool_file.encode({"kind": "turn"}, b"torn"))[:-1])
    spool = start("2")
    assert [(each.name, each.resumed_count) for each in spool.unfinished] == [("a", 1), ("c", 1)]
    assert spool.torn_bytes > 0
    again = start("3")
    assert [(each.name, each.resumed_count) for each in again.unfinished] == [("a", 2), ("c", 2)]
    assert again.torn_bytes == 0
    await again.keep("a", report("a"), rows("a"))
    assert [each.name for each in start("4").unfinished] == ["c"]


async def test_a_group_given_up_while_it_is_written_leaves_no_file(start: Start) -> None:
    spool = start()
    keeping = asyncio.create_task(spool.keep("a", report("a"), rows("a", bytes(1 << 20))))
    await asyncio.sleep(0)
    keeping.cancel()
    with pytest.raises(asyncio.CancelledError):
        await keeping
    await until(lambda: bool(spool._dead))  # the thread goes on to its end
    await spool.sweep()
    assert files(spool) == []
    assert (spool.size_bytes, held(spool, "t/a.0")) == (0, None)


async def test_groups_wait_for_room_on_a_full_disk_and_none_is_lost(small_disk, start: Start) -> None:
    disk = small_disk(256 * 1024)
    spool = start(directory=disk.path / "spool")
    disk.fill()
    spool.begin("a", runner_pb2.GroupAssignment(group_id="a"))  # not remembered, and no harm
    keeping = [asyncio.create_task(spool.keep(n, report(n), rows(n, bytes(16384)))) for n in ("a", "b", "c")]
    await until(lambda: spool.waiting_count == 3)
    assert not [task for task in keeping if task.done()]
    disk.free()
    async with asyncio.timeout(30):
        await asyncio.gather(*keeping)
    assert spool.waiting_count == 0
    assert [held(spool, f"t/{n}.0") for n in ("a", "b", "c")] == [bytes(16384)] * 3
    assert sorted(each.group.group_id for each in start("2", directory=disk.path / "spool").reports()) == [
        "a",
        "b",
        "c",
    ]


async def test_groups_wait_until_their_files_may_be_opened_and_none_is_lost(open_files, start: Start) -> None:
    spool = start()
    await asyncio.to_thread(lambda: None)  # a thread to write in
    open_files.exhaust()
    with capture_logs() as logs:
        keeping = asyncio.create_task(spool.keep("a", report("a"), rows("a")))
        await until(lambda: spool.waiting_count == 1)
        open_files.free()
        async with asyncio.timeout(30):
            await keeping
    assert [(entry["event"], entry["reason"]) for entry in logs] == [("spool_waits_for_room", "TOO_MANY_FILES")]
    assert held(spool, "t/a.0") == b"01234567"


async def test_rows_that_cannot_be_opened_now_are_neither_missing_nor_damaged(open_files, start: Start) -> None:
    spool = start()
    for name in ("a", "b"):
        await spool.keep(name, report(name), rows(name))
    open_files.exhaust()
    with capture_logs() as logs:
        with pytest.raises(TooManyFiles):
            held(spool, "t/a.0")
        with pytest.raises(TooManyFiles):
            list(spool.reports())
        open_files.free()
        assert held(spool, "t/a.0") == b"01234567"
        assert [each.group.group_id for each in spool.reports()] == ["a", "b"]
    assert logs == []


async def test_of_files_that_were_read_one_is_closed_for_another(open_files, start: Start) -> None:
    spool = start()
    for name in ("a", "b", "c"):
        await spool.keep(name, report(name), rows(name))
    held(spool, "t/a.0")
    open_files.exhaust()
    assert [held(spool, f"t/{name}.0") for name in ("b", "c", "a")] == [b"01234567"] * 3
