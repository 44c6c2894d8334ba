"""Which salts a worker still expects requests under."""

from __future__ import annotations

from typing import Any, cast

from slipstream.common.version import UNSET, PolicyVersion
from slipstream.engine.worker.salts import Salts

V1, V2, V3 = (PolicyVersion(1, step) for step in (1, 2, 3))


class Ended:
    """The part of an engine that is told."""

    def __init__(self) -> None:
        self.salts: list[str] = []

    def end_salt(self, salt: str) -> None:
        self.salts.append(salt)


def seen(limit: int = 8, **versions: PolicyVersion) -> tuple[Salts, Ended]:
    engine = Ended()
    salts = Salts(cast(Any, engine), limit)
    for salt, version in versions.items():
        salts.see(salt, version)
    return salts, engine


def test_salts_of_versions_no_group_runs_at_end_once():
    salts, engine = seen(a=V1, b=V2, c=V3, same=V1)
    assert salts.keep({V2}, V3) == 2
    assert engine.salts == ["a", "same"]
    assert salts.keep({V2}, V3) == 0
    salts.see("a", V1)
    assert salts.keep(set(), V3) == 2
    assert engine.salts == ["a", "same", "b", "a"]


def test_a_version_that_groups_may_be_dispatched_at_is_never_ended_by_a_late_call():
    salts, engine = seen(newer=V3, newest=PolicyVersion(2, 1))
    assert salts.keep({V1}, V2) == 0  # the caller dispatches at 3 by now
    assert engine.salts == []


def test_a_retrained_step_does_not_keep_the_dead_one():
    salts, engine = seen(dead=PolicyVersion(1, 51), retrained=PolicyVersion(2, 51))
    salts.keep(set(), PolicyVersion(2, 51))
    assert engine.salts == ["dead"]


def test_the_book_is_bounded_and_the_oldest_version_goes():
    _, engine = seen(limit=2, new=V3, old=V1, newer=V2)
    assert engine.salts == ["old"]


def test_a_salt_without_a_version_is_nobodys_to_end():
    salts, engine = seen(probe=UNSET)
    assert salts.keep(set(), V3) == 0
    assert engine.salts == []
