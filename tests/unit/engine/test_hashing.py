"""Golden values: the hash is shared by engine, router and runner, in whatever version each of them is."""

from __future__ import annotations

from slipstream.engine.hashing import block_hashes, prompt_hash


def test_block_hashes_are_the_golden_ones():
    assert block_hashes("run/1.0/float32", [1, 2, 3, 4, 5, 6, 7, 8, 9], 4) == GOLDEN
    assert block_hashes("run/1.0/float32", [1, 2, 3], 4) == []


def test_a_hash_covers_salt_and_all_earlier_tokens():
    first = block_hashes("a", [1, 2, 3, 4], 2)
    assert block_hashes("a", [1, 2, 3, 5], 2)[0] == first[0]
    assert block_hashes("a", [9, 2, 3, 4], 2)[1] != first[1]
    assert not set(block_hashes("b", [1, 2, 3, 4], 2)) & set(first)


def test_the_hash_of_a_prompt_covers_salt_length_and_every_token():
    assert (
        prompt_hash("run/1.0/float32", [1, 2, 3, 4]) == GOLDEN[0] == block_hashes("run/1.0/float32", [1, 2, 3, 4], 4)[0]
    )
    others = [("run/1.1/float32", [1, 2, 3, 4]), ("run/1.0/float32", [1, 2, 3]), ("run/1.0/float32", [1, 2, 3, 5])]
    assert len({prompt_hash(*each) for each in others} | {GOLDEN[0]}) == 4


GOLDEN = [18306468812678715510, 10792205567090811356]
