"""TOML written by hand against the standard library's reader."""

from __future__ import annotations

import math
import tomllib

from hypothesis import given
from hypothesis import strategies as st

from slipstream.common.toml import dump_table

# TOML has no surrogates and 64-bit integers; its lists are ours as they are.
text = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
scalars = st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | text
values = st.recursive(
    scalars | st.lists(scalars, max_size=3),
    lambda inner: st.dictionaries(text, inner, max_size=3) | st.lists(inner, max_size=3),
    max_leaves=12,
)


@given(st.dictionaries(text, values, max_size=5))
def test_a_table_reads_back_as_it_was_written(table):
    assert tomllib.loads(dump_table(table)) == table


def test_infinities_and_nan_are_written_as_toml_has_them():
    table = tomllib.loads(dump_table({"a": math.inf, "b": -math.inf, "c": math.nan, "d": 1e300, "e": 1e-7}))
    assert (table["a"], table["b"], table["d"], table["e"]) == (math.inf, -math.inf, 1e300, 1e-7)
    assert math.isnan(table["c"])
