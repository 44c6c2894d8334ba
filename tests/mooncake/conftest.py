"""What the bodies on a store share with those on a disk."""

from __future__ import annotations

from tests.offload.conftest import model_dir

__all__ = ["model_dir"]
