"""``spade envs`` as a person types it."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import msgspec
import pytest
from archive_fakes import GAMES, judged, played, run_with, source, written

from engine import cli


class Result(msgspec.Struct):
    code: int
    out: str
    err: str


class Spade(Protocol):
    def __call__(self, *arguments: object, stdin: str = "") -> Result: ...


@pytest.fixture
def spade(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Spade]:
    """Call the command in this process, beside a run of three environments; ``stdin`` comes by a pipe."""
    facts = [
        written(f"design-{at}", source(game), cohort=at, document=f"doc-{at}")
        for at, game in enumerate(GAMES[:3])
    ]
    plays = played(0, [fact.design for fact in facts])
    run_with(tmp_path / "runs", [*facts, *plays, judged(facts[0]), judged(facts[1], regret=0.05)])
    monkeypatch.chdir(tmp_path)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [])

    def call(*arguments: object, stdin: str = "") -> Result:
        capsys.readouterr()
        monkeypatch.setattr(sys, "argv", ["spade", "envs", *map(str, arguments)])
        ours, theirs = os.pipe()
        os.write(theirs, stdin.encode())
        os.close(theirs)
        with os.fdopen(ours) as piped:
            monkeypatch.setattr(sys, "stdin", piped)
            with pytest.raises(SystemExit) as caught:
                cli.main()
        printed = capsys.readouterr()
        return Result(int(caught.value.code or 0), printed.out, printed.err)

    yield call
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def ids(spade: Spade) -> list[str]:
    return [row["id"] for row in json.loads(spade("list", "--json").out)]


def test_list_shows_one_a_line(spade: Spade) -> None:
    result = spade("list", "--step", "..1", "--sort", "regret")
    lines = result.out.splitlines()
    assert result.code == 0
    assert [line.split()[0] for line in lines] == ["step", "0", "1"]
    assert "0.50 [0.20, 0.80]  0.25 [0.00, 0.50]" in lines[1]
    assert lines[1].endswith("Counting design-0")
    assert "2 of 3 environments" in result.err


def test_list_as_json_has_every_figure(spade: Spade) -> None:
    rows = json.loads(spade("list", "--json", "--min-regret", "0.1", "--run", "toy").out)
    assert [(row["step"], row["state"], row["regret_high"], row["document"]) for row in rows] == [
        (0, "frontier", 0.5, "doc-0")
    ]


def test_show_has_program_hint_plays_and_neighbours(spade: Spade) -> None:
    result = spade("show", ids(spade)[0][:6])
    assert result.code == 0
    for text in (
        "Counting design-0",
        "document          doc-0",
        "class ApplesEnv:",
        "hint: Count <i>up</i>.",
        "plain play of round 0, return 0.00",
        "hinted play",
        "most alike",
        ids(spade)[2],
    ):
        assert text in result.out
    assert "plain play" not in spade("show", ids(spade)[0], "--no-plays").out


def test_show_as_json_has_the_source(spade: Spade) -> None:
    shown = json.loads(spade("show", "design-2", "--json").out)
    assert shown["source"] == source(GAMES[2])
    assert (shown["state"], len(shown["plays"]), len(shown["neighbours"])) == ("open", 3, 2)


def test_play_goes_through_the_sandbox(spade: Spade) -> None:
    result = spade("play", "design-1", "--seed", 3, "--hint", stdin="0\n1\n2\n3\n:quit\n")
    assert result.code == 0, result.err
    assert result.out.startswith("hint: Count")
    assert "the rivers rivers of rivers number 0, which?" in result.out
    assert "end of the episode" in result.out


def test_export_says_how_many(spade: Spade) -> None:
    result = spade("export", "--to", "pool", "--state", "frontier")
    assert (result.code, result.out) == (0, "2 programs in pool\n")
    assert len(list(Path("pool").glob("*.py"))) == 2
    assert json.loads(Path("pool/manifest.json").read_text())["run"] == "toy"
    assert spade("export", "--to", "pool").code == 1


def test_diff_has_figures_and_lines(spade: Spade) -> None:
    result = spade("diff", "design-0", "design-1")
    assert "-class ApplesEnv:" in result.out
    assert "+class RiversEnv:" in result.out
    assert "0.25 [0.00, 0.50], 4 plays" in result.out
    assert "the same" in spade("diff", "design-0", "design-0").out


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (("show", "zzz"), ("no environment 'zzz'", "spade envs list")),
        (("show", "design"), ("beginning of 3 environments", "Give more characters")),
        (("list", "--step", "a..b"), ("no range of steps", "10..20")),
        (("list", "--step", "20..10"), ("no range of steps", "10..20")),
        (("list", "--state", "won"), ("no state 'won'", "mastered")),
        (("list", "--sort", "luck"), ("'luck'", "regret")),
        (("list", "--run", "other"), ("no run other", "toy")),
        (("list", "--directory", "none"), ("no run in none",)),
        (("export", "--to", "pool", "--state", "degenerate"), ("is like that",)),
    ],
)
def test_what_is_wrong_is_said_in_one_line(
    spade: Spade, arguments: tuple[str, ...], parts: tuple[str, ...]
) -> None:
    result = spade(*arguments)
    assert result.code == 2
    assert result.err.count("\n") == 1
    for part in parts:
        assert part in result.err


def test_a_database_that_is_none_is_named(spade: Spade) -> None:
    Path("runs/toy/run.db").write_text("not a database at all, " * 100)
    result = spade("list")
    assert result.code == 1
    assert "cannot be read" in result.err
