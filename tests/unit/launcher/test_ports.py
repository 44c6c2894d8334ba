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


def test_ports_that_are_held_already_are_kept_and_each_given_out_once(tmp_path):
    file = tmp_path / "endpoints.toml"
    first = assign_endpoints(file, REPLICAS, PortLease(tmp_path / "before"))[0]
    lease = PortLease(tmp_path / "locks", "the first")
    assert all(lease.try_take(port_of(address)) for address in first.values())
    assert lease.owner_of(port_of(first["router"])) == "the first"
    file.write_text(file.read_text().replace(first["router"], first["decode-1"]))
    again = assign_endpoints(file, REPLICAS, lease)[0]
    assert len(set(again.values())) == len(REPLICAS)
    assert again["orchestrator"] == first["orchestrator"]
