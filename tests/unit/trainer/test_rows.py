"""Stitching rows into sequences, and the choice of the probe."""

from __future__ import annotations

import numpy as np
import pytest

from slipstream.api.training.v1 import batch_pb2
from slipstream.api.types.v1 import types_pb2
from slipstream.common.version import PolicyVersion
from slipstream.engine.routes import Ranges
from slipstream.trainer.fetch import Part, RefId
from slipstream.trainer.probe import choose_probe, probe_prompts
from slipstream.trainer.rows import RowForm, RowsRefused, references, stitch
from slipstream.trainer.sequence import version_number
from slipstream.trainer.teacher_rows import teacher_logps

SHAPE = (2, 1)
FORM = RowForm(SHAPE, np.dtype(np.uint8), expert_count=200, vocab_size=50, trained=PolicyVersion(1, 4))


def ref(key: str, dtype: str = "uint8", shape: tuple[int, ...] = SHAPE) -> types_pb2.RowsRef:
    return types_pb2.RowsRef(holder="h", key=key, dtype=dtype, row_shape=shape)


def part(first: int, rows: np.ndarray, unknown: Ranges = ()) -> Part:
    return Part(first, memoryview(rows.tobytes()), unknown)


def routes(*ids: int) -> np.ndarray:
    return np.repeat(np.array(ids, np.uint8), 2).reshape(-1, *SHAPE)


def planned(**fields: object) -> batch_pb2.PlannedSequence:
    version = types_pb2.PolicyVersion(incarnation=1, step=3)
    defaults = {
        "token_count": 6,
        "advantage": 0.5,
        "loss_ranges": [types_pb2.RowRange(start=3, end=6)],
        "spans": [types_pb2.VersionSpan(token_count=3, version=version, kv_oldest_version=version)],
        "token_ids": ref("t", "int32", ()),
        "logprobs": ref("l", "float32", ()),
        "routes": [ref("p"), ref("d")],
    }
    return batch_pb2.PlannedSequence(**{**defaults, **fields})  # type: ignore[arg-type]


def parts(**extra: Part) -> dict[RefId, Part]:
    rows = {
        "t": part(0, np.arange(6, dtype=np.int32)),
        "l": part(0, -np.arange(6, dtype=np.float32)),
        "p": part(0, routes(10, 11)),
        "d": part(2, routes(12, 13, 14, 15)),
        **extra,
    }
    return {("h", key, 0, 0): value for key, value in rows.items()}


def test_prompt_rows_and_decode_rows_meet_at_their_positions():
    sequence = stitch(planned(), parts(), FORM)
    assert sequence is not None
    assert sequence.routes.rows[:, 0, 0].tolist() == [10, 11, 12, 13, 14]  # the last token needs none
    assert sequence.target_positions.tolist() == [3, 4, 5]
    assert sequence.engine_logps.tolist() == [-3.0, -4.0, -5.0]
    assert sequence.sampled_at.tolist() == [version_number(PolicyVersion(1, 3))] * 3


def test_what_a_teacher_says_comes_with_the_rows_and_without_it_the_sequence_is_lost():
    row = np.array([1, 1, 1, -1, 1, -2], np.float32)
    asked = planned(teacher_logprobs=ref("q", "float32", ()))
    sequence = stitch(asked, parts(q=part(0, row)), FORM)
    assert sequence is not None
    assert sequence.teacher_logps is not None
    assert sequence.teacher_logps.tolist() == [-1.0, 1.0, -2.0]
    assert np.isnan(teacher_logps([sequence])).tolist() == [False, True, False], "not asked: the loss leaves it out"
    assert stitch(asked, parts(), FORM) is None
    assert [each.key for each in references(asked)] == ["t", "l", "q", "p", "d"]
    alone = stitch(planned(), parts(), FORM)
    assert alone is not None
    assert alone.teacher_logps is None


def test_tokens_without_a_log_probability_do_not_train_and_the_rest_keep_their_versions():
    old, new = (types_pb2.PolicyVersion(incarnation=1, step=step) for step in (3, 4))
    spans = [types_pb2.VersionSpan(token_count=n, version=v, kv_oldest_version=old) for n, v in ((1, old), (2, new))]
    for unknown in (1.0, np.nan, np.inf, -np.inf):
        row = np.array([0, 0, 0, -1, unknown, -2], np.float32)
        sequence = stitch(planned(spans=spans, temperature=0.5), parts(l=part(0, row)), FORM)
        assert sequence is not None
        assert sequence.target_positions.tolist() == [3, 5]
        assert sequence.engine_logps.tolist() == [-1.0, -2.0]
        assert sequence.sampled_at.tolist() == [version_number(PolicyVersion(1, step)) for step in (3, 4)]
        assert sequence.temperature == 0.5
        assert sequence.unknown_logp_count == 1
    unknown = stitch(planned(), parts(l=part(0, np.ones(6, np.float32))), FORM)
    assert unknown is not None
    assert (unknown.target_positions.size, unknown.unknown_logp_count) == (0, 3)


def test_the_first_reference_that_knows_a_position_wins():
    overlapping = parts(p=part(0, routes(1, 1, 9), ((2, 3),)), d=part(1, routes(2, 2, 2)))
    sequence = stitch(planned(), overlapping, FORM)
    assert sequence is not None
    assert sequence.routes.rows[:, 0, 0].tolist() == [1, 1, 2, 2, 255]
    assert sequence.known_N.tolist() == [True, True, True, True, False]


def test_a_sequence_without_all_its_tokens_is_lost():
    assert stitch(planned(), parts(t=part(0, np.arange(5, dtype=np.int32))), FORM) is None
    missing = parts()
    del missing["h", "l", 0, 0]
    assert stitch(planned(), missing, FORM) is None


def test_a_loss_that_covers_fewer_tokens_takes_the_last_versions():
    spans = [
        types_pb2.VersionSpan(token_count=count, version=types_pb2.PolicyVersion(incarnation=1, step=step))
        for count, step in ((2, 3), (1, 4))
    ]
    fewer = planned(loss_ranges=[types_pb2.RowRange(start=4, end=6)], spans=spans)
    sequence = stitch(fewer, parts(), FORM)
    assert sequence is not None
    assert sequence.sampled_at.tolist() == [version_number(PolicyVersion(1, 3)), version_number(PolicyVersion(1, 4))]
    assert sequence.kv_oldest.tolist() == [0, 0]  # not said: taken for the oldest


def later(step: int) -> list[types_pb2.VersionSpan]:
    return [types_pb2.VersionSpan(token_count=3, version=types_pb2.PolicyVersion(incarnation=1, step=step))]


WRONG = {
    "routes.row_shape": (planned(routes=[ref("p", shape=(3, 2))]), {}),
    "routes.dtype": (planned(routes=[ref("p", "uint16")]), {}),
    "routes.size_bytes": (planned(), {"p": Part(0, memoryview(b"\x01\x02\x03"))}),
    "routes": (planned(), {"p": part(0, routes(10, 200))}),
    "token_ids.dtype": (planned(token_ids=ref("t", "uint16", ())), {}),
    "token_ids.row_shape": (planned(token_ids=ref("t", "int32", (2,))), {}),
    "token_ids": (planned(), {"t": part(0, np.arange(45, 51, dtype=np.int32))}),
    "logprobs.dtype": (planned(logprobs=ref("l", "int32", ())), {}),
    "logprobs.size_bytes": (planned(), {"l": Part(0, memoryview(bytes(25)))}),
    "spans.version": (planned(spans=later(5)), {}),
    "spans": (planned(spans=later(4)[:0]), {}),
    "loss_ranges": (planned(loss_ranges=[types_pb2.RowRange(start=3, end=7)]), {}),
    "advantage": (planned(advantage=np.nan), {}),
    "temperature": (planned(temperature=np.inf), {}),
    "token_count": (planned(token_count=1), {}),
}


@pytest.mark.parametrize("field", WRONG)
def test_what_cannot_be_right_is_refused_with_the_name_of_its_field(field):
    wrong, rows = WRONG[field]
    with pytest.raises(RowsRefused) as refused:
        stitch(wrong, parts(**rows), FORM)
    assert refused.value.field == field
    assert stitch(planned(spans=later(4)), parts(), FORM) is not None


def test_a_token_takes_each_expert_once_and_rows_that_are_not_known_may_hold_anything():
    form = RowForm((1, 2), np.dtype(np.uint8), expert_count=8, vocab_size=50, trained=PolicyVersion(1, 4))
    rows = np.array([[1, 2], [3, 0], [5, 5], [7, 6], [0, 7]], np.uint8).reshape(-1, 1, 2)
    several = planned(routes=[ref("p", shape=(1, 2))])
    with pytest.raises(RowsRefused, match="routes: they name an expert twice"):
        stitch(several, parts(p=part(0, rows)), form)
    sequence = stitch(several, parts(p=part(0, rows, ((2, 3),))), form)
    assert sequence is not None
    assert sequence.known_N.tolist() == [True, True, False, True, True]


def test_the_probe_is_the_first_prompt_whose_experts_are_chosen_clearly():
    prompts = probe_prompts(50, 12, seed=3)
    assert prompts == probe_prompts(50, 12, seed=3)
    margins = dict(zip(prompts, [1e-6, 5e-5, 0.2, 0.3, 0, 0, 0, 0], strict=True))
    assert choose_probe(prompts, lambda ids: ([1.0], margins[tuple(ids)]))[0] == prompts[2]
    assert choose_probe(prompts[:2], lambda ids: ([1.0], margins[tuple(ids)]))[0] == prompts[1]


def test_a_dense_model_has_a_row_of_nothing_for_every_token_and_needs_no_reference():
    form = RowForm((0, 0), np.dtype(np.uint8), expert_count=0, vocab_size=50, trained=PolicyVersion(1, 4))
    stitched = stitch(planned(routes=[]), parts(), form)
    assert stitched is not None
    assert stitched.known_N.all()
    assert stitched.routes.rows.shape == (len(stitched.token_ids) - 1, 0, 0)
