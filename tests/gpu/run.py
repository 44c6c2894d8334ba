"""Everything that is measured and tested on a GPU, in stages that do not need each other.

    python tests/gpu/run.py --out DIR [STAGE ...]

Each stage is a process with a time limit; what it said is in DIR/STAGE.log, how it ended in DIR/stages.json, which is
written after each. Without names all stages run, in this order.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
# The machine's own plug-ins are of other versions, and its warnings are not ours.
PLUGINS = ["-p", "pytest_asyncio.plugin", "-p", "pytest_timeout", "-p", "no:cacheprovider", "-W", "ignore"]
PYTEST = [sys.executable, "-m", "pytest", *PLUGINS, "-q", "-rA", "--tb=short", "--timeout=150"]
ON_GPU = ["--engine", "vllm", "--device", "cuda"]
LARGE = "--device cuda --dtype bfloat16 --layers 16 --experts 128 --hidden 2048 --heads 32 --top-k 8 --vocab 32768"
LOAD = [sys.executable, "loadtests/engine_throughput.py", "--prompt-tokens", "512", "--output-tokens", "256"]
MEDIUM = LARGE.replace("2048", "1024") + " --expert-dim 128"
LARGE += " --expert-dim 256"
"""7.0 GB; the medium one 1.7 GB, of which a version every 2 s can be brought."""

STAGES: dict[str, tuple[int, list[str]]] = {
    "smoke": (240, [*PYTEST, "tests/engine/test_update.py", *ON_GPU, "-k", "back_and_forth", "-x", "-s"]),
    "suite32": (540, [*PYTEST, "tests/engine", *ON_GPU]),
    "suite16": (
        300,
        [*PYTEST, "tests/engine", *ON_GPU, "--dtype", "bfloat16", "-k", "update or salts or decode or routes"],
    ),
    "fp8": (300, [*PYTEST, "tests/gpu/test_quantised.py", "-s"]),
    "offload": (300, [*PYTEST, "tests/offload/test_vllm.py", *ON_GPU]),
    "load": (420, [*LOAD, *LARGE.split(), "--parts", "service,large_update,capture", "--seconds", "8"]),
    "load_medium": (300, [*LOAD, *MEDIUM.split(), "--parts", "service,updates", "--seconds", "8"]),
    "load_memory": (300, [*LOAD, *LARGE.split(), "--parts", "memory"]),
}
"""Seconds and command of each."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stages", nargs="*", help=f"of {', '.join(STAGES)}")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    outcome: dict[str, dict[str, object]] = {}
    for name in options.stages or STAGES:
        limit_s, command = STAGES[name]
        if name.startswith("load"):
            command = [*command, "--json", str(options.out / f"{name}.json")]
        started_s = time.monotonic()
        code = run(command, options.out / f"{name}.log", limit_s)
        outcome[name] = {"exit": code, "seconds": round(time.monotonic() - started_s, 1)}
        (options.out / "stages.json").write_text(json.dumps(outcome, indent=1))
        print(f"== {name}: {outcome[name]}", flush=True)
        lines = (options.out / f"{name}.log").read_text(errors="replace").splitlines()
        print("\n".join(line[:300] for line in lines[-25:]), flush=True)
    return int(any(each["exit"] for each in outcome.values()))


def run(command: list[str], log: Path, limit_s: int) -> int:
    """Exit code; 124 for one that took too long, with all that it started ended."""
    path = os.pathsep.join([str(ROOT / "services"), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
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
