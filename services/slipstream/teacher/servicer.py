"""TeacherService: RPC to desk and back."""

from __future__ import annotations

import grpc
import numpy as np

from slipstream.api.inference.v1 import teacher_pb2, teacher_pb2_grpc
from slipstream.common.errors import ContextTooLong, InvalidRequest
from slipstream.models.teachers import Bounds
from slipstream.teacher.asked import Asked
from slipstream.teacher.config import TeacherConfig
from slipstream.teacher.desk import Desk


class TeacherServicer(teacher_pb2_grpc.TeacherServiceServicer):
    """Serves TeacherService."""

    def __init__(self, config: TeacherConfig, bounds: Bounds, desk: Desk) -> None:
        self._config = config
        self._bounds = bounds
        self._desk = desk

    async def GetTeacher(
        self, request: teacher_pb2.GetTeacherRequest, context: grpc.aio.ServicerContext
    ) -> teacher_pb2.GetTeacherResponse:
        return teacher_pb2.GetTeacherResponse(
            model=str(self._config.teacher_model),
            vocab_size=self._bounds.vocab_size,
            max_context_tokens=self._bounds.max_context_tokens,
            max_request_tokens=self._config.max_request_tokens,
            waiting_token_count=self._desk.token_count,
        )

    async def ScoreTokens(
        self, request: teacher_pb2.ScoreTokensRequest, context: grpc.aio.ServicerContext
    ) -> teacher_pb2.ScoreTokensResponse:
        if (tokens := sum(len(each.token_ids) for each in request.sequences)) > self._config.max_request_tokens:
            limit = self._config.max_request_tokens
            raise InvalidRequest(f"{tokens} tokens in one call", field="sequences", limit=limit)
        temperature = request.temperature or 1.0
        asked = [self._asked(index, each, temperature) for index, each in enumerate(request.sequences)]
        answers = await self._desk.ask(asked)
        return teacher_pb2.ScoreTokensResponse(
            sequences=[teacher_pb2.TokenLogprobs(logprobs=answer.tolist()) for answer in answers]
        )

    def _asked(self, index: int, sequence: teacher_pb2.TokenSequence, temperature: float) -> Asked:
        count, bounds = len(sequence.token_ids), self._bounds
        if count > bounds.max_context_tokens:
            limit = bounds.max_context_tokens
            raise ContextTooLong(f"{count} tokens, the teacher's context has {limit}", limit=limit, name="context")
        token_ids = np.fromiter(sequence.token_ids, np.int32, count)
        if token_ids.max() >= bounds.vocab_size:
            raise InvalidRequest(
                f"token {token_ids.max()} of a vocabulary of {bounds.vocab_size}",
                field=f"sequences[{index}].token_ids",
                limit=bounds.vocab_size - 1,
            )
        end = 1
        for part in sequence.ranges:
            if not end <= part.start < part.end <= count:
                raise InvalidRequest(
                    f"no ascending ranges from 1 within {count} tokens", field=f"sequences[{index}].ranges", limit=count
                )
            end = part.end
        positions = np.concatenate([np.arange(part.start, part.end) for part in sequence.ranges])
        return Asked(token_ids, positions, temperature)
