"""What keeps hostile requests from being honest ones: the stack trusts its callers, and obeys what is in order.

A stop that is well-formed stops; so what would rightly end or stall the run is not sent, and what opens something is
followed by the call that closes it.
"""

from __future__ import annotations

import random
from typing import Any

from callers import Answer, Caller
from contract import Rpc
from google.protobuf.message import Message
from messages import fill
from stack import Stack, rpc

from slipstream.api.types.v1 import types_pb2

ENDING = {"RunService.StopRun", "TrainerService.Stop", "WorkerService.Drain"}
FAR = 1_000_000
"""A step that no run of these tests reaches."""
LONG_WAIT_MS = 2_000


def base(stack: Stack, method: Rpc, rng: random.Random, sandbox_id: str = "") -> Any:
    """A valid request, its names such that a service finds something behind them where that does no harm."""
    request: Any = fill(method.request(), rng)
    hints: dict[str, Any] = {
        "GetPlanRequest": {"step": FAR, "incarnation": 1, "wait_ms": 0},
        "PlaceRequest": {"sample_count": 1},
        "TaskRef": {"environment": "letters", "split": "train"},
        "Sampling": {"max_new_tokens": 2, "temperature": 1.0},
        "CreateSandboxRequest": {"lease_ttl_ms": 2_000},
        "ExecRequest": {"sandbox_id": sandbox_id, "argv": ["true"]},
        "KvHandle": {"address": stack.endpoints["prefill-1"]},
        "BeginUpdateRequest": {"lease_ttl_ms": 100, "worker_epoch": ""},
        "CreateRolloutRequest": {"sample_count": 1},
        "TokenSequence": {"token_ids": [1, 2, 3], "ranges": [types_pb2.RowRange(start=1, end=3)]},
    }
    for message in _all(request):
        name = message.DESCRIPTOR.name
        for key, value in hints.get(name, {}).items():
            if message.DESCRIPTOR.fields_by_name[key].is_repeated:
                del getattr(message, key)[:]
                getattr(message, key).extend(value)
            else:
                setattr(message, key, value)
        if name == "PolicyVersion":
            message.incarnation, message.step = 1, FAR
        if name == "Rootfs":
            message.directory = "python"
        if "sandbox_id" in message.DESCRIPTOR.fields_by_name and sandbox_id and name != "DeleteSandboxRequest":
            message.sandbox_id = sandbox_id
        if name in ("PrefillRequest", "DecodeRequest"):
            message.worker_epoch = ""
            message.min_policy_version.Clear()
            message.prompt.base_token_count = 0
            message.prompt.new_token_ids.extend([1, 2, 3])
        if name == "DecodeRequest":
            message.ClearField("kv")
    rename(request, rng)
    return request


def rename(request: Any, rng: random.Random) -> None:
    """Give a request an id that no other one had."""
    if "request_id" in request.DESCRIPTOR.fields_by_name:
        request.request_id = f"edges-{rng.getrandbits(48):x}"


def _all(message: Message) -> list[Any]:
    found: list[Any] = [message]
    for field, value in message.ListFields():
        if field.message_type is None or field.message_type.GetOptions().map_entry:
            continue
        for inner in value if field.is_repeated else [value]:
            found += _all(inner)
    return found


def honest(method: Rpc, request: Any) -> bool:
    """Whether a request that keeps all rules would rightly stop, stall or take over the run."""
    if method.short in ENDING:
        return True
    if method.short == "BatchService.GetPlan":
        return 2 <= request.incarnation <= 17
    if method.short == "BatchService.ReportStep":
        return 1 <= request.version.incarnation <= 17 and request.version.step < FAR // 2
    if method.short in ("BroadcastService.OpenVersion", "BroadcastService.SealVersion", "WorkerService.BeginUpdate"):
        return request.version.incarnation == 1 and request.version.step < FAR // 2
    if method.service.endswith(".RunnerService"):
        return request.runner_id == "runner-1"
    return False


def waits(request: Any) -> bool:
    """Whether the caller asks the service to wait for longer than these tests do."""
    return getattr(request, "wait_ms", 0) > LONG_WAIT_MS


async def undo(caller: Caller, method: Rpc, request: Any, answer: Answer) -> None:
    """Close what an obeyed request opened."""
    response = method.response.FromString(answer.messages[0]) if answer.messages else method.response()
    if method.short == "RunnerService.AcquireGroups" and response.groups:
        groups = [{"group_id": group.group_id, "attempt": group.attempt} for group in response.groups]
        await caller.ask(
            rpc("RunnerService.ReportGroups"),
            request_id="edges-back",
            runner_id=request.runner_id,
            runner_epoch=request.runner_epoch,
            reports=[{"group": group, "outcome": "GROUP_OUTCOME_CANCELLED"} for group in groups],
        )
    elif method.short == "RouterService.Place":
        await caller.ask(rpc("RouterService.Release"), request_id="edges", placement_ids=[response.placement_id])
    elif method.short == "RunService.PauseRun":
        await caller.ask(rpc("RunService.ResumeRun"), request_id="edges")
    elif method.short == "RolloutService.CreateRollout":
        group_id = response.rollout.group_id
        await caller.ask(rpc("RolloutService.CancelRollout"), request_id="edges", group_id=group_id)
    elif method.short == "PrefillService.Prefill":
        await caller.ask(rpc("PrefillService.Abort"), request_id=request.request_id)
    elif method.short == "SandboxService.CreateSandbox":
        sandbox_id = response.sandbox.sandbox_id
        await caller.ask(rpc("SandboxService.DeleteSandbox"), request_id="edges", sandbox_id=sandbox_id)
