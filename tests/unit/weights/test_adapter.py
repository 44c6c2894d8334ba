"""What comes of a base and an adapter."""

from __future__ import annotations

import numpy as np
import pytest

from slipstream.common.errors import WeightsCorrupt
from slipstream.common.version import PolicyVersion
from slipstream.weights.adapter import Adapter, adapter_name, base_part, merge
from slipstream.weights.manifest import Manifest, check_geometry, describe_tensors, verify_tensors

BASE, NEXT = PolicyVersion(1, 0), PolicyVersion(1, 3)
RNG = np.random.default_rng(0)
WEIGHTS = {
    "q.weight": RNG.normal(size=(6, 4)).astype(np.float32),
    "norm.weight": np.ones(4, np.float32),
}
HALVES = {
    "base_model.model.q.lora_A.weight": RNG.normal(size=(2, 4)).astype(np.float32),
    "base_model.model.q.lora_B.weight": RNG.normal(size=(6, 2)).astype(np.float32),
}
ADAPTER = Adapter(adapter_name("run", NEXT), BASE, rank=2, alpha=3.0)


def manifest(version: PolicyVersion, tensors: dict[str, np.ndarray], adapter: Adapter | None = None) -> Manifest:
    return Manifest(version, describe_tensors(tensors)[0], adapter=adapter)


def test_what_is_added_up_is_a_version_like_any_other():
    whole, tensors = merge(manifest(NEXT, HALVES, ADAPTER), HALVES, manifest(BASE, WEIGHTS), WEIGHTS)
    a, b = HALVES.values()
    np.testing.assert_allclose(tensors["q.weight"], WEIGHTS["q.weight"] + 1.5 * b @ a, atol=1e-6)
    assert tensors["norm.weight"] is WEIGHTS["norm.weight"]
    assert (whole.version, whole.adapter) == (NEXT, None)
    check_geometry(whole.slices)
    assert verify_tensors(whole, tensors) == 2


def test_a_manifest_keeps_its_adapter_on_the_wire():
    there = manifest(NEXT, HALVES, ADAPTER)
    assert Manifest.from_proto(there.to_proto()) == there
    assert there.adapter is not None
    assert there.adapter.name == "run-1-3"


def test_the_weights_of_a_whole_version_are_told_from_its_adapter():
    both = manifest(BASE, {**WEIGHTS, **HALVES}, Adapter("run-1-0", BASE, 2, 3.0))
    assert [part.name for part in base_part(both).slices] == list(WEIGHTS)


@pytest.mark.parametrize(
    "halves",
    [
        dict(list(HALVES.items())[:1]),
        {name: half[:, :1] for name, half in HALVES.items()},
        {name.replace(".q.", ".k."): half for name, half in HALVES.items()},
        {name.replace("lora_A", "lora_C"): half for name, half in HALVES.items()},
    ],
    ids=["half", "shape", "name", "kind"],
)
def test_what_fits_no_weight_is_refused(halves):
    with pytest.raises(WeightsCorrupt):
        merge(manifest(NEXT, halves, ADAPTER), halves, manifest(BASE, WEIGHTS), WEIGHTS)
