"""Suites of questions with one answer: AIME by math-verify, GPQA-Diamond by the letter.

The data is not ours to ship: each suite reads a file of yours, or the Hub.
"""

from __future__ import annotations

import csv
import json
import random
import re
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from engine.config import Config, SamplingConfig
from engine.errors import ConfigError
from engine.evals.suite import Item, Outcome, Reply, Seat, Suite, paper_and_smoke, spread

LETTERS = "ABCD"
_JUDGE_SECONDS = 300.0  # a slow host must not make an answer wrong; math-verify has its own limits
_PHRASE = re.compile(r"answer\s*(?:is|:)?\s*\**\(?([A-D])\b", re.IGNORECASE)
_STEPS = "Reason step by step, and put your final answer into \\boxed{}."
_LETTER = "Reason step by step, and put the letter of your answer into \\boxed{}."


def same_answer(given: str, right: str) -> bool:
    """Return whether two answers are equal: as numbers, as texts, or for math-verify. Main thread only."""
    given, right = given.strip().strip("$"), right.strip()
    if given.removeprefix("-").isdecimal() and right.removeprefix("-").isdecimal():
        return int(given) == int(right)
    if given == right:
        return True
    from math_verify import parse, verify

    try:
        return bool(verify(parse(f"${right}$"), parse(f"${given}$")))
    except Exception:  # a parser that fails on what a model wrote has found no equal answer
        return False


class Questions(Suite):
    """Items from the records of a file or of a data set of the Hub."""

    hub: ClassVar[tuple[str, ...]]

    def __init__(self, argument: str) -> None:
        self.source = argument

    def available(self) -> str:
        if missing := super().available():
            return missing
        if not self.source:
            return f"it has no data: name a file, NAME:PATH, or take {self.hub[0]} of the hub, NAME:hub"
        if self.source != "hub" and not Path(self.source).exists():
            return f"there is no file {self.source}"
        return ""

    def items(self, count: int, seed: int) -> Sequence[Item]:
        try:
            found = list(self.read(self.records()))
        except (KeyError, ValueError, TypeError, OSError) as error:
            raise ConfigError(
                f"{self.source} cannot be read as this suite's data: {type(error).__name__}: {error}."
            ) from error
        return spread(found, count)

    @abstractmethod
    def read(self, records: Iterator[Mapping[str, Any]]) -> Iterator[Item]:
        """Yield the items of ``records``."""

    def records(self) -> Iterator[Mapping[str, Any]]:
        """Yield the records of the file, of the JSONL files of the folder, or of the hub."""
        if self.source == "hub":
            from datasets import load_dataset

            repository, *name, split = self.hub
            yield from load_dataset(repository, *name, split=split)
            return
        path = Path(self.source)
        files = sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
        for file in files:
            with file.open(encoding="utf-8", newline="") as stream:
                if file.suffix == ".csv":
                    yield from csv.DictReader(stream)
                else:
                    yield from (json.loads(line) for line in stream if line.strip())


class Aime(Questions):
    """``aime-25`` and ``aime-26``: whole numbers."""

    needs = ("math_verify",)
    presets: ClassVar = paper_and_smoke(
        SamplingConfig(temperature=1.0, top_p=0.95, top_k=20, max_tokens=32768), samples=64
    )

    def __init__(self, argument: str, year: int) -> None:
        super().__init__(argument)
        self.version = f"AIME 20{year}"
        self.year = year

    @property
    def hub(self) -> tuple[str, ...]:  # type: ignore[override]
        return (f"math-ai/aime{self.year}", "test")

    def read(self, records: Iterator[Mapping[str, Any]]) -> Iterator[Item]:
        for number, record in enumerate(records):
            problem = record["problem"] if "problem" in record else record["prompt"]
            answer = record["answer"] if "answer" in record else record["label"]
            yield Item(name=str(number), group="AIME", text=str(problem), data=(str(problem), str(answer)))

    async def play(self, item: Item, seat: Seat) -> Outcome:
        problem, right = item.data
        reply = await seat.ask([f"{problem}\n\n{_STEPS}"])
        if reply.boxed is None:
            return Outcome(score=0.0, reason=_no_answer(reply))
        won = await seat.work(same_answer, reply.boxed, right, seconds=_JUDGE_SECONDS)
        return Outcome(score=float(won), detail={"answer": reply.boxed, "right": right})

    def guess(self, item: Item, messages: Sequence[str], rng: random.Random) -> str:
        return f"\\boxed{{{rng.randrange(1000)}}}"


class Gpqa(Questions):
    """``gpqa-diamond``: four options in an order that is the same in each evaluation."""

    hub = ("Idavidrein/gpqa", "gpqa_diamond", "train")
    version = "GPQA-Diamond, options shuffled by seed 42"
    presets: ClassVar = paper_and_smoke(
        SamplingConfig(temperature=0.7, top_p=0.95, max_tokens=32768), samples=8, smoke_items=8
    )

    def read(self, records: Iterator[Mapping[str, Any]]) -> Iterator[Item]:
        rng = random.Random(42)
        for number, record in enumerate(records):
            right = str(record["Correct Answer"]).strip()
            options = [right, *(str(record[f"Incorrect Answer {index}"]).strip() for index in (1, 2, 3))]
            rng.shuffle(options)
            question = str(record["Question"]).strip()
            group = str(record.get("High-level domain") or "GPQA")
            yield Item(
                name=str(number),
                group=group,
                text=question,
                data=(question, options, LETTERS[options.index(right)]),
            )

    async def play(self, item: Item, seat: Seat) -> Outcome:
        question, options, right = item.data
        listed = "\n".join(f"({letter}) {option}" for letter, option in zip(LETTERS, options, strict=True))
        reply = await seat.ask([f"{question}\n\n{listed}\n\n{_LETTER}"])
        given = chosen_letter(reply)
        if not given:
            return Outcome(score=0.0, reason=_no_answer(reply))
        return Outcome(score=float(given == right), detail={"answer": given, "right": right})

    def guess(self, item: Item, messages: Sequence[str], rng: random.Random) -> str:
        return f"\\boxed{{{rng.choice(LETTERS)}}}"


def chosen_letter(reply: Reply) -> str:
    """Return the letter in the box, else that of the last "the answer is (X)", else ""."""
    boxed = re.fullmatch(r"(?:\\text\{)?\W*([A-Da-d])\W*", reply.boxed or "")
    if boxed:
        return boxed.group(1).upper()
    phrases = _PHRASE.findall(reply.text)
    return phrases[-1].upper() if phrases else ""


def _no_answer(reply: Reply) -> str:
    return "reply cut at its length limit" if reply.cut else "no answer in the reply"


def aime_25(argument: str, config: Config) -> Aime:
    """Return ``aime-25:FILE``, or ``aime-25:hub``."""
    return Aime(argument, 25)


def aime_26(argument: str, config: Config) -> Aime:
    """Return ``aime-26:FILE``, or ``aime-26:hub``."""
    return Aime(argument, 26)


def gpqa(argument: str, config: Config) -> Gpqa:
    """Return ``gpqa-diamond:FILE`` (CSV or JSONL), or ``gpqa-diamond:hub``."""
    return Gpqa(argument)
