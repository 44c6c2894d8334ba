"""Whether a teacher can judge what this run samples, token by token. Imports no torch."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer

from slipstream.common.config import ConfigError
from slipstream.environments.tokenizer import TOKENIZER_FILE, build_tokenizer
from slipstream.models.base import Sizes
from slipstream.models.teachers import Bounds, bounds_on_vllm, sizes_of_teacher
from slipstream.trainer.config import TrainerConfig
from slipstream.trainer.model_dir import require_model_dir, sizes_at_start

WHERE = "trainer.loss.teacher"


def teacher_sizes(config: TrainerConfig, teacher: Path, where: str = WHERE) -> Sizes:
    """Sizes of the teacher in this model directory, which we compute ourselves.

    Raises `ConfigError`, which begins with `where`, for one that is not whole, has other tokens, or a shorter context.
    """
    where = f"{where} {str(teacher)!r}"
    require_model_dir(teacher, where)
    try:
        sizes = sizes_of_teacher(teacher, config.model.architecture)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None
    _compare(config, teacher, Bounds(sizes.vocab_size, sizes.max_context_tokens), where)
    return sizes


def check_teacher_on_vllm(config: TrainerConfig, teacher: Path, where: str = WHERE) -> None:
    """The same of one that vLLM computes, of whatever architecture."""
    where = f"{where} {str(teacher)!r}"
    require_model_dir(teacher, where)
    try:
        bounds = bounds_on_vllm(teacher)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None
    _compare(config, teacher, bounds, where)


def _compare(config: TrainerConfig, teacher: Path, bounds: Bounds, where: str) -> None:
    student = sizes_at_start(config)
    if bounds.max_context_tokens < student.max_context_tokens:
        raise ConfigError(
            f"{where} has a context of {bounds.max_context_tokens} tokens; the run's is {student.max_context_tokens}"
        )
    if 0 < bounds.vocab_size < student.vocab_size:  # some pad theirs: what is beyond it could not be looked up
        raise ConfigError(f"{where} has a vocabulary of {bounds.vocab_size} tokens; the run's is {student.vocab_size}")
    try:
        same = _tokens(teacher) == _tokens(config.initial_model)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None
    if not same:
        raise ConfigError(f"{where} has another tokenizer than the run: its tokens could not be compared")


def _tokens(model_dir: Path | None) -> dict[str, int]:
    """Ids by token; of the built-in tokenizer without a directory."""
    if model_dir is None:
        return build_tokenizer().get_vocab()
    file = model_dir / TOKENIZER_FILE
    try:
        return Tokenizer.from_file(str(file)).get_vocab()
    except Exception as error:  # tokenizers raises no narrower one
        raise ConfigError(f"{file} cannot be read: {error}") from None
