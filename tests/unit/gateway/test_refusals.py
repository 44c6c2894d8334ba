"""What failures behind the gateway are for its clients, which repeat 408, 409, 429 and 5xx."""

from __future__ import annotations

import grpc
import pytest

from slipstream.common import errors
from slipstream.gateway.refusals import refusal_of

FULL = sorted(reason for reason, cls in errors.SlipstreamError.by_reason.items()
              if cls.code is grpc.StatusCode.RESOURCE_EXHAUSTED)  # fmt: skip
AWAY = sorted(reason for reason, cls in errors.SlipstreamError.by_reason.items()
              if cls.code is grpc.StatusCode.UNAVAILABLE)  # fmt: skip


@pytest.mark.parametrize("reason", FULL)
def test_what_is_full_is_asked_again_later_and_what_stays_full_is_not(reason):
    status = 400 if reason == "SESSION_LIMIT_REACHED" else 429
    refusal = refusal_of(errors.SlipstreamError.by_reason[reason]("full", name="runner.x", limit=1))
    assert (refusal.status, refusal.code) == (status, reason.lower())


@pytest.mark.parametrize("reason", AWAY)
def test_what_is_away_is_no_error_of_ours(reason):
    assert refusal_of(errors.SlipstreamError.by_reason[reason]("away")).status == 503
