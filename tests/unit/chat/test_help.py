"""What `slipstream sft` says of its own sections."""

from __future__ import annotations

import pytest

from slipstream.common.config_help import help_text
from slipstream.launcher.chat import PROGRAM, ChatRunConfig, asked_for


@pytest.mark.parametrize("section", ["data", "start", "training", "optim", "checkpoint", "data.train"])
def test_help_with_a_section_that_only_fine_tuning_has_is_that_of_fine_tuning(section):
    assert asked_for(["--help", section])
    assert section.rpartition(".")[2] in help_text(ChatRunConfig, PROGRAM, section)


def test_help_with_other_sections_is_that_of_runs():
    assert not asked_for(["--help"])
    assert not asked_for(["--help", "trainer"])


def test_keys_of_sections_without_a_default_are_told_as_required():
    assert "required" in help_text(ChatRunConfig, PROGRAM, "data")
