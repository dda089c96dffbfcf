"""What is told of designs: what was not played is in no mean, hints are compared where programs are."""

from __future__ import annotations

import pytest
from scenes.scorer_script import design_all, play_all, start
from scenes.scorer_world import config, lost

ONE_ROUND = {"rounds_per_window": 1, "delay": 1}


def test_lost_plays_and_fresh_designs_are_in_no_mean() -> None:
    recipe = config(
        steps=1,
        curriculum=ONE_ROUND | {"environments": 2, "hinted_plays": 0, "reissues": 0},
        reward={"low": 0.0, "high": 1.0},
    )
    world, machine = start(recipe)
    played, fresh = (ticket.design for ticket in design_all(world, machine))
    for request in list(world.requests.values()):
        if request.design == fresh or request.index == 0:
            del world.requests[request.episode]
            world.tell(machine, lost(request, "infra"))
    play_all(world, machine)
    one, other = world.scored[played], world.scored[fresh]
    assert (one.plays, one.turns, one.plateau, one.reward) == (1, 1.0, 1.0, pytest.approx(0.6))
    assert (other.state, other.plays, other.turns, other.plateau) == ("fresh", 0, None, 0.0)
    assert world.summaries[0].reward == pytest.approx(0.6)


@pytest.mark.parametrize(("scope", "apart"), [("global", False), ("skill", True), ("group", True)])
def test_hints_are_compared_within_their_skill_or_the_cohort(scope: str, apart: bool) -> None:
    recipe = config(
        steps=1,
        curriculum=ONE_ROUND | {"environments": 2},
        designer={"hint_train": True},
        learner={"designer": {"scope": scope, "advantage_scale": 1.0, "max_staleness": 64}},
    )
    world, machine = start(recipe)
    helped, *_ = (ticket.design for ticket in design_all(world, machine, hint_held=True))
    play_all(world, machine, lambda r: float(r.index or (r.arm == "hinted" and r.design == helped)))
    hints = {held.design: held for _, held in world.designs.values() if held.part}
    assert {held.members for held in hints.values()} == {1 if apart else 2}
    assert hints[helped].advantage == (0.0 if apart else 0.5)
