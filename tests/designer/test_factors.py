"""A switch changes its own factor: the one section of the prompt, and no ticket, seed or draw besides."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
from prompt_cases import Letters
from scenes import small_run

from bus.messages import DesignTicket, stable_id
from engine import ablations, recipe
from engine.config import Config
from roles.designer.attempt import Workshop
from roles.designer.authors import prompts_for
from roles.designer.corpus import Corpus
from roles.designer.memory import Memory
from roles.scorer import cohort_plan, scheduling
from roles.scorer.curriculum import Curriculum
from roles.scorer.state import Cohort, Design, Publish
from roles.work_loop import sampling_seed

COHORTS = 6


class Attempt(NamedTuple):
    """The inputs of one attempt at a design, except for the weights."""

    ticket: DesignTicket
    seed: int
    document: str
    sections: dict[str, str]


@pytest.fixture
def toml(tmp_path: Path) -> Path:
    """A recipe with everything on, and forty documents for any skill."""
    place = tmp_path / "documents"
    place.mkdir()
    for number in range(40):
        (place / f"{number}.txt").write_text(f"document number {number}, about doors")
    path = tmp_path / "recipe.toml"
    path.write_text(
        f"""
        [run]
        name = "all-on"
        [model]
        path = "m"
        max_model_len = 200000
        [designer]
        corpus = "dir:{place}"
        skills_per_cohort = 3
        attempts = 2
        prompt = "full"
        [curriculum]
        environments = 24
        """
    )
    return path


def remembered() -> Memory:
    """Return a memory with a game at the frontier and a mastered one for every skill."""
    memory = Memory(200)
    for skill in ablations.GAMES:
        for state, win in (("frontier", 0.5), ("mastered", 1.0)):
            name = f"{state} {skill}"
            shared = {"environment": stable_id(name), "skill": skill, "document": ""}
            source = f"class {state.title()}Env: ...  # {skill}"
            memory.ready(small_run.ready(name, source=source, title=name, **shared))
            bounds = {"win": win, "win_low": win - 0.1, "win_high": win, "hinted": win, "regret": 0.0}
            memory.scored(small_run.scored(name, state=state, **shared, **bounds))
    return memory


def tickets(config: Config) -> list[DesignTicket]:
    """The tickets of a run's first cohorts; those of the first are what the curriculum itself asks for."""
    found = []
    for number in range(COHORTS):
        life = cohort_plan.rounds_of(config.curriculum, number)
        names = [stable_id("design", config.run.name, number, slot) for slot in range(life.size)]
        cohort = Cohort(
            number=number, opens=life.opens, last=life.last, due=life.due, asked=life.size, designs=names
        )
        for slot, skill in enumerate(cohort_plan.skills(config.designer, number, life.size)):
            design = Design(design=names[slot], cohort=number, slot=slot, skill=skill)
            found.append(scheduling.ticket(config, cohort, design, 0))
    asked = first_tickets(config)
    assert asked == found[: len(asked)]
    assert len(asked) >= config.curriculum.environments
    return found


def first_tickets(config: Config) -> list[DesignTicket]:
    """Return the tickets that the curriculum publishes once the first weights are served."""
    machine = Curriculum(config)
    commands = machine.start()
    commands += [*machine.apply(1, small_run.policy(0)), *machine.apply(2, small_run.serving(0))]
    published = [command.message for command in commands if isinstance(command, Publish)]
    return [message for message in published if isinstance(message, DesignTicket)]


async def attempts(config: Config) -> list[Attempt]:
    chat: Any = Letters()
    absent: Any = None
    workshop = Workshop(
        config.designer,
        designer=absent,
        chat=chat,
        prompts=prompts_for(config, chat, external=False),
        corpus=Corpus.open(config, chat),
        memory=remembered(),
        review=absent,
        validator=absent,
    )
    found = []
    for ticket in tickets(config):
        for attempt in range(ticket.attempts):
            asked = await workshop.ask(ticket, attempt)
            seed = sampling_seed(ticket.seed, ticket.design, attempt)
            found.append(Attempt(ticket, seed, asked.document, sections(chat.decode(asked.ids))))
    return found


def sections(text: str) -> dict[str, str]:
    parts = ("\n" + text).split("\n# ")
    return {head.strip() or "task": body for head, _, body in (part.partition("\n") for part in parts)}


async def both(toml: Path, switch: str, *settings: str) -> list[tuple[Attempt, Attempt]]:
    on, off = [await attempts(recipe.load(toml, [*settings, *more]).config) for more in ([], [switch])]
    return list(zip(on, off, strict=True))


def differing(one: Attempt, other: Attempt) -> set[str]:
    heads = one.sections.keys() | other.sections.keys()
    return {head for head in heads if one.sections.get(head) != other.sections.get(head)}


@pytest.mark.parametrize("prompt", ["full", "tools"])
@pytest.mark.parametrize(
    ("switch", "section", "told"),
    [
        ("corpus=off", "Material", lambda attempt: "about doors"),
        ("memory=off", "Earlier environments", lambda attempt: f"# {attempt.ticket.skill}"),
    ],
)
async def test_a_switch_removes_its_section_and_nothing_else(
    toml: Path, prompt: str, switch: str, section: str, told: Callable[[Attempt], str]
) -> None:
    for on, off in await both(toml, switch, f"designer.prompt={prompt}"):
        assert (on.ticket, on.seed) == (off.ticket, off.seed)
        assert differing(on, off) == {section}
        assert told(on) in on.sections[section]
        assert section not in off.sections
        assert off.document == ("" if section == "Material" else on.document)


async def test_a_frozen_designer_is_asked_the_same(toml: Path) -> None:
    assert all(on == off for on, off in await both(toml, "designer=frozen"))
    assert recipe.load(toml, ["designer=frozen"]).config.designer.kind == "frozen"


async def test_two_skills_change_the_skill_and_nothing_else(toml: Path) -> None:
    """The description of a skill and its examples change with the skill; all else stays."""
    skills = set()
    for on, off in await both(toml, "skills=two"):
        skills.add(off.ticket.skill)
        assert (on.seed, on.document) == (off.seed, off.document)
        moved = msgspec.structs.replace(off.ticket, skill=on.ticket.skill, turn=on.ticket.turn)
        assert moved == on.ticket
        if on.ticket.skill == off.ticket.skill:
            assert differing(on, off) == set()
            continue
        assert differing(on, off) == {"Interface", "Skill", "Earlier environments", "Answer"}
        for head in ("Interface", "Answer"):
            assert off.sections[head].replace(off.ticket.skill, on.ticket.skill) == on.sections[head]
        line, *rest = on.sections["Skill"].splitlines()
        assert line.startswith(f"The environment must exercise: {on.ticket.skill} - ")
        assert off.sections["Skill"].splitlines()[1:] == rest
    assert skills == set(ablations.TWO)


async def test_switches_go_together(toml: Path) -> None:
    config = recipe.load(toml, ["corpus=off", "memory=off", "skills=two"]).config
    assert [
        set(found.sections) & {"Material", "Earlier environments"} for found in await attempts(config)
    ] == [set() for _ in range(2 * 6 * COHORTS)]
