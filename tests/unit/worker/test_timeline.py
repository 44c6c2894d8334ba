"""What a worker's timeline file holds."""

from __future__ import annotations

import json

from slipstream.engine.base import BusyInterval
from slipstream.engine.worker.timeline import Timeline


def test_short_gaps_are_bridged_and_kinds_kept_apart(tmp_path):
    path = tmp_path / "timeline" / "decode-1.jsonl"
    timeline = Timeline(path)
    timeline.add([BusyInterval("decode", 1.0, 1.5), BusyInterval("prefill", 1.1, 1.2)], 1.5)
    timeline.add([BusyInterval("decode", 1.51, 2.0), BusyInterval("decode", 2.1, 2.2)], 2.3)
    timeline.record("update", 2.25, 2.3, version="1.4")
    timeline.close()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(line["kind"], line["start_s"], line["end_s"]) for line in lines] == [
        ("decode", 1.0, 2.0),
        ("prefill", 1.1, 1.2),
        ("update", 2.25, 2.3),
        ("decode", 2.1, 2.2),
    ]
