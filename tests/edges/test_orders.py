"""Valid requests in a wrong order, to the wrong life of a process, or about what is not there."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from callers import Answer
from contract import common_statuses
from stack import rpc
from tame import FAR

pytestmark = pytest.mark.timeout(590, func_only=False)

WAIT_S = 300.0
"""For its turn, in a run that does other things."""
TOKENS = [1, 2, 3, 4, 5, 6, 7, 8, 9]


def version(step: int, incarnation: int = 1) -> dict[str, int]:
    return {"incarnation": incarnation, "step": step}


def refused(answer: Any, code: str, reason: str) -> dict[str, str]:
    """The metadata of a refusal, which must be this one."""
    assert isinstance(answer, Answer), f"obeyed: {answer}"
    assert answer.status == (code, reason), str(answer)
    assert len(answer.infos) == 1
    return answer.metadata


@pytest.mark.parametrize("replica", ["prefill-1", "decode-1"])
async def test_an_update_goes_through_its_states_or_not_at_all(replica, stack):
    async with stack.caller(replica) as worker:
        begin, apply, finish, abort = (
            rpc(f"WorkerService.{name}Update") for name in ("Begin", "Apply", "Finish", "Abort")
        )
        for step in (apply, finish):
            refused(await worker.ask(step, update_id="edges"), "FAILED_PRECONDITION", "UPDATE_NOT_OPEN")
        served = (await worker.ask(abort, update_id="edges")).version
        assert served.incarnation == 1

        async def begun(**fields: Any) -> Any:
            request = {"update_id": "edges", "holder": "edges", "version": version(FAR), "lease_ttl_ms": 100, **fields}
            answer = await worker.ask(begin, **request)
            while isinstance(answer, Answer) and answer.status[1] == "UPDATE_IN_PROGRESS":  # the run's own
                await asyncio.sleep(0.05)
                answer = await worker.ask(begin, **request)
            return answer

        refused(await begun(worker_epoch="another life"), "ABORTED", "WORKER_STALE")
        refused(await begun(), "NOT_FOUND", "WEIGHT_VERSION_UNKNOWN")
        refused(await begun(version=version(0)), "FAILED_PRECONDITION", "VERSION_NOT_NEWER")
        refused(await worker.ask(apply, update_id="edges"), "FAILED_PRECONDITION", "UPDATE_NOT_OPEN")


async def test_a_prompt_is_prefilled_once_and_gone_when_it_is_released(stack):
    async with stack.caller("prefill-1") as prefill, stack.caller("decode-1") as decode:

        async def prefilled(**fields: Any) -> Any:
            request = {"request_id": "edges-kv", "salt": "edges", "prompt": {"new_token_ids": TOKENS}, **fields}
            return await prefill.ask(rpc("PrefillService.Prefill"), **request)

        async def decoded(kv: Any, tokens: list[int] = TOKENS, **fields: Any) -> Any:
            request = {
                "request_id": "edges-decode",
                "salt": "edges",
                "prompt": {"new_token_ids": tokens},
                "kv": kv,
                "sample_ids": ["edges"],
                "sampling": {"max_new_tokens": 2, "temperature": 1e-40},
                **fields,
            }
            return await decode.ask(rpc("DecodeService.Decode"), **request)

        async def fetched(**fields: Any) -> Any:
            return await prefill.ask(rpc("KvService.FetchKv"), **fields)

        refused(await prefilled(worker_epoch="another life"), "ABORTED", "WORKER_STALE")
        refused(await prefilled(min_policy_version=version(FAR)), "ABORTED", "WORKER_STALE")
        base = {"rollout_id": "edges", "base_token_count": 3, "new_token_ids": TOKENS}
        refused(await prefilled(prompt=base), "FAILED_PRECONDITION", "PREFIX_UNKNOWN")
        limit = refused(
            await prefilled(prompt={"new_token_ids": [1] * 100_000}), "INVALID_ARGUMENT", "CONTEXT_TOO_LONG"
        )
        assert int(limit["limit"]) < 100_000
        outside = {"new_token_ids": [1, 2**31 - 1]}
        assert refused(await prefilled(prompt=outside), "INVALID_ARGUMENT", "INVALID_REQUEST")["field"] == "token_ids"

        kv = (await prefilled()).kv
        assert (await prefilled()).kv.transfer_id == kv.transfer_id
        refused(await prefilled(prompt={"new_token_ids": [9, 8, 7]}), "INVALID_ARGUMENT", "REQUEST_ID_REUSED")
        refused(await fetched(kv=kv, offset_bytes=2**40), "OUT_OF_RANGE", "OFFSET_OUT_OF_RANGE")
        elsewhere = type(kv).FromString(kv.SerializeToString())
        elsewhere.worker_epoch = "another life"
        refused(await fetched(kv=elsewhere), "ABORTED", "WORKER_STALE")
        refused(await decoded(kv, tokens=TOKENS[:4]), "INVALID_ARGUMENT", "KV_MISMATCH")
        refused(await decoded(kv, sample_ids=["twice", "twice"]), "INVALID_ARGUMENT", "INVALID_REQUEST")
        good = (await prefilled(request_id="edges-kv-2")).kv  # what was pulled for a refused call is released soon
        last = (await decoded(good))[-1].chunks[-1]
        assert last.finish_reason

        released = await prefill.ask(rpc("KvService.ReleaseKv"), request_id="edges", transfer_ids=[kv.transfer_id] * 2)
        assert released.released_count in (0, 1)  # the decode worker may have done so before
        refused(await fetched(kv=kv), "NOT_FOUND", "KV_UNKNOWN")
        refused(await decoded(kv), "ABORTED", "KV_TRANSFER_FAILED")
        nowhere = type(kv)(address="127.0.0.1:9", transfer_id="edges")
        assert refused(await decoded(nowhere), "INVALID_ARGUMENT", "KV_MISMATCH")["field"] == "address"
        itself = type(kv)(address=stack.endpoints["decode-1"], transfer_id="edges")
        assert refused(await decoded(itself), "INVALID_ARGUMENT", "KV_MISMATCH")["field"] == "address"


async def test_a_version_is_opened_published_and_sealed_in_that_order(stack):
    async with stack.caller("broadcaster") as broadcaster:

        async def opened(of: dict[str, int], ranks: int = 2) -> Any:
            return await broadcaster.ask(
                rpc("BroadcastService.OpenVersion"), request_id="edges", version=of, rank_count=ranks
            )

        async def sealed(of: dict[str, int], **fields: Any) -> Any:
            return await broadcaster.ask(rpc("BroadcastService.SealVersion"), request_id="edges", version=of, **fields)

        async def fetched(of: Any, **fields: Any) -> Any:
            return await broadcaster.ask(rpc("BroadcastService.FetchSlices"), version=of, **fields)

        refused(await sealed(version(FAR, 7)), "FAILED_PRECONDITION", "VERSION_NOT_OPEN")
        refused(again := await opened(version(1)), *either("VERSION_SEALED", "VERSION_NOT_NEWER", again))
        refused(await opened(version(0, 0)), "INVALID_ARGUMENT", "INVALID_REQUEST")
        for step in range(20):  # more than are open at once
            assert not isinstance(await opened(version(FAR + step)), Answer)
        assert len(list((stack.run.path / "versions").glob(".open-*"))) <= 9
        refused(await sealed(version(FAR)), "FAILED_PRECONDITION", "VERSION_NOT_OPEN")
        missing = refused(await sealed(version(FAR + 19)), "FAILED_PRECONDITION", "SHARDS_MISSING")
        assert missing["missing_ranks"] == "0,1"
        probe = {"token_ids": [1, 2], "logprobs": [float("nan")], "tolerance": 0.1}
        assert (
            "probe" in refused(await sealed(version(FAR), probe=probe), "INVALID_ARGUMENT", "INVALID_REQUEST")["field"]
        )

        async def fetched_of_newest(**fields: Any) -> Any:
            async with asyncio.timeout(WAIT_S):
                while True:  # the run goes on, and what was newest may be gone
                    newest = (await broadcaster.ask(rpc("BroadcastService.GetManifest"))).manifest
                    answer = await fetched(newest.version, **fields)
                    if not isinstance(answer, Answer) or answer.status[1] != "WEIGHT_VERSION_UNKNOWN":
                        return answer

        refused(await fetched_of_newest(slice_indexes=[2**31 - 1]), "NOT_FOUND", "SLICE_UNKNOWN")
        refused(await fetched_of_newest(offset_bytes=2**62), "OUT_OF_RANGE", "OFFSET_OUT_OF_RANGE")
        refused(await fetched(version(FAR)), "NOT_FOUND", "WEIGHT_VERSION_UNKNOWN")


def either(first: str, second: str, answer: Any) -> tuple[str, str]:
    """The status that came, if its reason is one of these."""
    assert answer.status[1] in (first, second)
    return answer.status


@pytest.mark.parametrize("replica", ["runner-1", "prefill-1", "decode-1"])
async def test_rows_that_are_not_there_are_missing_and_offsets_beyond_refused(replica, stack):
    async with stack.caller(replica) as holder:
        ref = {
            "holder": "edges",
            "key": "edges",
            "dtype": "int32",
            "ranges": [{"start": 3, "end": 5}, {"start": 5, "end": 9}],
        }
        frames = await holder.ask(rpc("RowsService.FetchRows"), refs=[ref] * 1000)
        assert all(part.missing for part in frames[0].header.parts)
        assert frames[0].header.size_bytes == 0
        beyond = await holder.ask(rpc("RowsService.FetchRows"), refs=[ref], offset_bytes=1)
        refused(beyond, "OUT_OF_RANGE", "OFFSET_OUT_OF_RANGE")
        for ranges in ([(5, 3)], [(3, 5), (6, 9)], [(3, 5), (4, 9)], [(7, 8), (3, 7)]):
            wrong = {**ref, "ranges": [{"start": start, "end": end} for start, end in ranges]}
            answer = await holder.ask(rpc("RowsService.FetchRows"), refs=[ref, wrong])
            assert refused(answer, "INVALID_ARGUMENT", "INVALID_REQUEST")["field"] == "refs.ranges"
        released = await holder.ask(rpc("RowsService.ReleaseRows"), request_id="edges", keys=["edges"] * 1000)
        assert released.released_count == 0


async def test_a_group_belongs_to_its_runner_and_ends_once(stack):
    async with stack.caller("orchestrator") as orchestrator:
        me = {"runner_id": "edges-orders", "runner_epoch": "5"}

        async def acquired(request_id: str, count: int = 1) -> Any:
            fields = {**me, "request_id": request_id, "max_groups": count, "wait_ms": 2000}
            return await orchestrator.ask(rpc("RunnerService.AcquireGroups"), **fields)

        async def reported(request_id: str, report: dict[str, Any], **fields: Any) -> Any:
            request = {**me, "request_id": request_id, "reports": [report], **fields}
            return await orchestrator.ask(rpc("RunnerService.ReportGroups"), **request)

        group, attempts = None, 0
        async with asyncio.timeout(WAIT_S):
            while group is None:  # others wait for groups too
                attempts += 1
                answer = await acquired(f"acquire-{attempts}")
                group = answer.groups[0] if answer.groups else None
        again = await acquired(f"acquire-{attempts}")
        assert [g.group_id for g in again.groups] == [group.group_id]
        refused(await acquired(f"acquire-{attempts}", count=2), "INVALID_ARGUMENT", "REQUEST_ID_REUSED")

        key = {"group_id": group.group_id, "attempt": group.attempt}
        other = await reported("other", {"group": key, "outcome": 2}, runner_id="edges-other")
        assert [g.group_id for g in other.refused] == [group.group_id]
        rows = {"holder": "127.0.0.1:9", "key": "k", "dtype": "int32"}
        record = {
            "rollout_id": "r",
            "prompt_token_count": 2,
            "token_count": 4,
            "loss_ranges": [{"start": 2, "end": 4}],
            "spans": [{"token_count": 2, "version": version(1)}],
            "token_ids": rows,
            "logprobs": {**rows, "dtype": "float32"},
        }
        contradictions = {
            "loss_ranges": [{"start": 2, "end": 2**31 - 1}],
            "spans": [{"token_count": 2**31 - 1, "version": version(1)}],
            "token_ids": {**rows, "dtype": "uint8"},
            "prompt_token_count": 5,
            "sample_index": 64,
            "reward": float("nan"),
            "role_rewards": [{"role": "white"}],
        }
        for field, value in contradictions.items():
            report = {"group": key, "outcome": 1, "rollouts": [{**record, field: value}]}
            metadata = refused(await reported(field, report), "INVALID_ARGUMENT", "INVALID_REQUEST")
            assert f"rollouts[0].{field}" in metadata["field"]
        far = [{"token_count": 2, "version": version(2**62, 2**62)}]
        report = {"group": key, "outcome": 1, "rollouts": [{**record, "spans": far}]}
        refused(await reported("far", report), "INVALID_ARGUMENT", "INVALID_REQUEST")
        report = {"group": key, "outcome": 1, "rollouts": [record, record]}
        refused(await reported("twice", report), "INVALID_ARGUMENT", "INVALID_REQUEST")

        assert not (await reported("back", {"group": key, "outcome": 3})).refused
        assert len((await reported("back again", {"group": key, "outcome": 3})).refused) == 1
        heartbeat = {**me, "runner_epoch": "4", "wait_ms": 0}
        late = await orchestrator.ask(rpc("RunnerService.Heartbeat"), **heartbeat)
        refused(late, "FAILED_PRECONDITION", "RUNNER_SUPERSEDED")


async def test_steps_are_planned_and_reported_in_order(stack):
    async with stack.caller("orchestrator") as orchestrator:

        async def plan(**fields: Any) -> Any:
            request = {"incarnation": 1, "step": 99_999, "wait_ms": 0, **fields}
            return await orchestrator.ask(rpc("BatchService.GetPlan"), **request)

        async def trained(of: dict[str, int]) -> Any:
            return await orchestrator.ask(rpc("BatchService.ReportStep"), request_id="edges", version=of)

        refused(await plan(), "FAILED_PRECONDITION", "STEP_NOT_NEXT")
        assert refused(await plan(rank=1), "INVALID_ARGUMENT", "INVALID_REQUEST")["field"] == "rank"
        wild = refused(await plan(incarnation=2**62), "INVALID_ARGUMENT", "INVALID_REQUEST")
        assert (wild["field"], wild["limit"]) == ("incarnation", "17")
        refused(await plan(incarnation=2, rank=7), "INVALID_ARGUMENT", "INVALID_REQUEST")
        refused(await trained(version(99_999)), "FAILED_PRECONDITION", "STEP_NOT_SEALED")
        refused(await trained(version(99_999, 2)), "FAILED_PRECONDITION", "STEP_NOT_SEALED")
        refused(await trained(version(99_999, 0)), "FAILED_PRECONDITION", "INCARNATION_SUPERSEDED")
        refused(await plan(), "FAILED_PRECONDITION", "STEP_NOT_NEXT")  # none of it took over


async def test_a_sandbox_is_used_while_it_is_there(stack):
    async with stack.caller("sandbox") as executor:

        async def asked(name: str, **fields: Any) -> Any:
            return await executor.ask(rpc(f"SandboxService.{name}"), **fields)

        created = await asked("CreateSandbox", request_id="edges-orders", lease_ttl_ms=30_000)
        refused(
            await asked("CreateSandbox", request_id="edges-orders", lease_ttl_ms=30_001),
            "INVALID_ARGUMENT",
            "REQUEST_ID_REUSED",
        )
        box = {"sandbox_id": created.sandbox.sandbox_id}
        refused(await asked("ReadFiles", **box, paths=["never"]), "NOT_FOUND", "SANDBOX_FILE_UNKNOWN")
        await asked("WriteFiles", **box, files=[{"path": "a", "data": bytes(1 << 20)}])
        limit = refused(await asked("ReadFiles", **box, paths=["a"] * 256), "INVALID_ARGUMENT", "INVALID_REQUEST")
        assert (limit["field"], int(limit["limit"])) == ("paths", 15 << 20)
        above = await asked("Exec", **box, argv=["true"], limits={"wall_ms": 2**62})
        assert refused(above, "INVALID_ARGUMENT", "INVALID_REQUEST")["field"] == "limits.wall_ms"
        for argv in (["true", *["x" * 120_000] * 100], [""], ["\U0001d518" * 3000], ["./nothing"]):
            assert (await asked("Exec", **box, argv=argv))[-1].result.outcome
        assert (await asked("DeleteSandbox", **box)).found
        assert not (await asked("DeleteSandbox", **box)).found
        for name, fields in {
            "Exec": {"argv": ["true"]},
            "RenewLease": {},
            "WriteFiles": {"files": [{"path": "a"}]},
            "ReadFiles": {"paths": ["a"]},
        }.items():
            refused(await asked(name, **box, **fields), "NOT_FOUND", "SANDBOX_UNKNOWN")


async def test_placements_and_rollouts_answer_for_what_they_know(stack):
    async with stack.caller("router") as router, stack.caller("orchestrator") as orchestrator:
        place = {"request_id": "edges-place", "group_id": "g", "prompt_token_count": 3, "sample_count": 1}
        far = {**place, "max_new_tokens": 1, "min_policy_version": version(FAR)}
        refused(await router.ask(rpc("RouterService.Place"), **far), "UNAVAILABLE", "NO_WORKER")
        placed = await router.ask(rpc("RouterService.Place"), **place, max_new_tokens=1)
        other = await router.ask(rpc("RouterService.Place"), **place, max_new_tokens=2)
        refused(other, "INVALID_ARGUMENT", "REQUEST_ID_REUSED")
        ids = [placed.placement_id, placed.placement_id, "edges"]
        released = await router.ask(rpc("RouterService.Release"), request_id="edges", placement_ids=ids)
        assert released.released_count == 1

        unknown = {"request_id": "edges-env", "task": {"environment": "edges"}, "sample_count": 1}
        answer = await orchestrator.ask(rpc("RolloutService.CreateRollout"), **unknown)
        assert "letters" in refused(answer, "NOT_FOUND", "ENVIRONMENT_UNKNOWN")["known"]
        for name in ("GetRollout", "CancelRollout"):
            fields = {"group_id": "edges", **({"request_id": "edges"} if name == "CancelRollout" else {})}
            refused(await orchestrator.ask(rpc(f"RolloutService.{name}"), **fields), "NOT_FOUND", "ROLLOUT_UNKNOWN")


def test_the_common_statuses_are_those_of_the_table():
    assert ("INVALID_ARGUMENT", "INVALID_REQUEST") in common_statuses()
    assert not any(reason == "INTERNAL" for _, reason in common_statuses())
