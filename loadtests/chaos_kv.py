"""What a killed run's workers found in their KV tiers, counted over their restarts."""

from __future__ import annotations

import json
import time
import urllib.request
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

HITS = "slipstream_worker_offload_hit_tokens_total"
ASKED = "slipstream_worker_prefix_query_tokens_total"
TIMEOUT_S = 1.0
INTERVAL_S = 0.5


class KvHits:
    """Counters of workers, which begin at 0 again in each process."""

    def __init__(self, run_path: Path) -> None:
        self.found: Counter[str] = Counter()
        """Prompt tokens found in host memory or on disk by each worker, as far as it was seen."""
        self.asked: Counter[str] = Counter()
        """Prompt tokens that each worker was asked for."""
        self._targets = run_path / "prometheus_targets.json"
        self._last: dict[tuple[str, str], int] = {}
        self._read_s = 0.0

    @property
    def tokens(self) -> int:
        """Found by all workers."""
        return self.found.total()

    def read(self) -> None:
        """Ask every worker, at most twice a second; one that does not answer has told all that it will."""
        if time.monotonic() - self._read_s < INTERVAL_S or not self._targets.exists():
            return
        self._read_s = time.monotonic()
        for target in json.loads(self._targets.read_text()):
            replica = target["labels"]["replica"]
            if replica.startswith(("prefill", "decode")):
                self.count(replica, _counters(target["targets"][0]))

    def count(self, replica: str, counters: Mapping[str, float]) -> None:
        """Add what a worker has counted since it was asked last, or since it was started."""
        for name, sums in ((HITS, self.found), (ASKED, self.asked)):
            if name in counters:
                now = int(counters[name])
                before = self._last.get((replica, name), 0)
                sums[replica] += now - before if now >= before else now
                self._last[replica, name] = now


def _counters(address: str) -> dict[str, float]:
    try:
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=TIMEOUT_S) as answer:
            text = answer.read().decode()
    except (OSError, ValueError):
        return {}
    return {sample.name: sample.value for family in text_string_to_metric_families(text) for sample in family.samples}
