"""Bodies on blocks of a Mooncake store, in a process of their own: `python -m tests.mooncake.lenders MASTER`."""

from __future__ import annotations

import sys

from slipstream.engine.vllm.offload.mooncake import MooncakeBlocks
from tests.offload.test_files import LAYOUT, SALT, key, parts, room

MIB = 2**20


def a_block_comes_back_to_another_worker_and_to_no_other_salt_or_layout(lenders: list[MooncakeBlocks]) -> None:
    one, other, stranger = lenders
    assert one.write(SALT, key(1), parts(1))
    target = room()
    assert other.find(SALT, [key(1), key(2)]) == [True, False]
    assert other.read(SALT, key(1), target)
    assert target == parts(1)
    assert other.find("run/1/8/bfloat16", [key(1)]) == stranger.find(SALT, [key(1)]) == [False]
    assert not stranger.read(SALT, key(1), room())
    assert not other.read(SALT, key(2), room())
    assert other.rejected_files == 0


def what_is_not_what_its_name_says_is_a_miss_counted_and_removed(lenders: list[MooncakeBlocks]) -> None:
    one, other, _ = lenders
    for number, data in ((11, b"short"), (12, b"x" * 1500)):
        assert one._store.put(one._name(SALT, key(number)), data) == 0
        assert not other.read(SALT, key(number), room())
    assert one.write(SALT, key(13), parts(13))
    foreign = bytes(one._store.get(one._name(SALT, key(13))))
    assert one._store.put(one._name(SALT, key(14)), foreign) == 0
    assert not other.read(SALT, key(14), room())
    assert other.rejected_files == 3


def the_end_of_a_salt_removes_its_blocks_even_if_just_read(lenders: list[MooncakeBlocks]) -> None:
    one, other, _ = lenders
    ending = "run/1/5/bfloat16"
    for salt in (ending, "run/1/6/bfloat16"):
        assert one.write(salt, key(1), parts(1))
    assert other.read(ending, key(1), room())
    assert other.end(ending) == 1
    assert one.find(ending, [key(1)]) == [False]
    assert one.find("run/1/6/bfloat16", [key(1)]) == [True]


def main(master: str) -> None:
    """All bodies, with two workers of one layout, and one of another."""
    layouts = (LAYOUT.digest, LAYOUT.digest, b"another".ljust(32))
    lenders = [MooncakeBlocks(master, 32 * MIB, "127.0.0.1", layout) for layout in layouts]
    for body in (
        a_block_comes_back_to_another_worker_and_to_no_other_salt_or_layout,
        what_is_not_what_its_name_says_is_a_miss_counted_and_removed,
        the_end_of_a_salt_removes_its_blocks_even_if_just_read,
    ):
        body(lenders)
    for lender in lenders:
        lender.close()


if __name__ == "__main__":
    main(sys.argv[1])
