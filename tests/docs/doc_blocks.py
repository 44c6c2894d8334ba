"""Fenced blocks of the documents: files to write, and commands to run with what they show.

```toml title="bigger.toml"        a file, or more of one that an earlier block begins
```console                         lines after "$ " are commands; what follows one are parts of its output
```console exit=2                  the code that each of them ends with, 0 unless said
```console norun                   shown only
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_FENCE = re.compile(r"^```(\w+)([^\n]*)\n(.*?)^```$", re.M | re.S)


@dataclass
class Command:
    """One command, and lines that its output must hold."""

    line: str
    exit_code: int
    shown: list[str] = field(default_factory=list[str])


def files_of(document: str) -> dict[str, str]:
    """Files that a document tells to write, by name."""
    files: dict[str, str] = {}
    for _, info, body in _blocks(document):
        if match := re.search(r'title="([^"]+)"', info):
            files[match[1]] = files.get(match[1], "") + body
    return files


def commands_of(document: str) -> list[Command]:
    """Commands of a document, in order."""
    commands: list[Command] = []
    for language, info, body in _blocks(document):
        if language != "console" or "norun" in info:
            continue
        match = re.search(r"exit=(\d+)", info)
        for line in body.splitlines():
            if line.startswith("$ "):
                commands.append(Command(line[2:].partition("  #")[0].strip(), int(match[1]) if match else 0))
            elif line.strip() not in ("", "..."):
                commands[-1].shown.append(line.strip())
    return commands


def _blocks(document: str) -> list[tuple[str, str, str]]:
    return [(m[1], m[2], m[3]) for m in _FENCE.finditer((ROOT / document).read_text())]
