"""What is compared in the pause of an update."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import pytest

from slipstream.common.errors import WeightsCorrupt
from slipstream.common.version import PolicyVersion
from slipstream.engine.base import PausedEngine
from slipstream.engine.worker import verification
from slipstream.engine.worker.verification import Verification
from slipstream.weights.manifest import Manifest, describe_tensors

TENSORS = {f"layer.{index}.weight": np.full((16, 4), index, np.float32) for index in range(10)}


class Reading(PausedEngine):
    """Remembers what was read."""

    def __init__(self, live: dict[str, np.ndarray]) -> None:
        self.read: set[str] = set()

        class Live(dict[str, np.ndarray]):
            def __getitem__(live, name: str) -> np.ndarray:
                self.read.add(name)
                return super().__getitem__(name)

        self._live = Live(live)

    def parameters(self, wanted: Collection[str] = ()) -> dict[str, np.ndarray]:
        return self._live

    def unchanged(self, names: Collection[str]) -> Collection[str]:
        return [name for name in names if np.array_equal(dict.__getitem__(self._live, name), TENSORS[name])]

    def probe(self, token_ids: Sequence[int]) -> list[float]:
        raise AssertionError("there is no probe")


def manifest(step: int) -> Manifest:
    return Manifest(PolicyVersion(1, step), describe_tensors(TENSORS)[0])


def test_a_small_model_is_compared_whole():
    engine, check = Reading(TENSORS), Verification(manifest(0))
    check(engine)
    assert (check.slice_count, engine.read) == (10, set(TENSORS))


def test_of_a_large_model_each_version_compares_other_slices_until_all_were(monkeypatch):
    monkeypatch.setattr(verification, "CHECKSUM_BYTES", 3 * 16 * 4 * 4)
    seen: list[set[str]] = []
    for step in range(4):
        engine, check = Reading(TENSORS), Verification(manifest(step))
        check(engine)
        assert check.slice_count == len(engine.read) == 3
        seen.append(engine.read)
    assert set.union(*seen) == set(TENSORS)
    assert not seen[0] & seen[1]
    broken = {name: values + (name in seen[1]) for name, values in TENSORS.items()}
    Verification(manifest(0))(Reading(broken))
    with pytest.raises(WeightsCorrupt, match="checksum"):
        Verification(manifest(1))(Reading(broken))


def test_what_was_compared_before_the_pause_is_not_read_in_it_unless_it_is_not_what_was_given():
    engine, check = Reading(TENSORS), Verification(manifest(0), given=TENSORS)
    check.prepared()
    check(engine)
    assert (check.slice_count, engine.read) == (10, set())
    name = "layer.7.weight"
    engine, check = Reading({**TENSORS, name: TENSORS[name] + 1}), Verification(manifest(0), given=TENSORS)
    check.prepared()
    with pytest.raises(WeightsCorrupt, match=f"checksum of {name}"):
        check(engine)
    assert engine.read == {name}


def test_weights_that_are_not_the_manifest_s_are_found_before_the_pause():
    name = "layer.7.weight"
    with pytest.raises(WeightsCorrupt, match=f"checksum of {name}"):
        Verification(manifest(0), given={**TENSORS, name: TENSORS[name] + 1}).prepared()
