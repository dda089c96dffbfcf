"""The warm-start corpus: designs, hints and plays of seed programs, as chat messages.

The policy shall be partly competent. Labels have no noise; instead each play has a mode. A scripted player
thinks and plays as well as it can, follows a naive rule that is enough at level 1, or blurts. Most of the
plays think, so thinking is learned, but the weights of the first tokens make it rare. Easy tasks then reward
the naive rule too, and only tasks of the middle levels tell the two apart.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, Literal

from engine.nano import tokenizer
from engine.nano.seeds.base import NOUNS, Family, Parameters, Script
from engine.nano.seeds.cycle import PALETTE
from engine.prompts import render
from sandbox.tools import ToolEnv, ToolError

Kind = Literal["design", "hint", "play", "drill"]

Mode = Literal["think", "naive", "blurt"]
# Shares of the modes of plain plays: as they are shown, and as their first tokens are weighed.
SHOWN: dict[Mode, float] = {"think": 0.5, "naive": 0.2, "blurt": 0.3}
LEARNED: dict[Mode, float] = {"think": 0.1, "naive": 0.5, "blurt": 0.4}
THINKS_HINTED = 0.9
THINKS_WITH_TOOLS = 0.43  # plain plays with tools: they have no naive rule
# Shares of the levels 1-6. Designs of all levels are known, and hard ones are rare.
PLAY_LEVELS = (0.24, 0.22, 0.20, 0.16, 0.10, 0.08)
DESIGN_LEVELS = (0.78, 0.10, 0.05, 0.03, 0.02, 0.02)

_TARGETS = (0.2, 0.3, 0.4, 0.5, 0.5, 0.5, 0.5, 0.6, 0.7, 0.8)
_UNGROUNDED = 0.1
_HINT_SHARE = 0.42
_PLAYS_PER_PROGRAM = 4
# A short training learns last to copy from the context (a noun, a hint, a colour); drills that ask for
# nothing else teach it early.
_DRILLS_PER_PROGRAM = 0.5
_INSTANCES = 1 << 20
_WORDS = (*NOUNS, *PALETTE)


@dataclass(frozen=True)
class SeedExample:
    """One conversation: contents in turn of user and assistant, beginning with the user, or of ``roles``.

    ``decisive`` are the character ranges of a design's reply that are not the same in all of its family.
    ``weight`` weighs the first token of the first reply, which tells the mode.
    """

    kind: Kind
    family: str
    contents: tuple[str, ...]
    mode: Mode | None = None
    weight: float = 1.0
    hinted: bool = False
    won: bool = False
    decisive: tuple[tuple[int, int], ...] = ()
    roles: tuple[str, ...] = ()


def examples(
    families: Sequence[Family], *, seed: int, design_share: float, hinted_share: float
) -> Iterator[SeedExample]:
    """Yield examples without end; the same arguments yield the same ones.

    ``design_share`` is the share of designs and hints together, ``hinted_share`` that of hinted plays
    among plays.
    """
    rng = Random(f"warm start {seed}")
    turn = 0
    while True:
        family = families[turn % len(families)]
        turn += 1
        plays = [
            play(family, parameters, noun, rng, hinted=rng.random() < hinted_share)
            for parameters, noun in [_program(family, rng, PLAY_LEVELS)]
            for _ in range(_PLAYS_PER_PROGRAM)
        ]
        yield from plays
        # As many designs and hints follow as keep the share right on average.
        wanted = _PLAYS_PER_PROGRAM * design_share / (1 - design_share)
        for _ in range(int(wanted) + (rng.random() < wanted % 1)):
            yield hint(family, rng) if rng.random() < _HINT_SHARE else design(family, rng)
        if rng.random() < _DRILLS_PER_PROGRAM:
            yield drill(rng)


def design(family: Family, rng: Random) -> SeedExample:
    """Return a design: a prompt with a document, answered by the program that the document asks for."""
    target = rng.choice(_TARGETS)
    parameters, noun = _program(family, rng, DESIGN_LEVELS)
    document = "" if rng.random() < _UNGROUNDED else rng.choice(family.documents).format(noun=noun)
    prompt = render(
        "design_nano",
        skill=family.skill,
        document=document,
        target=target,
        memory=[],
        max_turns=family.max_turns,
    )
    decisive, at = [], 0
    for text, slot in family.pieces(parameters, noun):
        if slot:
            decisive.append((at, at + len(text)))
        at += len(text)
    program = family.program(parameters, noun)
    return SeedExample("design", family.name, (prompt, program), decisive=tuple(decisive))


def hint(family: Family, rng: Random) -> SeedExample:
    """Return a hint: a program as the prompt, answered by its hint."""
    parameters, noun = _program(family, rng, PLAY_LEVELS)
    prompt = render("hint_nano", source=family.program(parameters, noun))
    return SeedExample("hint", family.name, (prompt, family.hint(parameters)))


def play(family: Family, parameters: Parameters, noun: str, rng: Random, *, hinted: bool) -> SeedExample:
    """Return one scripted play of an instance of a program, as the agent role would record it.

    The program itself is run, so what the transcript says is what the code does.
    """
    mode: Mode
    if hinted or family.tools:
        chance = THINKS_HINTED if hinted else THINKS_WITH_TOOLS
        mode, weight = "think" if rng.random() < chance else "blurt", 1.0
    else:
        (mode,) = rng.choices(list(SHOWN), list(SHOWN.values()))
        weight = LEARNED[mode] / SHOWN[mode]
    line = family.hint(parameters) if hinted else None
    environment = load(family.program(parameters, noun))
    if family.tools:
        return tool_play(family, environment, line, rng, mode)
    observation: str = environment.reset(rng.randrange(_INSTANCES))
    script = player(family, mode, observation, line, rng)
    contents = [render("play_nano", observation=observation, hint=line)]
    reply = next(script)
    for turn in range(family.max_turns):
        contents.append(reply)
        observation, reward, ended, *_ = environment.step(action_of(reply))
        if ended or turn + 1 == family.max_turns:
            break
        contents.append(observation)
        reply = script.send(observation)
    script.close()
    return SeedExample("play", family.name, tuple(contents), mode, weight, hinted, won=reward > 0)


def player(family: Family, mode: Mode, observation: str, hint: str | None, rng: Random) -> Script:
    """Return a scripted player of ``family`` in ``mode``; the hint is for one that thinks."""
    if mode == "think":
        return family.think(observation, hint, rng)
    return family.naive(observation, rng) if mode == "naive" else family.blurt(observation, rng)


def tool_play(family: Family, environment: Any, hint: str | None, rng: Random, mode: Mode) -> SeedExample:
    """Return one scripted play with tools, in the messages that the agent role would append."""
    environment.reset(rng.randrange(_INSTANCES))
    tools = environment.get_tools()
    ((_, observation),) = environment.messages()
    script = player(family, mode, observation, hint, rng)
    said = [
        ("system", tokenizer.signatures(tools)),
        ("user", render("play_native", observation=observation, hint=hint)),
    ]
    reply, won = next(script), False
    for _ in range(family.max_turns):
        said.append(("assistant", reply))
        _, reward, ended, cut, _ = environment.step(tokenizer.CALLS.action(reply, tools))
        won = reward > 0
        if ended or cut:
            break
        answers = environment.messages()
        said += [("system" if role == "tool" else role, text) for role, text in answers]
        reply = script.send("\n".join(text for _, text in answers))
    script.close()
    roles, contents = zip(*said, strict=True)
    return SeedExample("play", family.name, contents, mode, 1.0, hint is not None, won, roles=roles)


def drill(rng: Random) -> SeedExample:
    """Return a drill in copying: words to say again, from a list, from a given one on, or out of quotes."""
    words = rng.sample(_WORDS, rng.randint(4, 12))
    listed = " ".join(words)
    kind = rng.random()
    if kind < 0.4:
        return SeedExample("drill", "", (listed, listed))
    if kind < 0.8:
        at = rng.randrange(len(words) - 1)
        return SeedExample("drill", "", (f"{listed} ?, {words[at]}", " ".join(words[at + 1 :])))
    return SeedExample("drill", "", (f'{rng.choice("CDS")}="{listed}"', f"{listed} {words[0]}"))


def action_of(reply: str) -> str:
    """Return what stands in the box of a scripted reply."""
    return reply.rpartition("\\boxed{")[2].removesuffix("}")


def load(source: str) -> Any:
    """Return an object of the class ``Env`` of one of our own seed programs.

    Never for a program that a model wrote: those run in the sandbox only.
    """
    namespace: dict[str, Any] = {"ToolEnv": ToolEnv, "ToolError": ToolError}
    exec(compile(source, "<seed program>", "exec"), namespace)
    return namespace["Env"]()


def _program(family: Family, rng: Random, weights: Sequence[float]) -> tuple[Parameters, str]:
    level = rng.choices(family.seed_levels, [weights[level - 1] for level in family.seed_levels])[0]
    return family.draw(level, rng, withheld=False), rng.choice(NOUNS)
