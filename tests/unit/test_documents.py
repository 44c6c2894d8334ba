"""The documents name everything there is to name."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from slipstream.common.errors import SlipstreamError
from slipstream.launcher.config import SERVICES

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ROOT / "services" / "slipstream"
METRIC = re.compile(r"(?:Counter|Gauge|Histogram|Summary|Info|Enum)\(\s*\"(slipstream_\w+)\"")
EXIT_CODES = (0, 1, 2, 129, 130, 143)


def operations() -> str:
    return (ROOT / "docs" / "operations.md").read_text()


def test_every_error_reason_and_its_code_is_in_the_operations_guide():
    text = operations()
    rows = {
        f"| `{cls.reason}` | {cls.code.name} |" for cls in SlipstreamError.by_reason.values() if cls.reason != "UNKNOWN"
    }
    assert len(rows) > 40
    assert sorted(row for row in rows if row not in text) == []


def test_the_api_reference_is_what_the_protos_say():
    script = ROOT / "proto" / "reference.py"
    checked = subprocess.run([sys.executable, str(script), "check"], capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stderr


def test_every_metric_is_in_the_operations_guide():
    names = {
        name for path in SOURCES.rglob("*.py") if "api" not in path.parts for name in METRIC.findall(path.read_text())
    }
    assert len(names) >= 5
    text = operations()
    assert sorted(name for name in names if f"`{name}`" not in text) == []


def test_every_exit_code_is_in_the_operations_guide():
    table = operations().partition("## Exit codes")[2].partition("##")[0]
    codes = {int(code) for row in re.findall(r"^\| ([\d, ]+) \|", table, re.M) for code in row.split(",")}
    assert codes == set(EXIT_CODES)


@pytest.mark.parametrize("service", sorted(SERVICES))
def test_every_service_has_a_table_of_its_loops(service):
    """In its README, in its main module, or in what both kinds of worker share."""
    files = [SOURCES / service / "README.md", SOURCES / service / "__main__.py"]
    if service in ("prefill", "decode"):
        files.append(SOURCES / "engine" / "worker" / "worker.py")
    text = "\n".join(file.read_text() for file in files)
    assert re.search(r"^\| loop \|.*\n\|[-|]+\|\n\| ", text, re.M)


def test_the_glossary_is_alphabetical_and_says_each_word_once():
    words = re.findall(r"^\| ([^|]+?) \|", (ROOT / "docs" / "glossary.md").read_text(), re.M)
    words = [word for word in words if word not in ("word", "---")]
    assert words == sorted(words, key=str.lower)
    assert len(words) == len({word.lower() for word in words})
