"""The supervisor with a real broker and roles that do little."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import ClassVar

import anyio
import pytest
import structlog
from scenes.small_run import (
    BrokenRole,
    FakeEvaluator,
    FakeLearner,
    FakeRole,
    FakeServer,
    RememberingView,
    StuckRole,
    config,
    events,
    finished,
    policy,
    serving,
    with_roles,
)

from bus.messages import Heartbeat
from engine import telemetry
from engine.config import Config, UiConfig
from engine.errors import SpadeError
from engine.records import history
from engine.records import status as standing
from engine.records.status import RunStatus
from engine.run import RunDirectory
from engine.running.role_host import RoleLike
from engine.running.supervisor import Ending, Supervisor, read_address, stage, stages

ROLES: dict[str, type[RoleLike]] = {
    role.name: role for role in (FakeRole, FakeLearner, FakeServer, FakeEvaluator, StuckRole, BrokenRole)
}


class HastyRole(FakeRole):
    """Ends before anybody asked it to."""

    name = "hasty"

    async def run(self) -> None:
        pass


class DeafRole(FakeRole):
    """Is late in a drain, and hears what is commanded meanwhile, as a role on another host would."""

    name = "deaf"
    heard: ClassVar[list[tuple[str, ...]]] = []

    async def run(self) -> None:
        with anyio.CancelScope(shield=True), anyio.move_on_after(10):
            async with self.context.bus.follow("EVENT", tails=["event.supervisor.ordered"]) as commands:
                async for record in commands:
                    if record.message.command == "drain":
                        self.heard.append(record.message.roles)
                        if not record.message.roles:
                            return


ROLES |= {HastyRole.name: HastyRole, DeafRole.name: DeafRole}


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    FakeRole.ended.clear()
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    yield
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    telemetry.close()
    structlog.reset_defaults()


async def _model() -> Path:
    return Path("model")


async def supervise(recipe: Config, view: RememberingView | None = None) -> Ending:
    directory = RunDirectory.of(recipe)
    with directory.locked():
        directory.adopt(recipe)
        supervisor = Supervisor(
            recipe,
            directory,
            view or RememberingView(),
            structlog.stdlib.get_logger(),
            prepare=_model,
            load=ROLES.__getitem__,
        )
        return await supervisor.run()


def children() -> set[int]:
    """Processes whose parent we are."""
    return {int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()}


async def test_a_run_ends_by_itself_when_all_have_seen_the_final_weights(tmp_path: Path) -> None:
    before = children()
    recipe = with_roles(config(tmp_path), "fake", "learner", "server", "evaluator")
    view = RememberingView()
    assert await supervise(recipe, view) == "complete"
    assert FakeRole.ended[-1] == "server"
    assert sorted(FakeRole.ended) == ["evaluator", "fake", "learner", "server"]
    assert children() == before
    directory = RunDirectory.of(recipe)
    state = standing.read(history.open_for_reading(directory.database))
    assert (state.step, state.version_published, state.versions_serving) == (2, 2, (2,))
    assert state.agent_samples_trained == 4
    assert state.notes["ended"]["complete"] is True
    assert state.gauges["fake/fake-0"] == {"queue": 3.0}
    assert state.gauges["supervisor/supervisor"]["recorder.queued"] == 0.0
    assert view.seen[-1][0] == "complete"
    assert view.seen[0][0] in ("loading the weights", "running")


async def interrupted(
    recipe: Config,
    view: RememberingView,
    when: Callable[[RunStatus], bool] = lambda status: bool(status.gauges),
) -> Ending:
    """Supervise a run that gets two signals when a status is as wanted."""

    async def interrupt() -> None:
        await view.when(when)
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGTERM)

    with anyio.fail_after(30):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(interrupt)
            ending = await supervise(recipe, view)
            tasks.cancel_scope.cancel()
    return ending


async def test_a_signal_drains_and_a_second_one_is_harmless(tmp_path: Path) -> None:
    before, view = children(), RememberingView()
    assert await interrupted(with_roles(config(tmp_path), "fake"), view) == "stopped"
    assert FakeRole.ended == ["fake"]
    assert children() == before
    assert any("Stopping" in text for text in view.said)


async def test_a_role_that_does_not_heed_the_drain_is_cancelled(tmp_path: Path) -> None:
    recipe = with_roles(config(tmp_path), "stuck", drain_seconds=0.3)
    assert await interrupted(recipe, RememberingView()) == "stopped"


async def test_roles_on_other_hosts_are_drained_although_one_here_is_late(tmp_path: Path) -> None:
    recipe = with_roles(config(tmp_path), "deaf", drain_seconds=0.3)
    assert await interrupted(recipe, RememberingView()) == "stopped"
    assert DeafRole.heard == [("deaf",), ()]


async def test_a_role_that_ends_before_the_drain_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    telemetry.configure(tmp_path, "test")
    with caplog.at_level("INFO"):
        assert (
            await interrupted(with_roles(config(tmp_path), "fake", "hasty"), RememberingView()) == "stopped"
        )
    ended = {r.msg["role"]: r.levelname for r in caplog.records if "role.ended" in str(r.msg)}
    assert ended == {"hasty": "WARNING", "fake": "INFO"}


async def test_a_failing_role_ends_the_run_with_a_paragraph(tmp_path: Path) -> None:
    before = children()
    with pytest.raises(
        SpadeError, match="The role broken failed: ValueError: three is not a number"
    ) as caught:
        await supervise(with_roles(config(tmp_path), "fake", "broken"))
    assert caught.value.exit_code == 1
    assert "Run the same command again" in caught.value.remedy
    assert children() == before


async def test_a_disk_that_fills_up_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = children()
    monkeypatch.setattr("engine.running.supervisor.free_mb", lambda _path: 3)
    with pytest.raises(SpadeError, match=r"disk under .* is full \(3 MB are free\)"):
        await supervise(with_roles(config(tmp_path), "fake"))
    assert children() == before


async def test_a_run_resumes_where_its_history_ends(tmp_path: Path) -> None:
    recipe = with_roles(config(tmp_path), "fake", "learner", "evaluator", "stuck", drain_seconds=0.2)
    await interrupted(recipe, RememberingView(), lambda status: status.final)
    assert await supervise(with_roles(config(tmp_path), "learner", "server", "evaluator")) == "complete"
    state = standing.read(history.open_for_reading(RunDirectory.of(recipe).database))
    assert state.agent_samples_trained == 4


async def test_the_address_of_the_bus_is_private(tmp_path: Path) -> None:
    recipe = with_roles(config(tmp_path), "learner", "server", "evaluator")
    await supervise(recipe)
    root = RunDirectory.of(recipe).root
    address = read_address(root)
    assert address is not None
    assert address.run == "toy"
    assert (root / "bus.json").stat().st_mode & 0o077 == 0


def test_those_who_use_the_pool_drain_first_and_servers_last() -> None:
    class User(FakeRole):
        needs = frozenset({"pool"})

    assert stages({"server": FakeServer, "agent": User, "scorer": FakeRole}) == [
        ["agent"],
        ["scorer"],
        ["server"],
    ]


async def test_the_report_is_written_while_the_run_goes_on(tmp_path: Path) -> None:
    recipe = with_roles(config(tmp_path, ui=UiConfig(live="off", report_every=1)), "learner", steps=2)
    report = RunDirectory.of(recipe).report

    async def stop_once_it_is_there() -> None:
        while not report.exists():  # noqa: ASYNC110 - another process writes it
            await anyio.sleep(0.1)
        os.kill(os.getpid(), signal.SIGTERM)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(stop_once_it_is_there)
        with anyio.fail_after(50):
            assert await supervise(recipe) == "stopped"
    assert "plotly" in report.read_text()


def test_a_start_names_its_stages() -> None:
    connection = history.create(Path(":memory:"))
    roles = ("server", "designer")
    assert stage(standing.read(connection), roles) == "loading the weights"
    history.apply(connection, events([policy(0), serving(0)]))
    assert stage(standing.read(connection), roles) == "writing the first environments"
    counts = {"in_hand": 480.0, "played": 210.0}
    beat = Heartbeat(role="evaluator", instance="evaluator-0", state="running", statistics=counts)
    history.put_gauges(connection, [(1000.0, beat)])
    assert stage(standing.read(connection), roles) == "evaluating 210/480"
    history.apply(connection, events([policy(0), serving(0), finished("e1")]))
    assert stage(standing.read(connection), roles) == "running"
