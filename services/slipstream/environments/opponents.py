"""Players that are no model, for games whose observations name the moves there are.

An opponent is called with what the player was told since its last turn, and a `random.Random`; it returns what it says.
"""

from __future__ import annotations

import random
import re

_MOVE = re.compile(r"'(\[[^\[\]']+\])'")


def random_move(told: str, draw: random.Random) -> str:
    """One of the moves that the last line with any names, in quotes, as textarena's boards do: `'[0]', '[4]'`."""
    for line in reversed(told.splitlines()):
        moves = _MOVE.findall(line)
        if moves:
            return draw.choice(moves)
    return "[0]"
