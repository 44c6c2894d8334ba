"""Environments that cannot work are found before anything starts."""

# ruff: noqa: E501 tables with one case a line
from __future__ import annotations

from pathlib import Path

import pytest

from slipstream.environments.config import ExpressionConfig, ImportedConfig, SpellBackwardConfig
from slipstream.environments.config_renderer import FamilyConfig, TemplateConfig
from slipstream.environments.tokenizer import TextCodec, build_tokenizer
from slipstream.launcher.cli import main
from slipstream.launcher.environment_probe import probe, probe_renderer
from tests.unit.chat.families import renderer_of, tokenizer_of

MODULE = """
class Good:
    def __init__(self, config, seed): self.name = config.name
    def task(self, split, index): return index
    def prompt(self, task): return "what?"
    async def score(self, task, completions, tools): return []
    def demonstration(self, index, *, validation=False): return ("what?", "that")

class Blocking(Good):
    def score(self, task, completions, tools): return []

class Wordy(Good):
    def prompt(self, task): return "x" * 60

class Silent(Good):
    def demonstration(self, index, *, validation=False): return None

class Untaught(Good):
    def demonstration(self, index, *, validation=False): return "an answer"

class Nameless(Good):
    def prompt(self, task): return None

class Broken(Good):
    def __init__(self, config, seed): raise RuntimeError("no data\\nhere")

class Other:
    def __init__(self, config, seed): pass

CONSTANT = 5
"""


@pytest.fixture(autouse=True)
def _module(tmp_path, monkeypatch):
    (tmp_path / "probed_environments.py").write_text(MODULE)
    (tmp_path / "ends_everything.py").write_text("import os, sys\nprint('goodbye', file=sys.stderr)\nos._exit(3)\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))


def judged(config, *, context_tokens=64, demonstrations=True):
    codec = TextCodec(build_tokenizer())
    return probe([config], 0, codec=codec, context_tokens=context_tokens, demonstrations=demonstrations)


def imported(name: str) -> ImportedConfig:
    return ImportedConfig(name="mine", path=f"probed_environments:{name}")


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("Missing", "cannot import 'probed_environments:Missing'"),
        ("CONSTANT", "is not callable"),
        ("Other", "gives a Other, which is no Environment: it has no task, prompt, score, demonstration"),
        ("Blocking", "score must be an `async def`"),
        ("Broken", "fails with RuntimeError: no data"),
        ("Nameless", "prompt gives None, which is no text"),
        ("Wordy", "a prompt of 60 tokens and max_new_tokens = 10 exceed the model's context of 64 tokens"),
        ("Silent", "set its demonstration_weight = 0, or sft.enabled = false"),
        ("Untaught", "demonstration gives 'an answer', which is no pair"),
    ],
)
def test_what_is_wrong_with_an_environment_is_said(name, says):
    ((environment, sentence),) = judged(imported(name))
    assert environment == "mine"
    assert says in sentence


def test_environments_that_work_pass():
    assert judged(imported("Good")) == []
    assert judged(imported("Silent"), demonstrations=False) == []
    assert judged(ExpressionConfig()) == []
    assert judged(SpellBackwardConfig()) == []


def test_a_context_too_short_for_a_built_in_prompt_is_found():
    ((_, sentence),) = judged(SpellBackwardConfig(), context_tokens=16)
    assert "exceed the model's context of 16 tokens" in sentence


def test_words_that_are_all_held_out_are_found():
    ((_, sentence),) = judged(SpellBackwardConfig(evaluation_task_count=1_000_000))
    assert "no word is left to train on" in sentence


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("no_such_module:Thing", "x.toml: environments.mine: cannot import 'no_such_module:Thing': No module named"),
        ("ends_everything:Thing", "x.toml: environments: ends_everything:Thing end the process that builds them, exit code 3: goodbye"),
    ],
)  # fmt: skip
def test_code_that_does_anything_ends_the_command_with_one_line(path, says, capsys):
    Path("x.toml").write_text(f'[[environments]]\ntype = "import"\nname = "mine"\npath = "{path}"\n')
    with pytest.raises(SystemExit) as caught:
        main(["rl", "@", "x.toml"])
    error = capsys.readouterr().err
    assert caught.value.code == 2
    assert error.startswith(f"error: {says}")
    assert error.count("\n") == 1
    assert not Path("runs").exists()


ALGORITHMS = """
import os, sys

def greedy(members): return members.rewards
def few(members): return [1.0]
def ends(tokens, totals): print("goodbye", file=sys.stderr); os._exit(3)
def nothing(tokens, totals): return None
"""


@pytest.mark.parametrize(
    ("section", "path", "says"),
    [
        ("orchestrator.advantage", "own:few", "own:few returned [1.0] for 4 members"),
        ("orchestrator.advantage", "own:greed", "cannot import 'own:greed': module 'own' has no attribute 'greed'"),
        (
            "trainer.loss",
            "own:nothing",
            "own:nothing fails with TypeError: own:nothing returns NoneType, not LossTerms",
        ),
        ("trainer.loss", "own:ends", "own:ends end the process that builds them, exit code 3: goodbye"),
    ],
)
def test_a_loss_or_advantages_that_cannot_be_used_are_found_before_the_start(section, path, says, capsys):
    Path("own.py").write_text(ALGORITHMS)
    text = f'[[environments]]\ntype = "expression"\n[{section}]\ntype = "import"\npath = "{path}"\n'
    Path("x.toml").write_text(text)
    with pytest.raises(SystemExit) as caught:
        main(["rl", "@", "x.toml", "--dry-run"])
    assert caught.value.code == 2
    assert capsys.readouterr().err == f"error: x.toml: {section}.path: {says}\n"


def test_a_teacher_that_is_none_is_found_before_the_start(capsys):
    text = '[[environments]]\ntype = "expression"\n[trainer.loss]\ntype = "distillation"\nteacher = "nowhere"\n'
    Path("x.toml").write_text(text)
    with pytest.raises(SystemExit) as caught:
        main(["rl", "@", "x.toml", "--dry-run"])
    assert caught.value.code == 2
    assert capsys.readouterr().err.startswith("error: x.toml: trainer.loss.teacher 'nowhere' is no directory")


def test_a_renderer_that_cannot_be_is_found_before_anything_starts(tmp_path):
    codec = renderer_of("qwen3").codec
    family = FamilyConfig(family="kimi-k2")
    assert probe_renderer(TemplateConfig(), codec, None) == ""
    assert "takes trainer.initial_model" in probe_renderer(family, codec, None)
    tokenizer_of("qwen3").save(str(tmp_path / "tokenizer.json"))
    assert "the model's tokenizer is not that of kimi-k2" in probe_renderer(family, codec, tmp_path)
    assert probe_renderer(FamilyConfig(family="qwen3"), codec, tmp_path) == ""
