"""The catalogue: found by id, filtered, compared, copied out so that others read it back."""

from __future__ import annotations

import hashlib
import json
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from archive_fakes import GAMES, judged, played, run_with, source, written
from shell_fakes import config

from bus.messages import Message
from engine.config import PoolConfig, SuiteConfig
from engine.diversity.measures import SAMPLE, Item, measure
from engine.diversity.similarity import embed
from engine.errors import ConfigError, SpadeError
from engine.records import envs, history
from engine.records.envs import Catalogue, Entry, Filter
from engine.views import envs_view, report, report_diversity
from roles.designer.environment_pool import Programs
from roles.evaluator.suites import load_suite

SKILLS = ("Logical Deduction", "Optimization")


def story() -> list[Message]:
    """Eight games, two a step; the first one is written again at step 3; the last two have no verdict yet."""
    facts = [
        written(f"design-{at}", source(game, at), cohort=at // 2, skill=SKILLS[at % 2], document=f"doc-{at}")
        for at, game in enumerate(GAMES)
    ]
    again = written("design-again", source(GAMES[0], 0), cohort=3, skill=SKILLS[0])
    facts.append(again)
    verdicts = [
        judged(
            fact,
            win=at / 10,
            regret=None if at == 3 else 0.1 * at,
            state="mastered" if at > 3 else "frontier",
        )
        for at, fact in enumerate(facts[:6])
    ]
    designs = [fact.design for fact in facts]
    return [*facts, *played(0, designs[:4]), *played(1, designs[4:]), *verdicts]


@pytest.fixture
def connection(tmp_path: Path) -> Iterator[sqlite3.Connection]:
    opened = history.open_for_reading(run_with(tmp_path, story()).database)
    yield opened
    opened.close()


@pytest.fixture
def catalogue(connection: sqlite3.Connection) -> Catalogue:
    return Catalogue(connection)


def designs(entries: list[Entry]) -> list[str]:
    return [entry.design.removeprefix("design-") for entry in entries]


class TestSelect:
    def test_all_come_in_the_order_of_their_steps(self, catalogue: Catalogue) -> None:
        assert designs(catalogue.select(Filter())) == ["0", "1", "2", "3", "4", "5", "6", "7", "again"]

    @pytest.mark.parametrize(
        ("wanted", "expected"),
        [
            (Filter(skill="optim"), ["1", "3", "5", "7"]),
            (Filter(state="mastered"), ["4", "5"]),
            (Filter(state="open"), ["6", "7", "again"]),
            (Filter(steps=(1, 2)), ["2", "3", "4", "5"]),
            (Filter(least_regret=0.0), ["0", "1", "2", "4", "5"]),
            (Filter(least_regret=0.35, skill="deduction"), ["4"]),
            (Filter(state="degenerate"), []),
        ],
    )
    def test_filters_hold_together(self, catalogue: Catalogue, wanted: Filter, expected: list[str]) -> None:
        assert designs(catalogue.select(wanted)) == expected

    def test_figures_come_highest_first_and_missing_ones_last(self, catalogue: Catalogue) -> None:
        assert designs(catalogue.select(Filter(steps=(0, 2)), sort="regret")) == [
            "5",
            "4",
            "2",
            "1",
            "0",
            "3",
        ]
        assert designs(catalogue.select(Filter(), sort="win", limit=2)) == ["5", "4"]
        assert designs(catalogue.select(Filter(), sort="skill", limit=2)) == ["0", "2"]

    @pytest.mark.parametrize(
        ("wanted", "sort", "why"),
        [
            (Filter(state="won"), "step", "open"),
            (Filter(skill="poetry"), "step", "Optimization"),
            (Filter(), "luck", "regret"),
        ],
    )
    def test_what_is_not_there_is_named(
        self, catalogue: Catalogue, wanted: Filter, sort: str, why: str
    ) -> None:
        with pytest.raises(ConfigError) as caught:
            catalogue.select(wanted, sort=sort)
        assert why in caught.value.remedy

    def test_an_entry_has_the_verdict_of_its_window(self, catalogue: Catalogue) -> None:
        entry = catalogue.select(Filter())[2]
        assert (entry.step, entry.skill, entry.document) == (1, "Logical Deduction", "doc-2")
        assert (entry.win, entry.win_low, entry.win_high) == (0.2, 0.2, 0.8)
        assert (entry.regret, entry.regret_low, entry.plays, entry.turns) == (0.2, 0.0, 4, 1.0)


class TestFind:
    def test_by_hash_by_beginning_and_by_design(self, catalogue: Catalogue) -> None:
        entry = catalogue.entries[3]
        for name in (entry.id, entry.id.upper(), entry.environment, entry.environment[:9], entry.design):
            assert catalogue.find(name) == entry

    def test_of_designs_with_one_program_the_scored_one_is_taken(self, catalogue: Catalogue) -> None:
        first = catalogue.entries[0]
        assert catalogue.find(first.id).design == "design-0"
        assert [twin.design for twin in catalogue.twins(first)] == ["design-again"]
        assert catalogue.find("design-again").design == "design-again"

    def test_an_ambiguous_beginning_lists_the_candidates(self, catalogue: Catalogue) -> None:
        with pytest.raises(ConfigError, match="the beginning of 8 environments") as caught:
            catalogue.find("design-")
        assert catalogue.entries[0].id in caught.value.remedy
        assert "and 2 more" in caught.value.remedy

    def test_titles_of_candidates_steer_no_terminal(self, catalogue: Catalogue) -> None:
        catalogue.entries = [
            msgspec.structs.replace(entry, title="\x1b[2JDoors\u202e") for entry in catalogue.entries
        ]
        for name in ("design-", "nothing"):
            with pytest.raises(ConfigError) as caught:
                catalogue.find(name)
            assert "Doors" in str(caught.value.remedy)
            assert not {"\x1b", "\u202e"} & set(str(caught.value.remedy))

    def test_an_unknown_id_lists_what_is_like_it(self, catalogue: Catalogue) -> None:
        entry = catalogue.entries[5]
        wrong = entry.id[:5] + ("0" if entry.id[5] != "0" else "1") + entry.id[6:]
        with pytest.raises(ConfigError, match="no environment") as caught:
            catalogue.find(wrong)
        assert entry.id in caught.value.remedy
        with pytest.raises(ConfigError, match="no environment"):
            catalogue.find("  ")

    def test_ids_are_as_long_as_they_must_be(self) -> None:
        hashes = {"a" * 64, "a" * 20 + "b" * 44, "c" * 64}
        assert envs._lengths(hashes) == {"a" * 64: 21, "a" * 20 + "b" * 44: 21, "c" * 64: 8}

    def test_a_run_without_environments_says_so(self, tmp_path: Path) -> None:
        opened = history.open_for_reading(run_with(tmp_path, [], "none").database)
        empty = Catalogue(opened)
        assert empty.select(Filter(skill="x")) == []
        with pytest.raises(ConfigError) as caught:
            empty.find("abc")
        assert "none yet" in caught.value.remedy
        opened.close()


class TestShow:
    def test_plays_that_were_kept_come_best_first(self, catalogue: Catalogue) -> None:
        plays = catalogue.plays(catalogue.entries[0])
        assert [(row["arm"], row["returned"]) for row in plays] == [
            ("plain", 1.0),
            ("plain", 0.0),
            ("hinted", 1.0),
        ]
        assert plays[0]["turns"][0][:3] == ["<count>", "say \\boxed{1}", "1"]

    def test_neighbours_are_other_programs_nearest_first(self, tmp_path: Path) -> None:
        facts = [written(f"d{at}", source(game)) for at, game in enumerate(GAMES)]
        facts += [written("like", source(GAMES[2], 7)), written("same", source(GAMES[2]))]
        opened = history.open_for_reading(run_with(tmp_path, facts, "near").database)
        catalogue = Catalogue(opened)
        near = catalogue.neighbours(catalogue.find("d2"), count=3)
        opened.close()
        assert near[0][1].design == "like"
        assert [cosine for cosine, _ in near] == sorted((cosine for cosine, _ in near), reverse=True)
        assert catalogue.find("d2").environment not in {entry.environment for _, entry in near}

    def test_what_a_model_wrote_cannot_steer_a_terminal(self, tmp_path: Path) -> None:
        fact = written("d", "class AEnv: pass\n")
        evil = msgspec.structs.replace(fact, title="\x1b[2Jgone\u202e")
        opened = history.open_for_reading(run_with(tmp_path, [evil], "evil").database)
        catalogue = Catalogue(opened)
        for text in (envs_view.table(catalogue.entries), envs_view.sheet(catalogue.entries[0])):
            assert "\x1b" not in text
            assert "\u202e" not in text
            assert "[2Jgone" in text
        opened.close()

    def test_a_flag_is_shown_found_and_drawn(self, tmp_path: Path) -> None:
        fact = written("d1", source("apples"))
        flagged = msgspec.structs.replace(
            written("d2", source("rivers")),
            flag="off_ticket",
            flag_reason="a maze",
            summary="walks",
            prompt="p/3",
        )
        run = run_with(tmp_path, [fact, flagged, *played(0, ["d1", "d2"])], "flags")
        opened = history.open_for_reading(run.database)
        catalogue = Catalogue(opened)
        (entry,) = catalogue.select(Filter(state="off_ticket"))
        assert (entry.design, entry.flag_reason, entry.summary, entry.prompt) == (
            "d2",
            "a maze",
            "walks",
            "p/3",
        )
        assert "open off_ticket" in envs_view.table([entry])
        assert "off_ticket: a maze" in envs_view.sheet(entry)
        assert "flag" not in envs_view.sheet(catalogue.find("d1"))
        opened.close()
        assert "Designs that miss their ticket" in report.write(run).read_text()

    def test_a_database_of_an_older_build_is_read(self, tmp_path: Path) -> None:
        run = run_with(tmp_path, story(), "old")
        opened = history.create(run.database)
        opened.executescript("DROP TABLE labels; DROP TABLE diversity")
        opened.row_factory = sqlite3.Row
        entries = Catalogue(opened).entries
        opened.close()
        assert len(entries) == 9
        assert {entry.flag for entry in entries} == {""}
        assert "<h2>Diversity</h2>" in report.write(run).read_text()

    def test_a_table_is_cut_to_the_terminal(self, catalogue: Catalogue) -> None:
        lines = envs_view.table(catalogue.entries, width=110).splitlines()
        assert lines[0].split() == [
            "step",
            "id",
            "skill",
            "document",
            "state",
            "win",
            "regret",
            "turns",
            "title",
        ]
        assert len(lines) == 1 + len(catalogue.entries)
        assert max(map(len, lines[1:])) <= 130
        assert "0.50 [0.20, 0.80]" in lines[6]

    def test_two_are_compared(self, catalogue: Catalogue) -> None:
        one, other = catalogue.entries[0], catalogue.entries[1]
        lines = envs.difference(catalogue, one, other)
        assert lines[:2] == [f"--- {one.id}.py", f"+++ {other.id}.py"]
        assert "-class ApplesEnv:" in lines
        assert "+class RiversEnv:" in lines
        assert envs.difference(catalogue, one, one) == []
        assert "Optimization" in envs_view.beside(one, other)


class TestExport:
    def test_files_and_manifest_say_what_was_written(self, catalogue: Catalogue, tmp_path: Path) -> None:
        target = tmp_path / "out" / "deep"
        count = envs.export(catalogue, catalogue.select(Filter()), target, run="toy", max_turns=6)
        manifest = json.loads((target / "manifest.json").read_text())
        rows = manifest["environments"]
        assert (count, len(rows), manifest["run"], manifest["max_turns"]) == (8, 8, "toy", 6)
        assert {row["file"] for row in rows} == {path.name for path in target.glob("*.py")}
        for row in rows:
            data = (target / row["file"]).read_bytes()
            assert hashlib.sha256(data).hexdigest() == row["environment"]
            assert row["hint"] == "Count <i>up</i>."
        assert rows[1]["file"].startswith("00000-optimization-")

    def test_a_directory_that_holds_something_is_left_alone(
        self, catalogue: Catalogue, tmp_path: Path
    ) -> None:
        (tmp_path / "mine.py").write_text("x = 1\n")
        with pytest.raises(SpadeError, match="not empty"):
            envs.export(catalogue, catalogue.entries, tmp_path)
        (tmp_path / "file").write_text("")
        with pytest.raises(SpadeError, match="cannot be written"):
            envs.export(catalogue, catalogue.entries, tmp_path / "file")

    def test_a_held_out_suite_reads_it_back(self, catalogue: Catalogue, tmp_path: Path) -> None:
        envs.export(catalogue, catalogue.entries, tmp_path / "pool")
        suite = SuiteConfig(name="own", source=f"dir:{tmp_path / 'pool'}", episodes=10)
        items = load_suite(suite, config(tmp_path))
        assert {item.request.environment for item in items} == {
            entry.environment for entry in catalogue.entries
        }

    def test_a_pool_in_the_place_of_a_designer_reads_it_back(
        self, catalogue: Catalogue, tmp_path: Path
    ) -> None:
        envs.export(catalogue, catalogue.entries, tmp_path / "pool")
        pool = Programs.open(PoolConfig(source=f"dir:{tmp_path / 'pool'}"))
        dealt = {hashlib.sha256(pool.draw(number, 0)[1].encode()).hexdigest() for number in range(len(pool))}
        assert dealt == {entry.environment for entry in catalogue.entries}


class TestReport:
    def test_the_page_has_curves_picture_and_figures_by_skill(self, tmp_path: Path) -> None:
        run = run_with(tmp_path, story())
        page = report.write(run).read_text()
        section = page.partition("<h2>Diversity</h2>")[2].partition("<h2>Best environments</h2>")[0]
        for text in (
            "Effective number",
            "Repeated programs",
            "Novelty",
            "Documents",
            "t-SNE of their programs",
        ):
            assert text in section
        assert "<td>Optimization</td><td>4</td><td>44 %</td><td>4</td>" in section
        assert "win rate 0.20, regret 0.20" in section

    def test_hover_texts_are_escaped(self, tmp_path: Path) -> None:
        fact = written("d", source("x"), document="<img src=x onerror=alert(1)>")
        page = report.write(run_with(tmp_path, [fact, *played(0, ["d"])])).read_text()
        assert "<img" not in page.partition("<h2>Diversity</h2>")[2]

    def test_the_same_vectors_have_the_same_places_with_and_without_scikit_learn(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        vectors = embed([source(game, at) for game in GAMES for at in range(3)])
        places, method = report_diversity.layout(vectors)
        assert (method, places.shape) == ("t-SNE", (24, 2))
        assert (places == report_diversity.layout(vectors)[0]).all()
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
        assert report_diversity.layout(vectors)[1] == "PCA"

    @pytest.mark.parametrize("count", [0, 1, 2, 12])
    def test_what_is_all_the_same_has_a_picture_too(self, count: int) -> None:
        places, method = report_diversity.layout(embed([source("same")] * count))
        assert (places.shape, method) == ((count, 2), "PCA")
        assert abs(places).max(initial=0.0) < 1e-3

    @pytest.mark.slow
    def test_ten_thousand_environments_cost_no_more_than_a_thousand(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        run = run_with(tmp_path, [])
        large_run(run.database, 10_000)
        embedded: list[int] = []
        original = report_diversity.HashedTfidf.embed

        def counting(self: object, texts: list[str]) -> object:
            embedded.append(len(texts))
            return original(self, texts)  # type: ignore[arg-type]

        monkeypatch.setattr(report_diversity.HashedTfidf, "embed", counting)
        page = report.write(run).read_text()
        assert sum(embedded) <= 2 * SAMPLE
        assert len(page) < 12_000_000
        assert "those of 1,000 of the 10,000 environments" in page


def large_run(path: Path, count: int) -> None:
    """Fill a database with ``count`` environments of 3 kB, 25 a round, a play each, all measured."""
    text = source("filler") + "# " + "x" * 2400 + "\n"
    items = [Item("d", "e", SKILLS[0], "doc")]
    fields = json.dumps(dict.fromkeys(("win_low", "win_high", "regret_low", "regret_high"), 0.5))
    known = msgspec.json.encode(measure(items, embed([text]), near=0.97)).decode()
    connection = history.create(path)
    connection.execute("BEGIN")
    for at in range(count):
        program = text.replace("filler", f"w{at % 977} v{at % 89}", 3)
        name, number = hashlib.sha256(program.encode()).hexdigest(), at // 25
        design = f"design-{at:06d}"
        connection.execute(
            "INSERT INTO environments VALUES (?, ?, 0, ?, 0, ?, ?, ?, 'h', 'doc', ?, 0.1, 0, 1.0, NULL)",
            (design, at, number, SKILLS[at % 2], name, program, f"title {at}"),
        )
        connection.execute(
            "INSERT INTO scores VALUES (?, ?, 0, ?, ?, 0.5, 0.1, ?, 0, 'frontier', ?)",
            (design, at, number, number, at / count, fields),
        )
        for play in range(1):
            connection.execute(
                "INSERT INTO episodes VALUES (?, ?, 0, ?, ?, 'plain', ?, 1, 'terminated', NULL, 3, 50, 0.1)",
                (f"{at}-{play}", at, design, SKILLS[at % 2], number),
            )
        if at % 25 == 0:
            connection.execute("INSERT INTO diversity VALUES (?, ?)", (number, known))
    connection.execute("COMMIT")
    connection.close()
