"""The plan's time of a round, and its split of devices, against simulated rounds on eight GPUs."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from scenes.rounds_on_gpus import simulate
from scenes.small_run import finished, summary

from engine import recipe
from engine.records import history, status
from engine.records.history import Event
from engine.running import capacity
from engine.running.round_time import Latencies, Plays, fastest, round_of
from engine.views.overview import learner_shares

CONFIGS = Path(__file__).parents[2] / "configs"
# Latencies reckoned for eight H100 (30B: H200), the load of one server; the fastest number of servers.
KNOWN = {
    "4B": (Plays(240, 4100, 16000, 2, 384, 512), Latencies(0.008, 0.000127, 131, 13, 4.4), 4),
    "4B, lead 3": (Plays(240, 4100, 16000, 4, 384, 512), Latencies(0.008, 0.000127, 131, 13, 4.4), 5),
    "8B, template": (Plays(240, 20000, 30000, 2, 384, 512), Latencies(0.01, 0.0002, 2552, 26, 8.9), 3),
    "8B, keep": (Plays(240, 20000, 30000, 2, 384, 75), Latencies(0.01, 0.0002, 1680, 26, 8.9), 4),
    "30B": (Plays(240, 4270, 16000, 2, 384, 512), Latencies(0.017, 0.00008, 328, 97, 33), 2),
}


@pytest.mark.parametrize("name", KNOWN)
def test_the_round_of_each_split_is_that_of_the_simulation(name: str) -> None:
    plays, takes, best = KNOWN[name]
    found, reckoned = {}, {}
    for n in range(1, 8):
        loads = takes._replace(load=n * takes.load)  # one after the other
        found[n] = simulate(plays, loads, servers=n, learners=8 - n).seconds
        reckoned[n] = round_of(plays, loads, servers=n, learners=8 - n)
    assert {n: one.seconds for n, one in reckoned.items()} == pytest.approx(found, rel=0.12)
    assert min(found, key=found.__getitem__) == best
    assert fastest(range(1, 8), reckoned.__getitem__) == (best, reckoned[best])


@pytest.mark.parametrize("name", [path.stem for path in sorted(CONFIGS.glob("qwen3-*.toml"))])
def test_the_split_that_a_plan_proposes_is_the_fastest_of_all_that_fit(name: str) -> None:
    config = recipe.load(CONFIGS / f"{name}.toml").config
    shape, card, work = capacity.shape_of(config), capacity.CARDS[config.run.card], capacity.work_of(config)
    assert shape is not None
    plays = capacity.plays_of(config, work, capacity.server_of(config, shape, card))

    def seconds(servers: int) -> float:
        takes = capacity.latencies_of(config, shape, card, work, servers)
        return simulate(plays, takes, servers=servers, learners=8 - servers, rounds=16).seconds

    fit = [n for n in range(1, 8) if capacity.learner_of(config, shape, 8 - n).gib + 4 <= card.gib]
    _, better = capacity.rounds_of(config, shape, card, work)
    proposed = better[0] if better else config.server.count
    assert seconds(proposed) <= 1.05 * min(map(seconds, fit)), "a plan keeps a split that is as fast"


@pytest.mark.parametrize("name", ["4B", "8B, keep", "30B"])
def test_gauges_tell_who_waited_for_whom(name: str) -> None:
    plays, takes, servers = KNOWN[name]
    takes = takes._replace(load=servers * takes.load)
    run = simulate(plays, takes, servers=servers, learners=8 - servers, rounds=12)
    for told, true in zip(run.shares, run.true_shares, strict=True):
        assert {key: told.get(key, 0.0) for key in true} == pytest.approx(true)
    assert run.idle == pytest.approx(run.true_idle)
    assert any(0 < share < 1 for share in run.idle)
    state = SimpleNamespace(gauges={"learner/learner-0": run.shares[6]})
    shown = dict(part.split() for part in learner_shares(state).split(", "))  # type: ignore[arg-type]
    assert shown == {key.removeprefix("share_"): f"{share:.0%}" for key, share in run.true_shares[6].items()}
    messages = [
        (at, finished(f"{round_}-{index}", round_=round_))
        for round_, ends in run.ends.items()
        for index, at in enumerate(ends)
    ]
    messages += [(max(ends), summary(round_)) for round_, ends in run.ends.items()]
    connection = history.create(Path(":memory:"))
    history.apply(connection, [Event(i, at, message) for i, (at, message) in enumerate(messages, start=1)])
    tails = {row["round"]: row["tail"] for row in status.tails(connection)}
    true = {round_: ends[-1] - ends[len(ends) * 9 // 10 - 1] for round_, ends in run.ends.items()}
    assert tails == pytest.approx(true)
    assert status.read(connection).tail_seconds == tails[11]
    connection.close()
