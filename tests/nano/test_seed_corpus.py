"""The corpus: deterministic, in the run's own formats, without anything that is held out."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from functools import cache
from random import Random

from engine.nano import seeds
from engine.nano.seeds import corpus
from engine.nano.seeds.corpus import SeedExample
from engine.prompts import render

FAMILIES = seeds.families()
BY_NAME = {family.name: family for family in FAMILIES}


def stream(seed: int = 3) -> Iterator[SeedExample]:
    return corpus.examples(FAMILIES, seed=seed, design_share=0.18, hinted_share=0.4)


@cache
def drawn() -> list[SeedExample]:
    return list(itertools.islice(stream(), 4000))


def take(count: int) -> list[SeedExample]:
    """The first of one corpus, which all tests share."""
    return drawn()[:count]


def test_the_same_seed_gives_the_same_corpus() -> None:
    assert take(300) == list(itertools.islice(stream(), 300))
    assert take(300) != list(itertools.islice(stream(4), 300))


def test_shares_are_as_asked() -> None:
    items = take(4000)
    kinds = Counter(item.kind for item in items)
    asked = kinds["design"] + kinds["hint"]
    assert abs(asked / (asked + kinds["play"]) - 0.18) < 0.02
    plays = [item for item in items if item.kind == "play"]
    assert abs(sum(item.hinted for item in plays) / len(plays) - 0.4) < 0.04
    assert {item.family for item in plays} == set(BY_NAME)


def test_nothing_held_out_is_shown() -> None:
    held = {item.source for suite in seeds.SUITES for item in seeds.held_out(suite, 120, 1)}
    programs = [item.contents[1] for item in take(4000) if item.kind == "design"]
    programs += [item.contents[0].partition("\n")[2] for item in take(4000) if item.kind == "hint"]
    assert len(programs) > 500
    levels = set()
    for program in programs:
        assert program not in held
        family, level = seeds.classify(program) or ("", 0)
        read = BY_NAME[family].parse(program)
        assert read is not None
        assert not BY_NAME[family].withheld(read[0])
        levels.add(level)
    assert levels == set(seeds.LEVELS)


def test_designs_answer_the_design_prompt_about_the_noun_of_their_document() -> None:
    documents = {document.text: document for document in seeds.documents()}
    grounded = 0
    for item in (item for item in take(2000) if item.kind == "design"):
        prompt, program = item.contents
        family = BY_NAME[item.family]
        read = family.parse(program)
        assert read is not None
        text = prompt.partition("%.")[2].strip()
        targets = {
            render("design_nano", skill=family.skill, document=text, target=target, memory=[], max_turns=6)
            for target in (0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8)
        }
        assert prompt in targets
        if text:
            grounded += 1
            assert documents[text].skill == family.skill
            assert documents[text].id.endswith(f"-{read[1]}")
        decisive = {program[start:stop] for start, stop in item.decisive}
        assert decisive == {read[1], *map(str, read[0].values())}
    assert grounded > 100


def test_hints_and_plays_use_the_run_s_prompts() -> None:
    for item in take(1500):
        if item.kind == "hint":
            source = item.contents[0].partition("\n")[2]
            assert item.contents[0] == render("hint_nano", source=source)
        if item.kind == "play":
            observation, _, line = item.contents[0].partition("\nHINT: ")
            assert bool(line) is item.hinted
            assert item.contents[0] == render("play_nano", observation=observation, hint=line or None)
            assert all("\\boxed{" in reply for reply in item.contents[1::2])
            assert len(item.contents) % 2 == 0
            assert len(item.contents) // 2 <= seeds.MAX_TURNS


def test_thinking_is_a_mode_of_the_whole_play() -> None:
    for item in (item for item in take(1500) if item.kind == "play"):
        assert {reply.startswith("\\boxed{") for reply in item.contents[1::2]} == {item.mode == "blurt"}


def test_hinted_players_think_and_win_more_often() -> None:
    plays = [item for item in take(4000) if item.kind == "play"]

    def share(hinted: bool, **wanted: object) -> float:
        arm = [item for item in plays if item.hinted is hinted]
        return sum(all(getattr(item, key) == value for key, value in wanted.items()) for item in arm) / len(
            arm
        )

    assert share(True, mode="think") > 0.85
    assert share(True, won=True) > share(False, won=True) + 0.2


def test_the_weights_of_first_tokens_make_thinking_rare() -> None:
    plays = [item for item in take(4000) if item.kind == "play" and not item.hinted]
    total = sum(item.weight for item in plays)
    for mode, learned in corpus.LEARNED.items():
        assert abs(sum(item.weight for item in plays if item.mode == mode) / total - learned) < 0.04


def test_drills_can_be_answered_from_their_prompt_alone() -> None:
    forms = set()
    for number in range(60):
        asked, reply = corpus.drill(Random(number)).contents
        listed, _, cue = asked.partition(" ?, ")
        name, quoted, inside = listed.partition('="')
        words = (inside.removesuffix('"') if quoted else name).split()
        forms.add((bool(cue), bool(quoted)))
        if cue:
            words = words[words.index(cue) + 1 :]
        assert reply.split() == (words + words[:1] if quoted else words)
    assert forms == {(False, False), (True, False), (False, True)}
