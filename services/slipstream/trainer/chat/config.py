"""Configuration of fine-tuning on conversations. Imports no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from slipstream.common.config import BaseConfig, ServiceConfig
from slipstream.environments.base import Turns
from slipstream.models.lora.config import AdapterConfig
from slipstream.trainer.config import ComputeConfig, ParallelConfig, RankConfig
from slipstream.trainer.optim_config import OptimConfig


class DataConfig(BaseConfig):
    """Conversations, one JSON object a line: `{"messages": [...], "tools": [...]}`, as in OpenAI's chat format."""

    train: Path
    """File to learn from."""

    validation: Path | None = None
    """File to validate on. Unset takes `validation_rows` of `train`, chosen by seed, which are not trained on."""

    validation_rows: int = Field(default=50, ge=0)
    """Rows of the validation set; of a file of its own the first ones. 0 leaves validation out."""

    bad_rows: Literal["fatal", "skip"] = "fatal"
    """What a row that cannot be used means. Each is told with its line and field, the first of them one by one."""

    turns: Turns = "all"
    """Turns of the assistant that are learned: all, or only the last of each conversation. "last" is for templates that
    show a turn otherwise once others follow, such as those that drop what was thought."""

    chat_template: Path | None = None
    """Jinja file in place of the model's own template; written beside the trained model."""

    max_tokens: int = Field(default=1024, ge=2)
    """Tokens of the longest conversation; a longer one is a bad row."""


class StartConfig(BaseConfig):
    """The model that training starts from."""

    initial: Path
    """Model directory in Hugging Face's form, with a tokenizer, such as `slipstream convert` writes."""


class TrainingConfig(BaseConfig):
    """How the data is gone through."""

    tokens_per_step: int = Field(default=16384, ge=2)
    """Tokens of an optimizer step, as many whole conversations as fit."""

    micro_batch_tokens: int = Field(default=4096, ge=2)
    """Tokens of one pass; a longer conversation has one of its own."""

    epochs: int = Field(default=1, ge=1)
    """How often each conversation is learned from, each time in another order."""

    max_steps: int | None = Field(default=None, ge=1)
    """Ends training at this step if the epochs have not."""

    validate_every: int = Field(default=50, ge=1)
    """Steps between validations; there is one before the first and one after the last step, too."""

    torch_threads: int = Field(default=1, ge=1)
    """Threads of torch's operators on a CPU."""

    nproc: int = Field(default=1, ge=1, le=64)
    """Ranks, a process each, which share the model and the tokens of a step as `[parallel]` says."""


class CheckpointConfig(BaseConfig):
    """What a run that was stopped, or killed, goes on from."""

    every_steps: int = Field(default=100, ge=1)
    """Steps between checkpoints; there is one after the last step, too."""

    keep_last: int = Field(default=2, ge=1)
    """Checkpoints that are kept."""


class ChatConfig(ServiceConfig):
    """Everything that fine-tuning reads."""

    start: StartConfig
    data: DataConfig
    training: TrainingConfig = TrainingConfig()
    optim: OptimConfig = OptimConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    parallel: ParallelConfig = ParallelConfig()
    compute: ComputeConfig = ComputeConfig()
    lora: AdapterConfig | None = None
    """Train low-rank adapters alone. The model that is left has them merged."""

    group: RankConfig = RankConfig()

    @model_validator(mode="after")
    def _check_parallel(self) -> ChatConfig:
        self.parallel.layout(self.group.rank_count)
        return self

    @property
    def model_dir(self) -> Path:
        """Where the trained model is left."""
        return self.run_dir / "model"

    @property
    def adapter_dir(self) -> Path:
        """Where adapters are left by themselves."""
        return self.run_dir / "adapter"

    @property
    def checkpoint_dir(self) -> Path:
        return self.run_dir / "checkpoints"

    @property
    def metrics_file(self) -> Path:
        return self.run_dir / "metrics.jsonl"
