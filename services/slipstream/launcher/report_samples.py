"""Answers before and after training, as tables of HTML."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from slipstream.launcher.records import Record, RunRecords

SAMPLES_SHOWN = 8


def sample_tables(records: RunRecords, environments: Sequence[str]) -> list[tuple[str, str, str]]:
    """For each environment: its name, its table, and how the rows were chosen."""
    asked: dict[tuple[str, int], dict[str, Record]] = {}
    for rollout in records.evaluations:
        when = "before" if str(rollout.get("dispatch_version", "")).endswith(".0") else "after"
        key = (str(rollout.get("environment")), int(rollout.get("task_index", 0)))
        asked.setdefault(key, {})[when] = rollout
    tables = []
    for environment in environments:
        pairs = [pair for (name, _), pair in sorted(asked.items()) if name == environment and "before" in pair]
        # Mostly problems that were wrong before: the change is what one looks for.
        wrong = [pair for pair in pairs if not pair["before"].get("correct")]
        right = [pair for pair in pairs if pair["before"].get("correct")]
        shown = (wrong[: SAMPLES_SHOWN - min(2, len(right))] + right[:2])[:SAMPLES_SHOWN]
        if not shown:
            continue
        kept = sum(bool(pair["before"].get("correct")) for pair in shown)
        asked_for = _common_start([str(pair["before"].get("prompt", "")) for pair in pairs])
        rows = "".join(
            f"<tr><td>{_code(str(pair['before'].get('prompt', ''))[len(asked_for) :].strip())}</td>"
            f"<td>{_answer(pair['before'])}</td><td>{_answer(pair.get('after'))}</td></tr>"
            for pair in shown
        )
        head = "<thead><tr><th>problem</th><th>before</th><th>after</th></tr></thead>"
        table = f"<table>{head}<tbody>{rows}</tbody></table>"
        chosen = (
            f"{len(shown)} of the {len(pairs)} held-out problems, the first by number: {len(shown) - kept} wrong before"
        )
        chosen += f" and {kept} right before. Not a random sample; the accuracy above counts all."
        tables.append((environment, table, f"{asked_for.strip()} … {chosen}" if asked_for else chosen))
    return tables


def _common_start(prompts: Sequence[str]) -> str:
    """Whole words that all prompts begin with: the instruction, which need not stand in every row."""
    first, last = min(prompts), max(prompts)  # what the two ends of the order share, all share
    length = next((index for index, pair in enumerate(zip(first, last, strict=False)) if pair[0] != pair[1]), 0)
    return first[: first.rfind(" ", 0, length) + 1]


def _answer(rollout: Record | None) -> str:
    if rollout is None:
        return '<span class="empty">not asked</span>'
    mark = "right" if rollout.get("correct") else "wrong"
    return f'<span class="{mark}">{"✓" if mark == "right" else "✗"}</span> {_code(rollout.get("completion"))}'


def _code(text: object) -> str:
    return f"<code>{escape(str(text if text is not None else '')) or '&nbsp;'}</code>"
