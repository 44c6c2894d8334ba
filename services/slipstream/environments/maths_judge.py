"""Whether an answer to a problem of mathematics is right, by math-verify: run by `judge_server.py`.

An answer is `{"gold": "\\\\frac{1}{2}", "text": "... so it is $0.5$", "plain_numbers": true}`.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from typing import Any

import math_verify
import sympy

from slipstream.environments.judge_server import serve

MAX_SHOWN = 80
NUMBER = r"[+-]?\s*\$?\d[\d,]*(?:\.\d+)?|[+-]?\.\d+"
PLAIN = re.compile(
    rf"\s*(?:[A-Za-z]\s*=\s*)?(?:(?:{NUMBER})(?:\s*/\s*(?:{NUMBER}))?|[+-]?\s*\\d?frac\{{(?:{NUMBER})\}}\{{(?:{NUMBER})\}})"
    r"\s*(?:\\?%)?\.?\s*"
)
"""A number as people write it: nothing is left to compute but one division."""


def gold_of(text: str) -> list[Any]:
    """What a right answer is, as math-verify has it; empty when it cannot read it."""
    return math_verify.parse(f"\\boxed{{{text}}}", parsing_timeout=0)


def judge(answer: Mapping[str, Any]) -> dict[str, Any]:
    """The verdict of one answer. The last expression of a text counts, or all of its boxes together."""
    gold = gold_of(answer["gold"])
    if not gold:
        return {"error": f"math-verify cannot read the right answer {answer['gold']!r}", "unreadable": True}
    found = math_verify.parse(answer["text"], extraction_mode="first_match", parsing_timeout=0)
    if not found:
        return {"correct": False, "detail": "no expression found"}
    shown = str(found[-1])
    number = isinstance(gold[0], sympy.Rational | sympy.Float)
    if answer["plain_numbers"] and number and not PLAIN.fullmatch(shown):
        return {"correct": False, "detail": f"{shown[:MAX_SHOWN]} is left to compute"}
    correct = math_verify.verify(gold, found, timeout_seconds=0)
    return {"correct": bool(correct), "detail": shown[:MAX_SHOWN]}


def main() -> None:
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)  # that time limits are ours
    gold_of("1")  # builds what the first parsing builds, once for all forks
    serve(judge)


if __name__ == "__main__":
    main()
