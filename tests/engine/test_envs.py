"""The catalogue of environments: filtered, found by id, exported so that others read it back."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from scenes.archived_run import GAMES, judged, played, run_with, source, written
from scenes.small_run import config, ready

from bus.messages import Finding, Message
from engine.config import PoolConfig, SuiteConfig
from engine.errors import ConfigError, SpadeError
from engine.records import envs, history
from engine.records.envs import Catalogue, EnvironmentRecord
from engine.views import envs_view, report
from roles.designer.environment_pool import Programs
from roles.evaluator.suites import load_suite

SKILLS = ("Logical Deduction", "Optimization")
STATES = ("frontier", "mastered")


def story() -> list[Message]:
    """Eight games, two a step; the first one is written again at step 3; the last two have no verdict yet."""
    facts = [
        written(f"design-{at}", source(game, at), cohort=at // 2, skill=SKILLS[at % 2], document=f"doc-{at}")
        for at, game in enumerate(GAMES)
    ]
    again = written("design-again", source(GAMES[0], 0), cohort=3, skill=SKILLS[0])
    facts.append(again)
    verdicts = [
        judged(fact, win=at / 10, regret=None if at == 3 else 0.1 * at, state=STATES[at > 3])
        for at, fact in enumerate(facts[:6])
    ]
    designs = [fact.design for fact in facts]
    return [*facts, *played(0, designs[:4]), *played(1, designs[4:]), *verdicts]


@contextmanager
def catalogue_of(directory: Path, facts: Sequence[Message]) -> Iterator[Catalogue]:
    """Open the catalogue of a new run with ``facts``."""
    with closing(history.open_for_reading(run_with(directory, facts).database)) as opened:
        yield Catalogue(opened)


@pytest.fixture
def catalogue(tmp_path: Path) -> Iterator[Catalogue]:
    with catalogue_of(tmp_path, story()) as opened:
        yield opened


def designs(entries: list[EnvironmentRecord]) -> list[str]:
    return [entry.design.removeprefix("design-") for entry in entries]


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        ({}, ["0", "1", "2", "3", "4", "5", "6", "7", "again"]),
        ({"skill": "optim"}, ["1", "3", "5", "7"]),
        ({"state": "mastered"}, ["4", "5"]),
        ({"state": "open"}, ["6", "7", "again"]),
        ({"state": "open", "skill": "DEDUCTION"}, ["6", "again"]),
        ({"state": "degenerate"}, []),
        ({"sort": "regret", "limit": 6}, ["5", "4", "2", "1", "0", "3"]),
        ({"sort": "win", "limit": 2}, ["5", "4"]),
        ({"reverse": True, "limit": 2}, ["again", "7"]),
    ],
)
def test_environments_are_filtered_and_sorted(
    catalogue: Catalogue, wanted: dict[str, Any], expected: list[str]
) -> None:
    assert designs(catalogue.select(**wanted)) == expected


@pytest.mark.parametrize(
    ("wanted", "remedy"),
    [({"state": "won"}, "open"), ({"skill": "poetry"}, "Optimization"), ({"sort": "luck"}, "regret")],
)
def test_an_unknown_name_is_refused_with_those_that_exist(
    catalogue: Catalogue, wanted: dict[str, str], remedy: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        catalogue.select(**wanted)
    assert remedy in caught.value.remedy


def test_a_record_has_the_scores_of_its_window(catalogue: Catalogue) -> None:
    entry = catalogue.select()[2]
    assert (entry.step, entry.skill, entry.document) == (1, "Logical Deduction", "doc-2")
    assert (entry.win, entry.win_low, entry.win_high) == (0.2, 0.2, 0.8)
    assert (entry.regret, entry.regret_low, entry.plays, entry.turns) == (0.2, 0.0, 4, 1.0)


def test_an_environment_is_found_by_hash_by_its_beginning_and_by_design(catalogue: Catalogue) -> None:
    entry = catalogue.entries[3]
    for name in (entry.id, entry.id.upper(), entry.environment, entry.environment[:9], entry.design):
        assert catalogue.find(name) == entry


def test_of_designs_with_one_program_the_scored_one_is_found(catalogue: Catalogue) -> None:
    assert catalogue.find(catalogue.entries[0].id).design == "design-0"
    assert catalogue.find("design-again").design == "design-again"


@pytest.mark.parametrize(
    ("name", "complaint"), [("design-", "beginning of 8"), ("nothing", "no environment"), (" ", "no env")]
)
def test_candidates_are_named_without_control_characters(
    catalogue: Catalogue, name: str, complaint: str
) -> None:
    catalogue.entries = [
        msgspec.structs.replace(entry, title="\x1b[2JDoors\u202e") for entry in catalogue.entries
    ]
    with pytest.raises(ConfigError, match=complaint) as caught:
        catalogue.find(name)
    assert "Doors" in caught.value.remedy
    assert not {"\x1b", "\u202e"} & set(caught.value.remedy)


def test_ids_are_long_enough_to_differ(tmp_path: Path) -> None:
    names = ("a" * 64, "a" * 20 + "b" * 44, "c" * 64)
    alike = [ready(f"d{at}", source=source("x", at), environment=name) for at, name in enumerate(names)]
    with catalogue_of(tmp_path, alike) as catalogue:
        assert [len(entry.id) for entry in catalogue.entries] == [21, 21, 8]


def test_a_run_without_environments(tmp_path: Path) -> None:
    with catalogue_of(tmp_path, []) as catalogue:
        assert catalogue.select(skill="x") == []
        with pytest.raises(ConfigError) as caught:
            catalogue.find("abc")
    assert "none yet" in caught.value.remedy


def test_recorded_episodes_come_best_first(catalogue: Catalogue) -> None:
    plays = catalogue.plays(catalogue.entries[0])
    found = [(row["arm"], row["returned"]) for row in plays]
    assert found == [("plain", 1.0), ("plain", 0.0), ("hinted", 1.0)]
    assert plays[0]["turns"][0][:3] == ["<count>", "say \\boxed{1}", "1"]


def test_neighbours_are_other_programs_nearest_first(tmp_path: Path) -> None:
    facts = [written(f"d{at}", source(game)) for at, game in enumerate(GAMES)]
    facts += [written("like", source(GAMES[2], 7)), written("same", source(GAMES[2]))]
    with catalogue_of(tmp_path, facts) as catalogue:
        near = catalogue.neighbours(catalogue.find("d2"))
        assert catalogue.find("d2").environment not in {entry.environment for _, entry in near}
    assert near[0][1].design == "like"
    assert [cosine for cosine, _ in near] == sorted((cosine for cosine, _ in near), reverse=True)


def test_text_of_a_model_cannot_steer_a_terminal(tmp_path: Path) -> None:
    with catalogue_of(tmp_path, [ready("d", title="\x1b[2Jgone\u202e")]) as catalogue:
        entries = catalogue.entries
    for text in (envs_view.table(entries), envs_view.sheet(entries[0])):
        assert not {"\x1b", "\u202e"} & set(text)
        assert "[2Jgone" in text


def test_a_flag_is_listed_shown_and_drawn(tmp_path: Path) -> None:
    finding = Finding(flag="off_ticket", flag_reason="a maze")
    flagged = msgspec.structs.replace(written("d2", source("rivers")), finding=finding, prompt="p/3")
    run = run_with(tmp_path, [written("d1", source("apples")), flagged, *played(0, ["d1", "d2"])], "flags")
    with closing(history.open_for_reading(run.database)) as opened:
        catalogue = Catalogue(opened)
        (entry,) = catalogue.select(state="off_ticket")
        assert "flag" not in envs_view.sheet(catalogue.find("d1"))
    assert (entry.design, entry.prompt) == ("d2", "p/3")
    assert "open off_ticket" in envs_view.table([entry])
    assert "off_ticket: a maze" in envs_view.sheet(entry)
    assert "Designs that miss their ticket" in report.write(run).read_text()


def test_a_table_fits_the_terminal(catalogue: Catalogue) -> None:
    lines = envs_view.table(catalogue.entries, width=110).splitlines()
    assert lines[0].split() == ["step", "id", "skill", "document", "state", "win", "regret", "turns", "title"]
    assert len(lines) == 1 + len(catalogue.entries)
    assert max(map(len, lines[1:])) <= 130
    assert "0.50 [0.20, 0.80]" in lines[6]


def test_an_export_has_files_and_a_manifest(catalogue: Catalogue, tmp_path: Path) -> None:
    target = tmp_path / "out" / "deep"
    count = envs.export(catalogue, catalogue.select(), target, run="toy", max_turns=6)
    manifest = json.loads((target / "manifest.json").read_text())
    rows = manifest["environments"]
    assert (count, len(rows), manifest["run"], manifest["max_turns"]) == (8, 8, "toy", 6)
    assert {row["file"] for row in rows} == {path.name for path in target.glob("*.py")}
    for row in rows:
        data = (target / row["file"]).read_bytes()
        assert hashlib.sha256(data).hexdigest() == row["environment"]
        assert row["hint"] == "Count <i>up</i>."
    assert rows[1]["file"].startswith("00000-optimization-")


def test_an_export_overwrites_nothing(catalogue: Catalogue, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("x = 1\n")
    with pytest.raises(ConfigError, match="not empty"):
        envs.export(catalogue, catalogue.entries, tmp_path)
    with pytest.raises(SpadeError, match="cannot be written"):
        envs.export(catalogue, catalogue.entries, tmp_path / "mine.py")


def test_a_suite_and_a_pool_read_an_export(catalogue: Catalogue, tmp_path: Path) -> None:
    envs.export(catalogue, catalogue.entries, tmp_path / "pool")
    there = f"dir:{tmp_path / 'pool'}"
    _, items = load_suite(SuiteConfig(name="own", source=there, episodes=10), config(tmp_path))
    expected = {entry.environment for entry in catalogue.entries}
    assert {hashlib.sha256(item.data.source.encode()).hexdigest() for item in items} == expected
    pool = Programs.open(PoolConfig(source=there))
    dealt = {hashlib.sha256(pool.draw(number, 0)[1].encode()).hexdigest() for number in range(len(pool))}
    assert dealt == expected


def test_the_report_draws_diversity_and_escapes_documents(tmp_path: Path) -> None:
    fact = written("d", source("x"), document="<img src=x onerror=alert(1)>")
    page = report.write(run_with(tmp_path, [fact, *played(0, ["d"])])).read_text()
    for title in ("Diversity: effective number", "Repeated programs"):
        assert title in page
    assert "<img src=x" not in page
