"""One line when a peer goes, one when it comes back."""

from __future__ import annotations

from structlog.testing import capture_logs

from slipstream.runner.outage import Outage


def test_an_outage_is_told_once_and_a_start_is_no_fault():
    now_s = [0.0]
    outage = Outage("orchestrator", lambda: now_s[0])
    with capture_logs() as lines:
        for now_s[0] in (0.0, 0.5, 1.0):
            outage.failed("refused")
        outage.answered()
        outage.answered()
        for now_s[0] in (10.0, 10.5, 12.0):
            outage.failed("gone")
        outage.answered()
    assert [(line["event"], line["log_level"], line.get("after_s")) for line in lines] == [
        ("waiting_for_peer", "info", None),
        ("peer_answers", "info", 1.0),
        ("peer_away", "warning", None),
        ("peer_answers", "info", 2.0),
    ]
