"""The kernels of queries and keys, against plain operators."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch

from slipstream.models.turned import _takes


def test_the_kernels_of_a_card_give_the_same():
    """By triton's interpreter, which is chosen before triton is imported."""
    program = Path(__file__).with_name("fused_turns.py")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, str(program)], env=environment, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.stdout.strip().endswith("alike"), done.stderr[-2000:]


def test_on_a_cpu_there_are_none():
    assert not _takes(torch.zeros(1, 4, 2, 64, dtype=torch.bfloat16), torch.zeros(1, 4, dtype=torch.int64))
