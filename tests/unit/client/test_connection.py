"""Where the client finds a run."""

from __future__ import annotations

import fcntl

import pytest

from slipstream_client.connection import Connection, Tls
from slipstream_client.errors import RunEnded


def test_a_run_directory_says_address_token_and_certificates(tmp_path):
    with pytest.raises(FileNotFoundError, match="has not started"):
        Connection.of_run(tmp_path)
    (tmp_path / "endpoints.toml").write_text(
        '[endpoints]\norchestrator = "127.0.0.1:7000"\nrouter = "127.0.0.1:7001"\n'
    )
    assert Connection.of_run(tmp_path) == Connection("127.0.0.1:7000")
    (tmp_path / "token").write_text("secret\n")
    (tmp_path / "config.toml").write_text('[tls]\ncert_file = "a"\nkey_file = "b"\nca_file = "c"\n')
    connection = Connection.of_run(tmp_path)
    assert connection == Connection("127.0.0.1:7000", "secret", Tls("a", "b", "c"))
    assert connection.metadata == (("authorization", "Bearer secret"),)
    assert "secret" not in repr(connection)


def test_a_token_comes_as_text_or_from_a_file(tmp_path):
    (tmp_path / "token").write_text("secret\n")
    assert Connection.to("a:1", None, tmp_path / "token", None).token == "secret"
    with pytest.raises(ValueError, match="not both"):
        Connection.to("a:1", "x", tmp_path / "token", None)


def test_a_run_whose_launcher_is_gone_is_refused_at_once(tmp_path):
    (tmp_path / "endpoints.toml").write_text('[endpoints]\norchestrator = "127.0.0.1:7000"\n')
    with (tmp_path / "launcher.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert Connection.of_run(tmp_path).address == "127.0.0.1:7000"
    with pytest.raises(RunEnded, match=r"is over.*`slipstream up` starts another"):
        Connection.of_run(tmp_path)
