"""The few calls of the CUDA driver that torch has no word for: memory of its own, handles of it, and copies by address.

Memory that torch's allocator hands out may be part of an allocation, or mapped piecewise, and neither can be exported.
The context is torch's: `bind` makes it current on the calling thread.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import torch
from torch import Tensor

HANDLE_BYTES = 64
_LAZY_PEER_ACCESS = 1


class DriverError(Exception):
    """The driver refused."""


class _Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_char * HANDLE_BYTES),)


class DriverMemory:
    """An allocation of its own on the current device, as torch's tensor."""

    def __init__(self, size_bytes: int, device: torch.device) -> None:
        bind(device)
        torch.cuda.empty_cache()  # what torch keeps for later, nobody else can have
        pointer = ctypes.c_uint64()
        _call("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(size_bytes))
        self._device = device
        self.address = pointer.value
        self.size_bytes = size_bytes
        self.data = torch.as_tensor(_Array(self.address, size_bytes), device=device)
        assert self.data.data_ptr() == self.address
        handle = _Handle()
        _call("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(self.address))
        self.handle = ctypes.string_at(ctypes.byref(handle), HANDLE_BYTES)
        """What another process of this host opens it by."""

    def close(self) -> None:
        bind(self._device)
        self.data = torch.empty(0, dtype=torch.uint8)
        _call("cuMemFree_v2", ctypes.c_uint64(self.address))


class _Array:
    """Memory as `torch.as_tensor` takes it without a copy."""

    def __init__(self, address: int, size_bytes: int) -> None:
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": (size_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
            "strides": None,
        }


def bind(device: torch.device) -> None:
    """Make a device's context the calling thread's; `set_device` alone does nothing for the first device."""
    torch.cuda.set_device(device)
    torch.zeros(1, device=device)


def open_handle(handle: bytes) -> int:
    """Address of another process's allocation, for the current device; the other card need not be visible."""
    pointer, given = ctypes.c_uint64(), _Handle()
    ctypes.memmove(ctypes.byref(given), handle, HANDLE_BYTES)
    _call("cuIpcOpenMemHandle_v2", ctypes.byref(pointer), given, ctypes.c_uint(_LAZY_PEER_ACCESS))
    return pointer.value


def close_handle(address: int) -> None:
    _call("cuIpcCloseMemHandle", ctypes.c_uint64(address))


def copy_async(target: Tensor, offset_bytes: int, address: int, size_bytes: int, stream: torch.cuda.Stream) -> None:
    """Begin to copy bytes from an address into a tensor of this device."""
    _call(
        "cuMemcpyAsync",
        ctypes.c_uint64(target.data_ptr() + offset_bytes),
        ctypes.c_uint64(address),
        ctypes.c_size_t(size_bytes),
        ctypes.c_void_p(stream.cuda_stream),
    )


@cache
def _driver() -> Any:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise DriverError("there is no CUDA driver here") from error


def _call(name: str, *arguments: Any) -> None:
    status = getattr(_driver(), name)(*arguments)
    if status:
        words = ctypes.c_char_p()
        _driver().cuGetErrorName(status, ctypes.byref(words))
        raise DriverError(f"{name}: {(words.value or b'unknown').decode()} ({status})")
