"""What a curriculum test does to the world: answer tickets, play, train, look."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import msgspec

from bus.messages import DesignTicket, EpisodeRequest
from engine.config import Config
from roles.scorer.curriculum import Curriculum
from scenes.scorer_world import QUIET, World, finished, ready

Win = Callable[[EpisodeRequest], float]


def start(recipe: Config, **fields: Any) -> tuple[World, Curriculum]:
    world = World(recipe, random.Random(1), QUIET, **fields)
    machine = Curriculum(recipe)
    world.begin(machine)
    return world, machine


def design_all(world: World, machine: Curriculum, **fields: Any) -> list[DesignTicket]:
    tickets = list(world.tickets.values())
    world.tickets.clear()
    for part in (part for ticket in tickets for part in ticket.parts()):
        held = bool(fields.get("hint_held"))
        rest = {name: value for name, value in fields.items() if name != "hint_held"}
        world.tell(machine, msgspec.structs.replace(ready(part, hint_held=held), **rest))
    return tickets


def play_all(world: World, machine: Curriculum, win: Win = lambda r: float(r.index % 2)) -> None:
    while world.requests:
        name, request = next(iter(world.requests.items()))
        del world.requests[name]
        world.tell(machine, finished(request, win(request)))


def step(world: World, machine: Curriculum, win: Win = lambda r: float(r.index % 2)) -> None:
    """Design and play what is asked for, train and serve what is closed."""
    design_all(world, machine)
    play_all(world, machine, win)
    while world.trained < len(world.closed):
        world.train(machine)
        for server in world.serving:
            world.serve(machine, server)


def active(world: World, round_: int) -> set[str]:
    return {request.design for request in world.requested if request.round == round_}
