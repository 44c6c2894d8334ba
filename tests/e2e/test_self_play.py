"""A run whose model plays a game against itself: both sides train, each on its own reward, and are judged apart."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from run_process import DEADLINE_S, environment, said_by

from slipstream.environments.tokenizer import TextCodec
from slipstream.orchestrator.replay import unpacked

EXAMPLE = Path(__file__).parents[2] / "examples" / "self_play.py"
PLAYING = (
    *("--environments.letters.path", "self_play:Stones"),
    *("--environments.letters.max-new-tokens", "1"),
    *("--environments.letters.age-out", "hold"),
    *("--orchestrator.total-steps", "2"),
    *("--orchestrator.samples-per-group", "8"),
    *("--evaluation.after", "true"),
)


@pytest.mark.timeout(590)
def test_both_sides_of_a_game_train_each_on_its_own_reward(launch: Any, tmp_path: Path) -> None:
    shutil.copy(EXAMPLE, tmp_path)
    run = launch("play", *PLAYING)
    assert run.end() == 0, run.output
    rollouts = {
        f"{each['group_id']}.{each['attempt']}.{each['sample']}": each
        for each in run.rollouts()
        if each["purpose"] == "training"
    }
    codec = TextCodec.load(run.path / "model")
    for each in rollouts.values():
        samples = [each, *each.get("further_samples", [])]
        assert [sample["role"] for sample in samples] == ["first", "second"]
        rewards = {role["role"]: role["reward"] for role in each["roles"]}
        assert sorted(rewards.values()) == [0.0, 1.0]
        assert sum(len(sample["loss_ranges"]) for sample in samples) == each["turns"]
        for sample, messages in zip(samples, each["conversations"], strict=True):
            said = [message["content"] for message in messages if message["role"] == "assistant"]
            sampled = [said_by(codec, sample["token_ids"][start:end]) for start, end in sample["loss_ranges"]]
            assert said == sampled
    groups: dict[str, list[dict[str, Any]]] = defaultdict(list)
    seen: set[str] = set()
    for record in run.journal():
        for plan in map(unpacked, record.get("plans", ())):
            for sequence in (each for batch in plan.micro_batches for each in batch.sequences):
                stored = rollouts[sequence.rollout_id]
                rewards = {role["role"]: role["reward"] for role in stored["roles"]}
                assert sequence.reward == rewards[sequence.role]
                groups[f"{sequence.group_id}/{sequence.role}"].append(
                    {"reward": sequence.reward, "advantage": sequence.advantage}
                )
                seen.add(sequence.role)
    assert seen == {"first", "second"}
    for members in groups.values():  # by itself, each role of a group has a mean of nought
        assert sum(each["advantage"] for each in members) == pytest.approx(0, abs=1e-6)
        for each in members:
            assert (each["advantage"] > 0) == (each["reward"] == 1.0 and each["advantage"] != 0)
    steps = run.metrics("step")
    for step in steps:
        assert step["reward_by_role"].keys() == {"letters/first", "letters/second"}
    (judged,) = run.metrics("evaluation")
    assert judged["accuracy_by_role"].keys() == {"first", "second"}
    assert run.report()["reward_by_role"] == steps[-1]["reward_by_role"]
    check_replay(run, tmp_path)


def check_replay(run: Any, folder: Path) -> None:
    """The trainer alone takes the same steps on what was stored, every side's samples among it."""
    asked = ["-m", "slipstream.launcher", "rl", "--replay-rollouts", str(run.path), f"--run.directory={folder}"]
    ended = subprocess.run(
        [sys.executable, *asked],
        env=environment(),
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    lines = (folder / f"{run.path.name}-replay" / "metrics.jsonl").read_text().splitlines()
    again, then = [json.loads(line) for line in lines], run.metrics("step")
    assert [record["step"] for record in again] == [record["step"] for record in then]
    assert not any(record["sequences_lost"] for record in again)
    assert [record["loss_tokens"] for record in again] == [record["loss_tokens"] for record in then]
