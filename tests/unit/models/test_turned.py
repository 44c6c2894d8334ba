"""The kernels of queries and keys, against plain operators."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from slipstream.models import turned
from slipstream.models.qwen3_moe.config import MoeConfig
from slipstream.models.qwen3_moe.model import build_model


def test_the_kernels_of_a_card_give_the_same():
    """By triton's interpreter, which is chosen before triton is imported."""
    program = Path(__file__).with_name("fused_turns.py")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, str(program)], env=environment, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.stdout.strip().endswith("alike"), done.stderr[-2000:]


def test_attention_is_left_alone_unless_a_device_takes_the_kernels(monkeypatch: pytest.MonkeyPatch):
    assert not turned.FUSED_ON
    attention = next(module for module in build_model(MoeConfig(vocab_size=24)).modules() if hasattr(module, "q_norm"))
    turned.turn_at_once(attention)
    assert "forward" not in vars(attention)
    monkeypatch.setattr(turned, "FUSED_ON", {"cuda"})
    turned.turn_at_once(attention)
    assert "forward" in vars(attention)
    queries, positions = torch.zeros(1, 4, 2, 64, dtype=torch.bfloat16), torch.zeros(1, 4, dtype=torch.int64)
    assert not turned._takes(queries, positions)  # of a CPU
