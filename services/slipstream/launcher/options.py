"""Options of a subcommand: `--name VALUE` or `--name=VALUE`, flags without a value, and words that are neither."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence

from slipstream.common.config import ConfigError


def take(
    arguments: Sequence[str],
    program: str,
    values: Mapping[str, Callable[[str], None]],
    flags: Mapping[str, Callable[[], None]],
    word: Callable[[str], bool],
    other: Callable[[str, list[str]], bool] = lambda argument, rest: False,
) -> None:
    """Hand each argument to whom it is for, from left to right. Raises `ConfigError` for one that nobody takes.

    `word` says whether it takes a bare word. `other` is asked first; it may take more from the front of what follows.
    """
    rest = list(arguments)
    while rest:
        argument = rest.pop(0)
        name, equals, value = argument.partition("=")
        if other(argument, rest):
            continue
        if argument in flags:
            flags[argument]()
        elif name in values:
            if not equals and not rest:
                raise ConfigError(f"{name} takes a value; see {program} --help")
            values[name](value if equals else rest.pop(0))
        elif argument.startswith("-") or not word(argument):
            near = difflib.get_close_matches(name, [*values, *flags], n=1)
            meant = f"; did you mean {near[0]}?" if near else f"; see {program} --help"
            raise ConfigError(f"{argument!r} is not understood{meant}")
