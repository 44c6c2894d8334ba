"""Followers of changes hear of each thing's last change, in order, and cost no look at what they have seen."""

from __future__ import annotations

import random

from slipstream.orchestrator.changes import Changes


class Thing:
    def __init__(self, name: str) -> None:
        self.name = name
        self.number = 0


def test_followers_hear_of_what_a_search_of_everything_would_find():
    rng = random.Random(1)
    changes, things = Changes[Thing](), []
    seen = dict.fromkeys("ab", 0)
    for number in range(1, 3001):
        if things and rng.random() < 0.3:
            forgotten = things.pop(rng.randrange(len(things)))
            changes.drop(forgotten.number)
        if not things or rng.random() < 0.5:
            things.append(Thing(rng.choice("ab")))
        changed = rng.choice(things[-20:])
        changes.drop(changed.number)
        changed.number = number
        changes.add(number, changed)
        for label, after in seen.items():
            if rng.random() < 0.4:
                later = [thing for thing in things if thing.name == label and thing.number > after]
                seen[label], found = changes.after(after, lambda thing, label=label: thing.name == label)
                assert found is min(later, key=lambda thing: thing.number, default=None)
                assert seen[label] == (found.number if found is not None else number)


def test_a_follower_looks_once_at_each_change_that_is_not_for_it():
    changes, looks = Changes[str](), []

    def wanted(thing: str) -> bool:
        looks.append(thing)
        return False

    for number in range(1, 1001):
        changes.add(number, "other")
    seen, _ = changes.after(0, wanted)
    for number in range(1001, 1004):
        changes.add(number, "other")
        seen, _ = changes.after(seen, wanted)
    assert (seen, len(looks)) == (1003, 1003)


def test_what_changes_again_and_again_takes_no_more_room():
    changes = Changes[str]()
    for number in range(1, 10_001):
        changes.drop(number - 10)
        changes.add(number, str(number % 10))
    assert len(changes._places) < 100
    changes.drop(9_995)
    changes.drop(9_995)
    changes.drop(77)
    assert changes.after(9_994, lambda _: True) == (9_996, "6")
