"""What new weights must pass before the engine goes on: checksums of all slices, then the trainer's probe.

Runs on the engine's thread inside the pause. The probe is there too, not after the resume: no token is sampled on
weights without a verdict, so none has to be held or dropped.
"""

from __future__ import annotations

import math
import time

from slipstream.common.errors import ProbeFailed
from slipstream.engine.base import PausedEngine
from slipstream.weights.manifest import Manifest, verify_tensors


class Verification:
    """Called with the paused engine; raises `WeightsCorrupt` or `ProbeFailed`, else keeps its figures."""

    def __init__(self, manifest: Manifest) -> None:
        self._manifest = manifest
        self.slice_count = 0
        self.probe_max_abs_error = 0.0
        self.duration_s = 0.0

    def __call__(self, engine: PausedEngine) -> None:
        started_s = time.perf_counter()
        self.slice_count = verify_tensors(self._manifest, engine.parameters())
        self._probe(engine)
        self.duration_s = time.perf_counter() - started_s

    def _probe(self, engine: PausedEngine) -> None:
        probe = self._manifest.probe
        if probe is None or len(probe.token_ids) < 2:
            return
        logprobs = engine.probe(probe.token_ids)
        differences = [abs(ours - theirs) for ours, theirs in zip(logprobs, probe.logprobs, strict=True)]
        finite = all(map(math.isfinite, differences))
        worst = self.probe_max_abs_error = max(differences) if finite else math.inf
        if not worst <= probe.tolerance:
            raise ProbeFailed(
                f"log-probabilities of the probe are off by {worst:.3g}, {probe.tolerance:.3g} is allowed",
                max_abs_error=worst,
                tolerance=probe.tolerance,
                version=self._manifest.version,
            )
