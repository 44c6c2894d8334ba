"""What the engines were asked and what they sampled for a sequence, and what all of it must have been."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from slipstream.common.version import PolicyVersion
from tests.integration.workers.swap_oracle import KeptContext


@dataclass(frozen=True)
class Turn:
    """One of them, as the decode engine had it."""

    prompt: list[int]
    said: list[int]
    logprobs: list[float]
    versions: list[PolicyVersion]
    """Of each token that was said."""
    cached_count: int
    """Tokens of the prompt whose KV was there: at the decode engine, or at the prefill engine, if that computed it."""
    prefilled_at: PolicyVersion | None
    """The weights of the prefill engine; None where the decode engine computed what was not there."""


def turns(stack: Any, tokens: list[int], spans: Any) -> list[Turn]:
    """What came of the requests for what was said at `spans` of a sequence. What a text ended is its beginning."""
    return [_turn(stack, tokens[: span.start], tokens[span.start : span.end]) for span in spans]


def _turn(stack: Any, prompt: list[int], said: list[int]) -> Turn:
    for request in stack.decoder.decodes:
        for sample_id in request.sample_ids if list(request.token_ids) == prompt else ():
            answer = stack.decoder.answers.get(sample_id)
            if answer is None or answer.token_ids[: len(said)] != said:
                continue
            prefilled = stack.prefiller.prefills.get(request.request_id) if request.kv is not None else None
            return Turn(
                prompt,
                said,
                answer.logprobs[: len(said)],
                [version for count, version in answer.versions for _ in range(count)][: len(said)],
                answer.cached_token_count if prefilled is None else prefilled[1].cached_token_count,
                None if prefilled is None else prefilled[1].version,
            )
    raise AssertionError("no engine was asked for this, or it said something else")


class Shortened(KeptContext):
    """A context whose end can be taken back."""

    def shorten(self, count: int) -> None:
        for layers in (self._keys, self._values):
            for parts in layers:
                if parts:
                    parts[:] = [torch.cat(parts, 1)[:, :count]]


@torch.no_grad()
def recomputed(cluster: Any, sequence: list[Turn], dispatched_at: PolicyVersion) -> tuple[list[float], np.ndarray]:
    """Log-probabilities of all that was said, and the experts of all positions but the last, recorded once.

    The first prompt was computed at the dispatch version; later ones by the decode engine, in the step that sampled
    their first token, but for what it had kept.
    """
    tokens = [*sequence[-1].prompt, *sequence[-1].said]
    context = Shortened(cluster.sizes.n_layers)
    rows: list[np.ndarray] = []
    logprobs: list[float] = []
    known = 0
    for number, turn in enumerate(sequence):
        kept = turn.cached_count if number else 0
        context.shorten(kept)
        end = len(turn.prompt)
        owners = [turn.versions[0] if number else dispatched_at] * (end - 1 - kept) + turn.versions
        for version, run in itertools.groupby(zip(owners, itertools.count(kept)), key=lambda pair: pair[0]):
            places = [place for _, place in run]
            model = cluster.model(version)
            model.routes.begin(capture=True)
            span = tokens[places[0] : places[-1] + 1]
            hidden_1TD = model.hidden(torch.tensor([span]), torch.tensor([places]), context)
            logps = torch.log_softmax(model.logits(hidden_1TD[0]), -1)
            chosen = model.routes.captured().numpy()
            rows += [chosen[index] for index, place in enumerate(places) if place >= known]
            known = max(known, places[-1] + 1)
            logprobs += [float(logps[i, tokens[place + 1]]) for i, place in enumerate(places) if place >= end - 1]
    return logprobs, np.sort(np.stack(rows), -1)
