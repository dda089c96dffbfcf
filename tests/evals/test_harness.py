"""The harness with a scripted model: samples, faults, journals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from eval_scene import table

from engine.config import SamplingConfig
from engine.errors import ConfigError, SpadeError
from engine.evals import records
from engine.evals.harness import ATTEMPTS, Harness, require_names
from engine.evals.records import Journal, Sample, SuiteSummary, Summary
from engine.evals.suite import Item, Outcome, Suite, spread
from engine.inference.completion import InferenceUnavailable
from engine.inference.endpoint import EndpointMisused

SAMPLING = SamplingConfig()
ITEMS = [Item(name=str(number), group="ab"[number % 2], text=f"say {number}") for number in range(6)]


class Echo(Suite):
    """An item is right when the model says its name; ``faults`` is the number of faults before each."""

    def __init__(self, faults: int = 0) -> None:
        self.faults, self.tries = faults, dict[str, int]()

    def items(self, count: int, seed: int) -> list[Item]:
        return spread(ITEMS, count)

    async def play(self, item: Item, seat: Any) -> Outcome:
        self.tries[seat.key] = self.tries.get(seat.key, 0) + 1
        if self.tries[seat.key] <= self.faults and item.name == "3":
            raise InferenceUnavailable("gone")
        reply = await seat.ask([item.text])
        return Outcome(score=float(reply.boxed == item.name))


def right(key: str, messages: list[str]) -> str:
    return f"<think>\\boxed{{no}}</think> So \\boxed{{{messages[-1].split()[1]}}}"


async def play(suite: Suite, samples: int = 2, done: Any = ()) -> tuple[list[Sample], int]:
    found: list[Sample] = []
    harness = Harness(table(right).seat, concurrency=3, keep=found.append, delay=lambda _: 0.0)
    lost = await harness.play("echo", suite, ITEMS, sampling=SAMPLING, samples=samples, done=done)
    return found, lost


async def test_every_item_is_played_as_often_as_asked() -> None:
    found, lost = await play(Echo())
    assert lost == 0
    assert sorted((one.item, one.sample) for one in found) == [
        (str(i), s) for i in range(6) for s in range(2)
    ]
    assert {one.score for one in found} == {1.0}
    assert all(one.asked == [(f"say {one.item}", right("", [f"say {one.item}"]))] for one in found)


async def test_what_is_done_is_not_played_again() -> None:
    found, _ = await play(Echo(), done={("0", 0), ("5", 1)})
    assert len(found) == 10
    assert {("0", 0), ("5", 1)}.isdisjoint((one.item, one.sample) for one in found)


async def test_a_fault_of_servers_is_tried_again_and_is_no_score() -> None:
    found, lost = await play(Echo(faults=ATTEMPTS - 1), samples=1)
    assert (len(found), lost) == (6, 0)
    found, lost = await play(Echo(faults=ATTEMPTS), samples=1)
    assert (sorted(one.item for one in found), lost) == (["0", "1", "2", "4", "5"], 1)


async def test_a_suite_that_fails_on_a_reply_loses_that_sample() -> None:
    class Failing(Echo):
        async def play(self, item: Item, seat: Any) -> Outcome:
            if item.name == "2":
                raise LookupError("a defect of the suite")
            return await super().play(item, seat)

    found, lost = await play(Failing(), samples=1)
    assert (len(found), lost) == (5, 1)


async def test_an_error_of_all_samples_ends_the_evaluation() -> None:
    class Misused(Echo):
        async def play(self, item: Item, seat: Any) -> Outcome:
            raise EndpointMisused("wrong key")

    with pytest.raises(ExceptionGroup) as caught:
        await play(Misused())
    assert caught.group_contains(EndpointMisused)


async def test_a_reply_that_does_not_fit_is_cut() -> None:
    short = table(right)
    short.rules = short.rules.__class__(sampling=SAMPLING, max_turns=1, context_tokens=4, prompt="full")
    reply = await short.seat("k", SAMPLING).ask(["a long question"])
    assert (reply.text, reply.boxed, reply.cut) == ("", None, True)


def test_a_limit_takes_from_the_groups_in_turn() -> None:
    items = [Item(name=f"{group}{number}", group=group) for group in "xyz" for number in range(3)]
    assert [item.name for item in spread(items, 4)] == ["x0", "y0", "z0", "x1"]
    assert spread(items, 0) == items


def test_two_items_of_one_name_are_refused() -> None:
    with pytest.raises(SpadeError, match="Two items"):
        require_names([ITEMS[0], ITEMS[0]], "echo")


def sample(item: str, score: float, index: int = 0, **more: Any) -> Sample:
    values: dict[str, Any] = {
        "suite": "s",
        "policy": "model",
        "item": item,
        "group": item[0],
        "sample": index,
    }
    return Sample(**(values | {"score": score} | more))


def test_a_journal_continues_after_a_cut_line(tmp_path: Path) -> None:
    journal = Journal(tmp_path, {"model": "m"})
    journal.add(sample("a0", 1.0))
    journal.finish(Summary(conditions={}, suites={}))
    with (tmp_path / records.SAMPLES).open("ab") as stream:
        stream.write(b'{"suite":"s","policy":"mo')
    again = Journal(tmp_path, {"model": "m"})
    assert [one.item for one in again.samples] == ["a0"]
    again.add(sample("a1", 0.0))
    again.finish(Summary(conditions={}, suites={}))
    assert [one.item for one in records.read_samples(tmp_path)] == ["a0", "a1"]


def test_other_conditions_need_another_directory(tmp_path: Path) -> None:
    Journal(tmp_path, {"model": "m", "suites": {"s": {"sampling": {"temperature": 0.6}}}})
    with pytest.raises(ConfigError, match="other conditions: suites"):
        Journal(tmp_path, {"model": "m", "suites": {"s": {"sampling": {"temperature": 1.0}}}})


def test_a_summary_has_groups_and_baselines() -> None:
    samples = [sample("a0", 1.0), sample("a0", 0.0, 1), sample("b0", 0.0), sample("b0", 0.0, 1)]
    samples += [sample("a0", 0.5, policy="null"), sample("b0", 0.5, policy="null")]
    found = records.summarise(SuiteSummary(wanted=4), "s", samples)
    assert found.model is not None
    assert found.model.mean.value == 0.25
    assert {group: one.mean.value for group, one in found.groups.items()} == {"a": 0.5, "b": 0.0}
    assert found.baselines["null"].value == 0.5
    assert not found.partial
    assert SuiteSummary(missing="x").partial
