"""The ways in which weights reach a server, behind one interface (``[server] weights``).

``file`` reads what the learner wrote to a disk that both see. ``bus`` fetches the same files from the broker
into a local cache first. With ``nccl`` and ``ipc`` the learner itself writes into the servers' devices
(``engine.weights.device_transfer``), and a server only waits for that.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from typing import Literal

import anyio
import msgspec
import structlog

from bus.messages import PolicyPublished
from engine.inference.completion import InferenceError, ServerStuck
from engine.inference.vllm import CONTROL_SECONDS, VllmClient
from engine.lineage import Version
from engine.weights.outcome import FetchFailed, ServerBroken, UpdateRefused
from engine.weights.plugin import REFUSED, STATE
from engine.weights.update_plan import Route, routes

Cache = Literal["recompute", "keep"]
Turn = Callable[[], Awaitable[None]]

_ASK_SECONDS = (0.005, 0.25)
_ARRIVAL_SECONDS = 0.5
_CLOSE_SECONDS = 5.0  # who comes next closes what a hanging server has left open

log = structlog.get_logger("spade.weights")


class WeightPath(ABC):
    """Brings versions into servers. One object serves all servers of a role."""

    @abstractmethod
    async def bring(
        self,
        client: VllmClient,
        policy: PolicyPublished,
        *,
        cache: Cache,
        load_seconds: float,
        turn: Turn | None = None,
    ) -> float:
        """Bring ``policy`` into the server behind ``client`` and return the seconds without sampling.
        ``turn`` is awaited before the pause; a way on which the learner pauses the servers has no use for it.

        Raises UpdateRefused or FetchFailed (nothing was changed), ServerBroken (restart the server), or
        ServerGone and ServerStuck before anything was changed.
        """

    async def carries(self, client: VllmClient, policy: PolicyPublished) -> bool:
        """Whether the server samples with ``policy``. A paused one with that label was left by a role that
        died before the resume, or by a proof that failed: it has to load again.
        """
        return await client.version() == policy.version and not await client.paused()

    async def reject(self, client: VllmClient, policy: PolicyPublished) -> None:
        """See to it that nothing is sampled with ``policy``, which failed its proof for good."""
        await client.pause(clear_cache=False)

    async def settled(self, client: VllmClient, policy: PolicyPublished) -> None:  # noqa: B027 - most keep none
        """Let go of what came before ``policy``, which was announced just now."""

    def ended(self, client: VllmClient) -> None:  # noqa: B027 - most keep none
        """Let go of what was kept for the server behind ``client``, which has ended or is out of sight."""

    async def overtaken(self, client: VllmClient, policy: PolicyPublished) -> bool:
        """Whether somebody else has brought a newer version than ``policy`` into the server."""
        return False


class State(msgspec.Struct):
    """What a worker says of its weights (``FileWeightTransferEngine.state``)."""

    held: str = ""
    wanted: str = ""
    status: str = "idle"
    reason: str = ""
    prove_seconds: float = 0.0
    load_seconds: float = 0.0


class FilePath(WeightPath):
    """Files that the server can read. ``hold`` makes its workers keep what they load as a base for deltas."""

    def __init__(self, *, hold: bool = False) -> None:
        self._hold = hold

    async def bring(
        self,
        client: VllmClient,
        policy: PolicyPublished,
        *,
        cache: Cache,
        load_seconds: float,
        turn: Turn | None = None,
    ) -> float:
        await _open(client)
        try:
            info = await self._prove(client, policy, load_seconds)
            if turn is not None:
                await turn()
        except BaseException:
            with anyio.CancelScope(shield=True):
                await _close(client, deadline=_CLOSE_SECONDS)
            raise
        return await _load(client, policy, info, cache, load_seconds)

    async def localise(self, route: Route) -> Route:
        """Return ``route`` with files that the server can read. Raises FetchFailed or UpdateRefused."""
        return route

    def discard(self, route: Route) -> None:
        """Forget the files of a route that were found to be damaged."""

    async def _prove(self, client: VllmClient, policy: PolicyPublished, seconds: float) -> dict[str, object]:
        """Let all workers check the best route, while they sample, and return its description; where it is
        damaged, the next.
        """
        states = await worker_states(client)
        held = {state.held for state in states} if self._hold else {""}
        refused = UpdateRefused("there is no way to the weights", where=client.url)
        for route in routes(policy, held.pop() if len(held) == 1 else ""):
            try:
                local = await self.localise(route)
                await client.update_weights(local.info(check_only=True, hold=self._hold), deadline=seconds)
                await _proved(client, policy.sha256, seconds)
            except InferenceError as error:
                if REFUSED not in error.what and not isinstance(error, UpdateRefused):
                    raise
                refused = UpdateRefused(error.what, where=client.url)
                log.warning("weights_refused", server=client.url, deltas=len(route.deltas), reason=error.what)
                self.discard(route)
                await _close(client)
                await _open(client)
            else:
                return local.info(check_only=False, hold=self._hold)
        raise refused


class LearnerPath(WeightPath):
    """The learner writes into the servers' devices; a server waits until it carries the version."""

    async def bring(
        self,
        client: VllmClient,
        policy: PolicyPublished,
        *,
        cache: Cache,
        load_seconds: float,
        turn: Turn | None = None,
    ) -> float:
        with anyio.move_on_after(load_seconds):
            # The server announces nothing: it has to be asked.
            while not await self.carries(client, policy):
                if await self.overtaken(client, policy):
                    raise FetchFailed("newer weights have come already", where=client.url)
                await anyio.sleep(_ARRIVAL_SECONDS)
            return 0.0
        raise ServerStuck(
            f"the learner did not bring version {Version.unpack(policy.version)} in {load_seconds:.0f} s",
            where=client.url,
        )

    async def overtaken(self, client: VllmClient, policy: PolicyPublished) -> bool:
        return await client.version() > policy.version


async def worker_states(client: VllmClient) -> list[State]:
    """Return what each worker of a server says of its weights.

    Raises UpdateRefused for a server that was started without our extension of vLLM's workers.
    """
    try:
        answers = await client.collective(STATE)
        return [msgspec.json.decode(answer, type=State) for answer in answers]
    except (InferenceError, msgspec.DecodeError) as error:
        if isinstance(error, InferenceError) and STATE not in error.what and "404" not in error.what:
            raise
        raise UpdateRefused(
            "the server does not know how to take weights from files",
            where=client.url,
            remedy="Start it with the flags that `spade run --dry-run` shows (docs/weights.md).",
        ) from error


async def _proved(client: VllmClient, sha256: str, seconds: float) -> None:
    """Return when all workers have proved the weights; they answer at once, so they are asked again."""
    delay, longest = _ASK_SECONDS
    with anyio.move_on_after(seconds):
        while True:
            states = await worker_states(client)
            for state in states:
                if state.status == "refused":
                    raise UpdateRefused(f"{REFUSED} the push: {state.reason}", where=client.url)
            if all((state.status, state.wanted) == ("ready", sha256) for state in states):
                return
            await anyio.sleep(delay)
            delay = min(2 * delay, longest)
    raise ServerStuck(f"new weights were not read in {seconds:.0f} s", where=client.url)


async def _load(
    client: VllmClient, policy: PolicyPublished, info: dict[str, object], cache: Cache, seconds: float
) -> float:
    started = time.perf_counter()
    with anyio.CancelScope(shield=True):
        # Bounded by its deadlines; a cancellation waits, so that no half-loaded server stays behind.
        try:
            await client.pause(clear_cache=cache == "recompute")
        except InferenceError:
            await client.resume()
            raise
        try:
            await client.update_weights(info, deadline=seconds)
            await client.finish_update(policy.version)
            await client.resume()
        except InferenceError as error:
            if REFUSED in error.what:
                await client.resume()
                raise UpdateRefused(error.what, where=client.url) from error
            raise ServerBroken(f"loading new weights failed: {error.what}", where=client.url) from error
    return time.perf_counter() - started


async def _open(client: VllmClient) -> None:
    """Open a session; one that a dead predecessor left open is closed first (it has loaded nothing)."""
    try:
        await client.start_update()
    except InferenceError as error:
        if "already active" not in str(error):
            raise
        await client.finish_update(None)
        await client.start_update()


async def _close(client: VllmClient, *, deadline: float = CONTROL_SECONDS) -> None:
    """Close a session that has loaded nothing. vLLM has closed it already where the push was an error."""
    try:
        await client.finish_update(None, deadline=deadline)
    except InferenceError as error:
        log.debug("session_not_closed", server=client.url, reason=error.what)
