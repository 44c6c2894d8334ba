"""Environments of verifiers (https://github.com/PrimeIntellect-ai/verifiers), unchanged: its loops, tools and rubrics.

An environment of verifiers drives its rollouts itself and calls a client for each turn of the model. Here that client
hands the messages to the run's own sampling, so that tokens are those drawn; the rubric scores the state that results.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Sequence
from typing import Any
from uuid import uuid4

import verifiers
from verifiers.clients.client import Client
from verifiers.errors import Error, OverlongPromptError
from verifiers.types import Response, ResponseMessage
from verifiers.types import ToolCall as TheirCall

from slipstream.common.config import ConfigError
from slipstream.common.imports import import_callable
from slipstream.environments.base import Context, Score, Split, Task
from slipstream.environments.called_model import Ask, CalledModel, NoMoreTurns
from slipstream.environments.config_adapters import VerifiersConfig
from slipstream.environments.limits import Limits
from slipstream.environments.messages import Message, ToolSpec, message_from_json
from slipstream.environments.tools import Tools

MAX_TURNS = 64
"""Where neither the section nor the environment says how many."""


class Verifiers:
    """One environment of verifiers: `id` is loaded as verifiers does, `path` is called."""

    needs_sandbox = False

    def __init__(self, config: VerifiersConfig, seed: int) -> None:
        self.name = config.name
        self._seed = seed
        self._config = config
        where = f"environments.{config.name}"
        try:
            if config.path:
                self.environment = import_callable(config.path, where)(**config.options)
            else:
                self.environment = verifiers.load_environment(config.id, **config.options)
        except OSError:  # a hub that is away, say, which is a ValueError as well: another start may find it
            raise
        except (AttributeError, ImportError, TypeError, ValueError) as error:
            raise ConfigError(f"{where}: verifiers cannot load {config.id or config.path!r}: {error}") from error
        if not isinstance(self.environment, verifiers.Environment):
            made = type(self.environment).__name__
            raise ConfigError(f"{where}: {config.path!r} gives a {made}, which is no environment of verifiers")
        if self.environment.rubric.has_group_rewards:
            raise ConfigError(f"{where}: its rubric judges whole groups, and rollouts are scored one by one here")
        self._tasks = self._split(config.evaluation_task_count, where)
        turns = getattr(self.environment, "max_turns", 1)
        self.limits = Limits(max_turns=turns if turns > 0 else MAX_TURNS)

    def task(self, split: Split, index: int) -> Task:
        count = len(self._tasks[split])
        row = index % count if split == "held_out" else random.Random(f"{self._seed}/{index}").randrange(count)
        return Task(split, index, {"row": row})

    async def setup(self, task: Task, tools: Tools) -> VerifiersEpisode:
        row: Any = dict(self._tasks[task.split][task.payload["row"]])
        loop = CalledModel(lambda ask: self.environment.rollout(row, _Answers(ask), "policy", {}))
        try:
            messages, shown = await loop.first()
        except BaseException:
            await loop.close()
            raise
        return VerifiersEpisode(self.environment, loop, messages, shown, self._config.correct_at)

    def _split(self, held_out: int, where: str) -> dict[Split, Any]:
        """Its own evaluation set is held out; where it has none, rows of the other are, by seed."""
        has_both = self.environment.eval_dataset is not None or self.environment.eval_dataset_source is not None
        if has_both or not held_out:
            train = self.environment.get_dataset()
            return {"train": train, "held_out": self.environment.get_eval_dataset() if has_both else train}
        train = self.environment.get_dataset()
        if len(train) <= held_out:
            raise ConfigError(
                f"{where}: {len(train)} rows and no evaluation set, and evaluation_task_count = {held_out} of them are "
                "held out: none is left to train on; lower it"
            )
        order = list(range(len(train)))
        random.Random(f"verifiers/{self._seed}").shuffle(order)
        return {"held_out": train.select(order[:held_out]), "train": train.select(order[held_out:])}


class VerifiersEpisode:
    """One rollout."""

    def __init__(
        self,
        environment: verifiers.Environment,
        loop: CalledModel,
        messages: Sequence[Message],
        tools: Sequence[ToolSpec],
        correct_at: float,
    ) -> None:
        self.messages = messages
        self.tools = tools
        self._environment = environment
        self._loop = loop
        self._correct_at = correct_at

    async def step(self, message: Message) -> Sequence[Message] | Context:
        return await self._loop.answer(message)

    async def score(self) -> Score:
        state = await self._loop.result()
        error = state.get("error")
        if isinstance(error, Error):
            raise RuntimeError(f"verifiers: {error!r}") from error
        await self._environment.rubric.score_rollout(state)
        reward = float(state["reward"])
        detail = ", ".join(f"{name} {value:g}" for name, value in (state.get("metrics") or {}).items())
        return Score(reward, reward >= self._correct_at, detail)

    async def close(self) -> None:
        await self._loop.close()


class _Answers(Client[Ask, Any, Response, Any]):
    """What verifiers calls for a turn of the model."""

    def __init__(self, ask: Ask) -> None:
        super().__init__(ask)

    async def get_response(
        self, prompt: Any, model: str, sampling_args: Any, tools: Any = None, **kwargs: Any
    ) -> Response:
        shown = [ToolSpec(tool.name, tool.description, dict(tool.parameters)) for tool in tools or ()]
        try:
            message = await self.client([_ours(each) for each in prompt], shown)
        except NoMoreTurns:
            raise OverlongPromptError("the rollout has had its last turn") from None
        calls = [
            TheirCall(id=call.id, name=call.name, arguments=json.dumps(dict(call.arguments)))
            for call in message.tool_calls
        ]
        said = ResponseMessage(
            content=message.content,
            reasoning_content=message.reasoning or None,
            tool_calls=calls or None,
            finish_reason="tool_calls" if calls else "stop" if message.stopped else "length",
            is_truncated=not message.stopped,
        )
        return Response(id=uuid4().hex, created=int(time.time()), model=model, message=said)

    def setup_client(self, config: Any) -> Ask:
        raise TypeError("this client is no connection")

    async def to_native_tool(self, tool: Any) -> Any:
        return tool

    async def to_native_prompt(self, messages: Any) -> tuple[Any, dict[str, Any]]:
        return messages, {}

    async def get_native_response(
        self, prompt: Any, model: str, sampling_args: Any, tools: Any = None, **kwargs: Any
    ) -> Response:
        return await self.get_response(prompt, model, sampling_args, tools)

    async def raise_from_native_response(self, response: Response) -> None:
        return None

    async def from_native_response(self, response: Response) -> Response:
        return response

    async def close(self) -> None:
        return None


def _ours(message: Any) -> Message:
    """A message of theirs: OpenAI's form, but for flat tool calls and a role for plain text."""
    given = message.model_dump(exclude_none=True)
    if given["role"] == "text":
        return Message("user", given["content"])
    calls = [
        {"id": call["id"], "function": {"name": call["name"], "arguments": call["arguments"]}}
        for call in given.get("tool_calls") or ()
    ]
    return message_from_json({**given, "tool_calls": calls})
