"""The server role: keeps vLLM processes alive and brings every published policy into them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import ClassVar

import aiohttp
import anyio

from bus.concurrency import only
from bus.messages import PolicyPublished, ServerLost, ServerServing
from engine import models
from engine.config import Config
from engine.errors import SpadeError
from engine.inference.completion import InferenceError
from engine.inference.launch import weight_backend
from engine.inference.process import Ended, ServerFailed, external_server, serve
from engine.inference.server_checks import HandshakeRefused
from engine.inference.vllm import VllmClient, open_session
from engine.weights import ways
from engine.weights.update import UpdateRefused
from roles.base import Role, RoleContext
from roles.server.lifecycle import NewestPolicy, ServerLifecycle, Unserved, main_fault
from roles.server.rolling_update import RollingUpdate

_TAILS = (ServerServing.tail_form, ServerLost.tail_form)
_FAILED_STARTS = 5
_REST_SECONDS = 600.0
LONGEST_BACKOFF = 60.0
_FAREWELL_SECONDS = 5.0
_HEALTH_SECONDS = 3.0


class ServerRole(Role):
    """Runs one task per configured server, which is started here or external (by its URL).

    A server starts from the run's starting model while the learner starts too. It loads the newest published
    version, proves it (the canary; once per process the handshake), and only then is announced. Versions that
    appear during an update are skipped in favour of the newest. A server that dies, makes no progress, fails
    its proof, or refuses weights that another one serves is announced as lost and started again with
    back-off; one that has never served ends the run instead, with the error of its log. After
    ``_FAILED_STARTS`` starts in a row without serving, the run continues with the other servers, or ends
    where none of them serves the newest version.
    """

    name: ClassVar[str] = "server"

    def __init__(self, context: RoleContext) -> None:
        super().__init__(context)
        self._newest = NewestPolicy()
        self._lives: dict[int, ServerLifecycle] = {}
        cache = context.directory / "weights-cache" / context.instance
        self._loader = ways.loader(self.config, self.bus.blobs, cache)
        self._rollout = RollingUpdate(rolling=self.config.server.rollout == "rolling")
        self._restarts = 0
        self._resting: set[str] = set()
        self._model: Path | None = None
        self._resolving = anyio.Lock()

    @classmethod
    def check(cls, config: Config) -> None:
        """Check that weights can take the path that the recipe names. Raises ConfigError."""
        weight_backend(config)

    async def run(self) -> None:
        """Serve until drained. Raises SpadeError when a server cannot be brought to serve."""
        count = len(self.config.server.urls) or self.config.server.count
        try:
            async with open_session() as session, anyio.create_task_group() as tasks:
                known_to = await self._announce_lost(session)
                tasks.start_soon(self._follow, known_to)
                for index in range(count):
                    tasks.start_soon(self._keep, index, session)
                await self.context.draining.wait()
                tasks.cancel_scope.cancel()
        except BaseExceptionGroup as group:
            # Several servers may end at the same moment, for the same reason.
            error = main_fault(group)
            error = only(error) if isinstance(error, BaseExceptionGroup) else error
            raise error from error.__cause__

    @property
    def version(self) -> int:
        """The oldest version that a server of this role serves."""
        return min((life.serving.version for life in self._lives.values() if life.serving), default=-1)

    def statistics(self) -> dict[str, float]:
        """Gauges of all servers of this role and of each.

        Serving servers, their oldest step, updates, restarts, servers given up for now, the last update's
        figures; ``turns_waited_seconds`` and ``turns_passed`` of rolling updates; for each server NAME:
        ``NAME.step`` (-1: it does not serve), ``.updates``, ``.update_seconds``, ``.paused_seconds``.
        """
        lives = list(self._lives.values())
        serving = [life for life in lives if life.serving is not None]
        return {
            "servers": float(len(lives)),
            "serving": float(len(serving)),
            "step": float(min((life.step for life in serving), default=-1)),
            "updates": float(sum(life.updates for life in lives)),
            "restarts": float(self._restarts),
            "given_up": float(len(self._resting)),
            "canary_error": max((life.canary_error for life in serving), default=0.0),
            "update_seconds": max((life.update_seconds for life in serving), default=0.0),
            "paused_seconds": max((life.paused_seconds for life in serving), default=0.0),
            "turns_waited_seconds": self._rollout.waited,
            "turns_passed": float(self._rollout.passed),
            **{f"{life.name}.{name}": value for life in lives for name, value in life.figures().items()},
        }

    async def _follow(self, known_to: int) -> None:
        """Follow the published policies (the last in the stream is the newest) and the servers' facts.

        Announces a server of this role again when others announced it as lost. Facts of servers are known up
        to sequence ``known_to``.
        """
        last = await self.bus.last(PolicyPublished.tail_form)
        start = min(last.sequence, known_to + 1) if last is not None else 1
        async with self.bus.follow(
            "EVENT", start=start, tails=(PolicyPublished.tail_form, *_TAILS)
        ) as records:
            async for record in records:
                if isinstance(record.message, PolicyPublished):
                    if last is None or record.sequence >= last.sequence:
                        self._newest.offer(record.message, record.sequence)
                elif record.sequence > known_to:
                    self._rollout.note(record.message)
                if isinstance(record.message, ServerLost):
                    for life in self._lives.values():
                        await life.contradict(record.message)

    async def _announce_lost(self, session: aiohttp.ClientSession) -> int:
        """Announce the loss of servers that an earlier process of this run left as serving.

        Returns the sequence up to which the facts of servers are known.
        """
        known_to = 0
        alive: dict[str, ServerServing] = {}
        async for record in self.bus.replay("EVENT", tails=_TAILS):
            message, known_to = record.message, record.sequence
            self._rollout.note(message)
            if isinstance(message, ServerServing):
                alive[message.server] = message
            elif (
                isinstance(message, ServerLost) and alive.get(message.server, message).epoch == message.epoch
            ):
                alive.pop(message.server, None)
        for server, message in alive.items():
            ours = server.startswith(f"{self.context.instance}-")
            if ours or not await VllmClient(message.url, session).healthy(deadline=_HEALTH_SECONDS):
                await self.bus.publish(
                    ServerLost(server=server, epoch=message.epoch, reason="it does not answer any more")
                )
        return known_to

    async def _keep(self, index: int, session: aiohttp.ClientSession) -> None:
        """Keep server ``index`` alive. Raises SpadeError for a fault that a restart cannot cure."""
        name = f"{self.context.instance}-{index}"
        served, failed = False, 0  # failed: starts in a row without serving
        while True:
            life = ServerLifecycle(
                name, self.config, self.bus, self._newest, self.log, self._loader, self._rollout
            )
            self._lives[index] = life
            try:
                async with self._open(index, session) as (client, ended):
                    try:
                        await life.run(client, ended)
                    finally:
                        self._loader.ended(client)
            except (HandshakeRefused, Unserved):
                raise
            except (ServerFailed, InferenceError) as failure:
                error: SpadeError = failure
            finally:
                await self._farewell(life)
            served = served or life.updates > 0
            failed = 0 if life.updates else failed + 1
            spent = failed >= _FAILED_STARTS
            if not served and not isinstance(error, UpdateRefused):
                raise error
            if spent and not await self._others_serve(name):
                raise error
            self._restarts += 1
            if spent:
                await self._give_up(name, error, failed)
                continue
            delay = min(LONGEST_BACKOFF, 2.0**failed)
            self.log.warning("server_restart", server=name, reason=error.what, delay=delay)
            await anyio.sleep(delay)

    async def _others_serve(self, name: str) -> bool:
        """Return whether another server than ``name`` serves the newest version, or is about to."""
        policy, seconds = self._newest.policy, self.config.server.start_seconds
        if policy is None:
            return False
        return await self._rollout.others_carry(policy.version, beside=name, seconds=seconds)

    async def _give_up(self, name: str, error: SpadeError, starts: int) -> None:
        """Leave the run to the other servers: for ``_REST_SECONDS``, or until none of them serves."""
        self.log.error(
            "server_given_up", server=name, reason=error.what, starts=starts, again_in=_REST_SECONDS,
            remedy=error.remedy or f"See logs/{name}.log; the run continues with the other servers.",
        )  # fmt: skip
        self._resting.add(name)
        try:
            with anyio.move_on_after(_REST_SECONDS):
                await self._rollout.until(lambda: not self._rollout.carried(0, beside=name))
        finally:
            self._resting.discard(name)

    async def _farewell(self, life: ServerLifecycle) -> None:
        """Announce the loss of a server that was announced."""
        if life.serving is None:
            return
        life.serving = None
        with anyio.CancelScope(shield=True), anyio.move_on_after(_FAREWELL_SECONDS):
            await self.bus.publish(ServerLost(server=life.name, epoch=life.epoch, reason=life.reason))

    @asynccontextmanager
    async def _open(
        self, index: int, session: aiohttp.ClientSession
    ) -> AsyncIterator[tuple[VllmClient, Ended]]:
        """Yield the client of server ``index``, healthy, and a coroutine that returns when it is gone."""
        server = self.config.server
        if server.urls:
            url = server.urls[index]
            async with external_server(
                url, session, seconds=server.start_seconds, key="server.urls"
            ) as opened:
                yield opened
            return
        model = await self._starting_model()
        log_path = self.context.directory / "logs" / f"{self.context.instance}-{index}.log"
        async with serve(self.config, model, index=index, log_path=log_path, session=session) as process:
            yield VllmClient(process.url, session), process.wait

    async def _starting_model(self) -> Path:
        async with self._resolving:
            if self._model is None:
                self._model = await anyio.to_thread.run_sync(
                    models.resolve, self.config, self.context.directory
                )
            return self._model
