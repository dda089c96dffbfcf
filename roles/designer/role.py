"""The designer role: design tickets in, environments out."""

from __future__ import annotations

import secrets
from collections import Counter
from typing import TYPE_CHECKING, Any, Literal

import anyio

from bus import Delivery
from bus.concurrency import flat_task_group
from bus.messages import DesignRejected, DesignSample, DesignTicket, EnvironmentReady, FailureKind
from engine import similarity
from engine.files import replace
from engine.inference.segments import prompt_and_reply
from roles.base import Role, RoleContext
from roles.designer.attempt import Asked, Attempt, Workshop
from roles.designer.authors import author_of, check_designer, open_designer, open_external, prompts_for
from roles.designer.corpus import Corpus, probe, read_revisions, write_revisions
from roles.designer.hint import HintWriter
from roles.designer.judge import ModelJudge, open_judge
from roles.designer.memory import Memory
from roles.designer.memory_store import MemoryStore
from roles.designer.review import Neighbours, Review, digest
from roles.work_loop import INFRASTRUCTURE, answer_work, chat_tokens, hand_back
from sandbox import REASON_CHARACTERS, Validator, ValidatorSettings

if TYPE_CHECKING:
    from pathlib import Path

    from engine.config import Config
    from engine.inference.endpoint import Endpoint
    from engine.inference.pool import InferencePool
    from engine.inference.tokens import ChatTokens
    from roles.designer.authors import Author
    from roles.designer.environment_pool import Programs

_SALT = "validator.salt"


class DesignerRole(Role):
    """Answers design tickets, ``designer.concurrency`` at a time.

    Each attempt of a ticket has a document and a sampling seed of its own; the designs of a group share one
    prompt. What was written is published before the fact about it, so whoever reads the fact finds the
    tokens; a ticket that is delivered or issued again takes up the attempts that are already published
    instead of writing them anew, so tokens and fact always belong together.
    """

    name = "designer"
    needs = frozenset({"pool", "sandbox"})

    _corpus: Corpus
    _workshop: Workshop
    _hints: HintWriter
    _store: MemoryStore

    def __init__(self, context: RoleContext) -> None:
        super().__init__(context)
        self._counts = Counter(in_hand=0)
        self._memory = Memory(self.config.designer.memory_records)
        self._neighbours = Neighbours(
            self._memory,
            method=self.config.designer.similarity,
            bound=self.config.designer.memory_duplicate,
        )
        self._endpoint: Endpoint | None = None
        self._parts: list[Any] = []  # others with statistics of their own
        self._coverage = Coverage(self.config.designer.skills)

    @classmethod
    def check(cls, config: Config) -> None:
        """Check the sources of documents, the needs of the author of designs, and the sentence model.

        Raises ConfigError.
        """
        probe(config)
        check_designer(config)
        similarity.check(config.designer.similarity)

    async def run(self) -> None:
        chat = await chat_tokens(self.context)
        self._corpus = await anyio.to_thread.run_sync(self._open_corpus, chat)
        for line in self._corpus.named:
            self.log.warning("no document", place=line)
        for source, revision in self._corpus.revisions.items():
            self.log.info("corpus.revision", source=source, revision=revision)
        async with (
            open_external(self.context) as self._endpoint,
            open_designer(self.context, chat, self._endpoint) as designer,
            open_judge(self.context, chat, self._endpoint) as judge,
        ):
            self._equip(chat, designer, judge)
            await self._store.read_back()
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._store.follow)
                limit = self.config.designer.concurrency
                await answer_work(self, DesignTicket, self._answer, counts=self._counts, limit=limit)
                tasks.cancel_scope.cancel()
            await self._store.save()

    def _open_corpus(self, chat: ChatTokens) -> Corpus:
        known = read_revisions(self.context.directory)
        corpus = Corpus.open(self.config, chat, known)
        write_revisions(self.context.directory, corpus.revisions)
        return corpus

    @property
    def slots(self) -> int:
        return self.config.designer.concurrency

    def statistics(self) -> dict[str, float]:
        found: dict[str, float] = {"memory_records": 0}
        for part in self._parts:
            found |= part.statistics()
        spent = self._endpoint.statistics() if self._endpoint else {}
        found |= {f"external_{name}": value for name, value in spent.items()}
        return found | self._coverage.statistics() | self._counts

    def _equip(self, chat: ChatTokens, designer: Author | Programs, judge: ModelJudge | None) -> None:
        config, shared = self.config.designer, self.context.shared
        nano = self.config.model.scale == "nano"
        families = self.config.warmstart.families if nano else None
        review = Review(config, corpus=self._corpus, neighbours=self._neighbours, families=families)
        asks_for_solution = config.prompt == "full" and config.kind != "pool"
        settings = ValidatorSettings(
            salt=_salt(self.context.directory),
            solution="require" if asks_for_solution else "check",
        )
        checks = (review.check, *([judge.check] if judge else []))
        self._workshop = Workshop(
            config,
            designer=designer,
            chat=chat,
            prompts=prompts_for(self.config, chat, external=config.kind == "external"),
            corpus=self._corpus,
            memory=self._memory,
            review=review,
            validator=Validator(shared["sandbox"], settings, checks=checks),
        )
        self._hints = hint_writer(self.config, chat, shared["pool"], self._endpoint)
        self._store = MemoryStore(
            self.bus, self.context.directory, self._memory, self._corpus.note_used, log=self.log
        )
        self._parts = [self._store, self._corpus, self._workshop, self._hints, review]
        self._parts += [judge] if judge else []

    async def _answer(self, ticket: DesignTicket, delivery: Delivery) -> None:
        answered: set[str] = set()
        try:
            await self._design(ticket, answered)
        except INFRASTRUCTURE as error:
            if await hand_back(delivery, error, counts=self._counts, log=self.log, design=ticket.design):
                return
            for part in ticket.parts():
                if part.design not in answered:
                    await self._fail(part, "infra", str(error))
        await delivery.ack()

    async def _design(self, ticket: DesignTicket, answered: set[str]) -> None:
        """Answer every design of ``ticket``, all at once. Raises the first infrastructure fault, last."""
        if not ticket.designs:
            await self._fill(ticket, None)
            return
        shared = await self._shared(ticket)
        faults: list[Exception] = []

        async def fill(part: DesignTicket) -> None:
            try:
                await self._fill(part, shared)
                answered.add(part.design)
            except INFRASTRUCTURE as error:
                faults.append(error)

        async with flat_task_group() as tasks:
            for part in ticket.parts():
                tasks.start_soon(fill, part)
        if faults:
            raise faults[0]

    async def _shared(self, ticket: DesignTicket) -> Asked:
        """Return the prompt of a group: that of its published tokens, else a new one."""
        for part in ticket.parts():
            for attempt in range(part.attempts):
                held = await self._held(part, attempt)
                if held is not None and held.segments:
                    return Asked(held.document, prompt_and_reply(held.segments)[0], ticket.design)
        return await self._workshop.ask(ticket, 0)

    async def _fill(self, ticket: DesignTicket, shared: Asked | None) -> None:
        """Answer one design, in up to ``attempts`` attempts.

        Each publishes its tokens with its verdict. One that is published already is taken as it is.
        """
        for number in range(ticket.attempts):
            sample = await self._held(ticket, number)
            again = sample is not None
            if sample is not None:
                attempt = self._workshop.recall(sample)
                if attempt.valid:
                    self._neighbours.note(attempt.source, design=ticket.design)
            else:
                attempt = await self._workshop.attempt(ticket, number, shared)
                self._counts["attempts"] += 1
                sample = self._sample(ticket, number, attempt)
                if sample is not None:
                    await self.bus.publish(sample)
            if attempt.valid:
                await self._accept(ticket, number, attempt, sample)
                return
            await self._reject(ticket, number, attempt, sample, again=again)
        await self._fail(ticket, "policy", f"no valid program in {ticket.attempts} attempts")

    async def _held(
        self, ticket: DesignTicket, number: int, part: Literal["", "hint"] = ""
    ) -> DesignSample | None:
        wanted = DesignSample(**_attempt_of(ticket, number), valid=False, segments=(), part=part)
        record = await self.bus.last(wanted.tail)
        return record.message if record and isinstance(record.message, DesignSample) else None

    def _sample(self, ticket: DesignTicket, number: int, attempt: Attempt) -> DesignSample | None:
        """Return the message about an attempt that is trained or must not be written twice, else None."""
        trained = self._workshop.trained
        if not attempt.valid and not (trained and self.config.designer.invalid == "penalise"):
            return None
        return DesignSample(
            **_attempt_of(ticket, number),
            valid=attempt.valid,
            segments=attempt.reply.segments if trained else (),
            text="" if trained else attempt.reply.text,
            document=attempt.document,
            prompt=attempt.prompt,
            finding=attempt.finding,
            wins=attempt.wins,
        )

    async def _hint(self, ticket: DesignTicket, number: int, attempt: Attempt) -> str | None:
        """Return a hint. One that is paid for is published, and not bought again after a restart."""
        paid = self.config.designer.hint_writer == "external"
        held = await self._held(ticket, number, "hint") if paid else None
        if held is not None:
            return held.text
        hint = await self._hints.write(
            attempt.source, design=ticket.design, attempt=number, wins=attempt.wins
        )
        if paid and hint is not None:
            named = _attempt_of(ticket, number)
            await self.bus.publish(DesignSample(**named, valid=True, segments=(), text=hint, part="hint"))
        return hint

    async def _accept(
        self, ticket: DesignTicket, number: int, attempt: Attempt, sample: DesignSample | None
    ) -> None:
        hint = await self._hint(ticket, number, attempt)
        family, difficulty = self._classify(attempt.source)
        await self.bus.publish(
            EnvironmentReady(
                **_attempt_of(ticket, number),
                slot=ticket.slot,
                environment=digest(attempt.source),
                source=attempt.source,
                hint=hint,
                sample=_tokens_of(sample),
                document=attempt.document,
                prompt=attempt.prompt,
                finding=attempt.finding,
                difficulty=difficulty,
                family=family,
            )
        )
        self._counts["accepted"] += 1
        self._coverage.note(ticket.skill, accepted=True)
        self._counts["without_hint"] += hint is None

    async def _reject(
        self, ticket: DesignTicket, number: int, attempt: Attempt, sample: DesignSample | None, *, again: bool
    ) -> None:
        """Publish the refusal of an attempt; one that was refused ``again`` is not counted twice."""
        rung, reason = attempt.finding.rung, attempt.finding.reason
        await self.bus.publish(
            DesignRejected(
                **_attempt_of(ticket, number),
                rung=rung,
                reason=reason,
                source=attempt.source,
                document=attempt.document,
                prompt=attempt.prompt,
                sample=_tokens_of(sample),
            )
        )
        if not again:
            self._counts[f"rejected_{rung}"] += 1
            self._coverage.note(ticket.skill, accepted=False)

    async def _fail(self, ticket: DesignTicket, failure: FailureKind, reason: str) -> None:
        self._neighbours.release(ticket.design)
        await self.bus.publish_all(ticket.failed(failure, reason[:REASON_CHARACTERS]))
        self._counts[f"failed_{failure}"] += 1

    def _classify(self, source: str) -> tuple[str | None, float | None]:
        """Family and level where a classifier knows the program (nano), else nothing."""
        if self.config.model.scale != "nano":
            return None, None
        from engine.nano import seeds

        found = seeds.classify(source, self.config.warmstart.families)
        return (found[0], float(found[1])) if found else (None, None)


def hint_writer(
    config: Config, chat: ChatTokens, pool: InferencePool, endpoint: Endpoint | None
) -> HintWriter:
    """Return the writer of hints that the recipe names (``designer.hint_writer``)."""
    designer = config.designer
    author = author_of(designer.hint_writer, designer.hint_sampling, chat, pool, endpoint)
    prompts = prompts_for(config, chat, external=designer.hint_writer == "external")
    return HintWriter(author, prompts, designer.hint_attempts)


def _attempt_of(ticket: DesignTicket, attempt: int) -> dict[str, Any]:
    """Return the fields that name an attempt in every message about it."""
    return {
        "design": ticket.design, "cohort": ticket.cohort, "attempt": attempt, "skill": ticket.skill,
    }  # fmt: skip


def _salt(directory: Path) -> str:
    """Return the run's salt of the validator's seeds, drawn when the run begins and kept in its directory.

    A program cannot know it, so it cannot compute the seeds on which it is judged.
    """
    path = directory / _SALT
    try:
        return path.read_text(encoding="ascii")
    except FileNotFoundError:
        directory.mkdir(parents=True, exist_ok=True)
        salt = secrets.token_hex(16)
        replace(path, salt.encode(), durable=True)
        return salt


def _tokens_of(sample: DesignSample | None) -> str:
    """Return the id of the tokens of an attempt, "" without any."""
    return sample.sample if sample is not None and any(part.sampled for part in sample.segments) else ""


class Coverage:
    """Counts attempts and accepted designs by skill."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self._names = names
        self._tried: Counter[str] = Counter()
        self._accepted: Counter[str] = Counter()

    def note(self, skill: str, *, accepted: bool) -> None:
        """Count one attempt at a design for ``skill``."""
        self._tried[skill] += 1
        self._accepted[skill] += accepted

    def statistics(self) -> dict[str, float]:
        """Return gauges of the coverage.

        They are the number of skills with an accepted design, the smallest share of a skill in the accepted
        designs (1/n when they are even), and the share of valid attempts of the least valid skill.
        """
        accepted, total = [self._accepted[name] for name in self._names], self._accepted.total()
        valid = [self._accepted[name] / self._tried[name] for name in self._names if self._tried[name]]
        return {
            "skills_covered": sum(map(bool, accepted)),
            "skills_smallest_share": min(accepted) / total if total else 0,
            "skills_least_valid": min(valid, default=0),
        }
