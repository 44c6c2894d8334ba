"""How old the open groups are, by environment."""

from __future__ import annotations

from slipstream.algorithms.staleness import Group, Phase
from slipstream.orchestrator.group_figures import GroupFigures


def test_each_environment_has_its_oldest_and_most_lagging_groups_and_those_begun_again() -> None:
    now = 0.0
    figures = GroupFigures(["words", "numbers"], lambda: now)
    running = Group(0, "words", Phase.RUNNING, attempt=1, dispatch_step=1)
    scored = Group(1, "words", Phase.SCORED, attempt=1, dispatch_step=3)
    sealed = Group(2, "numbers", Phase.SEALED, attempt=1, dispatch_step=0)
    for group in (running, scored, sealed):
        figures.dispatched(group)
        now += 10.0
    running.attempt = 2
    figures.dispatched(running)
    assert figures.fields([running, scored, sealed], next_step=5) == {
        "lag_in_flight_by_environment": {"words": 3.0, "numbers": 0.0},
        "lag_in_queue_by_environment": {"words": 1.0, "numbers": 0.0},
        "oldest_group_s_by_environment": {"words": 30.0, "numbers": 0.0},
        "groups_again_by_environment": {"words": 1, "numbers": 0},
    }
    assert figures.oldest_s([scored]) == {"words": 20.0, "numbers": 0.0}
    figures.fields([], next_step=5)
    assert figures.oldest_s([running]) == {"words": 0.0, "numbers": 0.0}, "an ended one is forgotten"
