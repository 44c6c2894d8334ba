"""FP8 with a scale for each block: what is rounded and how far, what a gradient loses by it, and what stays exact."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from slipstream.common.config import ConfigError
from slipstream.models.checkpoint import load_hf, to_hf
from slipstream.models.fp8 import card
from slipstream.models.fp8.blocks import (
    LARGEST,
    block_linear,
    rounded,
    rounded_columns,
    rounded_rows,
    rounded_weight,
)
from slipstream.models.fp8.config import Fp8Config
from slipstream.models.fp8.modules import convert
from slipstream.models.lora.adapters import attach
from slipstream.models.lora.config import LoraConfig
from slipstream.models.qwen3_moe.config import MoeConfig
from slipstream.models.qwen3_moe.model import build_model, init_weights

SIZES = MoeConfig(
    vocab_size=64, dim=256, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=64, expert_dim=192, max_context_tokens=256
)
TOKENS = torch.randint(64, (1, 200), generator=torch.Generator().manual_seed(3))

MATRIX_ERROR, NORM_ERROR, WHOLE_ERROR = 0.1, 0.15, 0.06
"""The stated bound: length of the difference of a gradient to that in bfloat16, by the length of that, for each matrix,
for each norm, and for all of them together. bfloat16's own to that in float32 is 0.007."""


FP8 = Fp8Config()


def model(config: Fp8Config | None = FP8, dtype: torch.dtype = torch.float32) -> Any:
    made: Any = build_model(SIZES)
    init_weights(made, 0)
    if config is not None:
        convert(made, config)
    return made.to(dtype)


def routes() -> torch.Tensor:
    """The same for all, as what is compared is rounding and not choices."""
    generator = torch.Generator().manual_seed(5)
    return torch.rand(200, 2, SIZES.n_experts, generator=generator).argsort(-1)[..., : SIZES.top_k].to(torch.uint8)


def gradients(made: Any) -> dict[str, torch.Tensor]:
    made.routes.begin(replay_TLK=routes())
    logits_TV = made.logits(made.hidden(TOKENS)[0, :-1])
    F.cross_entropy(logits_TV.float(), TOKENS[0, 1:]).backward()
    return {name: each.grad.float() for name, each in made.named_parameters() if each.grad is not None}


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def whole(gradient: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([each.flatten() for each in gradient.values()])


def test_gradients_are_within_the_stated_bound_of_those_of_float32_and_bfloat16():
    exact, coarse = gradients(model(None)), gradients(model(None, torch.bfloat16))
    fp8 = gradients(model())
    assert fp8.keys() == exact.keys() == coarse.keys()
    for reference in (exact, coarse):
        errors = {name: error(fp8[name], reference[name]) for name in reference}
        assert max(errors[name] for name in errors if fp8[name].ndim > 1) < MATRIX_ERROR, errors
        assert max(errors.values()) < NORM_ERROR, errors
        assert error(whole(fp8), whole(reference)) < WHOLE_ERROR
    assert error(whole(fp8), whole(exact)) > 2 * error(whole(coarse), whole(exact)), "it was rounded"


@pytest.mark.filterwarnings("ignore:invalid escape sequence:DeprecationWarning")  # torchao's own
def test_rounding_is_that_of_torchaos_reference():
    from torchao.prototype.blockwise_fp8_training.kernels import (
        torch_blockwise_scale_act_quant_lhs,
        torch_blockwise_scale_act_quant_rhs,
        torch_blockwise_scale_weight_quant,
    )

    x = torch.randn(256, 384, generator=torch.Generator().manual_seed(1)) * torch.logspace(-3, 3, 384)
    x[:130, :130] = 0.0
    rows, scale = torch_blockwise_scale_act_quant_lhs(x)
    assert torch.equal(rounded_rows(x), rows.float() * scale.repeat_interleave(128, 1))
    columns, scale = torch_blockwise_scale_act_quant_rhs(x)
    assert torch.equal(rounded_columns(x), columns.float() * scale.repeat_interleave(128, 0))
    weight, scale = torch_blockwise_scale_weight_quant(x)
    expected = weight.float() * scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
    assert torch.equal(rounded_weight(x), expected)
    assert torch.equal(rounded_weight(torch.stack([x, x]))[1], expected)


def test_blocks_do_not_share_a_scale_and_the_last_may_be_cut():
    x = torch.full((3, 200), 0.3)
    x[0, 0] = 2.0**20 * LARGEST
    found = rounded(x, 1, 128)
    assert found[0, 0] == x[0, 0]
    assert (found[0, 1:128] == 0).all(), "below what the scale of the large one can show"
    assert (found[0, 128:] - 0.3).abs().max() < 0.3 / 16
    assert (found[1:] - 0.3).abs().max() < 0.3 / 16


def test_all_three_products_are_of_rounded_numbers():
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(5, 40, 160, generator=generator, requires_grad=True)
    weight = torch.randn(96, 160, generator=generator, requires_grad=True)
    grad = torch.randn(5, 40, 96, generator=generator)
    found = block_linear(x, weight)
    found.backward(grad)
    flat, flat_grad = x.detach().reshape(-1, 160), grad.reshape(-1, 96)
    shown = rounded_weight(weight.detach())
    torch.testing.assert_close(found.detach().reshape(-1, 96), rounded_rows(flat) @ shown.t())
    assert x.grad is not None
    torch.testing.assert_close(x.grad.reshape(-1, 160), rounded_rows(flat_grad) @ shown)
    torch.testing.assert_close(weight.grad, rounded_columns(flat_grad).t() @ rounded_columns(flat))


def test_an_expert_that_nobody_chose_gets_no_rows_and_a_gradient_of_zero():
    x, weight = torch.empty(0, 160, requires_grad=True), torch.randn(96, 160, requires_grad=True)
    found = block_linear(x, weight)
    assert found.shape == block_linear(x.detach(), weight.detach(), weight.detach()).shape == (0, 96)
    found.sum().backward()
    assert weight.grad is not None
    assert not weight.grad.any()


def test_under_autocast_products_are_exact_and_come_in_its_dtype():
    x = torch.randn(40, 160, requires_grad=True)
    weight = torch.randn(96, 160, requires_grad=True)
    plain = block_linear(x, weight)
    with torch.autocast("cpu", torch.bfloat16):
        found = block_linear(x, weight)
    assert torch.equal(found, plain.bfloat16())
    found.sum().backward()
    assert x.grad is not None
    assert weight.grad is not None
    assert x.grad.dtype == weight.grad.dtype == torch.float32


def test_what_is_published_is_not_rounded_and_the_router_is_exact():
    made = model()
    plain = model(None)
    assert all(torch.equal(each, to_hf(plain)[name]) for name, each in to_hf(made).items())
    kinds = {name: type(module).__name__ for name, module in made.named_modules()}
    assert kinds["layers.0.attention.wo"] == "Fp8LinearLinear"
    assert kinds["layers.1.moe.routed_experts.inner_experts"] == "Fp8ExpertsSplitExperts"
    assert kinds["layers.0.moe.router.gate"] == "Linear"
    assert "Fp8" not in kinds["lm_head"] + kinds["tok_embeddings"]


@torch.no_grad()
def test_frozen_weights_that_are_written_to_are_rounded_anew():
    serving, training = model(), model()
    serving.requires_grad_(False)
    for seed in (1, 2):
        init_weights(training, seed)
        load_hf(serving, to_hf(training))
        answers = []
        for made in (serving, training):
            made.routes.begin(replay_TLK=routes())
            answers.append(made.hidden(TOKENS))
        torch.testing.assert_close(*answers)


def test_adapters_on_top_are_exact_and_get_the_gradient_of_what_is_rounded_below():
    made = model()
    attach(made, LoraConfig(rank=4), 1)
    found = gradients(made)
    assert found
    assert all("lora_" in name for name in found)
    assert any("w2_EDF_lora_b" in name and each.any() for name, each in found.items())


def test_targets_are_groups_or_projections():
    made = model(Fp8Config(targets=("experts",)))
    assert type(made.layers["0"].attention.wo).__name__ == "Linear"
    with pytest.raises(ConfigError, match=r"trainer\.fp8\.targets: the model has no 'q_prj'"):
        model(Fp8Config(targets=("q_prj",)))


@pytest.mark.filterwarnings("ignore:invalid escape sequence:DeprecationWarning")  # torchao's own
def test_the_kernels_of_a_card_take_a_linear_layer_and_give_gradients_of_its_shapes():
    x = torch.empty(2, 100, 256, device="meta", requires_grad=True)
    weight = torch.empty(384, 256, device="meta", requires_grad=True)
    found = card.linear(x, weight)
    assert (found.shape, found.dtype) == ((2, 100, 384), torch.float32)
    found.sum().backward()
    assert x.grad is not None
    assert weight.grad is not None
    assert (x.grad.shape, weight.grad.shape) == (x.shape, weight.shape)
    assert card.takes(weight)
    assert not card.takes(torch.empty(4, 256, 192))


@pytest.mark.filterwarnings("ignore:invalid escape sequence:DeprecationWarning")  # torchao's own
@pytest.mark.parametrize("sizes", [[3, 0, 128, 130, 0], [0, 0, 5], [256, 1], [1], [1, 127, 129, 1], [0, 0]], ids=str)
def test_rows_of_experts_are_padded_as_torchao_does(sizes):
    from torchao.prototype.moe_training.kernels.mxfp8 import torch_pad_token_groups, torch_unpad_token_groups

    rows = torch.randn(sum(sizes), 16, generator=torch.Generator().manual_seed(4))
    ends = torch.tensor(sizes).cumsum(0).to(torch.int32)
    expected, found = torch_pad_token_groups(rows, ends, 128), card.padded(rows, ends, alignment_size=128)
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours, theirs)
        assert ours.dtype == theirs.dtype
    made = 2.0 * found[0] + 1.0
    back = card.unpadded(made, ends, found[1], len(rows), alignment_size=128)
    assert torch.equal(back, torch_unpad_token_groups(made, ends, found[1], len(rows), 128))
    assert torch.equal(back, 2.0 * rows + 1.0)


@pytest.mark.filterwarnings("ignore:invalid escape sequence:DeprecationWarning")  # torchao's own
def test_torchao_pads_by_ours():
    product = card._torchao().grouped_mm._Float8BlockwiseGroupedMM
    for step in (product.forward, product.backward):
        for name in ("pad_token_groups", "unpad_token_groups"):
            assert name in step.__code__.co_names
            assert step.__globals__[name].__module__ == card.__name__


def test_padding_reads_nothing_back():
    """On `meta`, where whatever would read a value fails."""
    rows, ends = torch.empty(9, 16, device="meta"), torch.empty(4, dtype=torch.int32, device="meta")
    out, starts, _ = card.padded(rows, ends)
    assert card.unpadded(out, ends, starts, 9).shape == rows.shape
