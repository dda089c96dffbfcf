"""Random kill -9 of the server and of every kind of client under load: nothing lost, nothing done twice.

``pytest -m chaos tests/bus`` is the short form, ``--chaos-kills 100`` the long one.
``--chaos-seed`` repeats a schedule.
"""

from __future__ import annotations

import json
import logging
import secrets
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import anyio
import pytest
from chaos_plan import DECK, Ledger, schedule, value
from chaos_world import Outcome, fight, left_running


def test_a_schedule_is_made_of_its_seed() -> None:
    assert schedule(7, 30) == schedule(7, 30)
    assert schedule(7, 30)[:12] == schedule(7, 12)
    assert schedule(7, 12) != schedule(8, 12)
    assert Counter(kill.kind for kill in schedule(3, 24)) == Counter(
        {k: 2 * DECK.count(k) for k in set(DECK)}
    )


def test_a_ledger_counts_once_in_any_order() -> None:
    ledger = Ledger()
    assert [ledger.add("p", number) for number in (0, 2, 2, 0, 4, 1)] == [
        True,
        True,
        False,
        False,
        True,
        True,
    ]
    assert (ledger.upto, ledger.above, ledger.holes()) == ({"p": 3}, {"p": {4}}, {"p": [3]})
    assert len(ledger) == 4
    again = Ledger.load(json.loads(json.dumps(ledger.dump())))
    assert again == ledger
    assert again.add("p", 3)
    assert again.dump() == {"upto": {"p": 5}, "above": {"p": []}}


def judge(outcome: Outcome, seed: int) -> dict[str, Any]:
    """Assert that every piece had its effect exactly once; return the figures."""
    wanted = {"upto": outcome.pieces, "above": {name: [] for name in outcome.pieces}}
    trained = Ledger.load(outcome.learner["ledger"])
    lost = sum(outcome.pieces.values()) - len(trained)
    double = outcome.learner["count"] - len(trained)
    assert (lost, double) == (0, 0)
    total = sum(value(seed, name, n) for name, count in outcome.pieces.items() for n in range(count))
    assert outcome.scorer["ledger"] == wanted
    assert outcome.learner["ledger"] == wanted
    assert outcome.learner["total"] == total
    assert outcome.messages == {"TASK": 0, "SAMPLE": 0, "DLQ": 0}
    assert [sequence for sequence, _ in outcome.events] == list(range(1, len(outcome.events) + 1))
    assert {name for _, name in outcome.events} == {
        f"episode:{name}-{number}" for name, count in outcome.pieces.items() for number in range(count)
    }
    return {
        "seed": seed,
        "pieces": sum(outcome.pieces.values()),
        "stored_again": len(outcome.events) - sum(outcome.pieces.values()),
        "suppressed": outcome.scorer["again"] + outcome.learner["again"],
        "lost": lost,
        "double": double,
        **outcome.figures.summary(),
    }


@pytest.mark.chaos
@pytest.mark.timeout(3600)
async def test_nothing_is_lost_or_done_twice(
    tmp_path: Path,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.CRITICAL, "spade.bus")
    kills: int = request.config.getoption("--chaos-kills")
    seed: int = request.config.getoption("--chaos-seed") or secrets.randbelow(1 << 31) + 1
    # The guard against a server that dies again and again would end a test that kills it again and again.
    monkeypatch.setattr(sys.modules["bus.server"], "_CRASH_SECONDS", 1.0)
    monkeypatch.setattr(sys.modules["bus.server"], "_YOUNG_SECONDS", 0.0)
    print(f"repeat with --chaos-kills {kills} --chaos-seed {seed}")
    with anyio.fail_after(150 + 4 * kills):
        outcome = await fight(tmp_path, seed=seed, kills=kills)
    figures = judge(outcome, seed)
    with capsys.disabled():
        print(f"\n{json.dumps(figures)}")
    assert figures["kills"]["total"] == kills
    assert figures["stored_again"] > 0
    assert figures["suppressed"] >= figures["stored_again"]
    assert left_running(tmp_path) == []
