"""Metrics of a runner."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from prometheus_client import Counter, Histogram

from slipstream.common.metrics import Reading

if TYPE_CHECKING:
    from slipstream.runner.rollout_log import RolloutLog
    from slipstream.runner.spool import Spool

groups_running = Reading("gauge", "slipstream_runner_groups_running", "Groups being run.")
groups_limit = Reading("gauge", "slipstream_runner_groups_limit", "The most groups run at once.")
spool_bytes = Reading("gauge", "slipstream_runner_spool_bytes", "Bytes of rows held for the trainer.")
spool_limit_bytes = Reading("gauge", "slipstream_runner_spool_limit_bytes", "At this many no group is taken.")
spool_stuck = Reading("gauge", "slipstream_runner_spool_stuck", "Finished groups that wait for room on the disk.")
rollout_log_stuck = Reading(
    "gauge", "slipstream_runner_rollout_log_stuck", "1 while rollouts wait for room on the disk."
)
rollouts = Counter("slipstream_runner_rollouts", "Rollouts finished, by environment.", ["environment"])
spool_damaged = Counter(
    "slipstream_runner_spool_damaged", "Records of the spool whose bytes are no longer those that were written."
)
groups_taken_up = Counter(
    "slipstream_runner_groups_taken_up",
    "Groups that an earlier process of this runner left, by what came of them.",
    ["how"],
)
rollouts_given_up = Counter(
    "slipstream_runner_rollouts_given_up",
    "Members of groups with spare ones that were given up as enough had ended, by environment.",
    ["environment"],
)
rollouts_failed = Counter(
    "slipstream_runner_rollouts_failed",
    "Members of groups that take turns which ended without a reward, by environment and reason.",
    ["environment", "reason"],
)
episodes_cut = Counter(
    "slipstream_runner_episodes_cut",
    "Rollouts that take turns whose first one was cut off at max_new_tokens, by environment.",
    ["environment"],
)
rollouts_cut = Counter(
    "slipstream_runner_rollouts_cut",
    "Rollouts that take turns which a limit ended, by environment and limit: turn, context, turns, tokens.",
    ["environment", "why"],
)
episodes_begun_again = Counter(
    "slipstream_runner_episodes_begun_again",
    "Episodes that went on in another process, as other code blocked theirs, by environment.",
    ["environment"],
)
environment_spans = Counter(
    "slipstream_runner_environment_spans",
    "Spans that processes of environments have sent, by environment.",
    ["environment"],
)
environment_spans_lost = Counter(
    "slipstream_runner_environment_spans_lost",
    "Spans of processes of environments that were lost, by environment and why: queue, malformed, process_ended.",
    ["environment", "why"],
)
samples_begun = Counter(
    "slipstream_runner_samples_begun",
    "Training samples begun by rollouts that take turns, by environment (`session`: those of outside agents) and why: "
    "first, branch, template, history.",
    ["environment", "why"],
)
sessions_open = Reading("gauge", "slipstream_runner_sessions_open", "Sessions of outside agents that are open here.")
session_turns = Counter("slipstream_runner_session_turns", "Turns of sessions that came to their end.")
turns_recalled = Counter(
    "slipstream_runner_turns_recalled", "Turns that an earlier process of this runner had sampled, and kept."
)
turns_told_again = Counter(
    "slipstream_runner_turns_told_again",
    "Turns of sessions that were told to the process that took a dead one's place.",
)
turns = Counter("slipstream_runner_turns", "Requests for model turns that ended, by outcome.", ["outcome"])
kept_tokens = Counter(
    "slipstream_runner_kept_tokens", "Sampled tokens of turns that broke off, which went on from them."
)
untrusted_tokens = Counter(
    "slipstream_runner_untrusted_tokens", "Sampled tokens dropped, as they do not belong into their rollouts."
)
environment_failures = Counter(
    "slipstream_runner_environment_failures", "Calls of environment code that failed, by environment.", ["environment"]
)
environment_processes_ended = Counter(
    "slipstream_runner_environment_processes_ended",
    "Processes of environments that ended before their time, by why: blocked, memory, too_slow, died.",
    ["environment", "why"],
)
group_duration = Histogram(
    "slipstream_runner_group_duration_seconds",
    "From a group's start to its report, by environment.",
    ["environment"],
    buckets=(0.1, 0.5, 1, 2, 5, 15, 60, 300, 1800),
)


def observe(running_count: Callable[[], int], max_running: int, spool: Spool, rollout_log: RolloutLog) -> None:
    """Read this runner from now on."""
    groups_running.read_from(running_count)
    groups_limit.read_from(lambda: max_running)
    spool_bytes.read_from(lambda: spool.size_bytes)
    spool_limit_bytes.read_from(lambda: spool.limit_bytes)
    spool_stuck.read_from(lambda: spool.waiting_count)
    rollout_log_stuck.read_from(lambda: rollout_log.full)
