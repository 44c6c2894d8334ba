"""Where a process says that its peers reach it."""

from __future__ import annotations

import pytest

from slipstream.common.config import ConfigError, ListenConfig


@pytest.mark.parametrize(
    ("listen", "address"),
    [
        (ListenConfig(), "127.0.0.1:7000"),
        (ListenConfig(host="::1"), "[::1]:7000"),
        (ListenConfig(host="0.0.0.0", advertise="decode-1:7011"), "decode-1:7011"),
    ],
)
def test_peers_are_told_what_is_advertised_else_where_it_listens(listen, address):
    assert listen.address(7000) == address


@pytest.mark.parametrize("host", ["0.0.0.0", "::", ""])
def test_every_address_of_a_host_is_none_that_peers_could_be_told(host):
    with pytest.raises(ConfigError, match=r"listen\.advertise is required"):
        ListenConfig(host=host).address(7000)
