"""Seed families of tool environments: recognised, played by scripts, and in the ids that are served."""

from __future__ import annotations

import itertools
from pathlib import Path
from random import Random

import pytest

from engine import recipe
from engine.inference.tokens import ChatTokens
from engine.nano import seeds, tokenizer
from engine.nano.seeds import Family, corpus
from engine.nano.seeds.base import LEVELS
from engine.nano.warmstart import ExampleEncoder
from roles.designer.hint import fault_of
from roles.designer.review import ways_to_win
from sandbox import SandboxPool, SandboxSettings, Validator

RECIPE = recipe.load(Path(__file__).resolve().parents[2] / "configs" / "nano-tools.toml").config
NAMES = RECIPE.warmstart.families
FAMILIES = seeds.families(NAMES)
CASES = [
    pytest.param(family, level, withheld, id=f"{family.name}-{level}-{'withheld' if withheld else 'seed'}")
    for family in FAMILIES
    for level in LEVELS
    for withheld in (False, True)
    if withheld or level in family.seed_levels
]


def wins(family: Family, level: int, *, withheld: bool, thinks: bool, hinted: bool, plays: int = 60) -> float:
    """Share of plays won by the scripted player, in the messages of the corpus."""
    rng, won = Random(f"{family.name} {level} {thinks} {hinted}"), 0
    for _ in range(plays):
        parameters = family.draw(level, rng, withheld=withheld)
        environment = corpus.load(family.program(parameters, "kites"))
        hint = family.hint(parameters) if hinted else None
        mode = "think" if thinks else "blurt"
        won += corpus.tool_play(family, environment, hint, rng, mode).won
    return won / plays


def test_each_skill_of_the_recipe_has_a_family() -> None:
    assert {family.skill for family in FAMILIES} == set(RECIPE.designer.skills)


@pytest.mark.parametrize(("family", "level", "withheld"), CASES)
def test_programs_are_recognised_and_hints_make_a_thinking_player_win(
    family: Family, level: int, withheld: bool
) -> None:
    rng = Random(5)
    for _ in range(10):
        parameters = family.draw(level, rng, withheld=withheld)
        assert family.withheld(parameters) is withheld
        source = family.program(parameters, "kites")
        assert seeds.classify(source, NAMES) == (family.name, level)
        assert seeds.classify(source + "\n# more", NAMES) is None
    assert wins(family, level, withheld=withheld, thinks=True, hinted=True) == 1.0
    blurted = wins(family, level, withheld=withheld, thinks=False, hinted=False)
    assert blurted < 0.35
    assert wins(family, level, withheld=withheld, thinks=True, hinted=False) > blurted


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
async def test_programs_pass_the_ladder_and_are_no_form(family: Family) -> None:
    async with SandboxPool(SandboxSettings(preload=())) as pool:
        for level in (1, 3, 6):
            program = family.program(family.draw(level, Random(level), withheld=level > 3), "kites")
            found = await Validator(pool).validate(program, max_turns=family.max_turns)
            assert (found.rung, found.reason, found.hack) == ("accepted", "", "")
            assert found.tools
            assert found.solvable


def test_the_corpus_is_in_the_ids_that_the_agent_appends(tmp_path: Path) -> None:
    """Each play of the corpus, token by token, is what the chat format makes of its messages."""
    examples = list(
        itertools.islice(corpus.examples(FAMILIES, seed=1, design_share=0.2, hinted_share=0.4), 300)
    )
    made = tokenizer.train(
        (text for item in examples for text in item.contents), vocabulary=700, context=1024
    )
    made.save_pretrained(tmp_path)
    chat, encode = ChatTokens(tmp_path), ExampleEncoder(made, design_weight=1.0)
    style = chat.tool_style
    assert (style.calls, style.lists, style.results) == (tokenizer.CALLS, True, "tool")
    assert chat.rewrites == ""
    plays = 0
    for item in examples:
        if item.kind != "play":
            continue
        plays += 1
        family = next(family for family in FAMILIES if family.name == item.family)
        program = family.program(family.draw(1, Random(0), withheld=False), "kites")
        ids = chat.first(item.contents[1], tools=corpus.load(program).get_tools())
        for reply, said in _turns(item):
            ids += [*chat.encode(reply), chat.stop_token_ids[0]]
            ids += chat.bridge(said) or [] if said else []
        assert ids == encode(item).tokens.tolist()
    assert plays > 100


def _turns(item: corpus.SeedExample) -> list[tuple[str, list[tuple[str, str]]]]:
    turns: list[tuple[str, list[tuple[str, str]]]] = []
    for role, text in list(zip(item.roles, item.contents, strict=True))[2:]:
        if role == "assistant":
            turns.append((text, []))
        else:
            turns[-1][1].append(("tool" if role == "system" else role, text))
    return turns


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
async def test_hints_tell_more_than_the_first_observation_and_less_than_the_answer(family: Family) -> None:
    async with SandboxPool(SandboxSettings(preload=())) as pool:
        for level in family.seed_levels:
            parameters = family.draw(level, Random(level), withheld=False)
            found = await Validator(pool).validate(family.program(parameters, "kites"), max_turns=6)
            assert fault_of(family.hint(parameters), ways_to_win(found)) == ""
