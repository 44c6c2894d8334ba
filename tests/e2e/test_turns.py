"""A run whose environment takes turns: its rollouts train, and are what the environment heard and said."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from rollout_traces import TRACED, check_lives, check_tree
from run_process import PREFILLING, said_by

from slipstream.environments.tokenizer import TextCodec

EXAMPLE = Path(__file__).parents[2] / "examples" / "guess_the_number.py"
GUESSING = (
    "--environments.letters.path",
    "guess_the_number:GuessTheNumber",
    "--environments.letters.max-new-tokens",
    "1",
    "--model.max-context-tokens",
    "96",
    "--evaluation.after",
    "true",
)


@pytest.mark.timeout(590)
def test_an_environment_that_takes_turns_trains(launch: Any, tmp_path: Path) -> None:
    shutil.copy(EXAMPLE, tmp_path)
    run = launch("turns", *PREFILLING, *GUESSING, *TRACED)
    assert run.end() == 0, run.output
    assert [record["step"] for record in run.metrics("step")][-1] == 4
    codec = TextCodec.load(run.path / "model")
    rollouts = [each for each in run.rollouts() if each["purpose"] == "training"]
    assert {each["environment"] for each in rollouts} == {"letters"}
    assert max(each["turns"] for each in rollouts) == 4
    for each in rollouts:
        assert len(each["loss_ranges"]) == each["turns"]
        (messages,) = each["conversations"]
        said = [message["content"] for message in messages if message["role"] == "assistant"]
        sampled = [said_by(codec, each["token_ids"][start:end]) for start, end in each["loss_ranges"]]
        assert said == sampled
        heard = codec.decode(each["token_ids"][: each["loss_ranges"][0][0]])
        assert heard == "0-9?\n"
        counted = sum(count for count, _ in each["versions"])
        assert counted == sum(end - start for start, end in each["loss_ranges"])
    assert any(each["cached_token_count"] for each in rollouts if each["turns"] > 1)
    lives = check_lives(run)
    by_name = {f"{each['group_id']}.{each['attempt']}.{each['sample']}": each for each in rollouts}
    for name, spans in lives.items():
        check_tree(spans, name)
        names = [span["name"] for span in spans.values()]
        turns = by_name[name]["turns"]
        assert [names.count(each) for each in ("turn", "tools", "environment_step")] == [turns, turns, turns], name
        assert names.count("Decode") >= turns - 1, "all but the first, which its group shares, are asked for by itself"
    assert any("prefill" in {span["name"] for span in spans.values()} for spans in lives.values())
    journal = [record for record in run.journal() if record["kind"] == "sealed"]
    assert len(journal) == 4
