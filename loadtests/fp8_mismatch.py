"""What FP8 inference costs in mismatch, and how much of it FP8 training takes back, on the demo's model and tasks.

    python loadtests/fp8_mismatch.py [--model runs/demo/checkpoints/final] [--prompts 96] [--json OUT]

The embedded engine samples answers in float32 and in FP8 (weights with a scale for each 128 by 128, activations for
each 1 by 128, emulated); the trainer computes them in float32, in bfloat16, and in FP8 with either between, on the
recorded expert routes. Without `--model` the demo's warm-up makes one, in ten seconds. It fails unless FP8 training
lowers the KL against the FP8 engine at least three times where its numbers are the engine's.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "services"))

import numpy as np
import torch
from numpy.typing import NDArray

from slipstream.common.config_files import read_toml
from slipstream.common.version import PolicyVersion
from slipstream.engine.base import DecodeRequest, Sampling
from slipstream.engine.embedded.config import EmbeddedConfig
from slipstream.engine.embedded.core import EngineCore
from slipstream.engine.embedded.outputs import Chunks, Recorded
from slipstream.engine.routes import RouteRows
from slipstream.environments.demonstrations import Demonstrations
from slipstream.models.checkpoint import load_model, to_hf
from slipstream.models.fp8.config import Fp8Config
from slipstream.models.fp8.modules import convert
from slipstream.models.head import target_logps
from slipstream.models.registry import load_sizes
from slipstream.trainer.config import TrainerConfig
from slipstream.trainer.model_dir import prepare_model_dir
from slipstream.trainer.packed import Packed
from slipstream.trainer.sequence import TrainSequence, version_number
from slipstream.trainer.start import make_model
from slipstream.trainer.status import Status

ROOT = Path(__file__).resolve().parent.parent
VERSION = PolicyVersion(1, 0)
SAMPLES = 4
MICRO_BATCH = 64
LEAST_GAIN = 3.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a model directory with its tokenizer")
    parser.add_argument("--prompts", type=int, default=96)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        config = demo_config(Path(scratch))
        model_dir = options.model or warmed_up(config)
        prompts = [example.prompt_ids for example in Demonstrations(config.environments, model_dir, 7).validation()]
        report = measure(model_dir, prompts[:: max(1, len(prompts) // options.prompts)])
    print(f"{'engine':>8}  {'trainer':>12}  {'mean KL':>9}  {'mean |d|':>9}  {'p99.9 |d|':>9}  {'max |d|':>9}")
    for row in report["rows"]:
        figures = "  ".join(f"{row[key]:9.2e}" for key in ("kl", "mean", "p999", "max"))
        print(f"{row['engine']:>8}  {row['trainer']:>12}  {figures}")
    print(f"FP8 training lowers the KL against the FP8 engine {report['gain']:.1f} times; {report['tokens']} tokens")
    if options.json:
        options.json.write_text(json.dumps(report, indent=1))
    return 0 if report["gain"] >= LEAST_GAIN else 1


def demo_config(run_dir: Path) -> TrainerConfig:
    """The demo's tasks and warm-up."""
    demo: Any = read_toml(ROOT / "examples" / "demo.toml")
    return TrainerConfig(run_dir=run_dir, environments=demo["environments"], sft=demo["sft"])


def warmed_up(config: TrainerConfig) -> Path:
    prepare_model_dir(config)
    make_model(config, lambda progress: None, Status())
    return config.model_dir


def measure(model_dir: Path, prompts: Sequence[Sequence[int]]) -> dict[str, Any]:
    rows: list[dict[str, Any]] = []
    trainers = {name: trainer(model_dir) for name in ("float32", "bfloat16", "fp8", "fp8+bfloat16")}
    for name, model in trainers.items():
        if "fp8" in name:
            convert(model, Fp8Config())
    tokens = 0
    for engine in ("float32", "fp8"):
        sequences = sample(model_dir, prompts, "fp8_per_block" if engine == "fp8" else "none")
        sampled = np.concatenate([sequence.engine_logps for sequence in sequences])
        tokens += sampled.size
        for name, model in trainers.items():
            difference = logps(model, sequences, "bfloat16" in name) - sampled
            size = np.abs(difference)
            rows.append(
                {
                    "engine": engine,
                    "trainer": name,
                    "kl": float((np.exp(difference) - 1 - difference).mean()),
                    "mean": float(size.mean()),
                    "p999": float(np.quantile(size, 0.999)),
                    "max": float(size.max()),
                }
            )
    kl = {(row["engine"], row["trainer"]): row["kl"] for row in rows}
    return {"rows": rows, "tokens": tokens, "gain": kl["fp8", "float32"] / max(kl["fp8", "fp8"], 1e-12)}


def trainer(model_dir: Path) -> Any:
    return load_model(load_sizes(model_dir), model_dir)


def sample(model_dir: Path, prompts: Sequence[Sequence[int]], quantization: Any) -> list[TrainSequence]:
    """Answers with their routes and log-probabilities."""
    core = EngineCore(load_sizes(model_dir), EmbeddedConfig(quantization=quantization))
    core.update(VERSION, to_hf(trainer(model_dir)), lambda engine: None)
    sampling = Sampling(max_new_tokens=24, seed=5, stop_token_ids=(stop_token(model_dir),))
    for index, prompt in enumerate(prompts):
        ids = tuple(f"{index}.{each}" for each in range(SAMPLES))
        core.add_decode(DecodeRequest(str(index), prompt, "salt", ids, sampling), 1e9)
    routes: dict[str, RouteRows] = {}
    answers: dict[str, tuple[list[int], list[float]]] = {}
    while core.busy:
        core.step()
        for output in core.take_outputs():
            if isinstance(output, Recorded):
                routes[output.key] = output.routes
            elif isinstance(output, Chunks):
                for chunk in output.chunks:
                    token_ids, values = answers.setdefault(f"{output.request_id}.{chunk.sample_index}", ([], []))
                    token_ids += chunk.token_ids
                    values += chunk.logprobs
    return [
        sequence(prompts[int(key.partition(".")[0])], *answers[key], routes[key.partition(".")[0]], routes[key])
        for key in answers
    ]


def sequence(
    prompt: Sequence[int], answer: list[int], values: list[float], before: RouteRows, after: RouteRows
) -> TrainSequence:
    count = len(answer)
    number = np.full(count, version_number(VERSION))
    return TrainSequence(
        token_ids=np.array([*prompt, *answer], np.int32),
        target_positions=np.arange(len(prompt), len(prompt) + count),
        engine_logps=np.array(values, np.float32),
        sampled_at=number,
        kv_oldest=number,
        routes=RouteRows(np.concatenate([before.rows, after.rows]), 0),
        advantage=1.0,
    )


@torch.no_grad()
def logps(model: Any, sequences: Sequence[TrainSequence], bfloat16: bool) -> NDArray[np.float32]:
    """As the trainer computes them, with its products in bfloat16 or float32."""
    found = []
    for at in range(0, len(sequences), MICRO_BATCH):
        batch = sequences[at : at + MICRO_BATCH]
        packed = Packed.of(
            [each.token_ids for each in batch],
            [each.target_positions for each in batch],
            [each.routes for each in batch],
        )
        with torch.autocast("cpu", torch.bfloat16, enabled=bfloat16):  # as `Ranked` does
            logits_RV = packed.logits_RV(model)
        found.append(target_logps(logits_RV.float(), packed.targets_R)[0].numpy())
    return np.concatenate(found)


def stop_token(model_dir: Path) -> int:
    from slipstream.environments.tokenizer import TextCodec

    return TextCodec.load(model_dir).end_id


if __name__ == "__main__":
    sys.exit(main())
