"""What a killed run's workers found in their KV tiers, counted over their restarts."""

from __future__ import annotations

import json
import time
import urllib.request
from collections.abc import Mapping
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

HITS = "slipstream_worker_offload_hit_tokens_total"
TIMEOUT_S = 1.0
INTERVAL_S = 0.5


class KvHits:
    """Counters of workers, which begin at 0 again in each process."""

    def __init__(self, run_path: Path) -> None:
        self.tokens = 0
        """Prompt tokens found in host memory or on disk, as far as it was seen."""
        self._targets = run_path / "prometheus_targets.json"
        self._last: dict[str, int] = {}
        self._read_s = 0.0

    def read(self) -> None:
        """Ask every worker, at most twice a second; one that does not answer has told all that it will."""
        if time.monotonic() - self._read_s < INTERVAL_S or not self._targets.exists():
            return
        self._read_s = time.monotonic()
        for target in json.loads(self._targets.read_text()):
            if target["labels"]["replica"].startswith("decode"):
                self.count(target["labels"]["replica"], _counters(target["targets"][0]))

    def count(self, replica: str, counters: Mapping[str, float]) -> None:
        """Add what a worker says that it has found since it was asked last, or since it was started."""
        if HITS in counters:
            found = int(counters[HITS])
            before = self._last.get(replica, 0)
            self.tokens += found - before if found >= before else found
            self._last[replica] = found


def _counters(address: str) -> dict[str, float]:
    try:
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=TIMEOUT_S) as answer:
            text = answer.read().decode()
    except (OSError, ValueError):
        return {}
    return {sample.name: sample.value for family in text_string_to_metric_families(text) for sample in family.samples}
