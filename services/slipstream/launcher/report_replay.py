"""The mismatch with routing replay on beside that with it off, as a table of HTML."""

from __future__ import annotations

from typing import Any

from slipstream.launcher.charts import number

KINDS = {"all": "all", "numeric": "numeric (pure context)", "policy_lag": "policy lag", "stale_kv": "stale KV"}


def replay_tables(figures: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Title, table and note; none where nothing was measured."""
    tokens = figures["replay_check_tokens"]
    if not tokens:
        return []
    shares = {"all": 1.0, **figures["mismatch_share"]}
    rows = "".join(
        f"<tr><td>{title}</td><td>{_percent(shares.get(kind, 0.0))}</td>"
        + "".join(f"<td>{_figure(figures[f'mismatch_replay_{state}'].get(kind))}</td>" for state in ("on", "off"))
        + "</tr>"
        for kind, title in KINDS.items()
    )
    head = "<thead><tr><th>tokens</th><th>share</th><th>replay on</th><th>replay off</th></tr></thead>"
    flipped = _percent(figures["routes_flipped_fraction"])
    note = (
        f"Mean k3 of {tokens} tokens, each computed twice on the same weights: with the experts that the engine chose, "
        f"and with those chosen live, when {flipped} of all choices came out otherwise."
    )
    return [
        ("Mismatch KL per token, routing replay on and off", f"<table>{head}<tbody>{rows}</tbody></table>", note),
    ]


def _percent(value: float) -> str:
    return f"{100 * value:.3g} %"


def _figure(value: float | None) -> str:
    return "–" if value is None else number(value)
