"""Metrics of the gateway."""

from __future__ import annotations

from prometheus_client import Counter, Histogram

from slipstream.common.metrics import Reading

connections = Reading("gauge", "slipstream_gateway_connections", "Open HTTP connections.")
connections_refused = Counter("slipstream_gateway_connections_refused", "Connections beyond the most there may be.")
body_bytes = Reading("gauge", "slipstream_gateway_body_bytes", "Bytes of bodies of requests that are read or answered.")
requests = Counter("slipstream_gateway_requests", "Requests, by path and status.", ["path", "status"])
turn_seconds = Histogram(
    "slipstream_gateway_turn_seconds",
    "From a request to the end of its answer.",
    buckets=(0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300),
)
