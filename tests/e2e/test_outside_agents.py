"""Outside agents with unmodified OpenAI clients drive all the training of a whole stack."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import openai
import pytest
from rollout_traces import TRACED, check_lives, names_of
from run_process import DEADLINE_S, RETRIES

from slipstream.environments.tokenizer import TextCodec
from slipstream_client import Client, Session, SessionState

pytestmark = pytest.mark.timeout(590, func_only=False)

SETTINGS = (
    *("--gateway.enabled", "true", "--launcher.restart", "on_failure", "--orchestrator.sessions.only", "true"),
    *("--orchestrator.groups-per-step", "1", "--orchestrator.total-steps", "9", "--orchestrator.total-positions", "4"),
)
KILLED = ("gateway", "runner-1", "orchestrator")
SNIPPET = (
    (Path(__file__).parents[2] / "docs" / "sessions.md").read_text().partition("```python\n")[2].partition("```")[0]
)
"""The agent that the documentation has."""
LOOK: Any = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}


def work(session: Session) -> list[Any]:
    """An agent's loop: it asks, shows what its tools found, and asks again. Returns its messages."""
    messages: list[Any] = [{"role": "user", "content": "look around"}]
    with openai.OpenAI(base_url=session.base_url, api_key=session.key, max_retries=RETRIES) as client:
        for turn in range(3):
            # The policy is random: whatever it says, calls or not, is answered.
            answer = client.chat.completions.create(model="any", messages=messages, tools=[LOOK], max_tokens=12)
            said = answer.choices[0].message
            messages.append(said.model_dump(exclude_none=True))
            for call in said.tool_calls or ():
                messages.append({"role": "tool", "tool_call_id": call.id, "content": "a door"})
            messages.append({"role": "user", "content": f"go on {turn}"})
    return messages


async def work_streamed(session: Session) -> str:
    """The asyncio client, streamed."""
    async with openai.AsyncOpenAI(base_url=session.base_url, api_key=session.key, max_retries=RETRIES) as client:
        stream = await client.chat.completions.create(
            model="any", messages=[{"role": "user", "content": "say something"}], stream=True, max_tokens=12
        )
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])


def refusal(session: Session, key: str) -> tuple[int, str | None]:
    with openai.OpenAI(base_url=session.base_url, api_key=key, max_retries=0) as client:
        with pytest.raises(openai.APIStatusError) as refused:
            client.chat.completions.create(model="any", messages=[{"role": "user", "content": "hi"}])
        return refused.value.status_code, refused.value.code


def test_what_agents_were_told_trains_token_by_token(launch):
    run = launch("agents", *SETTINGS, *TRACED)
    run.wait_up()
    with Client.of_run(run.path) as client:
        one = client.open_session(group_key="look", group_size=2, timeout_s=DEADLINE_S)
        other = client.open_session(group_key="look", group_size=2, timeout_s=DEADLINE_S)
        assert (one.position, other.position) == (0, 0)
        messages = work(one)
        text = asyncio.run(work_streamed(other))
        assert refusal(one, "no key at all") == (401, "invalid_api_key")
        assert refusal(one, (run.path / "token").read_text().strip()) == (401, "invalid_api_key")

        # Whichever of the processes behind it is killed, the next one goes on with the same session.
        for replica in KILLED:
            before = run.pid(replica)
            os.kill(before, signal.SIGKILL)
            run.wait_until(lambda before=before, replica=replica: run.pid(replica) != before)
            again = work(one)
            assert again[0] == messages[0]
            assert client.get_session(one.session_id).state is SessionState.OPEN

        assert client.close_session(one.session_id, 1.0).state is SessionState.CLOSED
        assert refusal(one, one.key) == (410, "session_ended")
        client.close_session(other.session_id, 0.0)
        run.wait_until(lambda: client.get_session(other.session_id).ended)
        trained = client.get_session(one.session_id)
        assert (trained.state, trained.step) == (SessionState.TRAINED, 1)

        # Two groups of four, whose rewards differ, or not: a random policy says what it likes.
        agent = SNIPPET.replace("runs/mine", str(run.path))
        told = subprocess.run(
            [sys.executable, "-c", agent], capture_output=True, text=True, timeout=DEADLINE_S, check=False
        )
        assert told.returncode == 0, told.stderr
        assert [line.split()[1] for line in told.stdout.splitlines()] == ["closed"] * 8

        # With the last position the run ends, and nobody answers any more.
        alone = client.open_session(timeout_s=DEADLINE_S)
        work(alone)
        client.close_session(alone.session_id, 0.5, advantage=0.25)
    assert run.end() == 0, run.output

    codec = TextCodec.load(run.path / "model")
    records = {(record["group_id"], record["sample"]): record for record in run.rollouts()}
    first = records["train-0", 0]
    # All loops began alike: each is a sample of its own, as it goes on from nothing that was sampled.
    assert first["turns"] == 3 * (1 + len(KILLED))
    shown = codec.decode_all(first["token_ids"])
    for message in messages:
        if message["role"] == "assistant":
            assert (message.get("content") or "").strip() in shown
    assert len(first["loss_ranges"]) == 3
    assert first["reward"] == 1.0
    assert (first["environment"], first["session_id"], "task_index" in first) == ("session", one.session_id, False)
    streamed = records["train-0", 1]
    ((start, end),) = streamed["loss_ranges"]
    # A random policy draws special tokens, too: all but the end token are shown.
    drawn = [token_id for token_id in streamed["token_ids"][start:end] if token_id != codec.end_id]
    assert codec.decode_all(drawn).strip() == text.strip()
    # One trace holds the whole life of a session, whoever was killed meanwhile; its members have traces apart.
    lives = check_lives(run)
    assert first["trace_id"] == one.trace_id != streamed["trace_id"] == other.trace_id
    turns = [span for span in lives["train-0.1.0"].values() if (span["service"], span["name"]) == ("runner", "turn")]
    # Of what the runner had done until it was killed, the last fifth of a second may be lost.
    assert 3 * len(KILLED) <= len(turns) <= first["turns"]
    assert {("gateway", "request"), ("runner", "RunTurn")} <= names_of(lives["train-0.1.0"])
    found = run.slipstream("trace", str(run.path), "--rollout", "train-0.1.0")
    assert found.returncode == 0, found.stderr
    sealed = [record["positions"] for record in run.journal() if record["kind"] == "sealed"]
    assert (sealed[0], sealed[-1]) == ([0], [3])
    steps = run.metrics("step")
    counts = [
        sum(
            e - s
            for r in records.values()
            if r["group_id"] == f"train-{position}"
            for sample in [r, *r.get("further_samples", [])]
            for s, e in sample["loss_ranges"]
        )
        for (position,) in sealed
    ]
    assert [step["loss_tokens"] for step in steps] == counts, "each token that was sampled trains, once"
