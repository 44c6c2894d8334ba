"""What every RPC handler is wrapped in: token, rules of the proto, errors to statuses, a cap on time, a span.

Wrapping happens once, when a servicer is added, not as a grpc interceptor, which would look a handler up
again on every call.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from slipstream.common import tracing
from slipstream.common.auth import TokenCheck
from slipstream.common.disk import shortage
from slipstream.common.errors import DeadlineExceeded, Draining, InvalidRequest, StreamStalled, Unsupported, refuse
from slipstream.common.metrics import RpcMetrics
from slipstream.common.validation import validate

Handler = Callable[[Any, grpc.aio.ServicerContext[Any, Any]], Awaitable[Any]]

# The longest a call may last, whatever its deadline.
MAX_UNARY_S = 600.0
MAX_STREAM_S = 24 * 3600.0
# The longest a stream waits for its client: to send the next message, or to take one.
MAX_STALL_S = 30.0

_UNREADABLE = object()
"""Stands for a request that could not be parsed."""


def ends_on_drain(handler: Any) -> Any:
    """Mark a handler that may wait long (a long poll): a drain ends its open calls with `DRAINING`.

    Streams named Watch... are ended so without the mark. Other open calls are waited for.
    """
    handler.ends_on_drain = True
    return handler


class Drain:
    """Whether this process still takes work, and the open calls that a drain ends."""

    def __init__(self) -> None:
        self.started = asyncio.Event()
        self._waiting: set[asyncio.Task[Any]] = set()

    def start(self) -> None:
        """Refuse new calls from now on and end the waiting ones."""
        self.started.set()
        for task in self._waiting:
            task.cancel()

    def enter(self, waiting: bool) -> None:
        if self.started.is_set():
            raise Draining("this process is stopping")
        task = asyncio.current_task()
        if waiting and task is not None:
            self._waiting.add(task)

    def leave(self) -> None:
        task = asyncio.current_task()
        if task is not None:
            self._waiting.discard(task)

    def ended_call(self) -> bool:
        """Whether the cancellation that the current handler sees came from `start`; takes it back if so."""
        task = asyncio.current_task()
        if task is None or not self.started.is_set() or task not in self._waiting or task.cancelling() == 0:
            return False
        task.uncancel()
        return True


class HandlerRegistrar:
    """Stands in for a server when a generated `add_XServicer_to_server` is called, and wraps its handlers."""

    def __init__(self, server: grpc.aio.Server, token_check: TokenCheck, drain: Drain) -> None:
        self._server = server
        self._token_check = token_check
        self._drain = drain

    def add_generic_rpc_handlers(self, handlers: Any) -> None:
        """Ignored: the same handlers come by name through the other method."""

    def add_registered_method_handlers(
        self, service: str, handlers: dict[str, grpc.RpcMethodHandler[Any, Any]]
    ) -> None:
        wrapped = {name: self._wrap(service, name, handler) for name, handler in handlers.items()}
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, wrapped),))

    def _wrap(self, service: str, name: str, handler: Any) -> grpc.RpcMethodHandler[Any, Any]:
        method = f"/{service}/{name}"
        behaviour: Any = handler.unary_unary or handler.unary_stream or handler.stream_unary or handler.stream_stream
        raw = getattr(behaviour, "raw_requests", False)
        deserializer = None if raw else _deserializer(handler.request_deserializer)
        waiting = getattr(behaviour, "ends_on_drain", False) or name.startswith("Watch")
        behaviour = _asynchronous(behaviour, method)
        behaviour = _received(behaviour, checked=not raw) if handler.request_streaming else _checked(behaviour)
        cap_s = MAX_STREAM_S if handler.request_streaming or handler.response_streaming else MAX_UNARY_S
        call = _guarded(behaviour, method, self._token_check, self._drain, waiting, cap_s)
        if not handler.request_streaming:
            make = (
                grpc.unary_stream_rpc_method_handler
                if handler.response_streaming
                else grpc.unary_unary_rpc_method_handler
            )
        elif handler.response_streaming:
            make = grpc.stream_stream_rpc_method_handler
        else:
            make = grpc.stream_unary_rpc_method_handler
        return make(call, request_deserializer=deserializer, response_serializer=_serialize)


def _guarded(
    behaviour: Handler, method: str, token_check: TokenCheck, drain: Drain, waiting: bool, cap_s: float
) -> Handler:
    """`behaviour` behind the token check and the drain, its exceptions turned into statuses."""
    exempt = token_check.exempt(method)
    metrics = RpcMetrics(method)
    name = method.rpartition("/")[2]

    async def call(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        started_s = time.perf_counter()
        code = "CANCELLED"  # what is left when neither a return nor an abort is seen
        cap = asyncio.timeout(cap_s)
        try:
            if not exempt:
                token_check.check(context.invocation_metadata() or ())
                drain.enter(waiting)
            async with cap:
                with tracing.span(name, traced_by(context)):
                    answer = await behaviour(request, context)
            code = "OK"
            return answer
        except asyncio.CancelledError:
            if not drain.ended_call():
                raise
            await refuse(context, Draining("this process is stopping"), method=method)
        except TimeoutError as error:
            capped = DeadlineExceeded(f"no call lasts longer than {cap_s:.0f} s", limit_s=cap_s)
            await refuse(context, capped if cap.expired() else error, method=method)
        except OSError as error:
            await refuse(context, shortage(error, error.filename or name) or error, method=method)
        except Exception as error:
            await refuse(context, error, method=method)
        finally:
            metrics.ended(code if code == "OK" else _aborted_with(context) or code, started_s)
            if waiting:
                drain.leave()

    return call


def traced_by(context: grpc.aio.ServicerContext[Any, Any]) -> tracing.TraceContext | None:
    """The trace that a call belongs to, as its caller says."""
    if tracing.enabled():
        for key, value in context.invocation_metadata() or ():
            if key == tracing.HEADER:
                return tracing.parse(value)
    return None


def _aborted_with(context: Any) -> str:
    """Name of the code that the call was aborted with; empty if it was not."""
    code = context.code()  # grpc answers 0 where none is set
    return code.name if code else ""


def _checked(behaviour: Handler) -> Handler:
    """`behaviour`, given only requests that keep the rules of their proto."""

    async def call(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        _check(request)
        return await behaviour(request, context)

    return call


def _received(behaviour: Handler, *, checked: bool) -> Handler:
    """`behaviour`, given the messages of a client that goes on sending; `checked`: those that keep their rules."""

    async def receive(requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
        messages = aiter(requests)
        while True:
            try:
                async with _stalling("no message came"):
                    request = await anext(messages)
            except StopAsyncIteration:
                return
            if checked:
                _check(request)
            yield request

    async def call(requests: AsyncIterator[Any], context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        return await behaviour(receive(requests), context)

    return call


@asynccontextmanager
async def _stalling(what: str) -> AsyncGenerator[None, None]:
    """Wait for the client of a stream, for `MAX_STALL_S` at most: what the call holds is not held for ever."""
    limit = asyncio.timeout(MAX_STALL_S)
    try:
        async with limit:
            yield
    except TimeoutError:
        if not limit.expired():
            raise
        raise StreamStalled(f"{what} for {MAX_STALL_S:g} s", limit_s=MAX_STALL_S) from None


def _deserializer(parse: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    """`parse`, or `_UNREADABLE` where that fails: grpc parses before it calls, so before the token is checked."""

    def deserialize(data: bytes) -> Any:
        try:
            return parse(data)
        except DecodeError:
            return _UNREADABLE

    return deserialize


def _check(request: Any) -> None:
    if request is _UNREADABLE:
        raise InvalidRequest("the bytes are no message of this method", field="message")
    validate(request)


def _asynchronous(behaviour: Any, method: str) -> Handler:
    """The handler as a coroutine function: a stream's messages are written to the context.

    Written rather than yielded, so that a cancelled call closes the servicer's generator, and runs its
    `finally`, at once; grpc would leave that to the garbage collector. A client that does not read ends the call
    the same way: what is left of it is one message and the status, which wait for the client or its connection's end.
    """
    if inspect.isasyncgenfunction(behaviour):

        async def stream(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
            async with aclosing(behaviour(request, context)) as messages:
                async for message in messages:
                    async with _stalling("the client took nothing"):
                        await context.write(message)

        return stream
    if inspect.iscoroutinefunction(behaviour):
        return behaviour
    if not getattr(behaviour, "__module__", "").endswith("_pb2_grpc"):
        raise TypeError(f"the handler of {method} must be 'async def'")

    async def unsupported(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        raise Unsupported(f"this server does not implement {method}", method=method)

    return unsupported


def _serialize(message: Any) -> bytes:
    """Bytes pass as they are: a servicer may yield frames that it encoded itself."""
    return message if type(message) is bytes else message.SerializeToString()
