"""A summary of a journal's records, as small as one can be."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class Counted:
    """Sums up how many records there are."""

    def __init__(self) -> None:
        self.count = 0

    def take(self, record: Mapping[str, Any]) -> None:
        self.count += 1

    def fields(self) -> dict[str, Any]:
        return {"count": self.count}
