"""Prometheus metrics of a process: what every service has, and figures that are read when they are asked for.

Names are `slipstream_<part>_<what>_<unit>`; labels have few values. Most figures of a service are counted by its
domain objects anyway, so they are read at each scrape (`Reading`) and cost nothing in between. Scrapes run on a
thread of their own: a reader only reads.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, cast

import structlog
from prometheus_client import REGISTRY, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from slipstream.common.addresses import is_loopback
from slipstream.common.config import ConfigError, ServiceConfig
from slipstream.common.exits import cannot_listen
from slipstream.common.scrapes import start_scrapes

log = structlog.get_logger()

READ_ATTEMPTS = 5
LATENCY_BUCKETS_S = (0.001, 0.005, 0.02, 0.1, 0.5, 2.0, 10.0)

loop_lag = Histogram(
    "slipstream_event_loop_lag_seconds",
    "How late a timer of the event loop fired.",
    buckets=(0.001, 0.005, 0.02, 0.05, 0.1, 0.5, 1.0, 5.0),
)
loop_lag_max = Gauge(
    "slipstream_event_loop_lag_max_seconds", "The latest that a timer of the event loop fired, since the start."
)
loop_tasks = Gauge("slipstream_event_loop_tasks", "Tasks of the event loop, at the last look.")
rpcs = Counter("slipstream_rpcs", "Calls answered, by method and status code.", ["method", "code"])
rpc_latency = Histogram(
    "slipstream_rpc_latency_seconds",
    "From a call's start to its end, by method. Long polls and streams last as long as they wait.",
    ["method"],
    buckets=LATENCY_BUCKETS_S,
)

Value = float | Mapping[Any, float]
"""One figure, or one for each value of the label (a tuple where there are several labels)."""


class Reading(Collector):
    """A gauge or counter whose value is kept by somebody else and read at each scrape.

        open_groups = Reading("gauge", "slipstream_orchestrator_groups", "Open groups.", ["state"])
        open_groups.read_from(lambda: {"running": 3, "scored": 5})

    Without a reader it has no samples. The last object to call `read_from` is the one that is read.
    """

    def __init__(
        self, kind: Literal["gauge", "counter"], name: str, documentation: str, labels: Sequence[str] = ()
    ) -> None:
        self._family: Any = CounterMetricFamily if kind == "counter" else GaugeMetricFamily
        self._name, self._documentation, self._labels = name, documentation, list(labels)
        self._read: Callable[[], Value] | None = None
        REGISTRY.register(self)

    def read_from(self, read: Callable[[], Value]) -> None:
        self._read = read

    def describe(self) -> Iterator[Metric]:
        yield self._family(self._name, self._documentation, labels=self._labels)

    def collect(self) -> Iterator[Metric]:
        family = self._family(self._name, self._documentation, labels=self._labels)
        if self._read is not None:
            value = _steady(self._read)
            if isinstance(value, Mapping):
                for label, number in value.items():
                    parts = cast("Sequence[object]", label if isinstance(label, tuple) else (label,))
                    family.add_metric([str(part) for part in parts], float(number))
            else:
                family.add_metric([], float(value))
        yield family


def _steady(read: Callable[[], Value]) -> Value:
    """What `read` says; asked again when the event loop changed a table under its feet."""
    for _ in range(READ_ATTEMPTS - 1):
        try:
            return read()
        except RuntimeError:  # "changed size during iteration"
            continue
    return read()


class RpcMetrics:
    """Count and latency of one method's calls; children are looked up once, as a lookup costs more than counting."""

    def __init__(self, method: str) -> None:
        self._method = method
        self._latency = rpc_latency.labels(method)
        self._codes: dict[str, Any] = {}

    def ended(self, code: str, started_s: float) -> None:
        """Count one call; `started_s` is of `time.perf_counter`."""
        count = self._codes.get(code)
        if count is None:
            count = self._codes[code] = rpcs.labels(self._method, code)
        count.inc()
        self._latency.observe(time.perf_counter() - started_s)


def serve_metrics(config: ServiceConfig) -> Callable[[], None]:
    """Serve metrics over HTTP on a thread, if the config names a port; returns what ends that."""
    metrics = config.metrics
    if not metrics.port:
        return lambda: None
    tls = config.tls
    certificates = None
    if not is_loopback(metrics.host):
        if tls.cert_file is None or tls.key_file is None or tls.ca_file is None:
            raise ConfigError(
                f"metrics.host is {metrics.host!r}, which is not loopback: that takes tls.cert_file, tls.key_file, "
                "tls.ca_file"
            )
        certificates = (tls.cert_file, tls.key_file, tls.ca_file)
    try:
        server, thread = start_scrapes(metrics.host, metrics.port, certificates)
    except OSError as error:
        raise cannot_listen(f"serve metrics on {metrics.host}:{metrics.port}", error) from error
    log.info("metrics_served", host=metrics.host, port=metrics.port)
    return lambda: _end(server, thread)


def _end(server: Any, thread: threading.Thread) -> None:
    server.shutdown()
    server.server_close()
    thread.join(timeout=1.0)
