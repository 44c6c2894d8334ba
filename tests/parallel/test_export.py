"""What ranks publish is the whole model by the names of its checkpoint, each entry once."""

from __future__ import annotations

import numpy as np
import pytest
from safetensors.numpy import load_file

LAYOUTS = [(2, 1, 2), (4, 1, 2), (2, 2, 4), (4, 2, 2)]


@pytest.mark.parametrize("kind", ["moe", "dense", "lora"])
@pytest.mark.parametrize(("data", "context", "expert"), LAYOUTS)
def test_boxes_of_all_ranks_tile_every_tensor(pool, kind, data, context, expert, tmp_path):
    layout = {"data": data, "context": context, "expert": 1 if kind == "dense" else expert}
    path = tmp_path / "box"
    held = pool.run("exported", data * context, kind=kind, layout=layout, path=str(path))
    whole = load_file(f"{path}-whole")
    rebuilt = {name: np.full(value.shape, np.nan, np.float32) for name, value in whole.items()}
    count = 0
    for rank, boxes in enumerate(held):
        tensors = load_file(f"{path}-{rank}")
        for number, (name, shape, offsets) in enumerate(boxes):
            values = tensors[str(number)]
            assert tuple(shape) == whole[name].shape
            place = tuple(slice(start, start + n) for start, n in zip(offsets, values.shape, strict=True))
            rebuilt[name][place] = values
            count += values.size
    assert count == sum(value.size for value in whole.values())
    for name, value in whole.items():
        if kind == "lora":  # merged: sums come in another order
            np.testing.assert_allclose(rebuilt[name], value, atol=1e-6, err_msg=name)
        else:
            assert np.array_equal(rebuilt[name], value), name
