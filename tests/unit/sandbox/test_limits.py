"""Limits asked for, given and refused; files of a sandbox; the command line of the jail."""

from __future__ import annotations

import pytest

from slipstream.api.sandbox.v1 import sandbox_pb2
from slipstream.common.errors import InvalidRequest, SandboxFilesFull, SandboxUnknown
from slipstream.sandbox.jail import Jail
from slipstream.sandbox.leases import SandboxTable
from slipstream.sandbox.program import Limits, Outcome
from slipstream.sandbox.servicer import OUTCOMES, merge_limits

SMALL = Limits(1.0, 1.0, 2**24, 4, 1000, 4096)
LARGE = Limits(10.0, 10.0, 2**30, 40, 10_000, 40_960)


def test_a_limit_of_zero_takes_the_default():
    assert merge_limits(sandbox_pb2.Limits(), SMALL, LARGE) == SMALL
    assert merge_limits(sandbox_pb2.Limits(wall_ms=2500), SMALL, LARGE).wall_s == 2.5


def test_a_limit_above_the_maximum_names_field_and_limit():
    with pytest.raises(InvalidRequest) as error:
        merge_limits(sandbox_pb2.Limits(process_count=41), SMALL, LARGE)
    assert error.value.metadata == {"field": "limits.process_count", "limit": "40"}


def test_every_outcome_is_in_the_contract():
    assert {OUTCOMES[outcome] for outcome in Outcome} == set(sandbox_pb2.Outcome.keys()) - {"OUTCOME_UNSPECIFIED"}


def test_files_are_written_all_or_none():
    sandbox = SandboxTable(1, 1.0).create("python", SMALL, LARGE, 60.0)
    sandbox.write_files({"a": b"12345"}, max_bytes=8, left_bytes=100)
    with pytest.raises(SandboxFilesFull):
        sandbox.write_files({"b": b"1", "c": b"123"}, max_bytes=8, left_bytes=100)
    sandbox.write_files({"a": b"12345678"}, max_bytes=8, left_bytes=100)
    assert sandbox.files == {"a": b"12345678"}


def test_a_sandbox_past_its_lease_is_unknown_before_it_is_swept():
    table = SandboxTable(1, 1.0)
    sandbox = table.create("python", SMALL, LARGE, 0.0)
    with pytest.raises(SandboxUnknown):
        table.get(sandbox.sandbox_id)
    assert len(table) == 1
    assert table.create("python", SMALL, LARGE, 60.0) is table.get(next(iter(table.page("", 1))).sandbox_id)


def test_words_of_the_program_are_never_options_of_the_jail():
    jail = Jail("bwrap", ("--dev-bind", "/r", "/"), "/usr/bin")
    command = jail.command(["--share-net", "--bind"], {}, {}, 4096, 0)
    assert command[command.index("--") + 4 :] == ["sh", "--share-net", "--bind"]


def test_sandboxes_together_hold_a_bounded_number_of_bytes():
    table = SandboxTable(4, 1.0, max_files_bytes=10)
    one, other = (table.create("python", SMALL, LARGE, 60.0) for _ in range(2))
    table.write_files(one, {"a": b"123456"}, max_bytes=8)
    with pytest.raises(SandboxFilesFull):
        table.write_files(other, {"a": b"12345"}, max_bytes=8)
    table.write_files(other, {"a": b"1234"}, max_bytes=8)
    table.delete(one.sandbox_id)
    table.write_files(other, {"a": b"12345678"}, max_bytes=8)
