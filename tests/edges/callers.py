"""Calls with any bytes at all, and what came back."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
from contract import Rpc, Status, common_statuses
from google.rpc import error_details_pb2, status_pb2

from slipstream.common.errors import STATUS_KEY
from slipstream.common.handlers import MAX_STALL_S

OPTIONS = (
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_retries", 0),
)
DEADLINE_S = 0.8 * MAX_STALL_S
"""Of a call. One that is held up by a stream which nobody reads, until that is ended, is not answered by then."""


@dataclass
class Answer:
    """How a call ended."""

    code: str
    details: str = ""
    infos: list[error_details_pb2.ErrorInfo] = field(default_factory=list)
    messages: list[bytes] = field(default_factory=list)
    duration_s: float = 0.0

    @property
    def status(self) -> Status:
        return self.code, self.infos[0].reason if self.infos else ""

    @property
    def metadata(self) -> dict[str, str]:
        return dict(self.infos[0].metadata) if self.infos else {}

    def __str__(self) -> str:
        reasons = [info.reason for info in self.infos]
        return f"{self.code} {reasons} {self.details[:160]!r} {self.metadata} after {self.duration_s:.2f} s"


class Caller:
    """A client of one endpoint."""

    def __init__(self, channel: grpc.aio.Channel, token: str | None) -> None:
        self.channel = channel
        self.metadata: tuple[tuple[str, str | bytes], ...] = (
            () if token is None else (("authorization", f"Bearer {token}"),)
        )

    async def call(
        self,
        rpc: Rpc,
        *bodies: bytes,
        timeout_s: float = DEADLINE_S,
        max_messages: int = 64,
        metadata: Iterable[tuple[str, str | bytes]] | None = None,
        **options: Any,
    ) -> Answer:
        """Send `bodies` as the request's messages and take up to `max_messages` of the answer's, then hang up."""
        started_s = time.monotonic()
        answer = Answer("OK")
        request: Any = _each(bodies) if rpc.client_streaming else bodies[0]
        kind = ("stream" if rpc.client_streaming else "unary") + ("_stream" if rpc.server_streaming else "_unary")
        invoke = getattr(self.channel, kind)(rpc.path, request_serializer=None, response_deserializer=None)
        sent = self.metadata if metadata is None else tuple(metadata)
        call = invoke(request, timeout=timeout_s, metadata=sent, **options)
        try:
            if rpc.server_streaming:
                async for message in call:
                    answer.messages.append(message)
                    if len(answer.messages) >= max_messages or rpc.name.startswith("Watch"):
                        break
            else:
                answer.messages.append(await call)
        except grpc.aio.AioRpcError as error:
            answer.code, answer.details = error.code().name, error.details() or ""
            answer.infos = error_infos(error.trailing_metadata())
        finally:
            call.cancel()
        answer.duration_s = time.monotonic() - started_s
        return answer

    async def ask(self, rpc: Rpc, timeout_s: float = DEADLINE_S, **fields: Any) -> Any:
        """A proper call: the response's message, the list of them for a stream, or the `Answer` that refused it."""
        answer = await self.call(rpc, rpc.request(**fields).SerializeToString(), timeout_s=timeout_s)
        if answer.code != "OK":
            return answer
        messages = [rpc.response.FromString(message) for message in answer.messages]
        return messages if rpc.server_streaming else messages[0]


@asynccontextmanager
async def calling(address: str, token: str | None) -> AsyncIterator[Caller]:
    async with grpc.aio.insecure_channel(address, options=OPTIONS) as channel:
        yield Caller(channel, token)


def error_infos(trailers: Any) -> list[error_details_pb2.ErrorInfo]:
    """Every ErrorInfo that came with a status."""
    infos = []
    for key, value in trailers or ():
        if key == STATUS_KEY:
            for detail in status_pb2.Status.FromString(value).details:
                info = error_details_pb2.ErrorInfo()
                if detail.Unpack(info):
                    infos.append(info)
    return infos


def fault(rpc: Rpc, answer: Answer) -> str:
    """What is wrong with an answer of a service by the contract, or nothing."""
    if answer.code == "OK":
        return ""
    if not answer.status[1] or answer.status not in rpc.statuses | common_statuses():
        return f"undocumented: {answer}"
    if len(answer.infos) != 1 or answer.infos[0].domain != "slipstream":
        return f"not one ErrorInfo of ours: {answer}"
    if answer.status == ("INVALID_ARGUMENT", "INVALID_REQUEST") and not answer.metadata.get("field"):
        return f"names no field: {answer}"
    return ""


async def _each(bodies: Iterable[bytes]) -> AsyncIterator[bytes]:
    for body in bodies:
        yield body
        await asyncio.sleep(0)
