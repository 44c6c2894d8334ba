"""An OpenEnv server with a small environment: echo, and the count of what was said. Prints its port."""

from __future__ import annotations

import socket
from typing import Any

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app


class Said(Action):
    message: str


class Heard(Observation):
    echo: str = ""
    seed: int | None = None


class Echo(Environment[Said, Heard, State]):
    """Three steps; the length of what was said is the reward."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._state = State(episode_id="", step_count=0)

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Heard:
        self._state = State(episode_id=episode_id or "", step_count=0)
        return Heard(echo="say something", seed=seed)

    def step(self, action: Said, timeout_s: float | None = None, **kwargs: Any) -> Heard:
        self._state.step_count += 1
        if action.message == "break":
            raise ValueError("a bug of theirs")
        done = self._state.step_count == 3
        return Heard(echo=action.message, reward=float(len(action.message)), done=done)

    @property
    def state(self) -> State:
        return self._state


def main() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        print(listening.getsockname()[1], flush=True)
        app = create_fastapi_app(Echo, Said, Heard, max_concurrent_envs=8)
        uvicorn.Server(uvicorn.Config(app, log_level="warning")).run(sockets=[listening])


if __name__ == "__main__":
    main()
