"""One evaluation from the command line: suites, baselines, a model, the summary."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import anyio
import anyio.to_thread
import msgspec

from engine.config import SamplingConfig
from engine.evals import target as targets
from engine.evals.contamination import Guard
from engine.evals.harness import Harness, require_names
from engine.evals.records import Journal, Policy, SuiteSummary, Summary, summarise
from engine.evals.suite import Item, Suite
from engine.evals.target import Target
from engine.evals.text_policies import CONTEXT, NULL_REPLY, TextChat, scripted_pool
from roles.agent.episode import Rules
from roles.designer.corpus import sources as corpora
from roles.evaluator.overlap import fingerprint
from roles.evaluator.seat import Table
from sandbox import SandboxPool

Say = Callable[[str], None]
_STEPS = 10


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """One suite of an evaluation: the items to play, ``samples`` times each."""

    name: str
    suite: Suite
    items: Sequence[Item] = ()
    preset: str = ""
    sampling: SamplingConfig
    samples: int = 1


async def evaluate(
    target: Target,
    parts: Sequence[Part],
    journal: Journal,
    *,
    missing: Mapping[str, str],
    baselines: bool,
    sources: Mapping[str, Iterable[str]],
    say: Say,
) -> Summary:
    """Play ``parts`` and their baselines at ``target``; return and write the summary.

    Samples that ``journal`` has already are not played again. ``missing`` names the suites that cannot be
    played, with the reason; ``sources`` are texts of the training that the contamination guard looks at.
    """
    started = time.monotonic()
    summary = Summary(conditions=journal.conditions, suites={})
    settings = target.config.sandbox
    for part in parts:
        require_names(part.items, part.name)
        settings = part.suite.sandbox(settings)
        summary.suites[part.name] = SuiteSummary(
            version=part.suite.version,
            split=part.suite.split,
            preset=part.preset,
            wanted=len(part.items) * part.samples,
        )
    summary.suites |= {name: SuiteSummary(missing=why) for name, why in missing.items()}
    if parts:
        async with SandboxPool(settings) as sandbox:
            if baselines:
                await _baselines(target, parts, journal, sandbox, summary)
            async with (
                targets.opened(target, journal.directory) as (pool, chat),
                targets.opened_user(target.user) as user,
            ):
                await _say_estimate(target, parts, journal, pool, chat, say)
                seconds, rules = target.config.agent.episode_seconds, Rules.of(target.config)
                unbounded = replace(rules, context_tokens=CONTEXT, play_tokens=CONTEXT)
                other = Table(*user, sandbox, unbounded, seconds=seconds) if user else None
                table = Table(pool, chat, sandbox, rules, seconds=seconds, user=other)
                for part in parts:
                    say(f"{part.name}: {len(part.items)} items, {part.samples} samples each")
                    left = await _play(part, table, journal, "model", target.places, say)
                    summary.suites[part.name].lost = left
    for name, one in summary.suites.items():
        summarise(one, name, journal.samples)
    await anyio.to_thread.run_sync(_look_for_copies, parts, journal, sources, summary)
    summary.seconds = time.monotonic() - started
    journal.finish(summary)
    return summary


async def _play(
    part: Part, table: Table, journal: Journal, policy: Policy, places: int, say: Say | None = None
) -> int:
    """Play what ``journal`` lacks of a part; return the number of lost samples."""
    own = [one for one in journal.samples if one.suite == part.name and one.policy == policy]
    finished = len(own)
    samples = part.samples if policy == "model" else 1
    whole = len(part.items) * samples

    def keep(sample: object) -> None:
        nonlocal finished
        journal.add(sample)  # type: ignore[arg-type]
        finished += 1
        if say is not None and finished * _STEPS // whole > (finished - 1) * _STEPS // whole:
            say(f"{part.name}: {finished} of {whole}")

    harness = Harness(table.seat, policy=policy, concurrency=places, keep=keep)
    return await harness.play(
        part.name,
        part.suite,
        part.items,
        sampling=part.sampling,
        samples=samples,
        done={(one.item, one.sample) for one in own},
    )


async def _baselines(
    target: Target, parts: Sequence[Part], journal: Journal, sandbox: SandboxPool, summary: Summary
) -> None:
    """Play each part once without a thought: with empty answers, and with guesses."""
    items = {f"random/{part.name}/{item.name}/0": (part.suite, item) for part in parts for item in part.items}

    def guess(key: str, messages: list[str]) -> str:
        suite, item = items[key]
        return suite.guess(item, messages, random.Random(f"{key} {len(messages)}"))

    rules = replace(Rules.of(target.config), context_tokens=CONTEXT, play_tokens=CONTEXT)
    replies: dict[Policy, Callable[[str, list[str]], str]] = {
        "null": lambda key, messages: NULL_REPLY,
        "random": guess,
    }
    for policy, reply in replies.items():
        table = Table(scripted_pool(reply), TextChat(), sandbox, rules, seconds=600.0)
        for part in parts:
            if policy in part.suite.baselines:
                summary.suites[part.name].lost += await _play(part, table, journal, policy, 8)


async def _say_estimate(
    target: Target, parts: Sequence[Part], journal: Journal, pool: object, chat: object, say: Say
) -> None:
    """On a server that is started here, measure its speed and say how long it will take at most."""
    if target.endpoint is not None:
        return
    done = {(one.suite, one.item, one.sample) for one in journal.samples if one.policy == "model"}
    longest = replies = 0
    for part in parts:
        left = sum(
            (part.name, item.name, index) not in done for item in part.items for index in range(part.samples)
        )
        room = min(part.sampling.max_tokens, target.config.model.max_model_len)
        replies, longest = replies + left, longest + left * room
    rate = await targets.tokens_per_second(pool, chat, min(target.places, max(1, replies)))
    say(
        f"{replies} plays; {rate:.0f} tokens per second here: at most {_time(longest / rate)} "
        "if each play has one reply"
    )


def _time(seconds: float) -> str:
    for unit, size in (("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def _look_for_copies(
    parts: Sequence[Part], journal: Journal, sources: Mapping[str, Iterable[str]], summary: Summary
) -> None:
    """Count, by source, the items of which a text of the training has a part; programs count as wholes."""
    programs = {part.name: {item.name: fingerprint(item.text) for item in part.items} for part in parts}
    asked = {(one.suite, one.item): one.asked[0][0] for one in journal.samples if one.asked}
    prose = {
        part.name: {
            item.name: item.text or asked.get((part.name, item.name), "")
            for item in part.items
            if not programs[part.name][item.name]
        }
        for part in parts
    }
    guard = Guard(prose)
    read = {source: list(texts) for source, texts in sources.items()}
    counted = guard.count(read)
    for part in parts:
        summary.suites[part.name].overlap = dict.fromkeys(read, 0) | counted.get(part.name, {})
    for source, texts in read.items():
        prints = {fingerprint(text) for text in texts} - {""}
        for part in parts:
            same = sum(one in prints for one in programs[part.name].values())
            summary.suites[part.name].overlap[source] += same


def training_texts(target: Target, more: Sequence[str]) -> dict[str, Iterable[str]]:
    """Return what the contamination guard reads: corpus and accepted designs of the run, and ``more``.

    ``more`` are sources as in ``designer.corpus``. Raises ConfigError for one that is unreadable.
    """
    found: dict[str, Iterable[str]] = {}
    if target.run_root is not None:
        corpus = corpora.load_for(target.config)
        found |= {one.source: [document.text for document in one.documents] for one in corpus.sources}
        designs = sorted(target.run_root.rglob("archive/*.py"))
        found["accepted designs"] = [file.read_text(encoding="utf-8") for file in designs]
    for source in more:
        documents = corpora.load(source).sources[0].documents
        found[source] = [document.text for document in documents]
    return found
