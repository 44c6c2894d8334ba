"""Settings that are each allowed and cannot work together. Pure: reads nothing but the configuration.

| combination | what would happen |
|---|---|
| prefill and decode workers with different engines | neither can read the other's KV |
| prefill workers with vLLM and no connector, or decode workers with another | KV has no way from one to the other |
| decode workers with a connector and no prefill workers | it would wait for KV that nobody sends |
| a memory tier smaller than a context | the engine does not start |
| a probe stricter than the engine's numbers | no version is ever served |
| vLLM with an architecture of one's own | vLLM would run its own code of another |
| blocks of prefill and decode of different sizes | prefix hashes never match |
| fewer KV blocks than two whole contexts | the engine does not start |
| fewer running samples than a group has | no group runs whole |
| ranks of an engine that cannot be spread so | the engine does not start, or computes nonsense |
| a context that the answer alone fills | every request is refused |
| a probe longer than the context | no version is ever served |
| several trainer ranks (one is started) | the others' part of each step is never trained |
| a warm-up without demonstrations | it has nothing to learn from |
| teacher workers and a loss that asks none | they judge for nobody |
| an evaluation without tasks | it would report nothing |
| a store that cannot hold the versions to keep | publishing is refused for ever |
| a spool that cannot hold the groups of a step | no new group is taken, and the step is never full |
| an environment that runs programs, and no sandbox | every execution fails |
| a judge that may run longer than the sandbox allows | every execution is refused |
| a lease shorter than two heartbeats | it ends while its runner lives |
| cards that cannot be shared out (`cards.py`) | two ranks would take the same one |
| workers asked more rarely than they count as away | they are away between two questions |
| a time in which nothing can happen (`impossible.py`) | it is over before anything answers |
| more parts of a curriculum than tasks | a part without a task is never asked |
| less memory for an environment than a process takes | it is ended as soon as it starts |

What looks alike and works: micro-batches shorter than a sequence (it gets one of its own), a rate that rises for longer
than the run lasts, more groups running than engines have room for (they wait).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from slipstream.common.config_errors import ConfigError, Origins
from slipstream.engine.vllm.config import VllmConfig, kv_bytes_per_token
from slipstream.engine.vllm.families import why_not
from slipstream.engine.vllm.parallel import Case, refusals
from slipstream.environments.config import ExpressionConfig
from slipstream.environments.config_own import PythonCodeConfig, TerminalConfig
from slipstream.launcher import cards, impossible
from slipstream.launcher.config import RunConfig

Problem = tuple[tuple[str, ...], str]
"""The keys, the one to change first, and what is wrong with that one."""

HEARTBEAT_S = 1.0
COARSE = 0.02
"""Log-probabilities of two bytes or less differ by more than this from those of float32."""
BYTES_A_PARAMETER = 4
SPOOLED_BYTES_A_TOKEN = 8
"""Token id and log-probability of a sampled token: what a runner holds at the least."""


def check_combinations(config: RunConfig, origins: Origins) -> None:
    """Raise `ConfigError` for the first combination that cannot work."""
    for rule in RULES:
        for keys, sentence in rule(config):
            raise ConfigError(f"{origins.located(*keys)} {sentence}")


def _engines(config: RunConfig) -> Iterator[Problem]:
    engines: dict[str, Any] = {pool: _of(config, pool, "engine") for pool in ("prefill", "decode")}
    if not config.replicas("prefill"):
        del engines["prefill"]
        if getattr(engines["decode"], "connector", "none") != "none":
            yield (
                ("decode.engine.connector", "prefill.replicas"),
                f'is "{engines["decode"].connector}", and with prefill.replicas = 0 nobody sends it KV; set it to '
                '"none", or raise prefill.replicas',
            )
    else:
        yield from _handed_over(engines["prefill"], engines["decode"])
    for pool, engine in engines.items():
        if engine.type == "vllm" and engine.side_channel_port and config.replicas(pool) > 1:
            yield (
                (f"{pool}.engine.side_channel_port", f"{pool}.replicas"),
                f"is {engine.side_channel_port} for {config.replicas(pool)} workers, and each needs a port of its own; "
                "leave it at 0, which picks free ones",
            )
        if engine.type == "vllm":
            yield from _precision(config, pool, engine)
            yield from _memory_tier(config, pool, engine)
        context = config.model.max_context_tokens
        needed = 2 * -(-context // engine.block_size_tokens)
        if engine.type == "vllm":  # a position more, for a probe of the whole context, and a block for itself
            needed = -(-2 * (context + 1) // engine.block_size_tokens) + 1
        if engine.block_count < needed and not _initial_model(config):
            yield (
                (f"{pool}.engine.block_count", f"{pool}.engine.block_size_tokens", "model.max_context_tokens"),
                f"is {engine.block_count}; two contexts of {context} tokens need at least {needed} blocks of "
                f"{engine.block_size_tokens} tokens",
            )
    samples = _of(config, "orchestrator", "samples_per_group")
    spare = max((environment.spare_samples for environment in config.environments), default=0)
    if engines["decode"].max_running_samples < samples + spare:
        more = f", and {spare} spare_samples" if spare else ""
        yield (
            ("decode.engine.max_running_samples", "orchestrator.samples_per_group"),
            f"is {engines['decode'].max_running_samples}, below orchestrator.samples_per_group = {samples}{more}: "
            "no group would ever run whole",
        )


def _handed_over(prefill: Any, decode: Any) -> Iterator[Problem]:
    """KV moves between two pools."""
    alone = "or set prefill.replicas = 0: decode workers then compute the prompts themselves"
    if prefill.type != decode.type:
        yield (
            ("prefill.engine.type", "decode.engine.type"),
            f'is "{prefill.type}", decode.engine.type is "{decode.type}", which cannot read its KV; give both the same '
            f"engine, {alone}",
        )
    elif prefill.type == "vllm":
        keys = "prefill.engine.connector", "decode.engine.connector"
        if prefill.connector != decode.connector:
            yield keys, f'is "{prefill.connector}", decode.engine.connector is "{decode.connector}"; KV needs the same'
        elif prefill.connector == "none":
            yield keys, f'is "none", so vLLM hands no KV over; set both to "nixl", {alone}'
        if prefill.dtype != decode.dtype:
            yield (
                ("prefill.engine.dtype", "decode.engine.dtype"),
                f'is "{prefill.dtype}", decode.engine.dtype is "{decode.dtype}", which cannot read its KV; give both '
                "the same",
            )
    if prefill.block_size_tokens != decode.block_size_tokens:
        yield (
            ("prefill.engine.block_size_tokens", "decode.engine.block_size_tokens"),
            f"is {prefill.block_size_tokens}, decode.engine.block_size_tokens is {decode.block_size_tokens}; they must "
            "be the same",
        )


def _precision(config: RunConfig, pool: str, engine: VllmConfig) -> Iterator[Problem]:
    allowed = _of(config, "trainer", "probe_tolerance")
    for field, value, usual in (("quantization", engine.quantization, 0.5), ("dtype", engine.dtype, 0.25)):
        if value not in ("none", "float32") and allowed < COARSE:
            yield (
                ("trainer.probe_tolerance", f"{pool}.engine.{field}"),
                f'is {allowed:g}, and with {pool}.engine.{field} = "{value}" log-probabilities differ by more: every '
                f"version would fail its probe; set it to {usual:g}",
            )


def _memory_tier(config: RunConfig, pool: str, engine: VllmConfig) -> Iterator[Problem]:
    if engine.offload is None or _initial_model(config):
        return
    needed = config.model.max_context_tokens * kv_bytes_per_token(config.model, engine.dtype)
    if engine.offload.memory_bytes < needed:
        yield (
            (f"{pool}.engine.offload.memory_bytes", "model.max_context_tokens"),
            f"is {engine.offload.memory_bytes}; one whole context needs {needed}",
        )


def _own_architecture(config: RunConfig) -> Iterator[Problem]:
    pools, architecture = config.pools_with("vllm"), config.model.architecture
    if pools and (why := why_not(architecture)):
        yield (
            ("model.architecture", *(f"{pool}.engine.type" for pool in pools)),
            f'is "{architecture}", {why}; set {pools[0]}.engine.type = "embedded"',
        )


def _parallel(config: RunConfig) -> Iterator[Problem]:
    for pool in ("prefill", "decode") if config.replicas("prefill") else ("decode",):
        engine, ranks = _of(config, pool, "engine"), _of(config, pool, "data_parallel_size")
        if not isinstance(engine, VllmConfig):
            continue
        own = engine.parallel.data_parallel_size
        if 1 not in (own, ranks) and own != ranks:
            yield (
                (f"{pool}.engine.parallel.data_parallel_size", f"{pool}.data_parallel_size"),
                f"is {own}, and {pool}.data_parallel_size is {ranks}; set one of them",
            )
        spread = engine.parallel.model_copy(update={"data_parallel_size": config.data_parallel_size(pool)})
        sizes = None if _initial_model(config) else config.model
        for option, sentence in refusals(Case(spread, pool, engine.device, engine.quantization, sizes)):
            yield (f"{pool}.engine.{option}", f"{pool}.data_parallel_size"), sentence


def _context(config: RunConfig) -> Iterator[Problem]:
    if _initial_model(config):
        return
    limit = config.model.max_context_tokens
    for index, environment in enumerate(config.environments):
        if environment.max_new_tokens >= limit:
            yield (
                (f"environments.{index}.max_new_tokens", "model.max_context_tokens"),
                f"is {environment.max_new_tokens}; with its prompt that must fit model.max_context_tokens = {limit}",
            )
    probe = _of(config, "trainer", "probe_tokens")
    if probe > limit:
        yield (
            ("trainer.probe_tokens", "model.max_context_tokens"),
            f"is {probe}, above model.max_context_tokens = {limit}",
        )


def _ranks(config: RunConfig) -> Iterator[Problem]:
    ranks = _of(config, "orchestrator", "data_ranks")
    if ranks != 1:
        yield ("orchestrator.data_ranks",), f"is {ranks}, but one trainer is started; set it to 1"


def _warm_up(config: RunConfig) -> Iterator[Problem]:
    shown = any(environment.demonstration_weight for environment in config.environments)
    if config.sft.enabled and not _initial_model(config) and not shown:
        keys = tuple(f"environments.{index}.demonstration_weight" for index in range(len(config.environments)))
        yield keys, "is 0, and nothing else has demonstrations to warm up on; raise it or set sft.enabled = false"


def _teacher(config: RunConfig) -> Iterator[Problem]:
    if not config.replicas("teacher"):
        return
    if _of(config, "trainer", "loss").type != "distillation":
        yield (
            ("teacher.replicas",),
            f"is {config.replicas('teacher')}, and the loss asks no teacher; "
            'set trainer.loss.type = "distillation", or teacher.replicas = 0',
        )


def _evaluation(config: RunConfig) -> Iterator[Problem]:
    asked = any(environment.evaluation_task_count for environment in config.environments)
    for when, never in (("before", "false"), ("after", "false"), ("every_steps", "0")):
        value = getattr(config.evaluation, when)
        if value and not asked:
            yield (
                (f"evaluation.{when}", "environments.0.evaluation_task_count"),
                f"is {str(value).lower()}, but every environment has evaluation_task_count = 0; "
                f"raise one of them or set evaluation.{when} = {never}",
            )


def _room(config: RunConfig) -> Iterator[Problem]:
    kept, store = _of(config, "broadcaster", "keep_version_count"), _of(config, "broadcaster", "max_store_bytes")
    needed = (kept + 1) * BYTES_A_PARAMETER * config.model.parameter_count(config.model.vocab_size or 2)
    if store < needed and not _initial_model(config):
        yield (
            ("broadcaster.max_store_bytes", "broadcaster.keep_version_count"),
            f"is {store}; {kept} kept versions of this model and a new one need {needed} bytes",
        )
    orchestrator: Any = config.section("orchestrator")
    rollouts = orchestrator.groups_per_step * orchestrator.samples_per_group
    shortest = min(environment.max_new_tokens for environment in config.environments)
    spool, runners = _of(config, "runner", "spool_limit_bytes"), config.replicas("runner")
    if rollouts * shortest * SPOOLED_BYTES_A_TOKEN > spool * runners:
        yield (
            ("runner.spool_limit_bytes", "orchestrator.groups_per_step"),
            f"is {spool}; the {rollouts} rollouts of a step have up to "
            f"{rollouts * shortest * SPOOLED_BYTES_A_TOKEN} bytes of rows, shared by {runners} runner(s)",
        )


def _sandbox(config: RunConfig) -> Iterator[Problem]:
    sandbox: Any = config.section("sandbox")
    most = sandbox.max_limits
    for index, environment in enumerate(config.environments):
        if isinstance(environment, ExpressionConfig | PythonCodeConfig):
            asked = [("sandbox_wall_s", environment.sandbox_wall_s, "max_limits.wall_s", most.wall_s)]
        elif isinstance(environment, TerminalConfig):
            asked = [
                ("command_wall_s", environment.sandbox_wall_s, "max_limits.wall_s", most.wall_s),
                ("memory_bytes", environment.memory_bytes, "max_limits.memory_bytes", most.memory_bytes),
                ("state_bytes", environment.sandbox_output_bytes, "max_limits.output_bytes", most.output_bytes),
                ("state_bytes", environment.state_bytes, "max_files_bytes", sandbox.max_files_bytes),
            ]
        else:
            asked = []
        if asked and not config.replicas("sandbox"):
            yield (
                ("sandbox.enabled", f"environments.{index}.type"),
                f'is false, and environments.{index} is of type "{environment.type}", which runs programs there',
            )
        for name, needed, limit, allowed in asked:
            if needed > allowed:
                given = getattr(environment, name)
                takes = "" if needed == given else f", which takes {needed:g}"
                yield (
                    (f"environments.{index}.{name}", f"sandbox.{limit}"),
                    f"is {given:g}{takes}, above sandbox.{limit} = {allowed:g}",
                )


def _leases(config: RunConfig) -> Iterator[Problem]:
    ttl_s = _of(config, "orchestrator", "runner_lease_ttl_s")
    if ttl_s < 2 * HEARTBEAT_S:
        yield (
            ("orchestrator.runner_lease_ttl_s",),
            f"is {ttl_s:g}; runners report each second, so at least 2 are needed",
        )
    keeper = _of(config, "orchestrator", "keeper")
    if keeper.away_after_s <= keeper.poll_interval_s:
        yield (
            ("orchestrator.keeper.away_after_s", "orchestrator.keeper.poll_interval_s"),
            f"is {keeper.away_after_s:g}; it must exceed orchestrator.keeper.poll_interval_s = "
            f"{keeper.poll_interval_s:g}, or every worker counts as away between two questions",
        )


RULES: tuple[Callable[[RunConfig], Iterator[Problem]], ...] = (
    _engines,
    _own_architecture,
    _parallel,
    _context,
    _ranks,
    _warm_up,
    _evaluation,
    _teacher,
    _room,
    _sandbox,
    _leases,
    cards.problems,
    impossible.problems,
)


def _of(config: RunConfig, service: str, name: str) -> Any:
    return getattr(config.section(service), name)


def _initial_model(config: RunConfig) -> bool:
    """Whether the sizes come from a model directory, not from `[model]`."""
    return _of(config, "trainer", "initial_model") is not None
