"""A game of the real textarena, played by scripts."""

from __future__ import annotations

import re
from collections.abc import Sequence

import pytest
from conversations import Says, play, play_roles, says

from slipstream.common.config import ConfigError
from slipstream.environments.config_adapters import TextArenaConfig
from slipstream.environments.limits import Cut
from slipstream.environments.messages import Message
from slipstream.environments.textarena import CUT_SENTENCES, TextArena

NUMBER = {"game": "GuessTheNumber-v0", "evaluation_task_count": 4}


def game(**fields: object) -> TextArena:
    return TextArena(TextArenaConfig.model_validate({**NUMBER, **fields}), 5)


def halves(history: Sequence[Message]) -> Message:
    """Finds a number from 1 to 20 by what it was told so far."""
    low, high = 1, 20
    for said, heard in zip(history[1::2], history[2::2], strict=False):
        guess = int(re.findall(r"\d+", said.content)[0])
        low, high = (guess + 1, high) if "higher" in heard.content else (low, guess - 1)
    return Message("assistant", f"I say [{(low + high) // 2}].")


async def test_a_game_that_is_won_earns_its_reward() -> None:
    played = await play(game(), halves)
    assert (played.score.reward, played.score.correct) == (1.0, True)
    assert "between 1 and 20" in played.history[0].content
    # The model is told what is new, and not what it said itself.
    assert all(re.search("higher|lower", m.content) and "I say" not in m.content for m in played.history[2::2])


async def test_a_game_that_is_lost_earns_less() -> None:
    lost = await play(game(), says("I do not know."))
    assert lost.score.reward < 1.0
    assert not lost.score.correct


@pytest.mark.parametrize("why", ["context", "turns", "tokens"])
async def test_a_game_that_a_limit_ends_says_so_and_pays_no_more_than_a_lost_one(why: Cut) -> None:
    cut = await play(game(), says("I say [3]."), max_turns=1, cut=why)
    assert (cut.score.reward, cut.score.correct, cut.score.detail) == (-1.0, False, CUT_SENTENCES[why])
    dear = await play(game(cut_reward=-3), says("I say [3]."), max_turns=1, cut=why)
    assert dear.score.reward == -3.0
    over = await play(game(options={"max_number": 1}), says("[1]"), cut=why)
    assert over.score.reward == 1.0
    # Of two, the one whose conversation is full is the one to move; the others' limits are those of both.
    both = await play_roles(noughts(), {FIRST: says("[0]"), SECOND: says("[4]")}, max_turns=1, cut=why)
    expected = {FIRST: 0.0 if why == "context" else -1.0, SECOND: -1.0}
    assert {role: each.reward for role, each in both.score.scores.items()} == expected
    assert both.score.scores[SECOND].detail == CUT_SENTENCES[why]
    assert both.score.scores[FIRST].detail == ("the game was not over" if why == "context" else CUT_SENTENCES[why])


async def test_rollouts_of_a_task_play_the_same_game_and_held_out_games_are_never_trained() -> None:
    one, other = await play(game(), halves, index=3), await play(game(), halves, index=3)
    assert one.history == other.history
    held_out = {game().task("held_out", index).payload["game"] for index in range(9)}
    trained = {game().task("train", index).payload["game"] for index in range(100)}
    assert len(held_out) == 4
    assert not held_out & trained


async def test_options_are_the_games_own() -> None:
    played = await play(game(options={"max_number": 7}), says("I do not know."), max_turns=1)
    assert "between 1 and 7" in played.history[0].content


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"game": "GuessTheNumbr-v0"}, "textarena has no game 'GuessTheNumbr-v0'; did you mean 'GuessTheNumber-v0'?"),
        ({"game": "TicTacToe-v0"}, "textarena cannot begin TicTacToe-v0 for one player"),
        ({"options": {"x": 1}}, "unexpected keyword argument 'x'"),
    ],
)
def test_a_game_that_cannot_be_played_is_refused(fields: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=r"^environments\.textarena: ") as caught:
        game(**fields)
    assert said in str(caught.value)


def noughts(**fields: object) -> TextArena:
    return game(game="TicTacToe-v0", players=2, **fields)


FIRST, SECOND = "player-0", "player-1"


async def test_two_players_see_what_the_other_did_and_have_a_reward_each() -> None:
    scripts = {FIRST: says("[0]", "[1]", "my move is [2]"), SECOND: says("[4]", "[5]")}
    played = await play_roles(noughts(), scripts)
    assert played.order == [FIRST, SECOND, FIRST, SECOND, FIRST]
    assert {role: (each.reward, each.correct) for role, each in played.score.scores.items()} == {
        FIRST: (1.0, True),
        SECOND: (-1.0, False),
    }
    heard = {role: "\n".join(m.content for m in messages[::2]) for role, messages in played.histories.items()}
    # Each is told its own rules and the other's moves, and its own moves are what it said.
    assert "You are Player 0" in heard[FIRST]
    assert "You are Player 0" not in heard[SECOND]
    assert "[player-1] [4]" in heard[FIRST]
    assert "[player-0] [0]" in heard[SECOND]
    assert "[player-0]" not in heard[FIRST]
    assert [m.content for m in played.histories[SECOND][1::2]] == ["[4]", "[5]"]


async def test_a_game_of_two_that_is_not_over_has_no_winner() -> None:
    played = await play_roles(noughts(), {FIRST: says("[0]"), SECOND: says("[4]")}, max_turns=2)
    assert [(each.reward, each.correct) for each in played.score.scores.values()] == [(-1.0, False)] * 2


def babbles(text: str) -> Says:
    """A model whose turn ends at its limit of tokens."""
    return lambda _: Message("assistant", text, stopped=False)


async def test_a_turn_that_is_cut_off_costs_as_much_as_an_illegal_move() -> None:
    illegal = await play_roles(noughts(), {FIRST: says("[4]"), SECOND: says("[9]")})
    assert illegal.order == [FIRST, SECOND, SECOND]  # textarena lets one pass
    # Whatever it begins with: a move that would win is none.
    babbled = await play_roles(noughts(), {FIRST: says("[4]"), SECOND: babbles("[0] and then")})
    assert babbled.order == [FIRST, SECOND]
    lost, scores = illegal.score.scores[SECOND], babbled.score.scores
    assert scores[SECOND].reward == lost.reward == -1.0
    assert "cut off" in scores[SECOND].detail
    assert (scores[FIRST].reward, scores[FIRST].correct) == (0.0, False)
    told = await play_roles(noughts(cut_reward=-2), {FIRST: babbles("[0]")})
    assert told.score.scores[FIRST].reward == -2.0
    # A number that is right, too.
    alone = await play(game(options={"max_number": 1}), babbles("[1]"))
    assert (alone.score.reward, alone.score.correct) == (-1.0, False)


async def test_an_opponent_plays_the_other_side_of_held_out_games() -> None:
    environment = noughts(opponent="slipstream.environments.opponents:random_move")
    assert environment.roles == (FIRST, SECOND)
    moves = says("[0]", "[1]", "[2]", "[3]", "[4]", "[5]", "[6]", "[7]", "[8]")
    first = await play_roles(environment, {FIRST: moves}, split="held_out")
    assert set(first.histories) == set(first.score.scores) == {FIRST}
    assert "Player 1 placed" in "".join(message.content for message in first.histories[FIRST])
    second = await play_roles(environment, {SECOND: says("[9]")}, split="held_out", index=1)
    assert set(second.score.scores) == {SECOND}
    assert second.score.scores[SECOND].reward == -1.0
    # The opponent's moves follow from the game's number: an episode that is begun again goes as before.
    again = await play_roles(environment, {SECOND: says("[9]")}, split="held_out", index=1)
    assert again.histories == second.histories
    trained = await play_roles(environment, {FIRST: says("[0]"), SECOND: says("[4]")}, max_turns=2)
    assert trained.order == [FIRST, SECOND]
    always = noughts(opponent="slipstream.environments.opponents:random_move", opponent_plays="all")
    assert set((await play_roles(always, {FIRST: says("[9]"), SECOND: says("[9]")})).histories) == {FIRST}


def test_an_opponent_of_one_player_is_refused() -> None:
    with pytest.raises(ValueError, match="a game for one player has none"):
        game(opponent="slipstream.environments.opponents:random_move")
