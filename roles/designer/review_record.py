"""What was found about a program, as it is published with it: told once, and told the same for ever after.

Probes need not come out the same twice, and memory grows: whoever takes a ticket up again does not judge a
program that was judged, but tells what was found then.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from bus.messages import Finding
from roles.designer.prober import Answers
from roles.work_loop import REASON_CHARACTERS

if TYPE_CHECKING:
    from roles.designer.attempt import Judged
    from roles.designer.review import Notes
    from sandbox import Verdict

_TITLE_CHARACTERS, _SUMMARY_CHARACTERS = 120, 300
# What is kept of what was played, for the checks of a hint.
_ACTIONS, _PLANS, _ACTION_CHARACTERS = 512, 16, 200


def finding(judged: Judged, notes: Notes) -> Finding:
    """Return what is told about a judged program."""
    reason = judged.reason[:REASON_CHARACTERS]
    if judged.rung or judged.verdict is None:
        return Finding(source=judged.source, rung=judged.rung, reason=reason)
    verdict, near, answers = judged.verdict, notes.near, notes.answers
    return Finding(
        source=judged.source,
        title=title(next(iter(verdict.first_observations), "")),
        summary=summary(verdict),
        trivial_win_rate=verdict.trivial_win_rate,
        degenerate=verdict.degenerate,
        near=near.environment,
        similarity=near.similarity if near.environment else None,
        flag=notes.finding.flag,
        flag_reason=notes.finding.reason[:REASON_CHARACTERS],
        firsts=tuple(verdict.first_observations),
        alone=answers.alone,
        plans=answers.plans[:_PLANS],
        actions=tuple(sorted(_short(answers.actions))[:_ACTIONS]),
        instances=answers.instances,
    )


def answers(found: Finding) -> Answers:
    """Return what a hint must not say."""
    return Answers(found.alone, found.plans, frozenset(found.actions), found.instances)


def summary(verdict: Verdict) -> str:
    """Return what a program declares of its idea and goal, for people and for the memory."""
    said = verdict.metadata
    parts = (said.title, said.idea, said.goal, said.win) if said else ()
    return "; ".join(" ".join(part.split()) for part in parts if part)[:_SUMMARY_CHARACTERS]


def title(observation: str) -> str:
    """Return the first line with text of an observation, for people."""
    lines = (line.strip() for line in observation.splitlines())
    return next((line for line in lines if line), "")[:_TITLE_CHARACTERS]


def _short(actions: frozenset[str]) -> set[str]:
    """Leave out what is too long to be said in a hint."""
    return {action for action in actions if len(action) <= _ACTION_CHARACTERS}
