"""The evaluator role: plays held-out suites with the served version."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import msgspec

from bus.messages import (
    BatchTrained,
    EnvironmentReady,
    EvaluationFinished,
    Message,
    PolicyPublished,
    ServerLost,
    ServerServing,
)
from engine.config import Config
from engine.errors import ConfigError
from engine.evals.harness import Harness
from engine.evals.records import Sample
from engine.evals.suite import Item, Suite
from engine.lineage import Lineage, Version
from roles.agent.episode import Rules
from roles.base import Role, RoleContext
from roles.evaluator.agenda import Agenda
from roles.evaluator.overlap import Overlap
from roles.evaluator.score import score
from roles.evaluator.seat import Table
from roles.evaluator.suites import load_suite
from roles.work_loop import back_off, chat_tokens
from sandbox import SandboxPool

_SERVERS = (ServerServing.tail_form, ServerLost.tail_form)
_PUBLISHED = PolicyPublished.tail_form
_TRAINED = BatchTrained.tail_form
_FINISHED = EvaluationFinished.tail_form
_READY = "event.designer.ready.*"
_FACTS = (*_SERVERS, _PUBLISHED, _TRAINED, _FINISHED, _READY)
_LINEAGE = "lineage"  # the key under which the learner stores the forks

_LEAST_SHARE = 0.5


class EvaluatorRole(Role):
    """Plays suites with half of the agent's concurrency, so that training continues beside it.

    It learns everything from the bus: the served versions, the evaluations so far (also of an earlier
    process), the forks of the lineage, and the end of the run. Weights may change while it plays; each fact
    names the versions that answered. An evaluation is not published when a drain interrupts it (it is played
    again after a restart), nor when a learner abandoned its weights meanwhile. Every sample is written to
    ``evaluations/SUITE-STEP.jsonl`` in the role's directory.
    """

    name = "evaluator"
    needs = frozenset({"pool", "sandbox"})

    _table: Table
    _overlap: Overlap

    @classmethod
    def check(cls, config: Config) -> None:
        """Load each suite, so that a wrong source is refused before the start.

        A suite of a test split may not choose the best checkpoint. Raises ConfigError.
        """
        for suite in config.evaluator.suites:
            found, _ = load_suite(suite, config)
            if suite.name == config.learner.best_by and found.split == "test":
                raise ConfigError(
                    f"learner.best_by = {suite.name!r} is a test split ({suite.source}), which may only be "
                    "reported",
                    remedy="Name a suite of a validation split, such as seeds:validation.",
                )

    def __init__(self, context: RoleContext) -> None:
        super().__init__(context)
        self._counts: Counter[str] = Counter()
        suites = [suite.name for suite in self.config.evaluator.suites]
        self._agenda = Agenda(suites, self.config.evaluator.every)
        self._news = anyio.Event()
        self._suites: dict[str, tuple[Suite, list[Item]]] = {}

    async def run(self) -> None:
        for suite in self.config.evaluator.suites:
            self._suites[suite.name] = await anyio.to_thread.run_sync(load_suite, suite, self.config)
        texts = {name: {item.text for item in items} for name, (_, items) in self._suites.items()}
        self._overlap = await anyio.to_thread.run_sync(Overlap, texts)
        start = await self._read_back()
        async with self._open_table() as self._table, anyio.create_task_group() as tasks:
            tasks.start_soon(self._follow, start)
            tasks.start_soon(self._evaluate_what_is_due)
            await self.context.draining.wait()
            tasks.cancel_scope.cancel()

    def statistics(self) -> dict[str, float]:
        return dict(self._counts)

    @asynccontextmanager
    async def _open_table(self) -> AsyncIterator[Table]:
        """Yield the seats at the served model. Suites with other limits get a sandbox of their own."""
        shared, seconds = self.context.shared, self.config.agent.episode_seconds
        chat, rules = await chat_tokens(self.context), Rules.of(self.config)
        settings = self.config.sandbox
        for suite, _ in self._suites.values():
            settings = suite.sandbox(settings)
        if settings == self.config.sandbox:
            yield Table(shared["pool"], chat, shared["sandbox"], rules, seconds=seconds)
            return
        async with SandboxPool(settings) as sandbox:
            yield Table(shared["pool"], chat, sandbox, rules, seconds=seconds)

    async def _read_back(self) -> int:
        """Read the present state of the run; return the sequence to follow the stream from."""
        last = (await self.bus.stream_info("EVENT")).last
        forks = await self.bus.state_get(_LINEAGE)
        if forks is not None:
            self._agenda.settle(msgspec.json.decode(forks[1], type=Lineage))
        # A foreign learner may not store its forks: then they follow from the versions that it published.
        tails_of_all = (_FINISHED, _READY) if forks is not None else (_FINISHED, _READY, _PUBLISHED)
        async for record in self.bus.replay("EVENT", tails=(*_SERVERS, *tails_of_all)):
            await self._note(record.message)
        # Only the last of these long facts matters.
        trained = await self.bus.last(_TRAINED)
        if trained is not None:
            self._agenda.note(trained.message)
        return last + 1

    async def _follow(self, start: int) -> None:
        async with self.bus.follow("EVENT", start=start, tails=_FACTS) as facts:
            async for record in facts:
                await self._note(record.message)
                self._news.set()
                self._news = anyio.Event()

    async def _note(self, fact: Message) -> None:
        if isinstance(fact, EnvironmentReady):
            await anyio.to_thread.run_sync(self._overlap.note, fact)  # parses the program
        else:
            self._agenda.note(fact)

    async def _evaluate_what_is_due(self) -> None:
        fruitless = 0
        while True:
            news = self._news
            due = self._agenda.due()
            if due is None:
                await news.wait()
                continue
            fact = await self._evaluate(*due)
            if fact is None or not self._agenda.wants(fact):
                self._log_discarded(fact)
                fruitless += 1
                await anyio.sleep(back_off(fruitless))
                continue
            fruitless = 0
            await self.bus.publish(fact)
            self._agenda.note(fact)
            self._counts["evaluations"] += 1

    def _log_discarded(self, fact: EvaluationFinished | None) -> None:
        if fact is not None:
            versions = [str(Version.unpack(version)) for version in (fact.version, fact.version_high)]
            self.log.info("evaluation_discarded", suite=fact.suite, step=fact.step, versions=versions)

    async def _evaluate(self, suite: str, step: int) -> EvaluationFinished | None:
        """Play ``suite``; return None when fewer than _LEAST_SHARE of its episodes have an outcome."""
        started = time.monotonic()
        serving = self._agenda.serving
        samples = await self._play(suite)
        wanted = len(self._suites[suite][1])
        if len(samples) < wanted * _LEAST_SHARE:
            self.log.warning("evaluation_failed", suite=suite, step=step, played=len(samples), wanted=wanted)
            return None
        total = score(samples, serving.pack() if serving else 0)
        fact = EvaluationFinished(
            suite=suite,
            # A server may have gone back to older weights than it announced.
            step=min(step, Version.unpack(total.low).step),
            version=total.low,
            version_high=total.high,
            episodes=total.episodes,
            win=total.win,
            stderr=total.stderr,
            by_family=total.by_family,
            seconds=time.monotonic() - started,
            overlap=self._overlap.count(suite),
        )
        await anyio.to_thread.run_sync(self._write, fact, samples)
        return fact

    def _write(self, fact: EvaluationFinished, samples: list[Sample]) -> None:
        file = self.context.directory / "evaluations" / f"{fact.suite}-{fact.step}.jsonl"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(b"".join(msgspec.json.encode(sample) + b"\n" for sample in samples))

    async def _play(self, name: str) -> list[Sample]:
        """Play a suite; samples that have no outcome after several tries are lost."""
        suite, items = self._suites[name]
        samples: list[Sample] = []

        def keep(sample: Sample) -> None:
            samples.append(sample)
            self._counts["played"] = len(samples)

        harness = Harness(
            self._table.seat, concurrency=self.config.agent.concurrency // 2, keep=keep, delay=back_off
        )
        sampling = msgspec.structs.replace(
            self.config.agent.sampling, temperature=self.config.evaluator.temperature
        )
        self._counts["in_hand"], self._counts["played"] = len(items), 0
        self._counts["lost"] += await harness.play(name, suite, items, sampling=sampling)
        self._counts["in_hand"] = 0
        return samples
