"""How a vLLM engine is spread: what cannot be is refused with its reason, the rest becomes vLLM's own arguments."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from slipstream.engine.vllm.kernels import find_deep_ep, find_deep_gemm, missing
from slipstream.engine.vllm.parallel import (
    Case,
    DataParallelRank,
    ParallelConfig,
    arguments,
    environment,
    refusals,
)
from slipstream.models.qwen3_moe.config import MoeConfig

LARGE = MoeConfig(vocab_size=1000, dim=2048, n_heads=32, n_kv_heads=4, head_dim=64, n_experts=128, expert_dim=768)
WIDE = {"data_parallel_size": 8, "expert_parallel": True}
LOW, HIGH = "deepep_low_latency", "deepep_high_throughput"


@dataclass(frozen=True)
class Row:
    """Settings and what is said of them: the option, and words of the reason."""

    settings: dict[str, Any]
    option: str
    reason: str
    role: str = "decode"
    device: str = "cuda"
    quantization: str = "none"
    sizes: dict[str, int] = field(default_factory=dict)


REFUSED = [
    Row({"all2all_backend": LOW, **WIDE}, "all2all_backend", "DeepEP runs on CUDA only", device="cpu"),
    Row({"all2all_backend": HIGH, **WIDE}, "all2all_backend", "DeepEP runs on CUDA only", device="cpu"),
    Row({"deep_gemm": True}, "deep_gemm", "DeepGEMM runs on CUDA only", device="cpu", quantization="fp8_per_block"),
    Row({"all2all_backend": HIGH, "data_parallel_size": 2}, "all2all_backend", "between experts' ranks"),
    Row({"all2all_backend": HIGH, "expert_parallel": True}, "all2all_backend", "there is no rank to move tokens to"),
    Row({"all2all_backend": LOW, **WIDE}, "all2all_backend", "deepep_high_throughput", role="prefill"),
    Row({"all2all_backend": LOW, **WIDE}, "all2all_backend", "not this model's 1024", sizes={"dim": 1024}),
    Row({"deep_gemm": True}, "deep_gemm", "takes fp8_per_block alone"),
    Row({"deep_gemm": True}, "deep_gemm", "fp8_per_tensor", quantization="fp8_per_tensor"),
    Row({}, "quantization", "expert_dim = 700 is no multiple", quantization="fp8_per_block", sizes={"expert_dim": 700}),
    Row({}, "quantization", "dim = 2000 is no multiple", quantization="fp8_per_block", sizes={"dim": 2000}),
    Row({"tensor_parallel_size": 5}, "tensor_parallel_size", "does not divide the model's 32 attention heads"),
    Row(
        {"tensor_parallel_size": 4},
        "tensor_parallel_size",
        "neither divides the 6 KV heads",
        sizes={"n_heads": 36, "n_kv_heads": 6},
    ),
    Row(
        {"data_parallel_size": 3, "expert_parallel": True},
        "data_parallel_size",
        "do not divide the model's 128",
    ),
    Row({"tensor_parallel_size": 2}, "tensor_parallel_size", "a weight update checks"),
    Row({"data_parallel_size": 2}, "data_parallel_size", "set expert_parallel = true"),
    Row({"expert_parallel": True}, "expert_parallel", "there is one data-parallel rank"),
]
ALLOWED = [
    ({}, "decode", "cpu"),
    (WIDE, "decode", "cpu"),
    ({"all2all_backend": HIGH, **WIDE}, "prefill", "cuda"),
    ({"all2all_backend": LOW, **WIDE}, "decode", "cuda"),
    ({"all2all_backend": LOW, "deep_gemm": True, **WIDE}, "decode", "cuda"),
]


def case(settings: dict[str, Any], role: Any, device: str, quantization: str, sizes: dict[str, int]) -> Case:
    return Case(ParallelConfig(**settings), role, device, quantization, LARGE.model_copy(update=sizes))


@pytest.mark.parametrize("row", REFUSED, ids=lambda row: f"{row.option}-{row.reason}")
def test_what_cannot_work_is_refused_with_the_option_and_the_reason(row: Row) -> None:
    found = list(refusals(case(row.settings, row.role, row.device, row.quantization, row.sizes)))
    assert [option for option, reason in found if row.reason in reason] == [
        row.option if row.option == "quantization" else f"parallel.{row.option}"
    ], found


@pytest.mark.parametrize(("settings", "role", "device"), ALLOWED, ids=str)
def test_what_can_work_is_not_refused(settings: dict[str, Any], role: str, device: str) -> None:
    assert (
        list(refusals(case(settings, role, device, "fp8_per_block" if "deep_gemm" in settings else "none", {}))) == []
    )


def test_sizes_that_are_not_known_yet_refuse_nothing() -> None:
    assert list(refusals(Case(ParallelConfig(tensor_parallel_size=1), "decode", "cuda", "fp8_per_block", None))) == []


def test_options_become_those_of_vllm() -> None:
    config = ParallelConfig(all2all_backend=LOW, deep_gemm=True, **WIDE)
    assert arguments(config, DataParallelRank(3, 8, "10.0.0.1", 7001)) == {
        "tensor_parallel_size": 1,
        "enable_expert_parallel": True,
        "all2all_backend": "deepep_low_latency",
        "moe_backend": "deep_gemm",
        "data_parallel_size": 8,
        "data_parallel_rank": 3,
        "data_parallel_address": "10.0.0.1",
        "data_parallel_rpc_port": 7001,
        "distributed_executor_backend": "uni",
    }
    assert environment(config) == {"VLLM_USE_DEEP_GEMM": "1", "VLLM_MOE_USE_DEEP_GEMM": "1"}
    assert environment(ParallelConfig()) == {"VLLM_USE_DEEP_GEMM": "0", "VLLM_MOE_USE_DEEP_GEMM": "0"}
    assert "moe_backend" not in arguments(ParallelConfig(), None)


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Puts a module on the path: `install("deep_ep", "Buffer = object")`."""
    monkeypatch.syspath_prepend(tmp_path)

    def put(name: str, source: str) -> None:
        path = tmp_path.joinpath(*name.split("."))
        path.mkdir(parents=True, exist_ok=True)
        (path / "__init__.py").write_text(source)
        monkeypatch.delitem(sys.modules, name, raising=False)

    yield put
    for name in ("deep_ep", "deep_gemm"):
        sys.modules.pop(name, None)


def test_kernels_that_are_not_installed_are_absent_and_the_step_is_named() -> None:
    assert (find_deep_ep().state, find_deep_gemm().state) == ("absent", "absent")
    assert "deepseek-ai/DeepEP" in find_deep_ep().step
    assert "vLLM's CUDA wheel" in find_deep_gemm().step


def test_packages_of_the_same_names_are_not_taken_for_deepseek_s(install) -> None:
    install("deep_ep", "def embed(): ...")
    install("deep_gemm", "version = '0.0.1'")
    assert (find_deep_ep().state, find_deep_gemm().state) == ("another package", "another package")
    config = ParallelConfig(all2all_backend=LOW, deep_gemm=True, **WIDE)
    assert [found.name for found in missing(config)] == ["DeepEP", "DeepGEMM"]
    assert missing(ParallelConfig()) == []


def test_deepseek_s_own_packages_are_found_by_what_they_hold(install) -> None:
    install("deep_ep", "class Buffer: ...")
    install("deep_gemm", "def fp8_gemm_nt(): ...")
    assert find_deep_ep().there
    assert find_deep_gemm().there
    assert missing(ParallelConfig(all2all_backend=HIGH, deep_gemm=True, **WIDE)) == []


def test_kernels_that_cannot_be_loaded_say_why(install) -> None:
    install("deep_ep", "raise OSError('libcuda.so.1: cannot open shared object file')")
    found = find_deep_ep()
    assert found.state == "broken"
    assert "libcuda.so.1" in found.detail


def test_deepgemm_in_vllm_s_wheel_is_found_without_importing_vllm(install, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "vllm", raising=False)
    install("vllm", "raise AssertionError('imported')")
    install("vllm.third_party.deep_gemm", "from ._C import fp8_gemm_nt")
    assert find_deep_gemm().there
