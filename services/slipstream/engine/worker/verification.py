"""What new weights must pass before the engine goes on: checksums of slices, then the trainer's probe.

All slices of a model up to `CHECKSUM_BYTES`; of a larger one another sample at each version, as requests wait.

Runs on the engine's thread inside the pause; in a group, each part ends when all ranks have passed it. The probe is
there too, not after the resume: no token is sampled on weights without a verdict, so none has to be held or dropped.
"""

from __future__ import annotations

import math
import time

from slipstream.common.errors import ProbeFailed
from slipstream.engine.base import PausedEngine
from slipstream.engine.worker.ballot import CHECKSUM, PREPARED, PROBE, Voice
from slipstream.weights.manifest import Manifest, WeightSlice, verify_tensors

CHECKSUM_BYTES = 16 << 20
"""Compared in the pause of one update, as float32: some 30 ms."""


class Verification:
    """Called with the paused engine; raises `WeightsCorrupt`, `ProbeFailed` or a veto, else keeps its figures.

    Ranks that can only step together must all probe or none: hence a vote before the probe, and not after it alone.
    """

    def __init__(self, manifest: Manifest, voice: Voice | None = None) -> None:
        self._manifest = manifest
        self._voice = voice
        self.slice_count = 0
        self.probe_max_abs_error = 0.0
        self.duration_s = 0.0

    def __call__(self, engine: PausedEngine) -> None:
        started_s = time.perf_counter()
        sample = self._sample()
        live = engine.parameters([part.name for part in sample])
        self.slice_count = verify_tensors(self._manifest, live, sample, partly=self._voice is not None)
        if self._voice is not None:
            self._voice.good(CHECKSUM, bytes(part.name in live for part in self._manifest.slices))
        self._probe(engine)
        self.duration_s = time.perf_counter() - started_s
        if self._voice is not None:
            self._voice.good(PROBE)

    def prepared(self) -> None:
        """Called before the pause by engines whose ranks can only pause together; waits for all of them."""
        if self._voice is not None:
            self._voice.good(PREPARED)

    def failed(self, error: Exception) -> None:
        """Tell the group that this rank does not go on; called while it is still paused, where the engine can."""
        if self._voice is not None:
            self._voice.failed(f"{type(error).__name__}: {error}")

    def _sample(self) -> list[WeightSlice]:
        """Slices to compare: where one version ends, the next goes on."""
        slices = self._manifest.slices
        if self._manifest.size_bytes <= CHECKSUM_BYTES:
            return list(slices)
        mean_bytes = self._manifest.size_bytes // len(slices)
        count = min(max(CHECKSUM_BYTES // max(mean_bytes, 1), 1), len(slices))
        first = self._manifest.version.step * count
        return [slices[(first + index) % len(slices)] for index in range(count)]

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
