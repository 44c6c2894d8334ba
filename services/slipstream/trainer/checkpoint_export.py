"""Write a checkpoint's weights as a model directory, `checkpoints/exported/<version>/`, unless it is there.

    python -m slipstream.trainer.checkpoint_export @ RUN/configs/trainer.toml --version 1.20

`slipstream eval RUN --checkpoint STEP` calls it. Adapters are merged; one process reads what any ranks wrote.
"""

from __future__ import annotations

import shutil
import sys

import torch

from slipstream.common.config import ConfigError, load_config, parse_arguments
from slipstream.common.disk import name_directory, replace_file, sync_directory
from slipstream.common.errors import SlipstreamError
from slipstream.common.exits import FAILED, REFUSED, end
from slipstream.common.version import PolicyVersion
from slipstream.environments.tokenizer import CHAT_FILES, TOKENIZER_FILE
from slipstream.models.checkpoint import save_tensors, to_hf
from slipstream.models.registry import find_architecture, load_sizes
from slipstream.trainer.checkpoint_state import load_weights
from slipstream.trainer.checkpoint_store import CheckpointStore
from slipstream.trainer.config import TrainerConfig
from slipstream.trainer.start import extended


def export(config: TrainerConfig, version: PolicyVersion) -> None:
    """Write it, unless it is there. Raises `SlipstreamError` or `ConfigError`."""
    root = config.run_dir / "checkpoints"
    target, scratch = root / "exported" / str(version), root / "exported" / f".writing-{version}"
    if target.exists():
        return
    saved = CheckpointStore(root).whole(version)
    sizes = load_sizes(config.model_dir)
    model = extended(config, find_architecture(sizes.architecture).build_model(sizes))
    with torch.no_grad():
        load_weights(model, saved.path)
        shutil.rmtree(scratch, ignore_errors=True)
        save_tensors(model.sizes, to_hf(model), scratch)
    for name in (TOKENIZER_FILE, *CHAT_FILES):
        if (config.model_dir / name).is_file():
            replace_file(scratch / name, (config.model_dir / name).read_bytes())
    name_directory(scratch, target)
    sync_directory(root)  # it may be the first that is exported


def main() -> None:
    *arguments, flag, version = sys.argv[1:]
    if flag != "--version":
        end(REFUSED, "usage: python -m slipstream.trainer.checkpoint_export @ FILE --version VERSION")
    try:
        given = parse_arguments(arguments)
        config = load_config(TrainerConfig, given.files, given.overrides)
        torch.set_num_threads(config.torch_threads)
        export(config, PolicyVersion.parse(version))
    except ConfigError as error:
        end(REFUSED, str(error))
    except (SlipstreamError, OSError) as error:
        end(FAILED, str(error))


if __name__ == "__main__":
    main()
