"""`slipstream sft` on conversations, as it is typed: bad data, a stop, going on, and the model that is left."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from slipstream.launcher.ports import PortLease, take_ports
from slipstream.models.checkpoint import save_model
from slipstream.models.registry import find_architecture, load_sizes
from tests.unit.chat.conversations import PLAIN_TEMPLATE, sizes, sums, write_rows, write_tokenizer

TOML = """
[run]
name = "chat"
directory = "{root}/runs"

[start]
initial = "{root}/start"

[data]
train = "{root}/rows.jsonl"
validation_rows = 4
max_tokens = 64

[training]
tokens_per_step = 300
epochs = 40
validate_every = 50

[optim]
lr = 1e-2
"""
DEADLINE_S = 90.0


@pytest.fixture
def root(tmp_path: Path) -> Path:
    model = find_architecture("llama").build_model(sizes())
    find_architecture("llama").init_weights(model, 1)
    save_model(model, tmp_path / "start")
    write_tokenizer(tmp_path / "start", PLAIN_TEMPLATE)
    write_rows(tmp_path / "rows.jsonl", [*sums(30), "{}"])
    (tmp_path / "sft.toml").write_text(TOML.format(root=tmp_path))
    return tmp_path


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "slipstream.launcher", "sft", *map(str, arguments)]


def steps_of(run: Path) -> list[int]:
    file = run / "metrics.jsonl"
    records = map(json.loads, file.read_text().splitlines()) if file.exists() else ()
    return [record["step"] for record in records if "loss" in record]


@pytest.mark.timeout(240)
def test_a_stopped_fine_tuning_goes_on_where_it_was_and_leaves_a_model(root):
    run = root / "runs" / "chat"
    asked = command("@", root / "sft.toml")
    refused = subprocess.run(asked, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert refused.returncode == 2
    assert "leaves them out\n  " in refused.stderr
    assert "rows.jsonl, line 31: messages: Field required" in refused.stderr
    assert not run.exists()

    with subprocess.Popen([*asked, "--data.bad-rows=skip"], stdout=subprocess.PIPE, text=True) as process:
        deadline = time.monotonic() + DEADLINE_S
        while len(steps_of(run)) < 5:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        process.send_signal(signal.SIGTERM)
        said, _ = process.communicate(timeout=DEADLINE_S)
        assert process.returncode == 128 + signal.SIGTERM
    assert f"slipstream sft --resume {run}" in said
    taken = steps_of(run)
    assert taken == list(range(1, len(taken) + 1))
    assert not (run / "model" / "config.json").exists()

    ended = resumed(run, "--training.nproc=2", f"--training.max-steps={len(taken) + 3}")
    assert f"goes on after step {len(taken)}" in ended.stdout
    assert steps_of(run) == list(range(1, len(taken) + 4))
    assert load_sizes(run / "model") == sizes()
    assert (run / "model" / "tokenizer_config.json").exists()

    assert "finished: the model is in" in resumed(run, f"--training.max-steps={len(taken) + 5}").stdout
    assert steps_of(run) == list(range(1, len(taken) + 6))


def resumed(run: Path, *changes: str) -> subprocess.CompletedProcess[str]:
    asked = command("--resume", run, "--training.validate-every=1000", *changes)
    ended = subprocess.run(asked, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert ended.returncode == 0, ended.stderr
    return ended


def test_adapters_are_left_merged_and_by_themselves(root):
    changes = ("--data.bad-rows=skip", "--training.max-steps=3", "--lora.rank=2")
    asked = command("@", root / "sft.toml", *changes)
    ended = subprocess.run(asked, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert ended.returncode == 0, ended.stderr
    run = root / "runs" / "chat"
    start, model = (load_file(path / "model.safetensors") for path in (root / "start", run / "model"))
    adapter = load_file(run / "adapter" / "adapter_model.safetensors")
    name = "model.layers.0.self_attn.q_proj"
    a, b = (adapter[f"base_model.model.{name}.lora_{half}.weight"] for half in "AB")
    scale = json.loads((run / "adapter" / "adapter_config.json").read_text())["lora_alpha"] / 2
    expected = start[f"{name}.weight"] + scale * (b @ a)
    np.testing.assert_allclose(model[f"{name}.weight"], expected, atol=1e-6)
    assert np.abs(b).max() > 0
    assert (model["model.embed_tokens.weight"] == start["model.embed_tokens.weight"]).all()


def test_groups_that_match_nothing_are_refused_and_leave_no_folder(root):
    group = root / "group.toml"
    group.write_text('[[optim.groups]]\npattern = "nothing"\n')
    asked = command("@", root / "sft.toml", "@", group, "--data.bad-rows=skip")
    refused = subprocess.run(asked, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert refused.returncode == 2
    assert refused.stderr.startswith("error: optim.groups.0.pattern: 'nothing' matches none of the")
    assert not list((root / "runs").iterdir())


MACHINES = 2


def torchrun(root: Path, endpoint: str, steps: int) -> list[subprocess.Popen[str]]:
    """An agent for each machine, which starts one rank there; what they say is in a file each."""
    name = "torch.distributed.run"
    agent = [sys.executable, "-m", name, "--nnodes", str(MACHINES), "--nproc-per-node", "1", "--rdzv-backend", "c10d"]
    agent += ["--rdzv-endpoint", endpoint, "--local-addr", "127.0.0.1", "--rdzv-id", str(steps)]
    rank = ["-m", "slipstream.trainer.chat", "@", str(root / "ranks.toml"), f"--training.max-steps={steps}"]
    started = []
    for machine in range(MACHINES):
        with (root / f"machine-{machine}-{steps}.log").open("w") as log:
            words = [*agent, *rank]
            started.append(subprocess.Popen(words, stdout=log, stderr=subprocess.STDOUT, text=True))
    return started


@pytest.mark.timeout(400)
def test_machines_that_meet_through_torchrun_fine_tune_together_and_go_on_together(root):
    run = root / "runs" / "ranks"
    text = TOML.format(root=root).replace(f'name = "chat"\ndirectory = "{root}/runs"\n', "").replace("[run]\n", "")
    (root / "ranks.toml").write_text(f'run_dir = "{run}"\n{text}'.replace("[data]", '[data]\nbad_rows = "skip"'))
    for steps, before in ((3, 0), (5, 3)):
        lease = PortLease()
        endpoint = take_ports(["rendezvous"], lease)["rendezvous"]
        lease.close()
        agents = torchrun(root, endpoint, steps)
        try:
            codes = [agent.wait(2 * DEADLINE_S) for agent in agents]
        finally:
            for agent in agents:
                agent.kill()
                agent.wait()
        said = [(root / f"machine-{machine}-{steps}.log").read_text() for machine in range(MACHINES)]
        assert codes == [0] * MACHINES, "\n".join(said)
        assert sum("conversations to learn from" in each for each in said) == 1  # rank 0 speaks
        assert any(f"goes on after step {before}" in each for each in said) == bool(before)
        assert steps_of(run) == list(range(1, steps + 1))
    assert load_sizes(run / "model") == sizes()
