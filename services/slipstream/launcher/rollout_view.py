"""Rollouts in a terminal: a table of many, or one whole, its tokens coloured by the weights that sampled them.

What models write is shown, not obeyed: control characters are written out.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from slipstream.launcher.rollout_files import samples_of, spans_of

COLOURS = ("cyan", "yellow", "magenta", "green", "blue", "red")
COLUMNS = (
    *("rollout", "environment", "task", "reward", "outcome", "step", "lag"),
    *("versions", "tokens", "turns", "seconds", "answer"),
)
RIGHT = {"task", "reward", "step", "lag", "tokens", "turns", "seconds"}
PIPE_WIDTH = 160
EXCERPT_CHARS = 400
GAP = 2
LEAST_ANSWER = 24
CONTEXT_TOKENS = 4
"""Before a piece of text, as decoders may write the first token of a text differently."""
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")

Decode = Callable[[Sequence[int]], str]


def open_console() -> Console:
    """Colours where there is a terminal and NO_COLOR is not set."""
    return Console(highlight=False, width=None if Console().is_terminal else PIPE_WIDTH)


def printable(text: object) -> str:
    """Text without what a terminal would act on."""
    return _CONTROL.sub(lambda match: f"\\x{ord(match[0]):02x}", str(text if text is not None else ""))


def table_of(records: Sequence[dict[str, Any]], width: int) -> Text:
    """One line a rollout. The answer has what is left of the width; names are never cut."""
    rows = [list(COLUMNS), *(_row(record) for record in records)]
    widths = [max(len(row[index]) for row in rows) for index in range(len(COLUMNS) - 1)]
    left = max(width - sum(widths) - GAP * len(widths), LEAST_ANSWER)
    text = Text()
    for row in rows:
        for name, cell, column in zip(COLUMNS, row, widths, strict=False):
            text.append(cell.rjust(column) if name in RIGHT else cell.ljust(column)).append(" " * GAP)
        answer = row[-1] if len(row[-1]) <= left else f"{row[-1][: left - 1]}…"
        text.append(f"{answer.rstrip()}\n")
    text.rstrip()
    return text


def _row(record: dict[str, Any]) -> list[str]:
    answer = " ".join(printable(record.get("completion")).split())[:EXCERPT_CHARS]
    figures = [record.get(name) for name in ("step", "lag")]
    return [
        printable(record.get("rollout")),
        printable(record.get("environment")),
        printable(record.get("task_index", "")),
        f"{record.get('reward', 0):.3g}{' ✓' if record.get('correct') else ''}{_of_roles(record, ' (', ')')}",
        printable(record.get("outcome")),
        *("" if figure is None else str(figure) for figure in figures),
        _versions(record),
        str(record.get("tokens", "")),
        str(record.get("turns", "")),
        f"{record.get('seconds', 0):.1f}",
        answer,
    ]


def _of_roles(record: dict[str, Any], before: str = "", after: str = "") -> str:
    """What it is worth for each role; nothing where it has none."""
    roles = [
        f"{printable(each.get('role'))} {each.get('reward', 0):.3g}{' ✓' if each.get('correct') else ''}"
        f"{' untrained' if each.get('untrained') else ''}"
        for each in record.get("roles", ())
    ]
    return f"{before}{', '.join(roles)}{after}" if roles else ""


def _versions(record: dict[str, Any]) -> str:
    versions = list(dict.fromkeys(printable(version) for _, version in spans_of(record)))
    return versions[0] if len(versions) == 1 else f"{versions[0]}-{versions[-1]}" if versions else ""


def view_of(record: dict[str, Any], decode: Decode | None, *, colours: bool) -> Text:
    """One rollout whole. Without colours, and with tokens of several versions, each begins with its version's name."""
    versions = list(dict.fromkeys(version for _, version in spans_of(record)))
    styles = {version: COLOURS[index % len(COLOURS)] for index, version in enumerate(versions)}
    text = Text()
    for name, value in _facts(record):
        text.append(f"{name:<12}", style="dim").append(f"{printable(value)}\n")
    text.append(f"{'sampled by':<12}", style="dim")
    for index, (count, version) in enumerate(spans_of(record)):
        text.append(f"{', ' if index else ''}{printable(version)} ({count})", style=styles[version])
    text.append("\n")
    for number, sample in enumerate(samples_of(record), 1):
        of_role = f", as {printable(sample['role'])}" if sample.get("role") else ""
        first = f"\nsample 1{of_role}:\n" if of_role else "\n"
        text.append(first if number == 1 else f"\nsample {number}{of_role}, from other tokens on:\n")
        for piece, version in _pieces(sample, decode):
            if version is not None and not colours and len(versions) > 1:
                text.append(f"[{printable(version)}]")
            text.append(printable(piece), style="dim" if version is None else styles[version])
        text.append("" if str(text).endswith("\n") else "\n")
    return text


def _facts(record: dict[str, Any]) -> list[tuple[str, str]]:
    timings: dict[str, float] = record.get("timings", {})
    task = f"{record.get('environment') or 'a prompt of its own'}, {record.get('split', '')} {record.get('task_index')}"
    if record.get("session_id"):
        task = f"{record['session_id']}, of an outside agent"
    outcome = str(record.get("outcome"))
    if record.get("step") is not None:
        outcome += f" at step {record['step']}, {_count(record.get('lag'), 'version')} behind"
    verdict = f"{record.get('reward', 0):g}; accuracy counts it as {'right' if record.get('correct') else 'wrong'}"
    verdict += f"; {record['detail']}" if record.get("detail") else ""
    parts = ", ".join(f"{name.removesuffix('_s')} {each:.3f}" for name, each in timings.items() if name != "total_s")
    tokens = f"{record.get('prompt_token_count')} of the prompt ({record.get('cached_token_count', 0)} from a cache), "
    tokens += f"{record.get('tokens')} sampled in {_count(record.get('turns'), 'turn')}, "
    tokens += f"ended by {record.get('finish_reason')}"
    tokens += f", cut short: {record['cut']}" if record.get("cut") else ""
    return [
        ("rollout", f"{record.get('rollout')} ({record.get('purpose')})"),
        ("task", task),
        ("reward", verdict),
        *([("by role", _of_roles(record))] if record.get("roles") else []),
        ("outcome", outcome),
        ("tokens", tokens),
        ("seconds", f"{record.get('seconds', 0):.3f}" + (f": {parts}" if parts else "")),
        ("dispatched", f"at {record.get('dispatch_version')}"),
        *([("trace", str(record["trace_id"]))] if record.get("trace_id") else []),
    ]


def _count(number: object, what: str) -> str:
    return f"{number} {what}" + ("" if number == 1 else "s")


def _pieces(record: dict[str, Any], decode: Decode | None) -> list[tuple[str, str | None]]:
    """Text by the version that sampled it; None for what nobody sampled."""
    token_ids: list[int] = record.get("token_ids", [])
    if decode is None or not token_ids:
        versions = [str(version) for _, version in record.get("versions", [])]
        prompt, answer = str(record.get("prompt", "")), str(record.get("completion", ""))
        return [(prompt + "\n", None), (answer, versions[0] if versions else None)]
    pieces = []
    for start, end, version in _runs(record, len(token_ids)):
        before = token_ids[max(start - CONTEXT_TOKENS, 0) : start]
        context, whole = decode(before), decode([*before, *token_ids[start:end]])
        piece = whole[len(context) :] if whole.startswith(context) else decode(token_ids[start:end])
        pieces.append((piece, version))
    return pieces


def _runs(record: dict[str, Any], token_count: int) -> list[tuple[int, int, str | None]]:
    """Ranges of tokens that one version sampled, or nobody."""
    spans = [(int(count), str(version)) for count, version in record.get("versions", [])]
    runs: list[tuple[int, int, str | None]] = []
    at = 0
    for start, end in record.get("loss_ranges", []):
        if start > at:
            runs.append((at, start, None))
        at = start
        while at < end and spans:
            count, version = spans[0]
            taken = min(count, end - at)
            runs.append((at, at + taken, version))
            at += taken
            spans[0] = (count - taken, version)
            if count == taken:
                spans.pop(0)
    if at < token_count:
        runs.append((at, token_count, None))
    return runs


def decoder(model_dir: Path) -> Decode | None:
    """Tokens to text with the tokenizer of a run; None where it has none that can be read."""
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    except Exception:  # the library raises this very class
        return None
    return lambda token_ids: tokenizer.decode(list(token_ids), skip_special_tokens=False)
