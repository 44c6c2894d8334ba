"""What new weights must pass before the engine goes on: checksums of slices, then the trainer's probe.

All slices of a model up to `CHECKSUM_BYTES`; of a larger one another sample at each version, as requests wait.

Runs on the engine's thread inside the pause; in a group, each part ends when all ranks have passed it. The probe is
there too, not after the resume: no token is sampled on weights without a verdict, so none has to be held or dropped.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Any

from slipstream.common.errors import ProbeFailed
from slipstream.engine.base import PausedEngine
from slipstream.engine.worker.ballot import CHECKSUM, PREPARED, PROBE, Voice
from slipstream.weights.manifest import Manifest, WeightSlice, verify_tensors
from slipstream.weights.straight.received import Received

CHECKSUM_BYTES = 16 << 20
"""Compared at one update, as float32: 12 to 30 ms."""


class Verification:
    """Called with the paused engine; raises `WeightsCorrupt`, `ProbeFailed` or a veto, else keeps its figures.

    Ranks that can only step together must all probe or none: hence a vote before the probe, and not after it alone.
    """

    def __init__(
        self, manifest: Manifest, voice: Voice | None = None, given: Mapping[str, Any] | Received | None = None
    ) -> None:
        """`given`: the tensors that the engine is given. Their sums are then compared before the pause, where the
        engine calls `prepared`, and in it only whether they are in use as they are. What an engine has received by
        itself was compared then, all of it."""
        self._manifest = manifest
        self._voice = voice
        self._given = given
        self._compared = False
        self.slice_count = 0
        self.probe_max_abs_error = 0.0
        self.duration_s = 0.0

    def __call__(self, engine: PausedEngine) -> None:
        started_s = time.perf_counter()
        sample = self._sample()
        known = set(engine.unchanged([part.name for part in sample])) if self._compared else set[str]()
        rest = [part for part in sample if part.name not in known]
        live = engine.parameters([part.name for part in rest])
        self.slice_count = verify_tensors(self._manifest, live, rest, partly=self._voice is not None)
        self.slice_count += len(sample) - len(rest)
        if self._voice is not None:
            self._voice.good(CHECKSUM, bytes(part.name in live for part in self._manifest.slices))
        self._probe(engine)
        self.duration_s = time.perf_counter() - started_s
        if self._voice is not None:
            self._voice.good(PROBE)

    def prepared(self) -> None:
        """Called before the pause, by engines that do; waits for the other ranks of a group."""
        if self._given is not None:
            if not isinstance(self._given, Received):
                verify_tensors(self._manifest, self._given, self._sample())
            self._compared = True
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
