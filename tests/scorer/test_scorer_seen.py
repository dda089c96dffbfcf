"""People see how much of a regret is luck: in the catalogue, in the report."""

from __future__ import annotations

from pathlib import Path

import pytest
from scenes.archived_run import GAMES, judged, played, run_with, source, written

from engine.records import history
from engine.records.envs import Catalogue
from engine.views import envs_view, report

DOUBT = {
    "noise_floor": 0.31,
    "regret_low": -0.2,
    "regret_high": 0.7,
    "regret_paid": 0.05,
    "pairs": 4,
    "pairs_apart": 3,
    "leak": True,
}


@pytest.fixture
def opened(tmp_path: Path) -> Path:
    facts = [written(f"design-{at}", source(game, at)) for at, game in enumerate(GAMES[:2])]
    scores = [judged(facts[0], regret=0.5, **DOUBT), judged(facts[1], regret=0.1)]
    return run_with(tmp_path, [*facts, *played(0, [f.design for f in facts]), *scores]).database


def test_the_catalogue_tells_noise_payment_versions_and_leaks(opened: Path) -> None:
    connection = history.open_for_reading(opened)
    first, second = sorted(Catalogue(connection).entries, key=lambda entry: entry.design)
    connection.close()
    told = dict(envs_view.facts(first))
    assert told["regret noise"].startswith("0.31")
    assert told["regret paid"].startswith("0.05")
    assert told["other versions"] == "in 3 of 4 pairs"
    assert told["hint"] == "holds the answer"
    assert not {"regret paid", "other versions", "hint"} & dict(envs_view.facts(second)).keys()


def test_the_report_has_them_beside_the_regret(opened: Path) -> None:
    connection = history.open_for_reading(opened)
    best, worst = report.extremes(connection)
    drawn = report.figures(connection)
    connection.close()
    rows = {row["design"]: row for row in (*best, *worst)}
    assert (rows["design-0"]["noise"], bool(rows["design-0"]["leak"])) == (0.31, True)
    assert not rows["design-1"]["leak"]
    assert (rows["design-0"]["paid"], rows["design-0"]["low"]) == (0.05, -0.2)
    assert any("noise of one environment" in str(figure) for figure in drawn)
