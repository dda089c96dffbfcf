"""Families: text and code agree, players play them, the classifier reads them, held-out ones stay out."""

from __future__ import annotations

import re
from random import Random

import pytest

from engine.config import DesignerConfig
from engine.errors import ConfigError
from engine.nano import seeds
from engine.nano.seeds import UNSEEN, Family, corpus
from engine.nano.seeds.cycle import Cycle
from engine.nano.seeds.guess import Guess

FAMILIES = seeds.families()
GUESS = {"base": 2, "end": 4, "top": 10}
CASES = [
    pytest.param(family, level, withheld, id=f"{family.name}-{level}-{'withheld' if withheld else 'seed'}")
    for family in FAMILIES
    for withheld in (False, True)
    for level in (family.held_levels if withheld else family.seed_levels)
]


def wins(
    family: Family, level: int, mode: corpus.Mode, *, withheld: bool, hinted: bool = False, plays: int = 80
) -> float:
    """Share of plays won by the scripted player, played as the corpus plays them."""
    rng = Random(f"{family.name} {level} {withheld} {mode} {hinted}")
    won = 0
    for _ in range(plays):
        parameters = family.draw(level, rng, withheld=withheld)
        environment = corpus.load(family.program(parameters, "kites"))
        observation = environment.reset(rng.randrange(1000))
        hint = family.hint(parameters) if hinted else None
        script = corpus.player(family, mode, observation, hint, rng)
        reply = next(script)
        for _turn in range(family.max_turns):
            observation, reward, terminated, truncated, info = environment.step(corpus.action_of(reply))
            assert type(terminated) is bool
            assert truncated is False
            assert info == {}
            assert reward in (0.0, 1.0)
            if terminated:
                break
            reply = script.send(observation)
        else:
            pytest.fail("a program outlasted its family's turns")
        won += reward > 0
        assert (observation == "yes") == (reward > 0)
    return won / plays


def test_each_skill_has_a_family_and_each_family_a_skill() -> None:
    assert {family.skill for family in FAMILIES} == set(DesignerConfig().skills)


@pytest.mark.parametrize(("family", "level", "withheld"), CASES)
def test_programs_are_recognised_and_their_text_agrees_with_their_code(
    family: Family, level: int, withheld: bool
) -> None:
    rng = Random(5)
    for _ in range(20):
        parameters = family.draw(level, rng, withheld=withheld)
        assert family.withheld(parameters) is withheld
        source = family.program(parameters, "kites")
        assert family.parse(source) == (parameters, "kites")
        assert seeds.classify(source) == (family.name, level)
        shown = corpus.load(source).reset(3)
        tries = int(re.findall(r"(\d+) tries", shown)[0])
        assert "kites" in shown
        assert tries == family.tries(parameters) <= family.max_turns <= seeds.MAX_TURNS
        # The program ends exactly when the text says so.
        environment = corpus.load(source)
        wrong = next(action for action in ("99", "98") if not _ends(source, action))
        environment.reset(3)
        ended = [environment.step(wrong)[2] for _ in range(tries)]
        assert ended == [False] * (tries - 1) + [True]


def _ends(source: str, action: str) -> bool:
    environment = corpus.load(source)
    environment.reset(3)
    return bool(environment.step(action)[2])


@pytest.mark.parametrize(("family", "level", "withheld"), CASES)
def test_hints_make_a_thinking_player_win_and_blurting_loses(
    family: Family, level: int, withheld: bool
) -> None:
    hinted = wins(family, level, "think", withheld=withheld, hinted=True)
    plain = wins(family, level, "think", withheld=withheld)
    blurted = wins(family, level, "blurt", withheld=withheld)
    assert hinted > 0.9
    assert plain > blurted
    assert blurted < 0.65


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_a_level_asks_for_skill_and_not_for_luck(family: Family) -> None:
    """A player that thinks wins at every level; the naive rule is enough at level 1 only."""
    for withheld, levels in ((False, family.seed_levels), (True, family.held_levels)):
        for level in levels:
            assert wins(family, level, "think", withheld=withheld) == 1.0
            naive = wins(family, level, "naive", withheld=withheld)
            assert naive == 1.0 if level == 1 else naive < (0.9 if level == 2 else 0.6)


@pytest.mark.parametrize(("family", "level", "withheld"), CASES)
def test_players_that_do_not_look_win_less_than_half_beyond_level_1(
    family: Family, level: int, withheld: bool
) -> None:
    rng = Random(11)
    games = [
        (corpus.load(family.program(family.draw(level, rng, withheld=withheld), "kites")), rng.randrange(999))
        for _ in range(120)
    ]
    constants = ["", *map(str, range(30)), "ahead", "left", "red", "yes"]
    policies = [lambda c=c: c for c in constants] + [lambda: str(rng.randint(0, 9))]
    for policy in policies:
        assert sum(_blind(game, seed, policy()) for game, seed in games) / len(games) < (
            0.45 if level > 1 else 0.6
        )


def _blind(game: object, seed: int, action: str) -> bool:
    game.reset(seed)  # type: ignore[attr-defined]
    for _ in range(seeds.MAX_TURNS):
        try:
            _, reward, ended, *_ = game.step(action)  # type: ignore[attr-defined]
        except ValueError:
            return False
        if ended:
            return bool(reward > 0)
    return False


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_instances_depend_on_the_seed_and_on_nothing_else(family: Family) -> None:
    source = family.program(family.draw(4, Random(1), withheld=False), "kites")

    def transcript(seed: int) -> tuple[str, ...]:
        environment = corpus.load(source)
        texts = [environment.reset(seed)]
        script = family.think(texts[0], None, Random(0))
        reply = next(script)
        for _ in range(family.max_turns):
            text, reward, ended, *_ = environment.step(corpus.action_of(reply))
            texts.append(f"{text} {reward}")
            if ended:
                break
            reply = script.send(text)
        return tuple(texts)

    runs = [transcript(seed) for seed in range(12)]
    assert runs == [transcript(seed) for seed in range(12)]
    assert len(set(runs)) > 1


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_a_program_that_contradicts_itself_is_no_member(family: Family) -> None:
    parameters = family.draw(1, Random(2), withheld=False)
    source = family.program(parameters, "kites")
    tries = family.tries(parameters)
    assert "{T} tries" in source
    assert seeds.classify(source.replace("{T} tries", f"{tries} tries")) is None
    assert seeds.classify(source.replace(">=T", f">={tries + 1}")) is None
    assert seeds.classify(source + "\n# more") is None
    assert seeds.classify("print(1)") is None


def test_what_is_hidden_must_lie_within_what_is_shown() -> None:
    source = Guess().program(GUESS, "kites")
    assert seeds.classify(source) == ("guess", 3)
    assert seeds.classify(source.replace("B=4", "B=11")) is None
    assert seeds.classify(source.replace("A=2", "A=5")) is None


def test_a_colour_that_comes_twice_makes_no_cycle() -> None:
    """Later items are not settled then."""
    source = Cycle().program({"words": "red tan blue", "least": 2, "most": 4}, "kites")
    assert seeds.classify(source) == ("cycle", 2)
    assert seeds.classify(source.replace("red tan blue", "red tan red blue")) is None


@pytest.mark.parametrize("suite", seeds.SUITES)
def test_held_out_suites_are_withheld_reproducible_and_spread_over_families(suite: str) -> None:
    episodes = seeds.held_out(suite, 48, 3)
    assert episodes == seeds.held_out(suite, 48, 3)
    assert (episodes == seeds.held_out(suite, 48, 4)) is (suite in seeds.TEST)
    levels = set(seeds.SUITES[suite])
    shown = [
        family
        for family in (seeds.families(UNSEEN) if suite == "unseen" else FAMILIES)
        if levels & set(family.held_levels)
    ]
    assert {item.family for item in episodes} == {family.name for family in shown}
    by_name = {family.name: family for family in shown}
    for item in episodes:
        assert item.level in levels
        assert item.max_turns <= seeds.MAX_TURNS
        read = by_name[item.family].parse(item.source)
        assert read is not None
        assert by_name[item.family].withheld(read[0])
        assert by_name[item.family].level(read[0]) == item.level


def test_the_test_split_shares_no_program_with_what_chooses() -> None:
    sources = {suite: {item.source for item in seeds.held_out(suite, 600, 1)} for suite in seeds.SUITES}
    for test in seeds.TEST:
        assert not any(sources[test] & sources[suite] for suite in seeds.SUITES if suite != test)


@pytest.mark.parametrize("family", seeds.families(UNSEEN), ids=lambda family: family.name)
def test_families_that_no_warm_start_shows_can_be_won_by_thinking(family: Family) -> None:
    for level in seeds.SUITES["unseen"]:
        assert wins(family, level, "think", withheld=True) == 1.0
        assert wins(family, level, "blurt", withheld=True) < 0.5


def test_an_unknown_suite_is_refused() -> None:
    with pytest.raises(ConfigError, match="easy, mid, hard"):
        seeds.held_out("medium", 4, 0)


def test_documents_belong_to_skills_and_name_their_noun_in_two_sentences() -> None:
    found = seeds.documents()
    assert len({document.id for document in found}) == len(found)
    assert {document.skill for document in found} == set(DesignerConfig().skills)
    for document in found:
        assert document.id.rpartition("-")[2] in document.text
        assert document.text.count(".") == 2


class Shouting(Guess):
    """A family of somebody else's."""

    name = "shouting"


def test_a_user_adds_a_family_by_an_importable_name() -> None:
    name = f"{__name__}:Shouting"
    found = seeds.families(("guess", name))
    assert [family.name for family in found] == ["guess", "shouting"]
    assert {document.id.split("-")[0] for document in seeds.documents((name,))} == {"shouting"}
    assert {item.family for item in seeds.held_out("mid", 4, 0, (name,))} == {"shouting"}


@pytest.mark.parametrize(
    "names",
    [
        *(
            ["nothing.here:Family"],
            ["engine.nano.seeds.guess:Nothing"],
            ["engine.errors:SpadeError"],
            ["nobody"],
        ),
        *([""], ["guess", "engine.nano.seeds.guess:Guess"]),
    ],
)
def test_a_family_that_is_missing_or_named_twice_is_refused(names: list[str]) -> None:
    with pytest.raises(ConfigError):
        seeds.families(names)
