"""What torchtitan's import leaves out, seen in a process of its own: this one may have imported it all."""

from __future__ import annotations

import subprocess
import sys


def run(source: str) -> str:
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_models_load_neither_the_compiler_nor_pipelines_nor_distributed_checkpoints():
    left_out = ("torch._dynamo", "torch._inductor", "torch.distributed.pipelining", "torch.distributed.checkpoint")
    shown = run(f"import sys, slipstream.models.qwen3_moe.model; print([m for m in {left_out!r} if m in sys.modules])")
    assert shown == "[]\n"


def test_shapes_of_a_checkpoint_are_told_without_the_compiler():
    shown = run(
        "import sys\n"
        "from slipstream.models.checkpoint import expected_shapes\n"
        "from slipstream.models.qwen3_moe.config import MoeConfig\n"
        "shapes = expected_shapes(MoeConfig(vocab_size=64))\n"
        "print(shapes['model.norm.weight'], 'torch._dynamo' in sys.modules)"
    )
    assert shown == "(128,) False\n"


def test_what_was_left_out_is_real_for_whoever_imports_it_later():
    shown = run(
        "import slipstream.models.titan, torch, torch.distributed.checkpoint as checkpoint\n"
        "print(checkpoint.__file__.endswith('.py'), checkpoint.save.__name__, torch.compile.__module__)"
    )
    assert shown == "True save torch\n"


def test_using_a_placeholder_says_what_it_is():
    shown = run(
        "import slipstream.models.titan, torchtitan.models.qwen3 as qwen3\n"
        "try:\n    qwen3.pipeline_llm()\nexcept ImportError as error:\n    print(error)"
    )
    assert "pipeline_llm is left out by slipstream.models.light_import" in shown
