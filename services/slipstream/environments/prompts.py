"""What a model is shown of a task: the environment's text, as it is or as a user's message of a chat."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from slipstream.common.config import ConfigError
from slipstream.environments.base import Environment, Task
from slipstream.environments.chat_template import ChatTemplate
from slipstream.environments.config_base import BaseEnvironmentConfig


class Prompts:
    """Of one model and the environments of a run."""

    def __init__(self, configs: Iterable[BaseEnvironmentConfig], model_dir: Path | None) -> None:
        """`model_dir`: None for a random start. Raises `ConfigError` where a chat is asked of a model without one."""
        self._chat = {config.name: config for config in configs if config.chat}
        self._template: ChatTemplate | None = None
        if self._chat:
            where = f"environments.{next(iter(self._chat))}: chat is true"
            if model_dir is None:
                raise ConfigError(f"{where}, and a random start has no chat template; it takes trainer.initial_model")
            try:
                self._template = ChatTemplate.load(model_dir)
            except ConfigError as error:
                raise ConfigError(f"{where}, and {error}") from None

    def text(self, environment: Environment, task: Task) -> str:
        """The prompt of a task."""
        return self.shown(environment.name, environment.prompt(task))

    def shown(self, name: str, text: str) -> str:
        """A text of the environment of that name."""
        if name not in self._chat or self._template is None:
            return text
        system = self._chat[name].system
        messages = [{"role": "system", "content": system}] if system else []
        return self._template.prompt([*messages, {"role": "user", "content": text}])
