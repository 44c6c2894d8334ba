"""What exit codes say of whether another start may help."""

from __future__ import annotations

import errno
import os

import pytest

from slipstream.common.config import ConfigError
from slipstream.common.exits import FAILED, REFUSED, ServiceFailed, cannot_listen, end


@pytest.mark.parametrize(
    ("number", "kind"),
    [(errno.EADDRINUSE, ServiceFailed), (errno.EADDRNOTAVAIL, ConfigError), (errno.EACCES, ConfigError)],
)
def test_a_port_that_another_program_has_may_be_free_again_and_no_other_reason_passes(number, kind):
    error = cannot_listen("listen on 192.0.2.1:80", OSError(number, os.strerror(number)))
    assert type(error) is kind
    assert str(error) == f"cannot listen on 192.0.2.1:80: {os.strerror(number).lower()}"


@pytest.mark.parametrize("code", [FAILED, REFUSED])
def test_an_end_is_one_line_and_its_code(capsys, code):
    with pytest.raises(SystemExit) as ended:
        end(code, "model/config.json is damaged")
    assert ended.value.code == code
    assert capsys.readouterr().err == "error: model/config.json is damaged\n"
