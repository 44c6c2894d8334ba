"""Environments behind an OpenEnv server (https://github.com/meta-pytorch/OpenEnv): a session of it is an episode.

The server runs the environment, wherever it is; here is its client. An action is the model's text in one of its
fields, and what the model is shown is one field of the observation.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from openenv.core import GenericEnvClient

from slipstream.environments.base import Context, Score, Split, Task
from slipstream.environments.config_adapters import OpenEnvConfig
from slipstream.environments.json_text import read_json
from slipstream.environments.limits import Limits
from slipstream.environments.messages import Message, ToolSpec
from slipstream.environments.tools import Tools

MAX_SEED = 2**31


class OpenEnv:
    """One server."""

    needs_sandbox = False
    limits = Limits(max_turns=64)

    def __init__(self, config: OpenEnvConfig, seed: int) -> None:
        self.name = config.name
        self._config = config
        self._seed = seed

    def task(self, split: Split, index: int) -> Task:
        # Tasks by number: held-out ones first, training tasks from the rest.
        held_out = self._config.evaluation_task_count
        number = index % max(1, held_out) if split == "held_out" else held_out + index
        return Task(split, index, {"seed": (self._seed * 1_000_003 + number) % MAX_SEED})

    async def setup(self, task: Task, tools: Tools) -> OpenEnvEpisode:
        client = GenericEnvClient(self._config.url, mode="simulation")
        try:
            begun = await client.reset(seed=task.payload["seed"], **self._config.reset)
        except BaseException:
            await client.close()
            raise
        return OpenEnvEpisode(client, self._config, begun)


class OpenEnvEpisode:
    """One session of the server."""

    tools: Sequence[ToolSpec] = ()

    def __init__(self, client: GenericEnvClient, config: OpenEnvConfig, begun: Any) -> None:
        self._client = client
        self._config = config
        self._rewards = [_reward(begun)]
        self.messages = [Message("user", f"{config.before}{self._shown(begun)}")]

    async def step(self, message: Message) -> Sequence[Message] | Context:
        result = await self._client.step(self._action(message.content))
        self._rewards.append(_reward(result))
        return [] if result.done else [Message("user", self._shown(result))]

    async def score(self) -> Score:
        reward = sum(self._rewards) if self._config.rewards == "sum" else self._rewards[-1]
        return Score(reward, reward >= self._config.correct_at, f"{len(self._rewards) - 1} steps")

    async def close(self) -> None:
        await self._client.close()

    def _action(self, text: str) -> dict[str, Any]:
        if self._config.action:
            return {self._config.action: text}
        try:
            action = read_json(text)
        except ValueError:
            action = None
        return action if isinstance(action, dict) else {}

    def _shown(self, result: Any) -> str:
        if not self._config.observation:
            return json.dumps(result.observation, ensure_ascii=False)
        return str(result.observation.get(self._config.observation, ""))


def _reward(result: Any) -> float:
    return float(result.reward or 0.0)
