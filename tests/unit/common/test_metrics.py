from __future__ import annotations

import re
import socket
import ssl
import threading
import time
import urllib.request
from importlib import import_module
from pathlib import Path

import pytest
from prometheus_client import REGISTRY
from prometheus_client.parser import text_string_to_metric_families

from slipstream.common import scrapes
from slipstream.common.config import ConfigError, MetricsConfig, ServiceConfig
from slipstream.common.exits import ServiceFailed
from slipstream.common.metrics import Reading, RpcMetrics, serve_metrics
from slipstream.launcher.certs import make_certificates
from tests.ports import free_port

MODULES = (
    "slipstream.common.metrics",
    "slipstream.broadcaster.telemetry",
    "slipstream.engine.worker.telemetry",
    "slipstream.gateway.telemetry",
    "slipstream.teacher.telemetry",
    "slipstream.orchestrator.telemetry",
    "slipstream.orchestrator.tracking.feed",
    "slipstream.router.telemetry",
    "slipstream.runner.telemetry",
    "slipstream.sandbox.execution",
    "slipstream.sandbox.leases",
    "slipstream.trainer.telemetry",
)
OPERATIONS = Path(__file__).parents[3] / "docs" / "operations.md"


@pytest.fixture
def reading():
    """Makes readings that are gone from the registry afterwards."""
    made = []

    def make(*arguments):
        made.append(Reading(*arguments))
        return made[-1]

    yield make
    for one in made:
        REGISTRY.unregister(one)


def test_a_reading_is_what_its_owner_says_at_each_scrape(reading):
    values = {"a": 1, "b": 2}
    reading("gauge", "test_things", "Things.", ["kind"]).read_from(lambda: values)
    assert REGISTRY.get_sample_value("test_things", {"kind": "b"}) == 2
    values["b"] = 5
    assert REGISTRY.get_sample_value("test_things", {"kind": "b"}) == 5


def test_a_counter_that_is_read_has_the_suffix_and_no_samples_before_it_has_a_reader(reading):
    counter = reading("counter", "test_events", "Events.")
    assert REGISTRY.get_sample_value("test_events_total") is None
    counter.read_from(lambda: 7)
    assert REGISTRY.get_sample_value("test_events_total") == 7


def test_a_table_that_changes_while_it_is_read_is_read_again(reading):
    calls = []

    def read():
        calls.append(1)
        if len(calls) < 3:
            raise RuntimeError("dictionary changed size during iteration")
        return 1.0

    reading("gauge", "test_racing", "Racing.").read_from(read)
    assert REGISTRY.get_sample_value("test_racing") == 1.0
    assert len(calls) == 3


def test_metrics_are_served_over_http_until_they_are_ended():
    RpcMetrics("/test/Served").ended("OK", time.perf_counter())
    port = free_port()
    end = serve_metrics(ServiceConfig(metrics=MetricsConfig(port=port)))
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
            families = {family.name for family in text_string_to_metric_families(answer.read().decode())}
        assert {"slipstream_rpcs", "slipstream_rpc_latency_seconds", "process_open_fds"} <= families
    finally:
        end()
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", port)) != 0


def scraped(port: int) -> int:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
        return answer.status


def test_connections_that_say_nothing_take_a_bounded_number_of_threads_for_a_bounded_time(monkeypatch):
    monkeypatch.setattr(scrapes, "TIMEOUT_S", 2.0)
    port = free_port()
    end = serve_metrics(ServiceConfig(metrics=MetricsConfig(port=port)))
    before = threading.active_count()
    try:
        silent = [socket.create_connection(("127.0.0.1", port)) for _ in range(scrapes.MAX_CONNECTIONS + 20)]
        assert [connection.recv(1) for connection in silent[-20:]] == [b""] * 20
        assert threading.active_count() - before <= 2 * scrapes.MAX_CONNECTIONS  # each with its clock
        with pytest.raises(OSError):  # noqa: PT011 one of several
            scraped(port)
        assert [connection.recv(1) for connection in silent] == [b""] * len(silent)
        assert scraped(port) == 200
        for connection in silent:
            connection.close()
    finally:
        end()


def test_over_tls_a_connection_that_says_nothing_holds_up_no_scrape(tmp_path):
    certificates = make_certificates(tmp_path / "certs", [], 1).tls
    port = free_port()
    end = serve_metrics(ServiceConfig(metrics=MetricsConfig(port=port, host="0.0.0.0"), tls=certificates))
    try:
        context = ssl.create_default_context(cafile=certificates.ca_file)
        assert certificates.cert_file is not None
        context.load_cert_chain(certificates.cert_file, certificates.key_file)
        with (
            socket.create_connection(("127.0.0.1", port)),
            urllib.request.urlopen(f"https://localhost:{port}/metrics", timeout=5, context=context) as answer,
        ):
            assert b"slipstream_rpcs" in answer.read()
    finally:
        end()


def test_a_taken_metrics_port_refuses_the_start():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(ServiceFailed, match="cannot serve metrics on 127"):
            serve_metrics(ServiceConfig(metrics=MetricsConfig(port=taken.getsockname()[1])))


def test_metrics_off_loopback_are_refused_without_tls():
    with pytest.raises(ConfigError, match="tls"):
        serve_metrics(ServiceConfig(metrics=MetricsConfig(host="0.0.0.0", port=1)))


def test_every_metric_is_documented_with_its_kind_and_labels_and_nothing_else_is():
    for module in MODULES:
        import_module(module)
    declared = {}
    for collector in {id(c): c for c in REGISTRY._names_to_collectors.values()}.values():
        for family in getattr(collector, "describe", tuple)():
            if family.name.startswith("slipstream_"):
                labels = getattr(collector, "_labelnames", None) or getattr(collector, "_labels", None) or ()
                kind = family.type + (" by " + ", ".join(f"`{label}`" for label in labels) if labels else "")
                declared[family.name] = kind
    rows = re.findall(r"^\| `(slipstream_\w+)` \| [^|]+ \| ([^|]+) \|", OPERATIONS.read_text(), re.MULTILINE)
    documented = dict(rows)
    assert len(rows) == len(documented)
    assert documented == declared
