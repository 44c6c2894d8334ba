"""Prefill and decode as two vLLM engines over NIXL, against engines with both roles.

    python loadtests/prefill_decode.py --json figures.jsonl                                       # two CPU engines
    python loadtests/prefill_decode.py --device cuda --cards 0,1 --dtype float32 --parts exact    # two cards
    python loadtests/prefill_decode.py --device cuda --cards 0,1 --dtype bfloat16 --parts load --layers 16 ...

Two workers with all servicers, each an engine of the same random model, are started once and serve everything. Lines
of JSON, as they come:

* `exact`: `--exact` prompts of different lengths, one after another, greedily. Answers and expert rows of prefill at
  one and decode at the other engine are compared with those of one engine alone. In float32 every answer must be the
  same, and of rows, which may differ where two experts are nearly tied, all but one in a thousand, or it ends with 1;
  in bfloat16 the parts that agree are told.
* `load`, for each mode: the same closed loop of `--concurrent` requests, prompts of `--prompt-tokens`, half, or twice
  as many, answers of `--output-tokens`; tokens a second of prompts and answers, time to the first token (of each eighth
  request, which asks for it at once), and the time between tokens after it. `one`: all on one engine, the other idle.
  `split`: prompts on one, answers on the other. `pair`: both engines do both, in turns: the same hardware as `split`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from statistics import quantiles
from typing import TYPE_CHECKING, Any

from engine_throughput import Client, add_worker_arguments, serve

if TYPE_CHECKING:
    from slipstream.api.inference.v1 import decode_pb2, prefill_pb2
    from slipstream.api.types.v1 import types_pb2

ONE, SPLIT, PAIR = "one", "split", "pair"
EARLY_OF = 8
"""Each so many requests asks for its tokens as they come."""
CALL_TIMEOUT_S = 120.0
ROWS_EQUAL = 0.999


@dataclass
class Answer:
    """What came of one request."""

    token_ids: list[int] = field(default_factory=list)
    refs: list[types_pb2.RowsRef] = field(default_factory=list)
    """Of prompt and answer."""
    first_token_s: float = 0.0
    seconds: float = 0.0


class Pools:
    """The two workers."""

    def __init__(self, first: Client, second: Client, options: argparse.Namespace) -> None:
        from slipstream.api.inference.v1 import decode_pb2_grpc, prefill_pb2_grpc

        self.workers = (first, second)
        self._prefill = prefill_pb2_grpc.PrefillServiceStub(first.channel)
        self._decode = [decode_pb2_grpc.DecodeServiceStub(client.channel) for client in self.workers]
        self._options = options
        self._number = 0
        self._held: dict[int, list[str]] = {0: [], 1: []}

    async def ask(
        self, mode: str, tokens: list[int], count: int, *, greedy: bool = False, early: bool = False
    ) -> Answer:
        """One request as a runner makes it."""
        from slipstream.api.inference.v1 import decode_pb2, prefill_pb2
        from slipstream.api.types.v1 import types_pb2

        self._number += 1
        name, started_s, answer = f"load-{self._number}", time.monotonic(), Answer()
        place = self._number % 2 if mode == PAIR else 1
        prompt = prefill_pb2.Prompt(new_token_ids=tokens)
        kv = await self._prefilled(name, prompt, answer) if mode == SPLIT else None
        sampling = types_pb2.Sampling(max_new_tokens=count, seed=7, temperature=0.0 if greedy else 1.0)
        request = decode_pb2.DecodeRequest(
            request_id=name,
            worker_epoch=self.workers[place].epoch,
            salt=name,
            prompt=prompt,
            kv=kv,
            sample_ids=[f"{name}/0"],
            sampling=sampling,
            capture_routes=True,
            for_training=True,
            flush=decode_pb2.Flush(max_tokens=1, max_ms=1) if early else None,
        )
        async for message in self._decode[place].Decode(request, timeout=CALL_TIMEOUT_S):
            self._take(message, answer, started_s)
        answer.seconds = time.monotonic() - started_s
        self._held[place] += [f"{'pd'[place]}/{name}", f"{'pd'[place]}/{name}/0"]
        return answer

    async def _prefilled(self, name: str, prompt: prefill_pb2.Prompt, answer: Answer) -> prefill_pb2.KvHandle | None:
        from slipstream.api.inference.v1 import prefill_pb2

        request = prefill_pb2.PrefillRequest(
            request_id=name, worker_epoch=self.workers[0].epoch, salt=name, prompt=prompt, capture_routes=True
        )
        response: prefill_pb2.PrefillResponse = await self._prefill.Prefill(request, timeout=CALL_TIMEOUT_S)
        if response.HasField("routes"):
            answer.refs.append(response.routes)
        self._held[0].append(f"p/{name}")
        return response.kv if response.HasField("kv") else None

    @staticmethod
    def _take(message: decode_pb2.DecodeResponse, answer: Answer, started_s: float) -> None:
        if message.HasField("prompt_routes"):
            answer.refs.append(message.prompt_routes)
        for chunk in message.chunks:
            if chunk.token_ids and not answer.token_ids:
                answer.first_token_s = time.monotonic() - started_s
            answer.token_ids += chunk.token_ids
            if chunk.HasField("routes"):
                answer.refs.append(chunk.routes)

    async def rows(self, answer: Answer) -> dict[int, bytes]:
        """The expert rows of an answer by position; those that are not known are left out."""
        found: dict[int, bytes] = {}
        for ref in answer.refs:
            client = next(each for each in self.workers if each.address == ref.holder)
            found |= await _rows(client.channel, ref)
        return found

    async def release(self) -> None:
        """Give up all rows, as who trains on them does."""
        from slipstream.api.rollout.v1 import rows_pb2, rows_pb2_grpc

        for place, client in enumerate(self.workers):
            keys, self._held[place] = self._held[place], []
            stub = rows_pb2_grpc.RowsServiceStub(client.channel)
            await stub.ReleaseRows(rows_pb2.ReleaseRowsRequest(request_id="load", keys=keys), timeout=CALL_TIMEOUT_S)


async def _rows(channel: Any, ref: types_pb2.RowsRef) -> dict[int, bytes]:
    from slipstream.api.rollout.v1 import rows_pb2
    from slipstream.common.frames import iter_data, raw_responses, raw_unary_stream, read_header

    fetch = raw_unary_stream(channel, "/slipstream.api.rollout.v1.RowsService/FetchRows")
    messages = raw_responses(fetch(rows_pb2.FetchRowsRequest(refs=[ref]), timeout=CALL_TIMEOUT_S))
    header = await read_header(messages, rows_pb2.RowsHeader)
    data = b"".join([bytes(frame) async for frame in iter_data(messages)])
    (part,) = header.parts
    if not part.size_bytes:
        return {}
    unknown = {position for each in part.unknown_ranges for position in range(each.start, each.end)}
    size = ref.row_shape[0] * ref.row_shape[1] * (1 if ref.dtype == "uint8" else 2)
    rows = {part.first_position + at: data[at * size : (at + 1) * size] for at in range(part.size_bytes // size)}
    return {position: row for position, row in rows.items() if position not in unknown}


def prompt_of(number: int, length: int, options: argparse.Namespace) -> list[int]:
    """Other tokens for each number, so that nothing of it is in a cache."""
    return [(7 * number + 13 * at + 31 * (at * number % 97)) % options.vocab for at in range(length)]


def length_of(number: int, options: argparse.Namespace) -> int:
    return max((options.prompt_tokens // 2, options.prompt_tokens, 2 * options.prompt_tokens)[number % 3], 2)


async def exact(pools: Pools, options: argparse.Namespace) -> dict[str, Any]:
    """Greedy answers and expert rows of both ways, one request at a time."""
    tokens = same_tokens = rows = same_rows = missing = equal = 0
    for number in range(options.exact):
        length = length_of(number, options) + number % 5
        prompt = prompt_of(number, length, options)
        one = await pools.ask(ONE, prompt, options.output_tokens, greedy=True)
        split = await pools.ask(SPLIT, prompt, options.output_tokens, greedy=True)
        ours, theirs = await pools.rows(split), await pools.rows(one)
        alike = next(
            (at for at, (a, b) in enumerate(zip(one.token_ids, split.token_ids, strict=False)) if a != b), None
        )
        alike = len(one.token_ids) if alike is None else alike
        tokens, same_tokens = tokens + len(one.token_ids), same_tokens + alike
        positions = range(length + alike - 1)  # beyond, they answer other prompts
        missing += sum(position not in ours or position not in theirs for position in positions)
        there = [position for position in positions if position in ours and position in theirs]
        rows, same_rows = rows + len(there), same_rows + sum(ours[at] == theirs[at] for at in there)
        equal += one.token_ids == split.token_ids
    await pools.release()
    return {
        "requests": options.exact,
        "answers_equal": equal,
        "tokens": tokens,
        "tokens_before_a_difference": same_tokens,
        "rows": rows,
        "rows_equal": same_rows,
        "rows_missing": missing,
    }


async def load(pools: Pools, mode: str, options: argparse.Namespace, turns: int) -> dict[str, Any]:
    """`turns` requests in each of the places."""
    answers: list[Answer] = []
    early: list[Answer] = []
    prompt_tokens = 0

    async def place(index: int) -> None:
        nonlocal prompt_tokens
        for turn in range(turns):
            number = index + options.concurrent * turn
            prompt = prompt_of(number, length_of(number, options), options)
            prompt_tokens += len(prompt)
            watched = number % EARLY_OF == 0
            answers.append(await pools.ask(mode, prompt, options.output_tokens, early=watched))
            if watched:
                early.append(answers[-1])

    started_s = time.monotonic()
    await asyncio.gather(*(place(index) for index in range(options.concurrent)))
    seconds = time.monotonic() - started_s
    await pools.release()
    between = [(each.seconds - each.first_token_s) / max(len(each.token_ids) - 1, 1) for each in early]
    return {
        "requests": len(answers),
        "seconds": seconds,
        "output_tokens_per_s": sum(len(each.token_ids) for each in answers) / seconds,
        "prompt_tokens_per_s": prompt_tokens / seconds,
        "first_token_ms": _spread([1e3 * each.first_token_s for each in early]),
        "between_tokens_ms": _spread([1e3 * each for each in between]),
        "request_s": _spread([each.seconds for each in answers]),
    }


def _spread(values: list[float]) -> dict[str, float]:
    if len(values) < 2:
        return {"p50": values[0]} if values else {}
    cuts = quantiles(values, n=20)
    return {"p50": round(cuts[9], 3), "p95": round(cuts[18], 3)}


async def measure(options: argparse.Namespace) -> int:
    def note(part: str, **values: Any) -> None:
        line = json.dumps({"part": part, **values})
        print(line, flush=True)
        if options.json is not None:
            with options.json.open("a") as out:
                out.write(line + "\n")

    cards = options.cards.split(",") if options.cards else []
    async with AsyncExitStack() as stack:
        started_s = time.monotonic()
        first, second = Client(options), Client(options)
        # NIXL compares the model's path, too.
        directory = stack.enter_context(tempfile.TemporaryDirectory())
        common: dict[str, Any] = {"connector": options.connector, "engine": options.engine, "directory": directory}
        await asyncio.gather(
            first.start(stack, True, ",".join(cards), prefills=True, **common),
            # Its own card first, and the other one, from which KV comes, after it.
            second.start(stack, True, ",".join(reversed(cards)), **common),
        )
        await second.ask("know", address=first.address)
        pools = Pools(first, second, options)
        note("start", seconds=time.monotonic() - started_s, options={k: str(v) for k, v in vars(options).items()})
        failed = False
        if "exact" in options.parts.split(","):
            found = await exact(pools, options)
            note("exact", dtype=options.dtype, **found)
            same = found["answers_equal"] == options.exact and found["rows_equal"] >= ROWS_EQUAL * found["rows"]
            failed = options.dtype == "float32" and not (same and not found["rows_missing"])
        if "load" in options.parts.split(","):
            for mode in (ONE, SPLIT, PAIR):
                await load(pools, mode, options, 1)  # warm
                once = await load(pools, mode, options, 1)
                note(
                    "load",
                    mode=mode,
                    **await load(pools, mode, options, max(round(options.seconds / once["seconds"]), 1)),
                )
    return int(failed)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cards", default="", help="two cards, the prefill worker's first; empty: what there is")
    parser.add_argument("--connector", default="nixl")
    parser.add_argument("--exact", type=int, default=12, help="prompts that are compared")
    parser.add_argument("--parts", default="exact,load")
    parser.add_argument("--engine", type=json.loads, default={}, help="further settings of both engines, JSON")
    add_worker_arguments(parser)
    options = parser.parse_args()
    if options.serve is not None:
        asyncio.run(serve(options))
        return 0
    return asyncio.run(measure(options))


if __name__ == "__main__":
    sys.exit(main())
