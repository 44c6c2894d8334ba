"""Ask a running slipstream for rollouts, watch them to their end, cancel one, and print what came of it.

slipstream up @ examples/demo.toml &
python examples/third_party_client.py runs/demo
"""

import argparse
import sys
import uuid
from pathlib import Path

from slipstream_client import Client, EnvironmentUnknown, RolloutState, Sampling, SlipstreamClientError

parser = argparse.ArgumentParser(description="Ask a running slipstream for rollouts.")
parser.add_argument("run", help="the run's directory, or host:port of its orchestrator")
parser.add_argument("--token-file", help="file with the run's token, when an address is given")
parser.add_argument("--environment", help="whose tasks to ask for; the run's first one if not given")
parser.add_argument("--groups", type=int, default=3)
parser.add_argument("--samples", type=int, default=4)


def work(client: Client, environment: str | None, groups: int, samples: int) -> bool:
    run = client.get_run()
    print(f"run {run.run_id}: {run.state}, {run.phase}, step {run.step} of {run.total_steps}")
    try:
        environment = environment or client.create_rollout(environment="?").environment
    except EnvironmentUnknown as error:  # which says what there is
        environment = error.metadata["known"].split(", ")[0]
    mine = {"batch": uuid.uuid4().hex}  # with labels, this program sees its groups and nobody else's
    wanted = [
        client.create_rollout(environment=environment, split="held_out", index=i, sample_count=samples, labels=mine)
        for i in range(groups)
    ] + [client.create_rollout(prompt="Tell me more: ", sampling=Sampling(max_new_tokens=8), labels=mine)]
    unwanted = client.cancel_rollout(client.create_rollout(environment=environment, sample_count=64).group_id)
    print(f"created {len(wanted) + 1} groups of {environment}, cancelled one of them")
    ended = {}  # by group
    for rollout in client.watch_rollouts(labels=mine, timeout_s=60):  # goes on by itself if the connection breaks
        ended |= {rollout.group_id: rollout} if rollout.ended else {}
        if len(ended) == len(wanted):
            break
    for group in ended.values():
        print(f"{group.prompt or '(own prompt)'!r}: {group.state} {group.reason} {group.detail}".rstrip())
        for s in group.samples:
            versions = ", ".join(f"{span.token_count} tokens of {span.version}" for span in s.versions)
            print(f"  {s.text!r}: reward {s.reward:.2f}, {s.finish_reason}, {versions}")
    print(f"cancelled: {unwanted.state}, reason {unwanted.reason}")
    return all(group.state is RolloutState.FINISHED for group in ended.values())


if __name__ == "__main__":
    given = parser.parse_args()
    try:
        is_path = Path(given.run).is_dir() or ":" not in given.run
        with Client.of_run(given.run) if is_path else Client.connect(given.run, token_file=given.token_file) as client:
            sys.exit(0 if work(client, given.environment, given.groups, given.samples) else 1)
    except FileNotFoundError as missing:
        parser.error(str(missing))
    except SlipstreamClientError as refused:
        sys.exit(f"error: {refused}")
