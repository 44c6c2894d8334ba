"""What people watch of a step: the same however it was split, and as the formulas say."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch

from slipstream.models.deepseek_v3 import build_model as build_deepseek
from slipstream.models.deepseek_v3.config import DeepseekV3Config
from slipstream.trainer.clock import PhaseClock
from slipstream.trainer.cost import ModelCost, peak_flops, peak_of_card, speed
from slipstream.trainer.figures import StepFigures, TokenFigures, expert_load

from .tiny import SIZES, VOCAB, tiny_model

TRAINED = 7


def tokens(seed: int, count: int) -> TokenFigures:
    rng = np.random.default_rng(seed)
    sampled = rng.integers(5, 8, count)
    return TokenFigures(
        logp_R=-rng.random(count, dtype=np.float32),
        entropy_R=rng.random(count, dtype=np.float32),
        inactive_R=rng.random(count) < 0.3,
        engine_R=-rng.random(count, dtype=np.float32),
        sampled_R=sampled,
        oldest_R=sampled - rng.integers(0, 2, count),
        replayed_R=rng.random(count) < 0.9,
        lengths=[count + 3, count],
        row_tokens=2 * count + 4,
        unknown_count=seed,
    )


def test_figures_of_ranks_add_up_to_those_of_one_process():
    parts = [tokens(seed, count) for seed, count in enumerate((1000, 1, 37))]
    sums = [{"loss": 0.25 * seed, "model_flops": 8.0} for seed in range(3)]
    counts = [np.arange(8).reshape(2, 4) * (seed + 1) for seed in range(3)]
    whole, ranks = StepFigures(), [StepFigures() for _ in range(4)]  # the last rank had nothing to train
    for part, rank, figures, count in zip(parts, ranks, sums, counts, strict=False):
        whole.add(part, figures, count)
        rank.add(part, figures, count)
    merged = StepFigures()
    for rank in ranks:
        merged.merge(rank)
    assert merged.report(TRAINED) == whole.report(TRAINED)
    report = whole.report(TRAINED)
    assert report["loss"] == pytest.approx(0.75)
    assert report["loss_tokens"] == 1038
    assert report["mismatch_kl"] == pytest.approx(
        report["mismatch_numeric"] + report["mismatch_policy_lag"] + report["mismatch_stale_kv"]
    )
    ratios = np.exp(np.concatenate([p.logp_R.astype(np.float64) - p.engine_R for p in parts]))
    assert report["ratio_p999"] == pytest.approx(np.quantile(ratios, 0.999), rel=1e-6)


def test_padding_is_told_of_the_packed_rows_and_of_attentions_slots():
    figures = StepFigures()
    for count in (2, 7):
        figures.add(tokens(count, count), {}, np.zeros((0, 0), np.int64))
    report = figures.report(TRAINED)
    assert report["padding_fraction"] == pytest.approx(2 / (8 + 18))
    assert report["attention_padding_fraction"] == pytest.approx(6 / (2 * 5 + 2 * 10))


def test_a_step_that_trained_nothing_has_figures_too():
    none = {"padding_fraction": 0.0, "attention_padding_fraction": 0.0, "loss_tokens": 0.0}
    assert StepFigures().report(TRAINED) == none


def test_expert_load_is_the_violation_of_the_busiest_expert():
    even, all_to_one = np.full((1, 4), 5), np.array([[20, 0, 0, 0]])
    assert expert_load(even) == {"expert_load_max": 0.0, "expert_load_mean": 0.0}
    assert expert_load(np.concatenate([even, all_to_one])) == {"expert_load_max": 3.0, "expert_load_mean": 1.5}
    assert expert_load(np.zeros((0, 4), np.int64)) == {}


def test_model_flops_are_six_a_weight_and_token_and_twelve_a_pair_that_sees():
    width, experts_taken = SIZES.dim, SIZES.top_k
    heads = SIZES.n_heads * SIZES.head_dim
    attention = width * (heads + 2 * SIZES.n_kv_heads * SIZES.head_dim) + heads * width + 2 * SIZES.head_dim
    experts = 3 * width * SIZES.expert_dim * experts_taken + width * SIZES.n_experts
    body = SIZES.n_layers * (attention + experts + 2 * width) + width  # norms too: a few thousandths
    cost = ModelCost.of(tiny_model())
    assert cost.token_flops == pytest.approx(6 * body)
    assert cost.head_flops == 6 * width * VOCAB
    assert cost.pair_flops == 12 * SIZES.n_layers * heads
    pairs = 1 + 2 + 3 + 1 + 2
    assert cost.flops([3, 2], 4) == pytest.approx(6 * body * 5 + 6 * width * VOCAB * 4 + cost.pair_flops * pairs)


def test_frozen_weights_need_no_gradient_of_their_own():
    trained, frozen = tiny_model(), tiny_model()
    frozen.requires_grad_(False)
    assert ModelCost.of(frozen).token_flops == pytest.approx(ModelCost.of(trained).token_flops * 4 / 6)


def test_values_narrower_than_keys_cost_less():
    sizes = DeepseekV3Config(
        vocab_size=16, dim=16, n_layers=2, n_dense_layers=1, n_heads=2, kv_lora_rank=8, qk_nope_head_dim=8,
        qk_rope_head_dim=4, v_head_dim=6, ffn_dim=16, expert_dim=8, n_experts=4, n_shared_experts=1, top_k=2,
        n_groups=1, top_k_groups=1, rope_theta=1e4, max_context_tokens=16, norm_eps=1e-6,
    )  # fmt: skip
    assert ModelCost.of(build_deepseek(sizes)).pair_flops == 6 * 2 * 2 * (12 + 6)


def test_the_peak_is_that_of_a_known_card_and_of_no_other():
    assert peak_of_card("NVIDIA H100 80GB HBM3") == 989e12
    assert peak_of_card("NVIDIA H100 PCIe") == 756e12
    assert peak_of_card("NVIDIA H200") == 989e12
    assert peak_of_card("NVIDIA H20") == 148e12
    assert peak_of_card("NVIDIA GB200") == 2.5e15
    assert peak_of_card("NVIDIA A100-SXM4-80GB") == 312e12
    assert peak_of_card("NVIDIA GeForce RTX 4090") is None
    cpu = torch.device("cpu")
    assert peak_flops(cpu) is None
    assert peak_flops(cpu, 1e12) == 1e12


def test_utilisation_is_only_there_where_the_peak_is_known():
    assert "mfu" not in speed(1e12, 100.0, 2.0, None)
    assert speed(1e12, 100.0, 2.0, 1e12, ranks=2) == {
        "trainer_tokens_per_s": 50.0,
        "model_flops_per_s": 5e11,
        "mfu": 0.25,
    }


def test_the_clock_tells_phases_apart_and_starts_again_when_read():
    clock, began_s = PhaseClock(torch.device("cpu")), time.perf_counter()
    for name, duration_s in (("forward", 0.02), ("backward", 0.05), ("forward", 0.02)):
        with clock.phase(name):
            time.sleep(duration_s)
    figures, whole_s = clock.read(), time.perf_counter() - began_s
    assert set(figures) == {"forward_s", "backward_s"}
    assert figures["forward_s"] >= 0.04
    assert figures["backward_s"] >= 0.05
    assert sum(figures.values()) <= whole_s
    assert clock.read() == {}
