"""Configuration of the trainer. Imports no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from slipstream.common.config import BaseConfig, ServiceConfig
from slipstream.environments.config import EnvironmentConfig
from slipstream.models.fp8.config import Fp8Config
from slipstream.models.lora.config import LoraConfig
from slipstream.models.qwen3_moe.config import MoeConfig
from slipstream.trainer.loss_config import LossConfig, MaskedRatioLossConfig
from slipstream.trainer.optim_config import Beta, OptimConfig
from slipstream.trainer.parallel.layout import ContextKind, Layout
from slipstream.weights.config import WeightsConfig


class ModelConfig(MoeConfig):
    """Sizes of the model that training starts from."""

    RANDOM_START: ClassVar[str] = "qwen3_moe"
    """The built-in architecture whose sizes these are."""

    vocab_size: int = Field(default=0, ge=0)
    """Rows of the embedding. 0 takes the tokenizer's."""

    extra: dict[str, Any] = Field(default_factory=dict[str, Any])
    """Further keys of the `config.json` that an architecture of your own reads."""

    def config_json(self, tokenizer_size: int) -> dict[str, Any]:
        """What the architecture reads its sizes from."""
        fields = self.model_dump(exclude={"extra"})
        return {**MoeConfig(**{**fields, "vocab_size": self.vocab_size or tokenizer_size}).to_hf(), **self.extra}


class SftConfig(BaseConfig):
    """Supervised warm-up on demonstrations, ended by a validation set."""

    enabled: bool = True
    """Run it before the first step. Ignored when `initial_model` is set."""

    batch_size: int = Field(default=64, ge=1)
    """Demonstrations a step."""

    lr: float = Field(default=3e-3, gt=0)
    """Learning rate, constant until the decay."""

    betas: tuple[Beta, Beta] = (0.9, 0.98)
    """Decay of the first and second moments."""

    balance_coefficient: float = Field(default=0.01, ge=0)
    """Weight of the experts' load-balance loss."""

    target_accuracy: float = Field(default=0.25, ge=0, le=1)
    """Part of the validation set answered exactly, greedily, at which the decay begins."""

    validate_every: int = Field(default=5, ge=1)
    """Steps between validations."""

    max_steps: int = Field(default=400, ge=1)
    """The decay begins at this step at the latest."""

    decay_steps: int = Field(default=15, ge=0)
    """Steps of linear decay to zero at the end."""


class ParallelConfig(BaseConfig):
    """How several ranks share the model and the tokens of a step, and what a rank keeps of its activations."""

    data: int | None = Field(default=None, ge=1, le=4096)
    """Ranks with micro-batches of their own, `context` ranks for each. Unset: as many as there are ranks for."""

    context: int = Field(default=1, ge=1, le=256)
    """Ranks that share the tokens of a micro-batch, for sequences that are too long for one."""

    context_kind: ContextKind = "ulysses"
    """How attention sees the tokens of other ranks: ulysses exchanges heads for tokens (`context` ranks must be able to
    share the heads), ring passes keys and values round."""

    expert: int = Field(default=1, ge=1, le=4096)
    """Ranks that share the experts of each layer; divides the ranks. All ranks share all other weights."""

    checkpointing: Literal["none", "selective", "full"] = "none"
    """Activations of a block that are computed again in the backward pass: none, the cheap ones, all."""

    compile: bool = False
    """Compile each block, which takes minutes at the first step. Needs a C++ compiler."""

    compile_backend: Literal["inductor", "aot_eager"] = "inductor"
    """aot_eager traces blocks and computes as without `compile`: for telling which of the two a mistake is in."""

    timeout_s: float = Field(default=120.0, gt=0)
    """A rank for which the others have waited so long is lost: it ends the step, and is named."""

    def layout(self, rank_count: int) -> Layout:
        """Of so many ranks. Raises `ValueError` where they are too few or too many."""
        data = self.data or max(1, rank_count // self.context)
        if data * self.context != rank_count:
            raise ValueError(f"{data} data ranks of {self.context} context ranks each are not the {rank_count} ranks")
        return Layout(data, self.expert, self.context, self.context_kind)


class ComputeConfig(BaseConfig):
    """Where and how a rank computes. Only the defaults have been measured."""

    device: Literal["cpu", "cuda"] = "cpu"
    """cuda: of the cards that the process sees, the one with its number among the machine's ranks."""

    precision: Literal["float32", "bfloat16"] = "float32"
    """Of products and of what layers hand on, in forward and backward passes. Weights, gradients, moments, routers and
    log-probabilities are float32 in any case. Engines that compute otherwise differ more than `trainer.probe_tolerance`
    allows for float32."""

    logits_bytes: int = Field(default=2**29, ge=4096)
    """Logits that exist at once, in bytes of float32: those of more targets are computed in parts, once more for the
    gradient. On a card, 10 GiB hold all of 16k targets of a vocabulary of 151k, in bfloat16 in half of that."""

    round_once: bool | None = None
    """For bfloat16: round weights once a step, and keep what that gives, 2 bytes a weight. false rounds them in each
    pass over a micro-batch, to the same numbers, as several ranks do in any case. Unset: where the copies take at most
    a quarter of what the card has free beside gradients and moments."""


class RankConfig(BaseConfig):
    """Which of the trainer's ranks a process is. The launcher tells, or torchrun by its environment."""

    rank: int = Field(default=0, ge=0)
    rank_count: int = Field(default=1, ge=1)

    local_rank: int | None = Field(default=None, ge=0)
    """Its number among the ranks of its machine, by which it takes a card. Unset: all are on one."""

    rendezvous: str = ""
    """Where ranks meet: tcp://host:port of a store that rank 0 keeps, or env:// for torchrun's."""

    @model_validator(mode="after")
    def _check(self) -> RankConfig:
        if self.rank >= self.rank_count:
            raise ValueError(f"rank: {self.rank} is not one of {self.rank_count}")
        return self

    @property
    def place(self) -> int:
        """Its number among the ranks of its machine."""
        return self.rank if self.local_rank is None else self.local_rank


class CheckpointConfig(BaseConfig):
    """Checkpoints that a trainer of the same run resumes from."""

    interval_steps: int = Field(default=0, ge=0)
    """Steps between two. 0 writes none: a trainer that ends then ends the run. Rows are kept until a checkpoint covers
    their step, so `runner.spool_limit_bytes` must hold so many steps and one more."""

    keep_last: int = Field(default=2, ge=1)
    """Newest checkpoints that are kept."""

    keep_every_steps: int = Field(default=0, ge=0)
    """Those of every so many steps are kept as well. 0: none."""


class TrainerConfig(ServiceConfig):
    """Everything the trainer reads."""

    orchestrator: str = "127.0.0.1:7000"
    """Address of the orchestrator's BatchService."""

    broadcaster: str = "127.0.0.1:7001"
    """Address of the broadcaster."""

    model: ModelConfig = ModelConfig()
    optim: OptimConfig = OptimConfig()
    loss: LossConfig = MaskedRatioLossConfig()
    parallel: ParallelConfig = ParallelConfig()
    compute: ComputeConfig = ComputeConfig()
    nproc: int = Field(default=1, ge=1, le=64)
    """Ranks that the launcher starts on this machine."""

    group: RankConfig = RankConfig()
    sft: SftConfig = SftConfig()
    lora: LoraConfig | None = None
    """Train low-rank adapters alone, from the first step on; the warm-up trains all weights."""
    fp8: Fp8Config | None = None
    """Multiply in FP8, from the first step on. An engine that does not then differs on the probe: raise
    `probe_tolerance`, as for one that does where the trainer does not."""
    checkpoint: CheckpointConfig = CheckpointConfig()

    teacher_pool: bool = False
    """Whether teacher workers judge what is sampled, so that the loss `distillation` takes what comes with the rows."""

    weights: WeightsConfig = WeightsConfig()
    """How published weights travel."""

    environments: list[EnvironmentConfig] = Field(default_factory=list)
    """Environments whose demonstrations the warm-up learns from."""

    initial_model: Path | None = None
    """Model directory to start from instead of a random start and warm-up: of `slipstream sft`, of an earlier run, or
    in Hugging Face's form (config.json, tokenizer.json, safetensors). Its sizes count; its context is cut to
    `model.max_context_tokens`."""

    incarnation: int = Field(default=1, ge=1)
    """Of the first start, from 1; with checkpoints, each restart takes the next."""

    torch_threads: int = Field(default=1, ge=1)
    """Threads of torch's operators, all within one thread of ours."""

    peak_flops: float | None = Field(default=None, gt=0)
    """Most FLOPs a second of one rank's device, for the figure `mfu`. Unset takes that of the card by its name; of an
    unknown card, and of a CPU, the figure is then left out."""

    plan_wait_s: float = Field(default=5.0, gt=0, le=30)
    """Longest wait of one GetPlan call, in seconds."""

    rows_timeout_s: float = Field(default=30.0, gt=0)
    """Longest time to fetch the rows of one portion of a step from one holder, in seconds."""

    routes_silence_s: float = Field(default=5.0, gt=0)
    """A worker that sends nothing for so long, asked for routes, has none: they are computed live, and counted."""

    rows_window_bytes: int = Field(default=256 * 2**20, ge=2)
    """Rows held at once: half of them being fetched, half being trained on, but of a micro-batch each at least."""

    save_weights: bool = True
    """Write all weights of step 0 to `<run_dir>/model` and the last ones to `checkpoints/final`. false is for runs of
    which nothing but figures is wanted, as a large model takes long to write. Checkpoints and adapters are written all
    the same."""

    probe_tokens: int = Field(default=12, ge=2)
    """Tokens of the probe prompt published with each version."""

    probe_tolerance: float = Field(default=1e-3, gt=0)
    """Largest difference of log-probabilities that an engine may show on the probe. For float32."""

    replay_check_interval_steps: int = Field(default=5, ge=0)
    """Every so many steps, from the first, one micro-batch is also computed with live routes, to compare the mismatch
    with that of replayed ones. 0: never."""

    timeline_limit_bytes: int = Field(default=64 * 2**20, ge=4096)
    """Bytes of the trainer's files under timeline/; the older half goes when they are reached."""

    @model_validator(mode="after")
    def _check_saved(self) -> TrainerConfig:
        if not self.save_weights and self.loss.reference_kl_coefficient:
            raise ValueError(
                "save_weights: loss.reference_kl_coefficient compares with the weights of step 0; say true"
            )
        return self

    @model_validator(mode="after")
    def _check_parallel(self) -> TrainerConfig:
        if self.group.rank_count > 1:
            self.parallel.layout(self.group.rank_count)
            if self.lora is not None and self.lora.publish != "merged":
                raise ValueError('lora.publish: several ranks publish merged weights; say "merged"')
            if self.parallel.timeout_s <= self.rows_timeout_s:
                raise ValueError("parallel.timeout_s: a rank may wait for rows for rows_timeout_s, which must be less")
            if self.weights.straight and self.parallel.timeout_s <= self.weights.lease_s:
                raise ValueError("parallel.timeout_s: a rank may wait for a reader for weights.lease_s: say less there")
        return self

    @model_validator(mode="after")
    def _check_weights(self) -> TrainerConfig:
        if self.weights.transport == "cuda_ipc" and self.compute.device != "cuda":
            raise ValueError("weights.transport: cuda_ipc needs a trainer on a card; set compute.device to cuda")
        own = "nccl" if self.compute.device == "cuda" else "gloo"
        if self.weights.transport == "nccl" and self.weights.backend not in ("auto", own):
            raise ValueError(f'weights.backend: compute.device = "{self.compute.device}" sends by {own} alone')
        return self

    @property
    def model_dir(self) -> Path:
        return self.run_dir / "model"

    @property
    def timeline_file(self) -> Path:
        """Where its intervals of work are recorded."""
        return self.run_dir / "timeline" / f"{self.replica or 'trainer'}.jsonl"
