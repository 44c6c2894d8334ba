"""Tensors in files that are in memory alone, have no name, and are gone with the process that made them.

vLLM's process opens one by its path; however either of the two ends, nothing is left behind.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
_ALIGNMENT = 8


class MemoryFile:
    """One file, of this process. It has a path, which other processes of the same user can open."""

    def __init__(self) -> None:
        self._fd = os.memfd_create("slipstream-vllm", os.MFD_CLOEXEC)
        self.path = f"/proc/{os.getpid()}/fd/{self._fd}"

    def close(self) -> None:
        """Free the memory, once nobody has it mapped. A repeat has no effect."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def write_tensors(path: str | Path, tensors: Mapping[str, Tensor]) -> None:
    """Replace what a file holds, in the form of safetensors, whose own writer takes no file without a name."""
    header: dict[str, object] = {}
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors.values():
            file.write(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().data)
