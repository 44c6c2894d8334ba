"""Ask a running slipstream for rollouts, watch them to their end, cancel one, and print what came of it.

    slipstream up @ examples/demo.toml &
    python examples/third_party_client.py runs/demo
    python examples/third_party_client.py 127.0.0.1:7000 --token-file token --environment spell_backward

Exits with 0 when every group ended as it should, with 1 when one did not or the run could not be reached, and with 2
when the arguments make no sense.
"""

from __future__ import annotations

import argparse
import sys
import uuid
from pathlib import Path

from slipstream_client import Client, EnvironmentUnknown, Rollout, RolloutState, Sampling, SlipstreamClientError


def main() -> int:
    parser = argparse.ArgumentParser(description="Ask a running slipstream for rollouts.")
    parser.add_argument("run", help="the run's directory, or host:port of its orchestrator")
    parser.add_argument("--token-file", help="file with the run's token, when an address is given")
    parser.add_argument("--environment", help="whose tasks to ask for; the run's first one if not given")
    parser.add_argument("--groups", type=int, default=3)
    parser.add_argument("--samples", type=int, default=4, help="samples of each group")
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds until everything must have ended")
    arguments = parser.parse_args()
    try:
        with open_client(arguments.run, arguments.token_file) as client:
            return work(client, arguments)
    except FileNotFoundError as error:
        parser.error(str(error))
    except SlipstreamClientError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def open_client(run: str, token_file: str | None) -> Client:
    """A run directory knows its address and token; an address needs to be told the token."""
    if Path(run).is_dir() or ":" not in run:
        return Client.of_run(run)
    return Client.connect(run, token_file=token_file)


def work(client: Client, arguments: argparse.Namespace) -> int:
    run = client.get_run()
    print(f"run {run.run_id}: {run.state}, {run.phase}, step {run.step} of {run.total_steps}")
    environment = arguments.environment or first_environment(client)

    # Labels are the caller's own: with them, this program sees its groups and nobody else's.
    mine = {"batch": uuid.uuid4().hex}
    wanted = [
        client.create_rollout(
            environment=environment, split="held_out", index=index, sample_count=arguments.samples, labels=mine
        )
        for index in range(arguments.groups)
    ]
    prompted = client.create_rollout(
        prompt="Tell me more: ", sampling=Sampling(max_new_tokens=8), include_tokens=True, labels=mine
    )
    unwanted = client.create_rollout(environment=environment, sample_count=64, labels=mine)
    client.cancel_rollout(unwanted.group_id)
    print(f"created {len(wanted) + 2} groups of {environment}, cancelled one of them")

    # One stream shows all of them. It resumes by itself if the connection breaks.
    ended: dict[str, Rollout] = {}
    for rollout in client.watch_rollouts(labels=mine, timeout_s=arguments.timeout):
        print(f"  {rollout.group_id[-6:]} is {rollout.state}")
        if rollout.ended:
            ended[rollout.group_id] = rollout
        if len(ended) == len(wanted) + 2:
            break

    for group in (*wanted, prompted):
        show(ended[group.group_id])
    cancelled = ended[unwanted.group_id]
    print(f"cancelled: {cancelled.state}, reason {cancelled.reason}")
    finished = all(ended[group.group_id].state is RolloutState.FINISHED for group in (*wanted, prompted))
    return 0 if finished and cancelled.state is RolloutState.CANCELLED else 1


def first_environment(client: Client) -> str:
    """The run names its environments to whoever asks for one that it does not have."""
    try:
        client.create_rollout(environment="?")
    except EnvironmentUnknown as error:
        return error.metadata["known"].split(", ")[0]
    raise AssertionError("an environment is called '?'")


def show(group: Rollout) -> None:
    """One line for the group and one for each of its samples."""
    print(f"{group.prompt!r}: {group.state} {group.reason} {group.detail}".rstrip())
    for sample in group.samples:
        versions = ", ".join(f"{span.token_count} tokens of {span.version}" for span in sample.versions)
        print(f"  {sample.text!r}: reward {sample.reward:.2f}, {sample.finish_reason}, {versions}")


if __name__ == "__main__":
    sys.exit(main())
