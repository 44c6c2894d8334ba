"""What only the embedded engine has; what every engine must do is in `tests/engine`."""

from __future__ import annotations

import threading

import pytest
import torch

from slipstream.common.errors import NoWeights
from slipstream.common.exits import ServiceFailed
from slipstream.engine.base import PrefillRequest
from slipstream.engine.embedded import engine as embedded
from slipstream.engine.embedded.engine import EmbeddedEngine
from tests.unit.engine.helpers import CONFIG, PROMPT, SIZES, V1, tensors, weights


async def test_an_engine_without_weights_refuses():
    engine = EmbeddedEngine(SIZES, CONFIG)
    await engine.start()
    with pytest.raises(NoWeights):
        await engine.prefill(PrefillRequest("p", PROMPT, "s"))
    await engine.stop()


async def test_operators_run_with_the_configured_number_of_threads():
    engine = EmbeddedEngine(SIZES, CONFIG.model_copy(update={"torch_threads": 2}))
    await engine.start()
    await engine.update(V1, tensors(weights(0)), lambda paused: None)
    try:
        seen = await engine.checksums(lambda name, array: torch.get_num_threads())
    finally:
        await engine.stop()
    assert set(seen.values()) == {2}


async def test_an_engine_whose_thread_stands_still_is_left_in_time(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(embedded, "STOP_TIMEOUT_S", 0.2)
    engine, go_on = EmbeddedEngine(SIZES, CONFIG), threading.Event()
    await engine.start()
    engine._post(lambda: go_on.wait(60))
    with pytest.raises(ServiceFailed, match=r"did not end within 0\.2 s"):
        await engine.stop()
    go_on.set()
    monkeypatch.undo()
    await engine.stop()
