"""`slipstream rollouts`, and what the report shows of them."""

from __future__ import annotations

import json
import zlib
from io import StringIO
from pathlib import Path

import pytest

from slipstream.environments.tokenizer import TextCodec, build_tokenizer
from slipstream.launcher.cli import main
from slipstream.launcher.report import write_report
from slipstream.launcher.report_rollouts import extremes_of
from slipstream.launcher.rundir import RunDir

CODEC = TextCodec(build_tokenizer())


def rollout(position: int, sample: int = 0, attempt: int = 1, **fields: object) -> dict[str, object]:
    prompt, answer = CODEC.encode("sun\n"), [*CODEC.encode("nus"), CODEC.end_id]
    return {
        "time_s": 1000.0 + position,
        "group_id": f"train-{position}",
        "attempt": attempt,
        "sample": sample,
        "purpose": "training",
        "environment": "spell",
        "task_index": position * 10,
        "dispatch_version": "1.0",
        "prompt": "sun\n",
        "completion": f"answer {position}",
        "reward": position / 10,
        "correct": position == 4,
        "finish_reason": "stop",
        "turns": 1,
        "versions": [[3, "1.0"], [1, "1.1"]] if position == 2 else [[4, "1.0"]],
        "loss_ranges": [[4, 8]],
        "prompt_token_count": 4,
        "token_ids": [*prompt, *answer],
        "timings": {"queue_s": 0.1, "total_s": 10.0 - position},
        **fields,
    }


def journal_line(number: int, kind: str, **fields: object) -> bytes:
    body = json.dumps({"n": number, "kind": kind, "time_s": 1.0, **fields}, separators=(",", ":")).encode()
    return b"%08x %b\n" % (zlib.crc32(body), body)


@pytest.fixture
def run(tmp_path: Path, monkeypatch, write_rollouts) -> Path:
    """Five groups: 0 filtered, 1 aged out, 2 and 3 trained, 4 waiting; and one rollout of an evaluation."""
    path = tmp_path / "runs" / "recorded"
    path.mkdir(parents=True)
    (path / "config.toml").write_text("")
    records = [rollout(position, sample) for position in range(5) for sample in range(2)]
    write_rollouts(path / "rollouts" / "runner-1.jsonl.zst", records)
    asked = rollout(9, purpose="evaluation", group_id="before-spell-0", reward=0.9, completion="\x1b[31mred <b>")
    write_rollouts(path / "rollouts" / "runner-1.evaluation.jsonl.zst", [asked])
    (path / "journal").mkdir()
    (path / "journal" / "journal.jsonl").write_bytes(
        journal_line(0, "acquired", position=0, attempt=1)
        + journal_line(1, "ended", position=0, attempt=1, outcome="filtered", reason="NO_VARIANCE")
        + journal_line(2, "regenerated", position=1, attempt=1, outcome="aged_out")
        + journal_line(
            3, "sealed", step=3, positions=[2, 3], attempts=[1, 1], dispatch_steps=[0, 2], plans=["x" * 5000]
        )
        + journal_line(4, "trained", step=3)
        + b'deadbeef {"n":5,"kind":"sea'
    )
    monkeypatch.chdir(tmp_path)
    return path


def shown(capsys, *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(["rollouts", *arguments])
    printed = capsys.readouterr()
    return int(ended.value.code or 0), printed.out, printed.err


def names(capsys, *arguments: str) -> list[str]:
    code, out, err = shown(capsys, *arguments, "--json")
    assert code == 0, err
    return [json.loads(line)["rollout"] for line in out.splitlines()]


def test_the_table_is_plain_in_a_pipe_and_shows_what_became_of_each(run, capsys):
    code, out, _ = shown(capsys)
    assert code == 0
    assert "\x1b" not in out
    lines = {line.split()[0]: line for line in out.splitlines()}
    assert len(lines) == 12
    assert "filtered" in lines["train-0.1.0"]
    assert "aged_out" in lines["train-1.1.0"]
    assert "trained" in lines["train-2.1.1"]
    assert "1.0-1.1" in lines["train-2.1.1"]
    assert "waiting" in lines["train-4.1.0"]
    assert "0.4 ✓" in lines["train-4.1.0"]
    assert r"\x1b[31mred <b>" in lines["before-spell-0.1.0"]
    assert out.splitlines()[1].startswith("before-spell-0"), "the newest first"


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (("--outcome", "trained"), {2, 3}),
        (("--outcome=right",), {4}),
        (("--step", "3", "--reward", "0.3:"), {3}),
        (("--reward=0.1:0.2",), {1, 2}),
        (("--reward", "0.4"), {4}),
        (("--version", "1.1"), {2}),
        (("--group", "train-1"), {1}),
        (("--text", "ANSWER 3"), {3}),
        (("--environment", "other"), set()),
        (("--purpose", "training", "--outcome", "waiting"), {4}),
    ],
)
def test_filters_take_what_is_asked_for(run, capsys, arguments, wanted):
    found = names(capsys, "recorded", *arguments, "--limit", "0")
    assert sorted(found) == sorted(f"train-{position}.1.{sample}" for position in wanted for sample in range(2))


def test_sorting_and_the_limit(run, capsys):
    assert names(capsys, "--sort", "reward", "--limit", "1") == ["before-spell-0.1.0"]
    assert names(capsys, "--sort", "-seconds", "--limit", "2", "--purpose", "training") == [
        "train-4.1.0",
        "train-3.1.0",
    ]
    by_lag = names(capsys, "--sort", "lag", "--limit", "0")
    assert by_lag[:4] == ["train-2.1.0", "train-2.1.1", "train-3.1.0", "train-3.1.1"]
    assert names(capsys, "--sort", "-lag", "--limit", "2", "--per-group", "0") == ["train-3.1.0", "train-3.1.1"]


def test_a_sorted_table_has_one_rollout_of_each_group_unless_told(run, capsys):
    firsts = ["before-spell-0.1.0", *(f"train-{position}.1.0" for position in (4, 3, 2, 1, 0))]
    assert names(capsys, "--sort", "reward") == firsts
    assert names(capsys, "--sort", "reward", "--limit", "2") == firsts[:2], "also where more are read than are shown"
    assert names(capsys, "--sort=-reward", "--limit", "2") == firsts[:-3:-1]
    assert names(capsys, "--sort", "reward", "--per-group", "2", "--limit", "4") == [
        *("before-spell-0.1.0", "train-4.1.0", "train-4.1.1", "train-3.1.0"),
    ]
    assert names(capsys, "--per-group", "1")[:2] == firsts[:2]
    for all_of_them in (("--sort", "reward", "--per-group=0"), ("--sort", "reward", "--limit", "0"), ()):
        assert len(names(capsys, *all_of_them)) == 11
    assert len(names(capsys, "--sort", "reward", "--group", "train-3")) == 2


def test_the_best_of_each_group_is_found_however_many_there_are(run, capsys, write_rollouts):
    rewards = {(position, sample): (position * 7 + sample * 3) % 50 for position in range(60) for sample in range(5)}
    many = [rollout(position, sample, reward=reward) for (position, sample), reward in rewards.items()]
    write_rollouts(run / "rollouts" / "runner-1.jsonl.zst", many)
    best = sorted((max(rewards[position, sample] for sample in range(5)) for position in range(60)), reverse=True)
    _, out, _ = shown(capsys, "--sort", "reward", "--limit", "9", "--purpose", "training", "--json")
    records = [json.loads(line) for line in out.splitlines()]
    assert [record["reward"] for record in records] == best[:9]
    assert len({record["group_id"] for record in records}) == 9


def test_the_table_says_that_it_leaves_out_what_is_of_the_same_group(run, capsys):
    said = "one of each group; --per-group 0 shows all\n"
    assert shown(capsys, "--sort", "reward")[2] == said
    for told in ((), ("--sort", "reward", "--per-group", "1"), ("--sort", "reward", "--limit", "0")):
        assert shown(capsys, *told)[2] == ""


def test_records_for_programs_are_whole(run, capsys):
    _, out, _ = shown(capsys, "--show", "train-2.1.1", "--json")
    record = json.loads(out)
    assert (record["step"], record["lag"], record["outcome"], record["tokens"]) == (3, 2, "trained", 4)
    assert record["token_ids"] == rollout(2)["token_ids"]


def test_one_rollout_whole_names_the_version_of_each_piece(run, capsys):
    (run / "model").mkdir()
    build_tokenizer().save(str(run / "model" / "tokenizer.json"))
    code, out, _ = shown(capsys, "--show", "train-2.1.0")
    assert code == 0
    assert out.endswith("sun\n[1.0]nus[1.1]<|end|>\n")
    assert "trained at step 3, 2 versions behind" in out
    assert "1.0 (3), 1.1 (1)" in out
    assert "\x1b" not in out


def test_all_samples_of_an_episode_are_shown(run, capsys, write_rollouts):
    (run / "model").mkdir()
    build_tokenizer().save(str(run / "model" / "tokenizer.json"))
    further = {**rollout(7), "versions": [[4, "1.2"]]}
    episode = rollout(7, turns=2, further_samples=[further])
    write_rollouts(run / "rollouts" / "runner-2.jsonl.zst", [episode])
    assert names(capsys, "--version", "1.2") == ["train-7.1.0"]
    _, out, _ = shown(capsys, "--show", "train-7.1.0")
    assert out.endswith("sun\n[1.0]nus<|end|>\n\nsample 2, from other tokens on:\nsun\n[1.2]nus<|end|>\n")
    assert "8 sampled in 2 turns" in out
    assert "1.0 (4), 1.2 (4)" in out


def test_without_a_tokenizer_the_text_is_shown(run, capsys):
    _, out, _ = shown(capsys, "--show", "before-spell-0.1.0")
    assert out.endswith("sun\n\n\\x1b[31mred <b>\n")


def test_colours_are_those_of_versions(run):
    from rich.console import Console

    from slipstream.launcher.rollout_view import decoder, view_of

    (run / "model").mkdir()
    build_tokenizer().save(str(run / "model" / "tokenizer.json"))
    record = {**rollout(2), "rollout": "train-2.1.0", "outcome": "waiting", "tokens": 4, "seconds": 1.0}
    text = view_of(record, decoder(run / "model"), colours=True)
    assert str(text).endswith("sun\nnus<|end|>\n")
    styled = {str(text)[span.start : span.end]: str(span.style) for span in text.spans}
    assert styled["nus"] != styled["<|end|>"]
    assert (styled["sun\n"], styled["1.0 (3)"]) == ("dim", styled["nus"])
    printed = {}
    for no_color in (True, False):
        file = StringIO()
        Console(file=file, force_terminal=True, no_color=no_color, color_system="standard").print(text)
        printed[no_color] = file.getvalue()
    assert ("\x1b[36mnus" in printed[False], "\x1b[36m" in printed[True]) == (True, False)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--outcome", "late"), "'late' is none of trained"),
        (("--reward", "good"), "'good' is no number and no range"),
        (("--reward", "2:1"), "'2:1' is no number and no range"),
        (("--sort", "colour"), "'colour' is none of time"),
        (("--limit", "-1"), "--limit takes a number"),
        (("--per-group", "few"), "--per-group takes a number, not 'few'"),
        (("--version", "12"), "--version takes a version such as 1.12, incarnation and step, not '12'"),
        (("--show",), "--show takes a value"),
        (("--outcom", "trained"), "did you mean --outcome?"),
        (("--show", "train-2"), "no rollout called train-2; it has train-2.1.0, train-2.1.1"),
        (("nowhere",), "no run called nowhere"),
    ],
)
def test_mistakes_are_told_in_one_line(run, capsys, arguments, sentence):
    code, out, err = shown(capsys, *arguments)
    assert (code, out) == (2, "")
    assert sentence in err
    assert len(err.splitlines()) == 1


def test_a_run_without_rollouts_says_so(run, capsys):
    for path in (run / "rollouts").iterdir():
        path.unlink()
    assert shown(capsys)[:2] == (0, "recorded: no rollouts yet\n")


def test_the_report_shows_the_best_the_worst_and_the_most_delayed(run):
    page = write_report(RunDir(run)).read_text()
    best, worst, delayed = (
        page.index(f"{title}</figcaption>") for title in ("The best rewards", "The worst rewards", "The most delayed")
    )
    assert best < page.index("train-4.1.0") < worst < page.index("train-0.1.0") < delayed
    assert delayed < page.index("trained at step 3, lag 2", delayed) < page.index("train-0.1.0", delayed)
    assert "before-spell" not in page[best:]


def test_the_rollout_of_a_session_is_shown_by_the_sessions_id_too(run, capsys, write_rollouts):
    session = rollout(8, environment="", session_id="session-1", completion="of the agent")
    write_rollouts(run / "rollouts" / "runner-2.jsonl.zst", [session])
    code, whole, _ = shown(capsys, "--show", "session-1")
    assert code == 0
    assert "session-1, of an outside agent" in whole
    assert shown(capsys, "--show", "train-8.1.0")[1] == whole


def test_the_best_are_of_different_groups_and_equal_rewards_have_no_worst():
    def named(position: int, sample: int, reward: float) -> dict[str, object]:
        return rollout(position, sample, rollout=f"{position}.{sample}", reward=reward)

    alike = extremes_of(named(position, sample, 0.5) for position in range(6) for sample in range(4))
    assert [record["rollout"] for record in alike.best] == ["5.0", "4.0", "3.0", "2.0"]
    assert alike.worst == []
    mixed = extremes_of(named(position, sample, float(sample)) for position in range(2) for sample in range(4))
    assert [record["rollout"] for record in mixed.best] == ["1.3", "0.3", "1.2", "0.2"]
    assert [record["rollout"] for record in mixed.worst] == ["1.0", "0.0", "1.1", "0.1"]


def test_the_most_delayed_are_of_different_groups():
    delays = {0: (2, 1.0), 1: (1, 9.0), 2: (2, 3.0), 3: (0, 20.0), 4: (1, 2.0)}
    found = extremes_of(
        rollout(position, sample, rollout=f"{position}.{sample}", lag=lag, seconds=seconds)
        for position, (lag, seconds) in delays.items()
        for sample in range(4)
    )
    assert [record["rollout"] for record in found.delayed] == ["2.0", "0.0", "1.0", "4.0"]


def test_roles_are_shown_with_their_rewards(run, capsys, write_rollouts):
    roles = [
        {"role": "white", "reward": 1.0, "correct": True},
        {"role": "bl\x1back", "reward": -0.5, "untrained": True},
    ]
    further = [{**{name: rollout(7)[name] for name in ("token_ids", "loss_ranges", "versions")}, "role": "bl\x1back"}]
    duel = rollout(7, group_id="train-duel", role="white", roles=roles, further_samples=further)
    write_rollouts(run / "rollouts" / "runner-2.jsonl.zst", [duel])
    _, table, _ = shown(capsys, "--group", "train-duel")
    assert r"0.7 (white 1 ✓, bl\x1back -0.5 untrained)" in table
    _, whole, _ = shown(capsys, "--show", "train-duel.1.0")
    assert "sample 1, as white:" in whole
    assert r"sample 2, as bl\x1back, from other tokens on:" in whole
    assert r"white 1 ✓, bl\x1back -0.5 untrained" in whole
    write_report(RunDir(run))
    assert "as white 1<br>" in (run / "report.html").read_text()


@pytest.mark.parametrize("options", [(), ("--sort", "-tokens"), ("--step", "0:", "--reward", "0:1")])
@pytest.mark.parametrize(
    ("field", "value"),
    [("attempt", float("nan")), ("attempt", float("inf")), ("reward", 10**400), ("time_s", 10**400),
     ("versions", [[10**400, "1.0"]])],
)  # fmt: skip
def test_a_number_that_is_none_is_of_no_rollout(run, capsys, write_rollouts, field, value, options):
    write_rollouts(run / "rollouts" / "runner-2.jsonl.zst", [rollout(8, **{field: value})])
    code, out, err = shown(capsys, *options)
    assert (code, "train-8" in out) == (0, False)
    assert "note: 1 record is of no rollout, and left out" in err


def test_half_a_character_is_written_out(run, capfd, write_rollouts):
    half = rollout(8, completion="nu\ud800s", detail="\udfff", environment="sp\ud800")
    half.pop("token_ids")
    write_rollouts(run / "rollouts" / "runner-2.jsonl.zst", [half])
    code, out, err = shown(capfd)
    assert code == 0, err
    assert r"nu\xd800s" in out
    code, out, err = shown(capfd, "--show", "train-8.1.0")
    assert code == 0, err
    assert r"nu\xd800s" in out
    assert r"\xdfff" in out


def test_what_cannot_be_read_is_left_out_and_told(run, capsys, write_rollouts):
    path = run / "rollouts" / "runner-1.jsonl.zst"
    whole = path.read_bytes()
    strange = {
        "reward": "high",
        "versions": [4, "1.0"],
        "timings": {"total_s": None},
        "roles": ["white"],
        "group_id": 5,
    }
    records = [rollout(8, **{name: value}) for name, value in strange.items()]
    write_rollouts(run / "rollouts" / "runner-2.jsonl.zst", [*records, rollout(8)])
    path.write_bytes(b"damaged" + whole)
    code, out, err = shown(capsys, "--limit", "0", "--json")
    assert (code, len(out.splitlines())) == (0, 12)
    assert err.splitlines() == [
        f"note: {path}: 7 bytes are damaged or half-written, and left out",
        "note: 5 records are of no rollout, and left out",
    ]
    path.write_bytes(b"damaged")
    _, _, err = shown(capsys, "--show", "train-2.1.0")
    assert "has no rollout called train-2.1.0" in err
    assert "7 bytes are damaged" in err
    assert write_report(RunDir(run)).exists()
