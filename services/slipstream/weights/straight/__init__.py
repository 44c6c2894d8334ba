"""Weights straight from the trainer's memory to the engines': kept copies, loans of them, and the ways to read them.

    trainer's rank: pack into a kept copy ── manifest with sums and its own address ──► broadcaster
    worker:         manifest ── BorrowShard ──► rank;   engine's process: read, sum up, compare;   ReturnShard ──► rank

Nothing here goes through the broadcaster but the manifest. What was read counts only once the loan is given back: one
that ran out may have been overwritten.
"""
