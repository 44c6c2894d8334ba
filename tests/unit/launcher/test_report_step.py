"""The picture of one step in the report."""

from __future__ import annotations

from typing import Any

from slipstream.launcher.records import RunRecords
from slipstream.launcher.report_step import MAX_ROLLOUTS, picture_of_a_step


def records_of(trained: list[dict[str, Any]], spans: list[dict[str, Any]]) -> RunRecords:
    return RunRecords("run", {}, [], {"trainer": trained} if trained else {}, [], spans={"runner-1": spans})


def step(number: int, **more: Any) -> list[dict[str, Any]]:
    begin_s = 10.0 * number
    return [
        {"kind": "train_step", "step": number, "start_s": begin_s, "end_s": begin_s + 4, **more},
        {"kind": "publish", "step": number, "start_s": begin_s + 4, "end_s": begin_s + 5},
    ]


def decode(group: int, start_s: float, index: int = 0) -> list[dict[str, Any]]:
    shared = {"kind": "span", "trace": f"trace-{group}.{index}"}
    name = f"train-{group}.1.{index}"
    return [
        {**shared, "name": "rollout", "rollout": name, "start_s": start_s - 1, "end_s": start_s + 3},
        {**shared, "name": "decode", "start_s": start_s, "end_s": start_s + 2},
    ]


def test_there_is_none_before_the_first_step():
    assert picture_of_a_step(records_of([], [])) is None


def test_without_traces_it_is_from_the_step_before_to_the_publishing_of_the_middle_one():
    picture = picture_of_a_step(records_of([*step(1), *step(2), *step(3)], []))
    assert picture is not None
    assert (picture.number, picture.begin_s, picture.end_s, picture.tracks) == (2, 14.0, 25.0, [])


def test_a_step_with_traced_rollouts_is_preferred_and_shows_the_first_of_each_group_by_dispatch():
    count = MAX_ROLLOUTS - 2
    links = [[f"trace-{n}.{index}", "root"] for n in range(count) for index in range(4)]
    spans = [span for n in range(count) for index in range(4) for span in decode(n, 9.0 - 0.1 * n, index)]
    picture = picture_of_a_step(records_of([*step(1, links=links), *step(2), *step(3)], spans))
    assert picture is not None
    assert picture.number == 1
    seconds = {count - 1, count - 2}
    expected = [f"train-{n}.1.{index}" for n in reversed(range(count)) for index in ((0, 1) if n in seconds else (0,))]
    assert [track.name for track in picture.tracks] == expected
    ((interval, _),) = picture.tracks[0].intervals
    assert interval == (9.0 - 0.1 * (count - 1), 11.0 - 0.1 * (count - 1))
    assert (picture.begin_s, picture.end_s) == (interval[0], 15.0)
