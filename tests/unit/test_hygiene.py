"""What no file of the repository may hold."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from hypothesis import settings

ROOT = Path(__file__).resolve().parents[2]
LARGEST_BYTES = 1024 * 1024
FORBIDDEN = {
    "a path of somebody's machine": re.compile(r"(?<![\w.])/(?:home|root|Users)/\w"),
    "pickle, which runs what it reads": re.compile(
        r"^\s*(?:import|from)\s+(?:pickle|cPickle|dill|cloudpickle)\b", re.M
    ),
    "a merge conflict": re.compile(r"^(?:<{7}|>{7}) ", re.M),
    "a package registry, which is for whoever installs to choose": re.compile(
        r"\b(?:pypi\.org|files\.pythonhosted|download\.pytorch|registry\.npmjs|crates\.io|proxy\.golang)\b"
    ),
    "an unfinished place": re.compile(r"#\s*(?:TODO|FIXME|XXX)\b|raise NotImplementedError"),
    "the environment, which only common/config.py reads": re.compile(r"\bos\.(?:environ|getenv)\b"),
}
# Tests and load tests hand environments to child processes; the config module is the reader.
READS_ENVIRONMENT = ("services/slipstream/common/config.py", "tests/", "loadtests/")


def tracked():
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("not a git checkout")
    return [name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()]


def test_no_file_holds_what_is_forbidden():
    found = []
    for name in tracked():
        if (
            not name.endswith((".py", ".toml", ".md", ".proto", "Makefile", "run"))
            or name == "tests/unit/test_hygiene.py"
        ):
            continue
        text = (ROOT / name).read_text(encoding="utf-8")
        for what, pattern in FORBIDDEN.items():
            if what.startswith("the environment") and name.startswith(READS_ENVIRONMENT):
                continue
            found += [f"{name}:{text.count(chr(10), 0, match.start()) + 1}: {what}" for match in pattern.finditer(text)]
    assert found == []


def test_generated_and_large_files_are_not_committed():
    names = tracked()
    assert [name for name in names if name.startswith(("services/slipstream/api/", "services/buf/", "runs/"))] == []
    assert [name for name in names if (ROOT / name).stat().st_size > LARGEST_BYTES] == []


def test_no_example_of_a_property_has_a_deadline_that_a_busy_machine_could_miss():
    assert settings.default is not None
    assert settings.default.deadline is None


WALL_CLOCK = re.compile(r"\btime\.time(?:_ns)?\b|\bdatetime\.(?:datetime\.)?(?:now|utcnow|today)\b")
READS_WALL_CLOCK = {
    "broadcaster/store.py": "when a version was sealed, for people",
    "common/tracing.py": "where a span begins; its length is of a steady clock",
    "common/tls.py": "whether a certificate is valid now",
    "engine/embedded/core.py": "where a busy interval begins; its length is of a steady clock",
    "engine/embedded/engine.py": "the timeline of busy intervals",
    "engine/vllm/counters.py": "where a busy interval ends; its length is of a steady clock",
    "engine/vllm/engine.py": "the timeline of busy intervals",
    "engine/worker/identity.py": "an epoch, compared for equality",
    "engine/worker/worker.py": "the timeline of busy intervals",
    "environments/chat_template.py": "today's date, for templates that tell it",
    "gateway/answers.py": "when an answer was made, which its client is told",
    "environments/verifiers.py": "when an answer was made, which that library asks of every one",
    "launcher/certs.py": "from when to when a certificate is valid",
    "launcher/doctor_machine.py": "the check of the clock itself",
    "launcher/doctor_run.py": "another host's clock, and when a certificate ends",
    "launcher/rundir.py": "when the launcher's events happened",
    "orchestrator/__main__.py": "hands the journal and the metrics their clock",
    "orchestrator/journal.py": "when a record was written",
    "orchestrator/metrics.py": "when a record was written",
    "orchestrator/run_state.py": "when the run began",
    "prefill/servicer.py": "when KV will be freed, for people",
    "runner/epoch.py": "names a start; never goes back, whatever the clock does",
    "runner/rollout_record.py": "when a rollout ended",
    "trainer/chat/__main__.py": "when a step was recorded",
    "trainer/loop.py": "when a step began; its length is of a steady clock",
    "trainer/timeline.py": "where an interval begins; its length is of a steady clock",
}
"""Who may read a clock that can be set, and for what. Leases, deadlines, intervals and back-off never."""


def test_the_wall_clock_is_read_for_records_alone():
    services = ROOT / "services" / "slipstream"
    readers = {
        str(path.relative_to(services))
        for path in services.rglob("*.py")
        if "api" not in path.relative_to(services).parts and WALL_CLOCK.search(path.read_text(encoding="utf-8"))
    }
    assert readers <= READS_WALL_CLOCK.keys(), "say here why it is no lease, deadline or interval"


def test_links_between_documents_resolve():
    broken = []
    for name in tracked():
        if not name.endswith(".md"):
            continue
        text = re.sub(r"^```.*?^```$", "", (ROOT / name).read_text(encoding="utf-8"), flags=re.M | re.S)
        for target in re.findall(r"\]\(([^)\s]+)\)", text):
            path = target.partition("#")[0]
            if path and "://" not in path and not ((ROOT / name).parent / path).exists():
                broken.append(f"{name}: {target}")
    assert broken == []
