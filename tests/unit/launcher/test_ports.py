"""Ports of a run: outside the ephemeral range, kept on restart, never shared by two runs."""

from __future__ import annotations

import socket

from slipstream.launcher.ports import (
    LOOPBACK,
    PortLease,
    assign_endpoints,
    candidate_ports,
    ephemeral_range,
    port_of,
    read_endpoints,
)

REPLICAS = ["orchestrator", "router", "decode-1", "decode-2"]


def test_no_candidate_lies_in_the_ephemeral_range():
    first, last = ephemeral_range()
    assert not [port for port in candidate_ports() if first <= port <= last]


def test_endpoints_are_distinct_written_and_kept_on_restart(tmp_path):
    file = tmp_path / "endpoints.toml"
    lease = PortLease(tmp_path / "locks")
    first = assign_endpoints(file, REPLICAS, lease)[0]
    lease.close()
    again = assign_endpoints(file, REPLICAS, PortLease(tmp_path / "locks"))[0]
    assert first == again == read_endpoints(file)
    assert len(set(first.values())) == len(REPLICAS)


def test_two_runs_side_by_side_share_no_port(tmp_path):
    one = assign_endpoints(tmp_path / "one.toml", REPLICAS, PortLease(tmp_path / "locks"))[0]
    (tmp_path / "two.toml").write_text((tmp_path / "one.toml").read_text())
    two = assign_endpoints(tmp_path / "two.toml", REPLICAS, PortLease(tmp_path / "locks"))[0]
    assert not set(one.values()) & set(two.values())


def test_a_kept_port_that_somebody_listens_on_is_replaced(tmp_path):
    file = tmp_path / "endpoints.toml"
    lease = PortLease(tmp_path / "locks")
    before = assign_endpoints(file, REPLICAS, lease)[0]
    lease.close()
    with socket.socket() as listener:
        listener.bind((LOOPBACK, port_of(before["router"])))
        listener.listen()
        after = assign_endpoints(file, REPLICAS, PortLease(tmp_path / "locks"))[0]
    assert after["router"] != before["router"]
    assert after["decode-1"] == before["decode-1"]
