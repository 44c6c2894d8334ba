"""Sentences as a terminal takes them: one line each, not longer than anybody reads."""

from __future__ import annotations

LIMIT_CHARACTERS = 320
TAIL_CHARACTERS = 160


def one_line(sentence: str, whole_in: str) -> str:
    """The sentence on one line; of a long one its beginning, what follows its last semicolon, and where all is."""
    flat = " ".join(sentence.split())
    if len(flat) <= LIMIT_CHARACTERS:
        return flat
    _, semicolon, last = flat.rpartition("; ")
    tail = f"; {last}" if semicolon and len(last) <= TAIL_CHARACTERS else ""
    return f"{flat[: LIMIT_CHARACTERS - len(tail)].rstrip()}…{tail} (all of it: {whole_in})"
