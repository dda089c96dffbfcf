"""Programs in the place of a designer, and which class of a program is the game."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import anyio
import msgspec
import pytest
from hypothesis import given
from hypothesis import settings as profile
from hypothesis import strategies as st
from scenes import archived_run
from scenes.memory_bus import MemoryBus
from scenes.small_run import ready, scored

import sandbox
from engine.config import Config, DesignerConfig, ModelConfig, PoolConfig, RunConfig
from engine.errors import ConfigError
from engine.evals import external_benchmarks
from engine.running import role_host
from roles.designer.authors import check_designer
from roles.designer.environment_pool import Programs, read
from roles.designer.memory import Memory
from sandbox import SandboxSettings

PROGRAMS = [(f"p{number}", f"source {number}") for number in range(7)]


@profile(max_examples=50, deadline=None)
@given(seed=st.integers(0, 99), size=st.integers(1, 9), passes=st.integers(1, 4))
def test_every_pass_deals_every_program_once(seed: int, size: int, passes: int) -> None:
    programs = Programs([(f"p{number}", "") for number in range(size)], seed=seed)
    dealt = [programs.draw(number, 0)[0] for number in range(size * passes)]
    for turn in range(passes):
        assert sorted(dealt[turn * size : (turn + 1) * size]) == [f"p{number}" for number in range(size)]
    assert programs.statistics() == {"programs": size}


def test_the_order_is_the_same_on_every_host_and_new_in_every_pass() -> None:
    one, other = Programs(PROGRAMS, seed=42), Programs(PROGRAMS[::-1], seed=42)
    late = [other.draw(number, 0) for number in reversed(range(21))][::-1]
    assert late == [one.draw(number, 0) for number in range(21)]
    assert late[:7] != late[7:14] != late[14:]
    assert late[:7] != [Programs(PROGRAMS, seed=43).draw(number, 0) for number in range(7)]


def test_replacements_of_a_ticket_are_all_different_and_take_from_no_other() -> None:
    programs = Programs(PROGRAMS, seed=1)
    before = [programs.draw(number, 0) for number in range(7)]
    spares = [programs.draw(3, attempt)[0] for attempt in range(1, 7)]
    assert Counter([before[3][0], *spares]) == Counter(name for name, _ in PROGRAMS)
    assert [programs.draw(number, 0) for number in range(7)] == before


def test_a_sliding_window_opens_the_next_level_once_the_last_is_won() -> None:
    known = list(read("seeds:guess,peak"))
    programs = Programs(known, seed=1, window=2, raise_at=0.9)

    def drawn(*wins: tuple[int, float]) -> set[str]:
        """Return the levels drawn after one play of a program a win."""
        memory = Memory(200)
        for number, (level, win) in enumerate(wins):
            source = [text for name, text in known if name.startswith(f"{level}/")][number]
            fact = ready(f"d{number}", source=source, environment=f"{number}")
            memory.ready(fact)
            memory.scored(scored(fact.design, environment=fact.environment, win=win))
        return {programs.draw(number, 0, memory.programs())[0][0] for number in range(60)}

    first = [(1, 0.95)] * 16
    assert drawn() == drawn(*first[:15]) == drawn(*first[:15], (1, 0.0)) == {"1"}
    assert drawn(*first) == {"1", "2"}
    assert drawn(*first, *[(2, 1.0)] * 16) == {"2", "3"}
    assert drawn(*[(2, 0.2)] * 16) == {"2", "3"}
    assert programs.statistics()["level"] == 3
    with pytest.raises(ConfigError, match="level of each program"):
        Programs.open(PoolConfig(source="dir:sandbox", window=2))


def test_the_first_designs_of_a_run_are_a_pool(tmp_path: Path) -> None:
    messages = [ready(f"d{number}", source=f"program {number}") for number in range(5)]
    run = archived_run.run_with(tmp_path, messages)
    assert dict(read(f"run:{run.root}?first=2")) == {"d0": "program 0", "d1": "program 1"}
    assert len(list(read(f"run:{run.root}"))) == 5
    with pytest.raises(ConfigError, match="is no run"):
        list(read(f"run:{tmp_path}"))


def test_a_directory_is_read_with_what_lies_below_it(tmp_path: Path) -> None:
    (tmp_path / "logic").mkdir()
    (tmp_path / "logic" / "a.py").write_text("class AEnv: ...")
    (tmp_path / "b.py").write_text("class BEnv: ...")
    (tmp_path / "notes.txt").write_text("not a program")
    (tmp_path / "old.py").mkdir()
    assert dict(read(f"dir:{tmp_path}")) == {"logic/a.py": "class AEnv: ...", "b.py": "class BEnv: ..."}


def config(**designer: object) -> Config:
    return Config(
        run=RunConfig(name="t"),
        model=ModelConfig(path="x"),
        designer=msgspec.convert(designer, DesignerConfig),
    )


@pytest.mark.parametrize(
    ("designer", "says"),
    [
        ({"kind": "pool", "pool": {"source": "dir:/nowhere"}}, "not a directory"),
        ({"kind": "pool", "pool": {"source": "dir:configs"}}, "has no program"),
        ({"kind": "pool", "pool": {"source": "zip:x"}}, "no environment pool"),
        ({"kind": "external", "external": {"base_url": "http://x", "key_env": "NOT_SET_KEY"}}, "NOT_SET_KEY"),
        ({"kind": "frozen", "frozen": {"path": "/nowhere"}}, r"designer\.frozen\.path = '/nowhere'"),
    ],
)
def test_what_is_missing_is_said_before_the_start(designer: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        check_designer(config(**designer))


def test_what_is_there_is_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SET_KEY", "k")
    (tmp_path / "a.py").write_text("class AEnv: ...")
    check_designer(config())
    check_designer(config(kind="frozen"))
    check_designer(config(kind="pool", pool={"source": f"dir:{tmp_path}"}))
    check_designer(config(kind="external", external={"base_url": "http://x", "key_env": "SET_KEY"}))
    check_designer(config(kind="frozen", frozen={"url": "http://127.0.0.1:1"}))


def test_packages_that_are_not_installed_are_said_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(external_benchmarks, "installed", lambda _: False)
    with pytest.raises(ConfigError, match="not installed"):
        list(read("gem:"))


def test_foreign_programs_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    foreign = external_benchmarks.Foreign
    found = [foreign("reasoning_gym", name, level, f"{name} {level}") for name in "ab" for level in "01"]
    monkeypatch.setattr(external_benchmarks, "installed", lambda _: True)
    monkeypatch.setattr(external_benchmarks, "reasoning_gym_programs", lambda: iter(found))
    assert len(list(read("reasoning_gym:"))) == 4
    assert dict(read("reasoning_gym:b")) == {f"reasoning_gym/b/{level}": f"b {level}" for level in "01"}
    with pytest.raises(ConfigError, match="has no c"):
        list(read("reasoning_gym:b,c"))


@pytest.mark.parametrize(
    ("source", "preloads"), [("reasoning_gym:", True), ("gem:", True), ("dir:programs", False)]
)
async def test_the_sandbox_loads_what_foreign_programs_need(
    source: str, preloads: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[SandboxSettings] = []

    class Pool:
        def __init__(self, settings: SandboxSettings) -> None:
            seen.append(settings)

        async def __aenter__(self) -> Pool:
            return self

        async def __aexit__(self, *_: object) -> None: ...

    monkeypatch.setattr(sandbox, "SandboxPool", Pool)
    recipe = config(kind="pool", pool={"source": source})
    bus = MemoryBus(run="t", role="t", instance="0")
    async with (
        anyio.create_task_group() as tasks,
        role_host.services(recipe, bus, frozenset({"sandbox"}), tasks) as shared,
    ):
        assert isinstance(shared["sandbox"], Pool)
    (settings,) = seen
    assert (external_benchmarks.HELD in settings.preload) is preloads
    assert set(recipe.sandbox.preload) <= set(settings.preload)
    assert (settings.start_seconds == role_host.FOREIGN_START_SECONDS) is preloads
