"""Weight updates with requests in flight: nothing restarts, nothing is mixed up, a failure leaves no trace."""

from __future__ import annotations

import pytest
import torch

from slipstream.engine.base import PrefillRequest
from slipstream.engine.embedded.core import EngineCore
from slipstream.engine.embedded.outputs import Chunks, PrefillDone, Transfer
from slipstream.engine.hashing import block_hashes
from tests.unit.engine.helpers import (
    CONFIG,
    PROMPT,
    SIZES,
    V1,
    V2,
    decode_request,
    greedy,
    tensors,
    weights,
)


def accept(paused) -> None:
    """A verification that finds nothing."""


def decoded(core: EngineCore) -> list:
    return [chunk for output in core.take_outputs() if isinstance(output, Chunks) for chunk in output.chunks]


def oracle(prompt: list[int], before: int, count: int) -> list[int]:
    """Greedy tokens when weights 1 compute the first `before` steps and weights 2 go on with their KV.

    An engine of one row that is stepped by hand, told apart from the engine under test by having no batch, no sharing
    and no cache: the KV of weights 1 enters as an export.
    """
    core = EngineCore(SIZES, CONFIG)
    core.update(V1, tensors(weights(1)), accept)
    core.add_decode(decode_request("o", prompt=prompt, temperature=0.0, max_new_tokens=before), 1.0)
    while core.busy:
        core.step()
    first = decoded(core)[0].token_ids
    assert first == greedy(weights(1), prompt, before)
    # By hand: positions so far hold KV of weights 1; the newest token and all later ones run on weights 2.
    return first + _continue(prompt + first, len(prompt) + before - 1, count - before)


def _continue(tokens: list[int], old_positions: int, count: int) -> list[int]:
    old, new = weights(1), weights(2)
    keys_values = _kv_of(old, tokens[:old_positions])
    out = []
    for _ in range(count):
        logits, keys_values = _forward(new, tokens[len(keys_values[0][0]) :], keys_values)
        tokens = [*tokens, int(logits.argmax())]
        out.append(tokens[-1])
    return out


def _kv_of(model, tokens):
    empty = torch.zeros(0, SIZES.n_kv_heads, SIZES.head_dim)
    return _forward(model, tokens, [(empty, empty)] * SIZES.n_layers)[1]


def _forward(model, tokens, past):
    """The last token's logits, and KV with the new positions appended; plain attention written out."""
    start, present = len(past[0][0]), []
    positions = torch.arange(start, start + len(tokens)).unsqueeze(0)
    h = model.tok_embeddings(torch.tensor([tokens]))
    model.routes.begin()
    for layer, (old_k, old_v) in zip(model.layers.values(), past, strict=True):
        attention = layer.attention
        q, k, v = attention.qkv_linear(layer.attention_norm(h))
        q, k = attention.rope(attention.q_norm(q), attention.k_norm(k), positions)
        k, v = torch.cat((old_k, k[0])), torch.cat((old_v, v[0]))
        present.append((k, v))
        repeats = SIZES.n_heads // SIZES.n_kv_heads
        scores = torch.einsum("tnh,cnh->ntc", q[0], k.repeat_interleave(repeats, 1)) / SIZES.head_dim**0.5
        scores = scores.masked_fill(torch.arange(len(k)) > positions[0][:, None], -torch.inf)
        out = torch.einsum("ntc,cnh->tnh", scores.softmax(-1), v.repeat_interleave(repeats, 1))
        h = h + attention.wo(out.flatten(1).unsqueeze(0))
        h = h + layer.moe(layer.ffn_norm(h))
    return model.lm_head(model.norm(h))[0, -1], present


@pytest.mark.parametrize("before", [1, 4, 7])
def test_tokens_after_a_swap_come_from_the_new_weights_on_the_kept_kv(before):
    core = EngineCore(SIZES, CONFIG)
    core.update(V1, tensors(weights(1)), accept)
    prompts = [PROMPT, PROMPT[:5], PROMPT[::-1]]
    for index, prompt in enumerate(prompts):
        core.add_decode(decode_request(f"{index}", prompt=prompt, temperature=0.0, max_new_tokens=12), 60.0)
    for _ in range(before):
        core.step()
    report = core.update(V2, tensors(weights(2)), accept)
    assert (report.previous_version, report.in_flight_samples) == (V1, 3)
    while core.busy:
        core.step()
    tokens: dict[str, list[int]] = {}
    spans: dict[str, list] = {}
    for output in core.take_outputs():
        if isinstance(output, Chunks):
            for chunk in output.chunks:
                tokens.setdefault(output.request_id, []).extend(chunk.token_ids)
                spans.setdefault(output.request_id, []).extend(chunk.versions)
                assert chunk.kv_oldest_version == V1
    for index, prompt in enumerate(prompts):
        assert tokens[f"{index}"] == oracle(prompt, before, 12)
        assert spans[f"{index}"] == [(before, V1), (12 - before, V2)]


def test_a_prompt_that_an_update_cuts_rests_on_the_older_weights():
    core = EngineCore(SIZES, CONFIG.model_copy(update={"max_prefill_tokens": 4}))
    core.update(V1, tensors(weights(1)), accept)
    core.add_prefill(PrefillRequest("p", PROMPT, "s"))
    core.step()
    assert core.unfinished is not None
    assert core.blocks.match(block_hashes("s", PROMPT, 4)) == []  # nobody finds half a prompt
    core.update(V2, tensors(weights(2)), accept)
    while core.busy:
        core.step()
    (done,) = [output for output in core.take_outputs() if isinstance(output, PrefillDone)]
    assert isinstance(done.outcome, Transfer)
    result = done.outcome.result
    assert (result.token_count, result.cached_token_count) == (len(PROMPT) - 1, 0)
    assert (result.version, result.kv_oldest_version) == (V2, V1)
    core.add_decode(decode_request("d"), 1.0)
    while core.busy:
        core.step()
    (chunk,) = decoded(core)
    assert (chunk.cached_token_count, chunk.kv_oldest_version) == (8, V1)
