"""A client of a slipstream run: create, watch and cancel rollouts.

    with Client.of_run("runs/demo") as client:
        rollout = client.create_rollout(environment="spell_backward", split="held_out", index=3, sample_count=4)
        for sample in client.wait_rollout(rollout.group_id, timeout_s=60).samples:
            print(sample.text, sample.reward)

`AsyncClient` is the same for asyncio; `slipstream_client.fake` is a server for the tests of your own code.
"""

from slipstream_client.aio import AsyncClient
from slipstream_client.client import Client
from slipstream_client.connection import Tls
from slipstream_client.errors import (
    DeadlineExceeded,
    Draining,
    EnvironmentUnknown,
    GatewayAbsent,
    InternalError,
    InvalidRequest,
    RequestIdReused,
    RolloutQueueFull,
    RolloutUnknown,
    RunEnded,
    SamplingBiased,
    SessionsFull,
    SessionUnknown,
    SlipstreamClientError,
    Unauthenticated,
    Unreachable,
    Unsupported,
)
from slipstream_client.rollout import Rollout, RolloutState, Sample, Sampling, Version, VersionSpan
from slipstream_client.run import Accuracy, Run, WorkerVersion
from slipstream_client.session import Session, SessionState

__all__ = [
    "Accuracy",
    "AsyncClient",
    "Client",
    "DeadlineExceeded",
    "Draining",
    "EnvironmentUnknown",
    "GatewayAbsent",
    "InternalError",
    "InvalidRequest",
    "RequestIdReused",
    "Rollout",
    "RolloutQueueFull",
    "RolloutState",
    "RolloutUnknown",
    "Run",
    "RunEnded",
    "Sample",
    "Sampling",
    "SamplingBiased",
    "Session",
    "SessionState",
    "SessionUnknown",
    "SessionsFull",
    "SlipstreamClientError",
    "Tls",
    "Unauthenticated",
    "Unreachable",
    "Unsupported",
    "Version",
    "VersionSpan",
    "WorkerVersion",
]
