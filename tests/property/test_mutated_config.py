"""However an example's TOML is changed, it loads or is refused in one line; nothing else ever comes out."""

from __future__ import annotations

import contextlib
import tomllib
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from slipstream.common.config import ConfigError
from slipstream.common.config_files import load_with_origins
from slipstream.common.toml import dump_table
from slipstream.launcher.config import RUN_CONFIG
from slipstream.launcher.resolve import check

DEMO = (Path(__file__).parents[2] / "examples" / "demo.toml").read_text()
CHECKS = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
"""That are left out: each example writes over the file, and a busy machine draws slowly."""
KEYS = [
    *("run", "seed", "orchestrator", "total_steps", "trainer", "loss", "type", "environments", "weight", "engine"),
    *("decode", "block_count", "0", "max-new-tokens", "replicas", "model", "dim", "betas", "optim", "options"),
    *("", "a.b", "\n"),
]
WORDS = st.text(max_size=8) | st.sampled_from(["clipped", "expression"])
scalars = st.integers() | st.floats() | st.booleans() | st.dates() | WORDS
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=3),
    max_leaves=6,
)


def tables(value: Any) -> list[dict[str, Any]]:
    """Every table in a document."""
    if isinstance(value, list):
        return [table for item in value for table in tables(item)]
    return [value, *(t for item in value.values() for t in tables(item))] if isinstance(value, dict) else []


def loads_or_is_refused(path: Path, overrides: tuple[str, ...] = ()) -> None:
    try:
        check(*load_with_origins(RUN_CONFIG, [path], overrides))
    except ConfigError as error:
        refusal = str(error)
    else:
        return
    assert refusal
    assert refusal.isprintable(), "one line"


@settings(max_examples=150, deadline=None, suppress_health_check=CHECKS)
@given(data=st.data())
def test_a_changed_value_loads_or_is_refused(tmp_path, data):
    document = tomllib.loads(DEMO)
    for _ in range(data.draw(st.integers(1, 3))):
        table = data.draw(st.sampled_from(tables(document)))
        key = data.draw(st.sampled_from([*table, *KEYS]))
        table[key] = data.draw(values)
    path = tmp_path / "mutated.toml"
    text = dump_table(document)
    with contextlib.suppress(UnicodeEncodeError):  # a lone surrogate is no text
        path.write_text(text, encoding="utf-8")
        loads_or_is_refused(path)


@settings(max_examples=100, deadline=None, suppress_health_check=CHECKS)
@given(at=st.integers(0, len(DEMO)), length=st.integers(0, 40), into=st.binary(max_size=12))
def test_a_changed_file_loads_or_is_refused(tmp_path, at, length, into):
    path = tmp_path / "mutated.toml"
    data = DEMO.encode()
    path.write_bytes(data[:at] + into + data[at + length :])
    loads_or_is_refused(path)


@settings(max_examples=100, deadline=None, suppress_health_check=CHECKS)
@given(keys=st.lists(st.sampled_from(KEYS), min_size=1, max_size=4), value=st.text(max_size=12))
def test_any_flag_loads_or_is_refused(tmp_path, keys, value):
    path = tmp_path / "demo.toml"
    path.write_text(DEMO)
    loads_or_is_refused(path, (f"{'.'.join(keys)}={value}",))
