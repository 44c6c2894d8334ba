"""The training step: packing, replay, padding, schedule, exactness."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from slipstream.models.qwen3_moe.model import MoeModel
from slipstream.trainer.loss_config import ClippedLossConfig, DistillationLossConfig, MaskedRatioLossConfig
from slipstream.trainer.sequence import TrainSequence
from slipstream.trainer.step import Learner

from .tiny import BASE, OPTIM, SIZES, sequence, tiny_model


def learner(model: MoeModel | None = None) -> Learner:
    return Learner(model or tiny_model(), OPTIM, ClippedLossConfig())


def test_one_micro_batch_and_many_take_the_same_step():
    batch = [sequence(i, length=8 + i, advantage=(-1.0) ** i) for i in range(6)]
    whole, split = learner(), learner()
    count = sum(len(s.target_positions) for s in batch)
    one = whole.train([batch], step=1, loss_token_count=count, trained=BASE)
    many = split.train([batch[:1], [], batch[1:4], batch[4:]], step=1, loss_token_count=count, trained=BASE)
    assert many["loss"] == pytest.approx(one["loss"], rel=1e-5)
    assert many["entropy"] == pytest.approx(one["entropy"], rel=1e-5)
    # The balance loss is of each micro-batch and not additive, hence the tolerance.
    assert many["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-2)


def test_packed_neighbours_and_padding_change_nothing():
    agent = learner()
    batch = [sequence(i, length=length) for i, length in enumerate((7, 18, 11))]
    alone = np.concatenate([agent.logps([s]) for s in batch])
    np.testing.assert_allclose(agent.logps(batch), alone, atol=2e-6)


def test_replayed_routes_decide_the_experts_and_their_gradient_reaches_the_gate():
    agent = learner()
    batch = [sequence(1)]
    agent.train([batch], step=1, loss_token_count=5, trained=BASE)
    gates = [p.grad for name, p in agent.model.named_parameters() if "router.gate" in name]
    assert len(gates) == SIZES.n_layers
    assert all(grad is not None and grad.abs().sum() > 0 for grad in gates)
    other = sequence(1, routes=np.roll(batch[0].routes.rows, 1, axis=2) * 0 + [2, 3])
    assert np.abs(learner().logps(batch) - learner().logps([other])).max() > 1e-4


def test_engine_and_trainer_agree_where_the_context_is_pure():
    agent = learner()
    with torch.no_grad():
        plain = sequence(3, length=12)
        tokens = torch.from_numpy(plain.token_ids.astype(np.int64)).unsqueeze(0)
        agent.model.routes.begin(capture=True)
        logp = torch.log_softmax(agent.model.logits(agent.model.hidden(tokens[:, :-1])), -1)[0]
        routes = agent.model.routes.captured().numpy()
    engine = logp[torch.arange(4, 11), tokens[0, 5:]].numpy()
    exact = sequence(3, length=12, routes=routes)
    object.__setattr__(exact, "engine_logps", engine)
    metrics = agent.train([[exact, sequence(4)]], step=1, loss_token_count=12, trained=BASE + 1)
    assert metrics["pure_token_count"] == 0  # sampled at another version
    metrics = learner().train([[exact]], step=1, loss_token_count=7, trained=BASE)
    assert metrics["pure_token_count"] == 7
    assert metrics["pure_max_abs_diff"] < 1e-5
    assert metrics["mismatch_kl"] == pytest.approx(0.0, abs=1e-9)


def test_tokens_after_an_unknown_route_are_not_counted_as_exact():
    metrics = learner().train([[sequence(5, unknown_ranges=((6, 7),))]], step=1, loss_token_count=5, trained=BASE)
    assert metrics["routes_unknown_fraction"] == pytest.approx(1 / 9)
    assert metrics["pure_token_count"] == 2  # targets 5 and 6 rest on positions 0 to 5


def test_tokens_after_positions_computed_again_by_other_weights_are_not_counted_as_exact():
    again = sequence(5, recomputed_from=6)
    assert again.replayed_R.all()  # one version computed everything, so it came out the same
    sampled_at = again.sampled_at.copy()
    sampled_at[-1] += 1
    later = replace(again, sampled_at=sampled_at)
    assert later.replayed_R.tolist() == [True, True, False, False, False]


def test_rewarded_tokens_become_more_likely():
    agent = Learner(tiny_model(), OPTIM, MaskedRatioLossConfig())
    good, bad = sequence(1, advantage=1.0), sequence(2, advantage=-1.0)
    before = agent.logps([good]).sum() - agent.logps([bad]).sum()
    agent.train([[good, bad]], step=1, loss_token_count=10, trained=BASE)
    assert agent.logps([good]).sum() - agent.logps([bad]).sum() > before


def test_an_empty_plan_changes_no_gradient_and_reports_no_tokens():
    agent = learner()
    assert agent.train([[], []], step=1, loss_token_count=1, trained=BASE)["loss_tokens"] == 0


@pytest.mark.parametrize("broken", ["loss", "gradient"])
def test_a_step_that_is_not_finite_changes_nothing_and_the_next_one_is_as_if_it_had_not_been(broken):
    agent, other = learner(), learner()
    batch = [sequence(1), sequence(2, advantage=-1.0)]

    def take(each: Learner, step: int) -> dict[str, float]:
        return each.train([batch], step=step, loss_token_count=10, trained=BASE)

    take(agent, 1)
    take(other, 1)
    before = agent.export()
    agent.begin(10, 2, 18, BASE)
    agent.add([[replace(batch[0], advantage=np.inf)] if broken == "loss" else batch])
    if broken == "gradient":
        next(p.grad for p in agent.model.parameters() if p.grad is not None)[0] = np.nan
    figures = agent.finish(2)
    assert figures["step_skipped"] == 1.0
    assert all(np.isfinite(value) for value in figures.values())
    after = agent.export()
    assert all(np.array_equal(before[name], after[name]) for name in before)
    mine, theirs = take(agent, 2), take(other, 2)
    assert (mine["loss"], mine["grad_norm"]) == (theirs["loss"], theirs["grad_norm"])
    mine, theirs = agent.export(), other.export()
    assert all(np.array_equal(mine[name], theirs[name]) for name in mine)


def unknown() -> TrainSequence:
    return replace(
        sequence(1), target_positions=np.zeros(0, np.int64), engine_logps=np.zeros(0, np.float32),
        sampled_at=np.zeros(0, np.int64), kv_oldest=np.zeros(0, np.int64), unknown_logp_count=5,
    )  # fmt: skip


def test_a_sequence_whose_tokens_are_all_unknown_trains_nothing_and_they_are_counted():
    figures = learner().train([[unknown()], [sequence(2)]], step=1, loss_token_count=10, trained=BASE)
    assert (figures["logps_unknown"], figures["loss_tokens"], figures["step_skipped"]) == (5.0, 5.0, 0.0)
    assert "nothing_known" not in figures


def all_unknown_to_the_teacher(value: float) -> TrainSequence:
    return replace(sequence(1), teacher_logps=np.full(5, value, np.float32))


@pytest.mark.parametrize(
    "batch", [unknown(), *(all_unknown_to_the_teacher(value) for value in (np.nan, -np.inf, np.inf, 0.5))]
)
def test_a_step_of_which_nothing_is_known_is_skipped_and_says_no_loss_and_no_distance(batch):
    agent = Learner(tiny_model(), OPTIM, DistillationLossConfig(teacher=Path("unread")))
    if batch.teacher_logps is None:
        batch = replace(batch, teacher_logps=np.zeros(0, np.float32))
    before = agent.export()
    figures = agent.train([[batch], []], step=1, loss_token_count=5, trained=BASE)
    assert (figures["step_skipped"], figures["nothing_known"], figures["logps_unknown"]) == (1.0, 1.0, 5.0)
    assert not figures.keys() & {"loss", "teacher_kl", "loss_tokens"}
    after = agent.export()
    assert all(np.array_equal(before[name], after[name]) for name in before)
    known = replace(sequence(2), teacher_logps=np.full(5, -0.5, np.float32))
    figures = agent.train([[batch], [known]], step=1, loss_token_count=10, trained=BASE)
    assert figures["step_skipped"] == 0.0
    assert {"loss", "teacher_kl"} <= figures.keys()


def test_the_probe_reports_log_probabilities_and_a_margin():
    agent = learner()
    ids = [3, 1, 4, 1, 5]
    logps, margin = agent.probe(ids)
    with torch.no_grad():
        agent.model.routes.begin()
        logp = torch.log_softmax(agent.model.logits(agent.model.hidden(torch.tensor([ids[:-1]]))), -1)[0]
    assert logps == pytest.approx(logp[torch.arange(4), torch.tensor(ids[1:])].tolist(), abs=1e-5)
    assert 0.0 <= margin < 1.0


def test_exported_weights_do_not_follow_later_steps():
    agent = learner()
    before = agent.export()
    copies = {name: tensor.copy() for name, tensor in before.items()}
    agent.train([[sequence(1)]], step=1, loss_token_count=5, trained=BASE)
    assert all(np.array_equal(before[name], copies[name]) for name in copies)
    assert any(not np.array_equal(before[name], tensor) for name, tensor in agent.export().items())


def engine_chose_other_experts() -> list[TrainSequence]:
    """Two pure rollouts and one of an older version, by an engine with the trainer's weights and routes of its own."""
    agent, batch = learner(), [sequence(1), sequence(2), sequence(3)]
    for number, each in enumerate(batch):
        object.__setattr__(each, "engine_logps", agent.logps([each]))
        if number == 2:
            object.__setattr__(each, "sampled_at", each.sampled_at - 1)
            object.__setattr__(each, "kv_oldest", each.kv_oldest - 1)
    return batch


def test_the_replay_check_shows_what_live_routes_would_do_to_the_same_tokens():
    batch = engine_chose_other_experts()
    options = {"step": 3, "loss_token_count": 15, "trained": BASE, "with_replay_check": True}
    metrics = learner().train([[sequence(9)], [], batch[:1], batch], **options)  # the last one is looked at
    assert metrics["replay_check_tokens"] == 15
    assert metrics["replay_check_numeric_fraction"] == pytest.approx(2 / 3)
    assert metrics["replay_on_kl"] == pytest.approx(0.0, abs=1e-9)
    assert metrics["replay_off_numeric"] > 1e-5
    assert metrics["replay_off_policy_lag"] > 1e-5
    assert metrics["replay_off_stale_kv"] == 0.0
    assert metrics["replay_off_kl"] == pytest.approx(metrics["replay_off_numeric"] + metrics["replay_off_policy_lag"])
    assert 0.3 < metrics["routes_flipped_fraction"] < 1.0  # random pairs of 4 experts


def test_unknown_routes_count_neither_as_flipped_nor_as_kept():
    options = {"step": 1, "loss_token_count": 5, "trained": BASE, "with_replay_check": True}
    metrics = learner().train([[sequence(1, unknown_ranges=((0, 9),))]], **options)
    assert metrics["routes_flipped_fraction"] == 0.0
    assert metrics["replay_on_kl"] == metrics["replay_off_kl"]


def test_the_replay_check_changes_nothing_in_the_step():
    checked, plain = learner(), learner()
    batch = engine_chose_other_experts()
    figures = [
        agent.train([batch], step=1, loss_token_count=15, trained=BASE, with_replay_check=check)
        for agent, check in ((checked, True), (plain, False))
    ]
    computed = {name: value for name, value in figures[1].items() if not name.endswith(("_s", "_bytes"))}
    assert figures[0].items() >= computed.items()
    left, right = checked.export(), plain.export()
    assert all(np.array_equal(left[name], right[name]) for name in left)
