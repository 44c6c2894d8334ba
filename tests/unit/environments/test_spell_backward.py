"""Words spelled backward: who sees which word, and what the scorer lets pass."""

from __future__ import annotations

import pytest

from slipstream.environments.base import Completion, Score, Task
from slipstream.environments.config import SpellBackwardConfig
from slipstream.environments.spell_backward import SpellBackward
from slipstream.environments.tools import Tools

SEEDS = (0, 1, 2)


@pytest.fixture(scope="module", params=SEEDS)
def environment(request: pytest.FixtureRequest) -> SpellBackward:
    return SpellBackward(SpellBackwardConfig(), request.param)


def word_of(environment: SpellBackward, index: int) -> str:
    shown = environment.demonstration(index)
    assert shown is not None
    return shown[0].rpartition(": ")[2].strip()


def lower(words: list[str]) -> set[str]:
    return {word.lower() for word in words}


def test_held_out_validation_and_training_words_are_disjoint_whatever_their_case(environment: SpellBackward) -> None:
    sets = [lower(environment.held_out), lower(environment.validation), lower(environment.training)]
    assert [len(environment.held_out), len(environment.validation)] == [200, 100]
    assert len(set.union(*sets)) == sum(map(len, sets))


def test_tasks_and_demonstrations_stay_on_their_side_of_the_split(environment: SpellBackward) -> None:
    held_out, validation = lower(environment.held_out), lower(environment.validation)
    trained = {environment.task("train", index).payload["word"].lower() for index in range(2000)}
    shown = lower([word_of(environment, index) for index in range(2000)])
    assert min(len(trained), len(shown)) > 1000
    assert not (trained | shown) & (held_out | validation)
    asked = {environment.task("held_out", index).payload["word"] for index in range(400)}
    assert asked == set(environment.held_out)
    checked = [environment.demonstration(index, validation=True) for index in range(100)]
    assert {answer[::-1] for _, answer in filter(None, checked)} == set(environment.validation)


def test_demonstrations_have_short_words_and_as_many_long_ones_as_asked() -> None:
    environment = SpellBackward(SpellBackwardConfig(), 0)
    lengths = [len(word_of(environment, index)) for index in range(2000)]
    assert (min(lengths), max(lengths)) == (3, 8)
    never = SpellBackward(SpellBackwardConfig(long_demonstration_share=0, demonstration_word_len=5), 0)
    assert max(len(word_of(never, index)) for index in range(500)) == 5


def test_an_environment_is_a_pure_function_of_its_seed() -> None:
    first, again, other = (SpellBackward(SpellBackwardConfig(), seed) for seed in (5, 5, 6))
    for split in ("train", "held_out"):
        tasks = [[e.prompt(e.task(split, i)) for i in range(50)] for e in (first, again, other)]
        assert tasks[0] == tasks[1] != tasks[2]
    # Whatever was asked before.
    assert first.task("train", 3) == again.task("train", 3)
    assert [first.demonstration(i) for i in range(20)] == [again.demonstration(i) for i in reversed(range(20))][::-1]


async def score(answer: str, *, stopped: bool = True, exact_share: float = 0.5) -> Score:
    environment = SpellBackward(SpellBackwardConfig(exact_share=exact_share), 0)
    (result,) = await environment.score(
        Task("train", 0, {"word": "Strength"}), [Completion(answer, stopped)], Tools(None)
    )
    return result


@pytest.mark.parametrize("answer", ["htgnertS", "htgnerts", "HTGNERTS"])
async def test_the_right_letters_are_right_in_any_case(answer: str) -> None:
    assert await score(answer) == Score(1.0, True, "score 1.000")


@pytest.mark.parametrize("answer", ["htgnertS ", "htgnertS and more", "htgnertSS"])
async def test_junk_behind_a_right_answer_is_not_correct(answer: str) -> None:
    result = await score(answer)
    assert not result.correct
    assert 0 < result.reward <= 0.5


async def test_a_leading_space_shifts_every_letter() -> None:
    assert (await score(" htgnertS")).reward == 0


async def test_an_answer_without_an_end_token_earns_nothing() -> None:
    assert await score("htgnertS", stopped=False) == Score(0.0, False, "no end token")


async def test_part_of_the_reward_follows_the_letters() -> None:
    half = await score("htgnXXXX")
    assert (half.reward, half.correct) == (0.25, False)
    assert (await score("htgnXXXX", exact_share=1.0)).reward == 0
    assert (await score("")).reward == 0


def test_words_are_those_of_reasoning_gyms_dataset() -> None:
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)  # from a dependency of reasoning-gym
        from reasoning_gym.algorithmic.spell_backward import SpellBackwardConfig as DatasetConfig
        from reasoning_gym.algorithmic.spell_backward import SpellBackwardDataset

    theirs = SpellBackwardDataset(DatasetConfig(size=1, seed=0, min_word_len=3, max_word_len=8))
    ours = SpellBackward(SpellBackwardConfig(evaluation_task_count=0), 0)
    validation = lower(ours.validation)
    assert {*ours.validation, *ours.training} == {
        word for word in theirs.words if word.lower() not in validation or word in ours.validation
    }
    word = theirs[0]["metadata"]["word"]
    assert theirs[0]["question"] + "\n" == ours.prompt(Task("train", 0, {"word": word}))
