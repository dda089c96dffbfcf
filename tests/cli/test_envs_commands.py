"""``spade envs``: the environments of a run as a user sees them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from scenes.archived_run import GAMES, judged, played, run_with, source, written
from scenes.cli import Spade, refused


@pytest.fixture
def envs(spade: Spade, tmp_path: Path) -> Spade:
    """Call ``spade envs`` beside a run of three environments."""
    facts = [
        written(f"design-{at}", source(game), cohort=at, document=f"doc-{at}")
        for at, game in enumerate(GAMES[:3])
    ]
    plays = played(0, [fact.design for fact in facts])
    run_with(tmp_path / "runs", [*facts, *plays, judged(facts[0]), judged(facts[1], regret=0.05)])
    return lambda *arguments, **more: spade("envs", *arguments, **more)


def ids(envs: Spade) -> list[str]:
    return [row["id"] for row in json.loads(envs("list", "--json").stdout)]


def test_list_shows_one_a_line(envs: Spade) -> None:
    result = envs("list", "--sort", "regret", "--limit", "2")
    lines = result.stdout.splitlines()
    assert result.returncode == 0
    assert [line.split()[0] for line in lines] == ["step", "0", "1"]
    assert "0.50 [0.20, 0.80]  0.25 [0.00, 0.50]" in lines[1]
    assert lines[1].endswith("Counting design-0")
    assert "2 of 3 environments" in result.stderr


def test_list_as_json_has_every_figure(envs: Spade) -> None:
    rows = json.loads(envs("list", "--json", "--state", "frontier", "--limit", "1", "--run", "toy").stdout)
    assert [(row["step"], row["state"], row["regret_high"], row["document"]) for row in rows] == [
        (0, "frontier", 0.5, "doc-0")
    ]


def test_show_has_program_hint_plays_and_neighbours(envs: Spade) -> None:
    result = envs("show", ids(envs)[0][:6])
    assert result.returncode == 0
    for text in (
        "Counting design-0",
        "document          doc-0",
        "class ApplesEnv:",
        "hint: Count <i>up</i>.",
        "plain episode of round 0, return 0.00",
        "hinted episode",
        "most similar programs",
        ids(envs)[2],
    ):
        assert text in result.stdout


def test_show_as_json_has_the_source(envs: Spade) -> None:
    shown = json.loads(envs("show", "design-2", "--json").stdout)
    assert shown["source"] == source(GAMES[2])
    assert (shown["state"], len(shown["plays"]), len(shown["neighbours"])) == ("open", 3, 2)


def test_play_goes_through_the_sandbox(envs: Spade) -> None:
    result = envs("play", "design-1", "--seed", 3, "--hint", stdin="0\n1\n2\n3\n:quit\n")
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("hint: Count")
    assert "the rivers rivers of rivers number 0, which?" in result.stdout
    assert "end of the episode" in result.stdout


def test_export_says_how_many(envs: Spade) -> None:
    result = envs("export", "--to", "pool", "--state", "frontier")
    assert (result.returncode, result.stdout) == (0, "2 programs in pool\n")
    assert len(list(Path("pool").glob("*.py"))) == 2
    assert json.loads(Path("pool/manifest.json").read_text())["run"] == "toy"
    refused(envs("export", "--to", "pool"), "not empty", code=2)


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (("show", "zzz"), ("no environment 'zzz'", "spade envs list")),
        (("list", "--run", "other"), ("no run other", "toy")),
        (("list", "--directory", "none"), ("no run in none",)),
        (("export", "--to", "pool", "--state", "degenerate"), ("has no such environment",)),
    ],
)
def test_bad_input_is_refused(envs: Spade, arguments: tuple[str, ...], parts: tuple[str, ...]) -> None:
    refused(envs(*arguments), *parts, code=2)


def test_a_broken_database_is_named(envs: Spade) -> None:
    Path("runs/toy/run.db").write_text("not a database at all, " * 100)
    refused(envs("list"), "cannot be read", code=1)
