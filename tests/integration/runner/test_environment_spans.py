"""What an environment's process did, in the trace of the rollout that it did it for."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import REGISTRY

from slipstream.api.rollout.v1 import runner_pb2
from slipstream.api.sandbox.v1 import sandbox_pb2_grpc
from slipstream.common import tracing
from slipstream.common.config import TracingConfig
from slipstream.common.runtime import build_server
from slipstream.environments.config import ImportedConfig
from slipstream.launcher.records import read_all
from slipstream.runner.config import RunnerConfig
from slipstream.runner.span_text import row_of, span_of
from slipstream.sandbox.__main__ import SERVICE
from slipstream.sandbox.config import SandboxConfig
from slipstream.sandbox.executor import open_executor
from tests.otlp_collector import collector

BOTH = 2
"""Samples of a group: members of which each has an episode."""
SHOWN = ("setup", "turn", "place", "prefill", "decode", "tools", "score")
"""The runner's own spans of each: what they share, and what is its own."""
ALWAYS = 7
"""Spans of each: its four calls, and three of their own in them."""


def telling(behaviour: str = "") -> list[ImportedConfig]:
    return [ImportedConfig(name="told", path="small_spans:Told", options={"behaviour": behaviour})]


@pytest.fixture
def start_traced(start_world: Any, make_config: Any) -> Iterator[Callable[..., Any]]:
    """Starts a world whose runner traces as it is told, as its process would."""

    async def start(behaviour: str = "", endpoint: str = "", share: float = 1.0, **fields: Any) -> Any:
        settings = TracingConfig(sample_share=share, otlp_endpoint=endpoint)
        tracing.setup(make_config(RunnerConfig, replica="runner-1", tracing=settings), "runner")
        return await start_world(environments=telling(behaviour), tracing=settings, **fields)

    yield start
    tracing.close()
    tracing.use(tracing.Tracer("", 0.0))


@asynccontextmanager
async def sandbox(make_config: Callable[..., SandboxConfig]):
    """The address of a real executor."""
    config = make_config(SandboxConfig)
    with open_executor(config) as executor:
        add = sandbox_pb2_grpc.add_SandboxServiceServicer_to_server
        server, port = build_server(config, [(add, executor.servicer, SERVICE)])
        await server.start()
        try:
            yield f"127.0.0.1:{port}"
        finally:
            await server.stop(grace=1.0)


def spans_of(directory: Path) -> dict[str, list[dict[str, Any]]]:
    """By the process that they are of."""
    return {path.stem: read_all(path) for path in sorted((directory / "timeline").glob("*.jsonl"))}


def lost(why: str) -> float:
    name = "slipstream_runner_environment_spans_lost_total"
    return REGISTRY.get_sample_value(name, {"environment": "told", "why": why}) or 0.0


def chain(span: dict[str, Any], by_id: dict[str, dict[str, Any]]) -> list[str]:
    """Names from a span up to the first that is in a file: the group's own is the orchestrator's."""
    names = [span["name"]]
    while (parent := by_id.get(span["parent"])) is not None:
        span = parent
        names.append(span["name"])
    return names


async def test_a_rollouts_trace_shows_the_environments_calls_and_the_sandbox_below_them(
    start_traced: Any, make_config: Any
) -> None:
    async with sandbox(make_config) as address:
        world = await start_traced("runs code", sandbox_address=address)
        group_id = await world.give("told", samples=BOTH)
        report = await world.report(group_id)
        assert report.outcome == runner_pb2.GROUP_OUTCOME_FINISHED, report
        group = tracing.group_trace(group_id, 1, 1)
        rollouts = [tracing.rollout_trace(group_id, 1, 1, index) for index in range(BOTH)]
        # The runner's own wait for others a moment; `run` ends last.
        await world.until(lambda: any(s["name"] == "run" for s in spans_of(world.directory).get("runner-1", [])))
        files = spans_of(world.directory)
    spans = [span for lines in files.values() for span in lines]
    by_id = {span["span"]: span for span in spans}
    assert {span["trace"] for span in spans} == {tracing.trace_id(each) for each in (group, *rollouts)}
    assert [record.trace_id for record in report.rollouts] == [tracing.trace_id(each) for each in rollouts]
    for index, trace in enumerate(rollouts):
        mine = [span for span in spans if span["trace"] == tracing.trace_id(trace)]
        assert sorted(span["name"] for span in mine if span.get("rollout") == f"{group_id}.1.{index}") == sorted(SHOWN)
        own = [chain(span, by_id) for span in files["runner-1-told"] if span in mine]
        assert sorted(own) == sorted([
            ["environment_step", "tools"],
            ["compile", "environment_step", "tools"],
            ["sandbox_run", "compile", "environment_step", "tools"],
            ["environment_score", "score"],
            ["think", "environment_score", "score"],
            ["fails", "environment_score", "score"],
            ["environment_close", "score"],
        ])  # fmt: skip
        roots = {span["parent"] for span in mine if span["parent"] not in by_id}
        assert trace is not None
        assert roots == {trace.span_id}, "what a trace has lies below its root, which the orchestrator writes"
    shared = [chain(span, by_id) for span in files["runner-1-told"] if span["trace"] == tracing.trace_id(group)]
    expected = [["environment_setup", "setup", "run"], ["prepare", "environment_setup", "setup", "run"]]
    assert sorted(shared) == sorted(expected * BOTH)
    # The executor's own, which another process would have written.
    programs = [chain(span, by_id) for span in spans if span["name"] == "program"]
    assert programs == [["program", "Exec", "sandbox_run", "compile", "environment_step", "tools"]] * BOTH
    attributes = next(span for span in spans if span["name"] == "prepare")
    assert (attributes["number"], attributes["text"], attributes["odd"]) == (7, "???", "object")
    assert (attributes["huge"], attributes["nan"]) == ("0x1" + "0" * 20, "nan")
    compiled = next(span for span in spans if span["name"] == "compile")
    assert (compiled["files"], compiled["warnings"]) == ("a.py, b.py", 2)
    assert next(span for span in spans if span["name"] == "fails")["error"] == "LookupError"
    for span in spans:
        above = by_id.get(span["parent"])
        # Clocks of one machine, each span rounded to a microsecond.
        assert above is None or span["start_s"] >= above["start_s"] - 0.001, (span, above)


async def test_a_collector_is_sent_the_environments_spans_as_of_a_process_of_their_own(start_traced: Any) -> None:
    with collector() as (endpoint, got):
        world = await start_traced(endpoint=endpoint)
        await world.report(await world.give("told", samples=BOTH))

        def arrived() -> dict[str, set[str]]:
            names: dict[str, set[str]] = {}
            for resource in [resource for request in got for resource in request.resource_spans]:
                said = {each.key: each.value.string_value for each in resource.resource.attributes}
                spans = [span for scope in resource.scope_spans for span in scope.spans]
                names.setdefault(f"{said['service.name']} {said['service.instance.id']}", set()).update(
                    span.name for span in spans
                )
            return names

        await world.until(lambda: "environment_close" in arrived().get("environment runner-1-told", set()))
        await world.until(lambda: "run" in arrived().get("runner runner-1", set()))
        assert arrived()["environment runner-1-told"] == {
            *("environment_setup", "prepare", "environment_step", "environment_score", "think", "fails"),
            "environment_close",
        }
        ids = {span.trace_id for r in got for each in r.resource_spans for s in each.scope_spans for span in s.spans}
        assert len(ids) == 1 + BOTH, "the group's and its rollouts'"


async def test_spans_that_find_no_room_are_counted_and_the_episode_goes_on(start_traced: Any) -> None:
    before = lost("queue")
    world = await start_traced("tells too much")
    report = await world.report(await world.give("told", samples=BOTH))
    assert [record.reward for record in report.rollouts] == [1.0] * BOTH
    await world.until(lambda: lost("queue") > before)

    def told() -> int:
        return len(spans_of(world.directory).get("runner-1-told", []))

    # Those that each member has in any case are among what may be lost.
    await world.until(lambda: told() + lost("queue") - before == (5000 + ALWAYS) * BOTH)


async def test_of_a_process_that_died_it_is_counted_that_spans_are_lost(start_traced: Any) -> None:
    before = lost("process_ended")
    world = await start_traced("dies")
    report = await world.report(await world.give("told", samples=1))
    assert report.outcome == runner_pb2.GROUP_OUTCOME_FAILED
    assert lost("process_ended") == before + 1

    def told() -> set[str]:
        return {span["name"] for span in spans_of(world.directory).get("runner-1-told", [])}

    await world.until(lambda: told() >= {"environment_setup", "prepare"})


async def test_without_tracing_an_environments_spans_are_nothing(start_world: Any) -> None:
    world = await start_world(environments=telling())
    report = await world.report(await world.give("told", samples=BOTH))
    assert [record.reward for record in report.rollouts] == [1.0] * BOTH
    assert not (world.directory / "timeline").exists()


async def test_groups_that_are_not_among_the_traced_share_send_no_spans(start_traced: Any) -> None:
    world = await start_traced(share=1e-9)
    report = await world.report(await world.give("told", samples=BOTH))
    assert [record.reward for record in report.rollouts] == [1.0] * BOTH
    assert "runner-1-told" not in spans_of(world.directory)


def test_a_line_of_spans_is_what_any_json_reader_takes(tmp_path: Path) -> None:
    context = tracing.TraceContext("a" * 32, "b" * 16)
    deeper: list[Any] = []
    deeper.append(deeper)
    attributes = {"kind": float("inf"), "deep": [1, [2.5]], "endless": deeper}
    span = tracing.Span("x" * 500, context, "c" * 16, 1.0, 2.0, [context], attributes)
    row = json.loads(json.dumps(row_of(span), allow_nan=False))
    again = span_of(row, ("environment", "runner-1-told"))
    assert (len(again.name), again.attributes) == (128, {"kind_": "inf", "deep": "1, 2.5", "endless": "list"})
    assert (again.context, again.parent_id, again.links) == (context, "c" * 16, [context])


class Odd(list[int]):
    """Environment code's: its operators fail."""

    def __getitem__(self, _: Any) -> Any:
        raise LookupError("no such")


@pytest.mark.parametrize(
    ("name", "shown"), [(None, "None"), (7, "7"), ("", "span"), (object(), "object"), (Odd(), "Odd")]
)
def test_a_span_is_told_whatever_its_name_and_values_are(name: Any, shown: str) -> None:
    context = tracing.TraceContext("a" * 32, "b" * 16)
    attributes: Any = {7: None, None: Odd([1]), "deep": [Odd([1])], "map": {"a": 1}}
    row = json.loads(json.dumps(row_of(tracing.Span(name, context, "c" * 16, 1.0, 2.0, (), attributes))))
    again = span_of(row, ("environment", "runner-1-told"))
    assert again.name == shown
    assert again.attributes == {"7": "None", "None": "Odd", "deep": "list", "map": "dict"}


@pytest.mark.parametrize("traced", [True, False])
async def test_an_environment_whose_spans_have_odd_names_and_values_does_as_well_traced_as_not(
    start_traced: Any, traced: bool
) -> None:
    world = await start_traced("says odd things", share=1.0 if traced else 0.0)
    report = await world.report(await world.give("told", samples=BOTH))
    assert [record.reward for record in report.rollouts] == [1.0] * BOTH, report


@pytest.mark.parametrize(
    "row",
    [
        None,
        [],
        ["name", "a" * 32, "b" * 16, "", 1.0, 2.0, {}, []],
        ["name", "A" * 32, "b" * 16, "c" * 16, 1.0, 2.0, {}, []],
        ["name", "a" * 32, "b" * 16, "c" * 16, 2.0, 1.0, {}, []],
        ["name", "a" * 32, "b" * 16, "c" * 16, 1.0, float("nan"), {}, []],
        ["name", "a" * 32, "b" * 16, "c" * 16, 1.0, 1e18, {}, []],
        ["name", "a" * 32, "b" * 16, "c" * 16, 1.0, 2.0, [], []],
        ["name", "a" * 32, "b" * 16, "c" * 16, 1.0, 2.0, {}, [["a"]]],
        ["name", 1, 2, 3, 1.0, 2.0, {}, []],
        ["name", "a" * 32, "b" * 16, "c" * 16, "soon", 2.0, {}, []],
    ],
)
def test_a_row_that_is_no_span_is_refused(row: Any) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 whatever is wrong with it
        span_of(row, ("environment", "runner-1-told"))
