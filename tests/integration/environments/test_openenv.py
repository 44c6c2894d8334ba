"""An environment behind the real OpenEnv server."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conversations import play, says

from slipstream.environments.config_adapters import OpenEnvConfig
from slipstream.environments.openenv import OpenEnv


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """A server; it listens before it says its port, so nobody comes too early."""
    program = Path(__file__).with_name("openenv_server.py")
    with subprocess.Popen([sys.executable, str(program)], stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        yield f"http://127.0.0.1:{int(server.stdout.readline())}"
        server.kill()


def environment(url: str, **fields: Any) -> OpenEnv:
    return OpenEnv(OpenEnvConfig.model_validate({"url": url, "evaluation_task_count": 2, **fields}), 1)


async def test_an_episode_is_a_session_and_earns_its_rewards(url: str) -> None:
    played = await play(environment(url, observation="echo", before="Go. ", correct_at=6), says("a", "bb", "ccc"))
    assert [m.content for m in played.history] == ["Go. say something", "a", "a", "bb", "bb", "ccc"]
    assert (played.score.reward, played.score.correct, played.score.detail) == (6.0, True, "3 steps")
    last = await play(environment(url, rewards="last"), says("a", "bb", "ccc"))
    assert last.score.reward == 3.0


async def test_the_model_may_write_whole_actions_and_see_whole_observations(url: str) -> None:
    played = await play(environment(url, action=""), says('{"message": "abc"}'), max_turns=1, index=4)
    assert json.loads(played.history[0].content)["echo"] == "say something"
    # Tasks 0 and 1 are held out.
    assert json.loads(played.history[0].content)["seed"] == 1_000_003 + 2 + 4
    assert played.score.reward == 3.0


@pytest.mark.parametrize(
    "text", ["[" * 100_000, '{"message": NaN}', r'{"message": "\ud800"}', '{"message": 1' + "0" * 5000]
)
async def test_what_is_no_action_is_an_empty_one(url: str, text: str) -> None:
    with pytest.raises(RuntimeError, match="Server error"):  # it wants a message
        await play(environment(url, action=""), says(text), max_turns=1)


async def test_sessions_do_not_see_each_other(url: str) -> None:
    theirs = environment(url, observation="echo")
    played = await asyncio.gather(*(play(theirs, says(text)) for text in ("x", "yy", "zzz")))
    assert [one.score.reward for one in played] == [3.0, 6.0, 9.0]


async def test_what_the_server_answers_with_an_error_is_raised(url: str) -> None:
    with pytest.raises(RuntimeError, match="Server error"):
        await play(environment(url), says("break"))
    with pytest.raises(ConnectionError):
        await play(environment("http://127.0.0.1:9"), says("a"))
