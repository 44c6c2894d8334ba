"""Configuration of trackers: `[[orchestrator.tracking]]`, one table each, chosen by `type`. Imports none of them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from slipstream.common.config import BaseConfig


class TrackerConfig(BaseConfig):
    """What all trackers have."""

    MODULE: ClassVar[str]
    """What must be installed; also the name of the extra."""

    queue_records: int = Field(default=256, ge=1)
    """Records that may wait for a slow tracker; more are dropped and counted."""

    finish_timeout_s: float = Field(default=3.0, ge=0)
    """How long the end of the run waits for records that are still on their way."""


class TensorBoardConfig(TrackerConfig):
    """Event files for TensorBoard."""

    MODULE = "tensorboard"
    type: Literal["tensorboard"] = "tensorboard"

    directory: Path | None = None
    """Where they are written. Unset means `tensorboard/` in the run directory."""


class WandbConfig(TrackerConfig):
    """Weights & Biases. The library finds the key itself, in `WANDB_API_KEY` or where `wandb login` left it."""

    MODULE = "wandb"
    type: Literal["wandb"] = "wandb"

    project: str = Field(default="slipstream", min_length=1)
    entity: str | None = None
    """Team or user; unset takes the account's own."""

    name: str | None = None
    """Of the run there; unset means the run's own."""

    mode: Literal["online", "offline"] = "online"
    """`offline` writes files into the run directory, for `wandb sync`."""


class TrackioConfig(TrackerConfig):
    """trackio: a local database (the library's, in its cache directory), or a Hugging Face Space."""

    MODULE = "trackio"
    type: Literal["trackio"] = "trackio"

    project: str = Field(default="slipstream", min_length=1)
    name: str | None = None
    """Of the run there; unset means the run's own."""

    space_id: str | None = None
    """`owner/space` to send it to; unset keeps it here."""


AnyTracker = Annotated[TensorBoardConfig | WandbConfig | TrackioConfig, Field(discriminator="type")]
