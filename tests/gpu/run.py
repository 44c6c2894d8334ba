"""Everything that is measured and tested on a GPU, in stages that do not need each other.

    python tests/gpu/run.py --out DIR [STAGE ...]
    python tests/gpu/run.py --out DIR --shards 4 suite32    # its files shared out to four processes, over all cards

Each stage is a process with a time limit; what it said is in DIR/STAGE.log, how it ended in DIR/stages.json, which is
written after each. Without names all stages run, in this order. Shards are for tests alone, not for what is measured.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
# The machine's own plug-ins are of other versions, and its warnings are not ours.
PLUGINS = ["-p", "pytest_asyncio.plugin", "-p", "pytest_timeout", "-p", "no:cacheprovider", "-W", "ignore"]
PYTEST = [sys.executable, "-m", "pytest", *PLUGINS, "-q", "-rA", "--tb=short", "--timeout=150"]
ON_GPU = ["--engine", "vllm", "--device", "cuda"]
LARGE = "--device cuda --dtype bfloat16 --layers 16 --experts 128 --hidden 2048 --heads 32 --top-k 8 --vocab 32768"
STEP = [sys.executable, "loadtests/trainer_throughput.py"]
LOAD = [sys.executable, "loadtests/engine_throughput.py", "--prompt-tokens", "512", "--output-tokens", "256"]
MEDIUM = LARGE.replace("2048", "1024") + " --expert-dim 128"
UNCOMPILED = ["--engine", '{"compiled": false}']
LARGE += " --expert-dim 256"
"""7.0 GB; the medium one 1.7 GB, of which a version every 2 s can be brought."""

RUN = [sys.executable, "loadtests/two_cards.py", "--runs", "/tmp/runs", "--limit-s"]
RANKS = [*PYTEST, "-v", "-s", "tests/gpu/test_parallel.py", "--device", "cuda"]
REST = "bfloat16 or written or lora or stuck or without or again or loaded or neighbours"
RANKS_LOAD = [sys.executable, "loadtests/ranks_throughput.py", "--device", "cuda"]
WEIGHTS = [sys.executable, "loadtests/weight_transports.py", "--device", "cuda", "--out", "{out}/weights.jsonl"]

GRPC = ["--weights.transport", "grpc", "--weights.dtype", "float32"]
X2 = ["@", "examples/h200-x2.toml"]
SPLIT = [sys.executable, "loadtests/prefill_decode.py", "--cards", "0,1", "--engine"]
EXACT = (
    "--parts exact --exact 24 --device cuda --dtype float32 --layers 4 --experts 16 --hidden 512 --heads 8 --top-k 4 "
    "--expert-dim 256 --vocab 4096 --prompt-tokens 256 --output-tokens 64"
)
SPLIT_LOAD = (
    f"{LARGE.replace('--layers 16', '--layers 8').replace('--expert-dim 256', '--expert-dim 768')} --parts exact,load "
    "--exact 4 --prompt-tokens 1024 --output-tokens 256 --concurrent 64 --seconds 6"
)
"""Layers of Qwen3-30B-A3B's shape."""

STAGES: dict[str, tuple[int, list[str]]] = {
    "smoke": (240, [*PYTEST, "tests/engine/test_update.py", *ON_GPU, "-k", "back_and_forth", "-x", "-s"]),
    "suite32": (540, [*PYTEST, "tests/engine", *ON_GPU]),
    "suite16": (
        300,
        [*PYTEST, "tests/engine", *ON_GPU, "--dtype", "bfloat16", "-k", "update or salts or decode or routes"],
    ),
    "trainer": (150, [*PYTEST, "tests/gpu/test_trainer.py", "-s"]),
    "throughput": (540, [*STEP, "--all"]),
    "smollm2": (440, [sys.executable, "tests/gpu/smollm2.py"]),
    "fp8": (300, [*PYTEST, "tests/gpu/test_quantised.py", "-s"]),
    "offload": (300, [*PYTEST, "tests/offload/test_vllm.py", *ON_GPU]),
    "load": (420, [*LOAD, *LARGE.split(), "--parts", "service,large_update", "--seconds", "8"]),
    "load_capture": (300, [*LOAD, *LARGE.split(), "--parts", "capture", "--seconds", "6", *UNCOMPILED]),
    "load_medium": (300, [*LOAD, *MEDIUM.split(), "--parts", "service,updates", "--seconds", "8"]),
    "load_memory": (300, [*LOAD, *LARGE.split(), "--parts", "memory"]),
}
"""Seconds and command of each."""

ON_THE_CARD = "--transport cuda_ipc --parts updates --seconds 6"

PARTS: dict[str, tuple[int, list[str]]] = {
    "step_lora": (140, [*STEP, "--shape", "qwen3-30b-a3b-lora", "--micro-batches", "4", "--warm-up", "1"]),
    "step_moe": (150, [*STEP, "--shape", "moe-1b", "--warm-up", "1"]),
    "step_moe_rounded": (100, [*STEP, "--shape", "moe-1b", "--only", "rl", "--warm-up", "1", "--round-each-pass"]),
    "step_moe_kept": (100, [*STEP, "--shape", "moe-1b", "--only", "rl", "--warm-up", "1", "--checkpointing", "none"]),
    "step_moe_grouped": (100, [*STEP, "--shape", "moe-1b", "--only", "rl", "--warm-up", "1", "--grouped"]),
    "step_moe_turned": (100, [*STEP, "--shape", "moe-1b", "--only", "rl", "--warm-up", "1", "--turned"]),
    "step_fp8": (200, [*STEP, "--shape", "moe-1b", "--only", "fp8", "--micro-batches", "2", "--warm-up", "3"]),
    "fp8_mismatch": (240, [sys.executable, "loadtests/fp8_mismatch_card.py", "--out", "{out}/fp8_mismatch.jsonl"]),
    "load_updates": (240, [*LOAD, *MEDIUM.split(), *ON_THE_CARD.split(), *UNCOMPILED]),
}
"""Of the stages above, each with a limit of its own; not run unless named."""

TWO_CARDS: dict[str, tuple[int, list[str]]] = {
    "weights_smoke": (150, [*WEIGHTS, "--gigabytes", "2", "--updates", "3", "--limit-s", "30"]),
    "weights": (200, [*WEIGHTS, "--gigabytes", "4", "--updates", "10", "--limit-s", "25", "--check"]),
    "ranks_short": (150, [*RANKS, "-k", "gradient_of_one or lost or (steps and ep2)"]),
    "ranks_rest": (200, [*RANKS, "-k", REST]),
    "ranks": (300, RANKS),
    "ranks_load": (240, [*RANKS_LOAD, "--out", "{out}/ranks.jsonl"]),
    "x2_smoke": (150, [*RUN, "120", *X2, "@", "examples/h200-x2-tiny.toml"]),
    "x2_smoke_grpc": (150, [*RUN, "120", *X2, "@", "examples/h200-x2-tiny.toml", *GRPC]),
    "x2": (260, [*RUN, "220", *X2]),
    "x2_lora": (260, [*RUN, "220", *X2, "@", "examples/h200-x2-lora.toml"]),
    "x2_grpc": (260, [*RUN, "220", *X2, *GRPC, "--model.n-layers", "1", "--model.vocab-size", "32768"]),
    "x2_prefill": (260, [*RUN, "220", *X2, "@", "examples/h200-x2-prefill.toml"]),
    "x2_async": (
        420,
        [*RUN, "200", "--train-s", "80", "--bounds", "3,0", *X2, "@", "loadtests/async_vs_sync_cards.toml"],
    ),
    "x2_exact": (150, [*SPLIT, '{"compiled": false, "gpu_memory_fraction": 0.05}', *EXACT.split()]),
    "x2_split": (200, [*SPLIT, '{"compiled": false}', *SPLIT_LOAD.split()]),
}
"""The same on two cards; not run unless named."""

NAMED = STAGES | PARTS | TWO_CARDS


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stages", nargs="*", help=f"of {', '.join(NAMED)}")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--shards", type=int, default=1, help="processes that share the files of a stage of tests")
    parser.add_argument("--cards", type=int, default=1, help="that the shards are spread over")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    outcome: dict[str, dict[str, object]] = {}
    for name in options.stages or STAGES:
        limit_s, command = NAMED[name]
        command = [word.replace("{out}", str(options.out)) for word in command]
        if name.startswith(("load", "x2")):
            command = [*command, "--json", str(options.out / f"{name}.json")]
        if name == "throughput" or name.startswith("step"):
            profile = options.out if name == "throughput" else options.out / f"profile-{name}.txt"
            command = [*command, "--profile", str(profile), "--out", str(options.out / f"{name}.jsonl")]
        if name == "smollm2":
            command = [*command, "--out", str(options.out)]
        with ThreadPoolExecutor(options.shards) as pool:
            parts = sharded(name, command, options.shards)
            codes = {
                part: pool.submit(
                    timed_run,
                    words,
                    options.out / f"{part}.log",
                    limit_s,
                    None if len(parts) == 1 else index % options.cards,
                )
                for index, (part, words) in enumerate(parts.items())
            }
            outcome |= {part: done.result() for part, done in codes.items()}
        (options.out / "stages.json").write_text(json.dumps(outcome, indent=1))
        for part in parts:
            print(f"== {part}: {outcome[part]}", flush=True)
            lines = (options.out / f"{part}.log").read_text(errors="replace").splitlines()
            print("\n".join(line[:300] for line in lines[-25:]), flush=True)
    return int(any(each["exit"] for each in outcome.values()))


def sharded(name: str, command: list[str], shards: int) -> dict[str, list[str]]:
    """The command, or one for each shard, which has every so-manieth file of the folder in it."""
    if shards == 1:
        return {name: command}
    folder = next(word for word in command if word.startswith("tests/"))
    files = sorted(str(file.relative_to(ROOT)) for file in (ROOT / folder).glob("test_*.py"))
    before, after = command[: command.index(folder)], command[command.index(folder) + 1 :]
    return {f"{name}-{index}": [*before, *files[index::shards], *after] for index in range(shards)}


def timed_run(command: list[str], log: Path, limit_s: int, card: int | None) -> dict[str, object]:
    started_s = time.monotonic()
    code = run(command, log, limit_s, card)
    return {"exit": code, "seconds": round(time.monotonic() - started_s, 1)}


def run(command: list[str], log: Path, limit_s: int, card: int | None) -> int:
    """Exit code; 124 for one that took too long, with all that it started ended. Without a card it sees all."""
    path = os.pathsep.join([str(ROOT / "services"), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    if card is not None:
        environment["CUDA_VISIBLE_DEVICES"] = str(card)
        environment["TMPDIR"] = str(log.with_suffix(".tmp"))  # tests look at what is left there
        os.makedirs(environment["TMPDIR"], exist_ok=True)
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            return process.wait(limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            process.wait()
            return 124


if __name__ == "__main__":
    sys.exit(main())
