"""The HTTP requests, each from bytes to a turn and back."""

from __future__ import annotations

import asyncio
import time
from contextlib import aclosing

import structlog
from aiohttp import web
from aiohttp.http_exceptions import PayloadEncodingError

from slipstream.api.rollout.v1 import rollout_pb2
from slipstream.common import tracing
from slipstream.common.errors import SlipstreamError
from slipstream.gateway import telemetry
from slipstream.gateway.answers import Answer, event
from slipstream.gateway.bodies import BodyRoom, HeldBody
from slipstream.gateway.refusals import Refusal, refusal_of, wrong_key
from slipstream.gateway.requests import ChatRequest, CompletionRequest, parse
from slipstream.gateway.turns import Turns

log = structlog.get_logger()

PATHS = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/models", "/v1/models/{model}"})
SERVED = (
    "there are POST /v1/chat/completions, POST /v1/completions and GET /v1/models. "
    "Agents that use the Responses API take chat completions instead"
)
STREAM_HEADERS = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-store"}


class Handlers:
    """Answers requests."""

    def __init__(
        self, turns: Turns, model: str, bodies: BodyRoom, body_timeout_s: float, write_timeout_s: float
    ) -> None:
        self._turns = turns
        self._model = model
        self._bodies = bodies
        self._body_timeout_s = body_timeout_s
        self._write_timeout_s = write_timeout_s

    def routes(self) -> list[web.RouteDef]:
        """What there is."""
        return [
            web.post("/v1/chat/completions", self._chat),
            web.post("/v1/completions", self._complete),
            web.get("/v1/models", self._models),
            web.get("/v1/models/{model}", self._one_model),
        ]

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, ChatRequest)

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, CompletionRequest)

    async def _models(self, request: web.Request) -> web.StreamResponse:
        await self._turns.find(_key(request))
        return web.json_response({"object": "list", "data": [self._shown()]})

    async def _one_model(self, request: web.Request) -> web.StreamResponse:
        await self._turns.find(_key(request))
        if request.match_info["model"] != self._model:
            raise Refusal(404, f"the model is called {self._model}", code="model_not_found", param="model")
        return web.json_response(self._shown())

    def _shown(self) -> dict[str, object]:
        return {"id": self._model, "object": "model", "created": 0, "owned_by": "slipstream"}

    async def _answer(
        self, request: web.Request, kind: type[ChatRequest] | type[CompletionRequest]
    ) -> web.StreamResponse:
        started_s = time.monotonic()
        found = await self._turns.find(_key(request))  # before its body: nobody else gets memory here
        session = found.session
        incarnation, index = session.dispatch_version.incarnation, session.sample_index
        trace = tracing.rollout_trace(found.group_id, incarnation, found.attempt, index)
        plain = not request.headers.get("content-encoding")  # else its length says nothing of what it unpacks to
        with (
            self._bodies.hold(request.content_length if plain else None) as held,
            tracing.span("request", trace, path=request.path, session_id=session.session_id),
        ):
            response = await self._answered(request, found, kind, held)
        log.debug("turn_answered", duration_s=round(time.monotonic() - started_s, 3))
        return response

    async def _answered(
        self,
        request: web.Request,
        found: rollout_pb2.FindSessionResponse,
        kind: type[ChatRequest] | type[CompletionRequest],
        held: HeldBody,
    ) -> web.StreamResponse:
        body = await self._body(request)
        held.came(len(body))
        asked = parse(kind, body)
        turn = asked.turn(found.session.session_id)
        answer = Answer(asked, self._model)
        with telemetry.turn_seconds.time():
            async with aclosing(self._turns.run(found.address, turn)) as pieces:
                if not asked.stream:
                    async for piece in pieces:
                        answer.take(piece)
                    _check_complete(answer)
                    return web.json_response(answer.whole())
                first = await anext(pieces, None)  # what is refused has a status of its own
                response = web.StreamResponse(headers=STREAM_HEADERS)
                await self._write(response, request, b"".join(answer.begin()))
                try:
                    while first is not None:
                        answer.take(first)
                        await self._write(response, request, b"".join(answer.piece(first)))
                        first = await anext(pieces, None)
                    _check_complete(answer)
                except (SlipstreamError, Refusal) as error:
                    refusal = error if isinstance(error, Refusal) else refusal_of(error)
                    log.info("stream_broke_off", status=refusal.status, code=refusal.code)
                    await self._write(response, request, event(refusal.as_json()))
                    return response
                await self._write(response, request, b"".join(answer.end()))
        return response

    async def _body(self, request: web.Request) -> bytes:
        try:
            async with asyncio.timeout(self._body_timeout_s):
                return await request.read()
        except TimeoutError:
            raise Refusal(408, "the body did not come in time", code="request_timeout") from None
        except (web.RequestPayloadError, PayloadEncodingError):
            raise Refusal(400, "the body is not encoded as its headers say", code="invalid_body") from None

    async def _write(self, response: web.StreamResponse, request: web.Request, data: bytes) -> None:
        """Send a part. A client that takes none is let go: what it leaves is bounded by the socket's buffers."""
        try:
            async with asyncio.timeout(self._write_timeout_s):
                if not response.prepared:
                    await response.prepare(request)
                await response.write(data)
        except TimeoutError:
            if request.transport is not None:
                request.transport.abort()
            raise ConnectionResetError("the client takes nothing") from None


def _check_complete(answer: Answer) -> None:
    if not answer.complete:
        raise Refusal(502, "the turn broke off", code="turn_broken_off", kind="server_error")


def _key(request: web.Request) -> str:
    kind, _, key = request.headers.get("authorization", "").partition(" ")
    if kind.lower() != "bearer" or not key.strip() or len(key) > 512 or not key.isascii():
        raise wrong_key()
    return key.strip()


@web.middleware
async def in_openai_shape(request: web.Request, handler: web.Handler) -> web.StreamResponse:  # pyright: ignore
    """Whatever is refused, or goes wrong, has OpenAI's shape."""
    resource = request.match_info.route.resource
    path = resource.canonical if resource is not None and resource.canonical in PATHS else "other"
    try:
        response: web.StreamResponse = await handler(request)
    except Refusal as error:
        response = refused(error)
    except SlipstreamError as error:
        log.info("request_refused", path=path, reason=error.reason)
        response = refused(refusal_of(error))
    except web.HTTPRequestEntityTooLarge as error:
        response = refused(Refusal(413, f"the body is too large: {error.text}", code="body_too_large"))
    except web.HTTPNotFound:
        response = refused(Refusal(404, f"{request.path} is not served: {SERVED}", code="not_found"))
    except web.HTTPException as error:
        code = "method_not_allowed" if isinstance(error, web.HTTPMethodNotAllowed) else "bad_request"
        response = refused(Refusal(error.status, f"{request.method} {request.path}: {error.reason}", code=code))
    except ConnectionResetError:
        raise
    except Exception:
        log.exception("request_failed", path=path)
        response = refused(Refusal(500, "internal error", code="internal_error", kind="server_error"))
    telemetry.requests.labels(path, str(response.status)).inc()
    return response


def refused(refusal: Refusal) -> web.Response:
    """An answer that says so."""
    headers = {"www-authenticate": "Bearer"} if refusal.status == 401 else {}
    return web.json_response(refusal.as_json(), status=refusal.status, headers=headers)
