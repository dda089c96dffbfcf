"""One server from its start to its end: newest version in, proof, announcement, watch."""

from __future__ import annotations

import time
import uuid
from collections.abc import Awaitable, Callable, Iterator
from functools import partial

import anyio
import structlog

from bus import Bus, BusError
from bus.messages import Message, PolicyPublished, ServerLost, ServerServing
from engine.config import Config
from engine.errors import SpadeError
from engine.inference.completion import InferenceError
from engine.inference.process import ServerFailed
from engine.inference.server_checks import HandshakeRefused, examine, handshake
from engine.inference.vllm import CONTROL_SECONDS, VllmClient
from engine.inference.vllm_schema import UNLABELLED
from engine.lineage import Version
from engine.weights.paths import LearnerPath, WeightPath
from engine.weights.update import FetchFailed, UpdateRefused, update
from roles.server.rolling_update import Rollout

PUBLISHED = "event.learner.published"
PROBE_SECONDS = 15.0
ADOPTED_SECONDS = 2.0
_HEALTH_SECONDS = 5.0
_MISSES = 3
_FETCH_SECONDS = (0.5, 10.0)  # pauses between attempts to fetch: the first, the longest
_REFUSED = 4.0  # so many times as long after a refusal: all of the weights were read for it

Ended = Callable[[], Awaitable[str]]


class Unserved(UpdateRefused):
    """No server took a version."""

    @classmethod
    def after(cls, seconds: float, policy: PolicyPublished, refusal: UpdateRefused) -> Unserved:
        """Return the error of ``policy``, which ``refusal`` speaks of last."""
        remedy = f"Its weights are {policy.uri}. Mend what is named here and run the same command again: the "
        return cls(
            f"no server took version {Version.unpack(policy.version)} within {seconds:.0f} s: {refusal.what}",
            where=refusal.where,
            remedy=refusal.remedy or f"{remedy}learner publishes its last checkpoint anew.",
        )


def _fence(policy: PolicyPublished) -> int:
    return Version.unpack(policy.version).fence


class Newest:
    """The policy published last; whoever is behind waits for one that is not its own."""

    def __init__(self) -> None:
        self._policy: PolicyPublished | None = None
        self._sequence = 0
        self._changed = anyio.Event()

    @property
    def policy(self) -> PolicyPublished | None:
        """The newest policy, None before the first."""
        return self._policy

    def offer(self, message: Message, sequence: int = 0) -> None:
        """Take in what the stream says at ``sequence``, 0 for right now. Of one learner later means newer,
        whatever the number; a learner that was replaced has nothing to say any more.
        """
        if isinstance(message, PolicyPublished):
            fence, known = _fence(message), -1 if self._policy is None else _fence(self._policy)
            if fence < known or (fence == known and 0 < sequence <= self._sequence):
                return
            self._policy, self._sequence = message, sequence or self._sequence
            changed, self._changed = self._changed, anyio.Event()
            changed.set()

    async def ask(self, bus: Bus) -> None:
        """Take in what was published last: after an outage the stream may be behind. Raises BusError."""
        last = await bus.last(PUBLISHED)
        if last is not None:
            self.offer(last.message, last.sequence)

    async def other_than(self, policy: PolicyPublished | None) -> PolicyPublished:
        """Return the newest policy as soon as it is not ``policy``."""
        while self._policy is None or self._policy == policy:
            await self._changed.wait()
        return self._policy


class Life:
    """One life of one server. ``serving`` is the announced policy, None before the first proof; ``epoch``
    names the life on the bus, and a new one names it after others took it for lost.
    """

    def __init__(
        self,
        name: str,
        config: Config,
        bus: Bus,
        newest: Newest,
        log: structlog.stdlib.BoundLogger,
        path: WeightPath,
        rollout: Rollout,
    ) -> None:
        self.name, self.epoch = name, uuid.uuid4().hex[:12]
        self._config, self._bus, self._newest, self._path = config, bus, newest, path
        self._rollout = rollout
        self._log = log.bind(server=name)
        self._updating = False
        self._examined = self._proved = False
        self._url = ""
        self.serving: PolicyPublished | None = None
        self.reason = "it was stopped"
        self.updates = 0
        self.canary_error = self.paused_seconds = self.update_seconds = self._waited = 0.0

    @property
    def step(self) -> int:
        """The step it serves, -1 before the first proof."""
        return -1 if self.serving is None else self.serving.step

    def figures(self) -> dict[str, float]:
        """What is worth knowing of this server."""
        return {
            "step": float(self.step),
            "updates": float(self.updates),
            "update_seconds": self.update_seconds,
            "paused_seconds": self.paused_seconds,
        }

    async def run(self, client: VllmClient, ended: Ended) -> None:
        """Follow the newest policy until cancelled.

        Raises ServerFailed when the server ends or makes no progress, ServerBroken when it cannot prove a
        version, UpdateRefused when it does not take one (:meth:`_patiently`), and HandshakeRefused for what a
        restart cannot cure.
        """
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._watch_end, ended)
                tasks.start_soon(self._watch_progress, client)
                await self._follow(client)
        except BaseExceptionGroup as group:
            error = main_fault(group)
            self.reason = str(error)
            if isinstance(error, SpadeError):
                raise error from error.__cause__
            raise

    async def _watch_end(self, ended: Ended) -> None:
        raise ServerFailed(await ended(), where=self.name)

    async def _watch_progress(self, client: VllmClient) -> None:
        """A live process is not a working one: sample a token now and then (invariant I10)."""
        patience = max(CONTROL_SECONDS, self._config.server.request_seconds / 2)
        while True:
            await anyio.sleep(PROBE_SECONDS)
            try:
                await client.probe(deadline=patience)
            except InferenceError as error:
                if not self._updating:
                    raise ServerFailed(f"it makes no progress: {error.what}", where=self.name) from error
            else:
                await self._watch_version(client)

    async def _watch_version(self, client: VllmClient) -> None:
        """One that was started anew behind our back answers, but with other weights."""
        before = self.serving
        if before is None or self._updating:
            return
        found = await client.version()
        if self._updating or self.serving != before or found == before.version:
            return
        if isinstance(self._path, LearnerPath) and found > before.version:
            return  # the learner brings weights before it announces them
        label = "none" if found == UNLABELLED else str(Version.unpack(found))
        raise ServerFailed(
            f"its weights are not those it was given: version {label}, not {Version.unpack(before.version)}",
            where=self.name,
        )

    async def _follow(self, client: VllmClient) -> None:
        policy: PolicyPublished | None = None
        while True:
            policy = await self._patiently(client, await self._newest.other_than(policy))

    async def _patiently(self, client: VllmClient, policy: PolicyPublished) -> PolicyPublished:
        """Bring ``policy``, or the newest meanwhile where it is refused or cannot be fetched; return which.

        A server that serves goes on with its old weights for as long as that lasts. Raises FetchFailed for
        one that has nothing to serve, after ``[server] start_seconds``; for refusals see :meth:`_news`. The
        time of either starts anew with the other.
        """
        seconds, (delay, longest) = self._config.server.start_seconds, _FETCH_SECONDS
        end = time.monotonic() + seconds
        since: float | None = None  # the first refusal of this policy
        while True:
            before = policy
            try:
                await self._bring(client, policy)
            except FetchFailed as error:
                self._log.warning("fetch_failed", version=policy.version, reason=str(error), again_in=delay)
                if time.monotonic() > end and self.serving is None:
                    raise
                since = None
                with anyio.move_on_after(delay):
                    policy = await self._newest.other_than(policy)
            except UpdateRefused as error:
                # A fault of this server, or pruned meanwhile, or the last of a former learner, or bad.
                self._log.warning("update_refused", version=policy.version, reason=str(error))
                self._rollout.refused(self.name)
                end = time.monotonic() + seconds
                told = await self._hear()
                since = (time.monotonic() if since is None else since) if told else None
                policy = await self._news(policy, error, since, _REFUSED * delay)
            else:
                return policy
            since = since if policy == before else None
            delay = min(2 * delay, longest)

    async def _hear(self) -> bool:
        """Hear of the newest policy; False when the bus does not say."""
        try:
            await self._newest.ask(self._bus)
        except BusError as error:
            self._log.warning("newest_unknown", reason=str(error))
            return False
        return True

    async def _news(
        self, policy: PolicyPublished, refusal: UpdateRefused, since: float | None, pause: float
    ) -> PolicyPublished:
        """Return what to bring after ``policy`` was refused, the first time at ``since``: the newest policy,
        at once where it is not ``policy``, else after ``pause`` seconds or as soon as there is something new.

        Unless ``since`` is None (nobody knows what is newest) raises ``refusal`` where another server serves
        ``policy``: then the fault is this server's; and Unserved when none took it for ``[server]
        start_seconds`` and as long as others wait for their turn.
        """
        if self._newest.policy == policy:
            if since is not None:
                pause = min(pause, self._time_left(policy, refusal, since))
            await self._pause(policy, pause)
        return self._newest.policy or policy

    def _time_left(self, policy: PolicyPublished, refusal: UpdateRefused, since: float) -> float:
        """Return for how many seconds ``policy``, which is the newest, may still be refused (see above)."""
        if self._rollout.serves(policy.version, beside=self.name):
            raise refusal
        seconds = self._config.server.start_seconds + self._rollout.detour(self.name, policy.version)
        left = since + seconds - time.monotonic()
        if left > 0:
            return left
        if self._rollout.carried(policy.version, beside=self.name):
            raise refusal
        raise Unserved.after(seconds, policy, refusal) from refusal

    async def _pause(self, policy: PolicyPublished, seconds: float) -> None:
        """Return after ``seconds``, or as soon as ``policy`` is not the newest or another server takes it."""
        before = self._rollout.serves(policy.version, beside=self.name)

        async def wait_for_others() -> None:
            await self._rollout.until(lambda: self._rollout.serves(policy.version, beside=self.name) > before)
            tasks.cancel_scope.cancel()

        with anyio.move_on_after(seconds):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(wait_for_others)
                await self._newest.other_than(policy)
                tasks.cancel_scope.cancel()

    async def _bring(self, client: VllmClient, policy: PolicyPublished) -> None:
        """Load, prove and announce one version."""
        server = self._config.server
        started, self._waited = time.perf_counter(), 0.0
        self._updating = True
        try:
            if not self._examined and not await client.paused():
                await self._examine(client, policy)
            updated = await update(
                client,
                policy,
                cache=server.pause_cache,
                tolerance=self._config.canary_tolerance,
                load_seconds=server.start_seconds,
                path=self._path,
                turn=partial(self._turn, policy.version),
            )
            if not self._proved:
                await self._prove(client, policy)
        finally:
            self._updating = False
        if updated.attempts > 1:
            # What was sampled between the two loads bore a label that was not true: with a new epoch nobody
            # waits any longer for this one's word, and all of it is thrown away.
            self.epoch = uuid.uuid4().hex[:12]
        self.canary_error, self.paused_seconds = updated.canary_error, updated.paused
        self.update_seconds = time.perf_counter() - started - self._waited
        self.updates += 1
        self.serving, self._url = policy, client.url
        await self._announce(policy)
        await self._path.settled(client, policy)
        self._log.info(
            "serving",
            version=str(Version.unpack(policy.version)),
            canary_error=updated.canary_error,
            paused=round(updated.paused, 4),
            seconds=round(self.update_seconds, 4),
        )

    async def _turn(self, version: int) -> None:
        """Wait, sampling, until other servers have loaded that have to be first."""
        started, self._updating = time.perf_counter(), False
        await self._rollout.turn(self.name, version)
        self._updating = True
        self._waited += time.perf_counter() - started

    async def contradict(self, lost: ServerLost) -> None:
        """Announce the server again, as a new epoch, when somebody took it for lost while it serves."""
        policy = self.serving
        if policy is not None and (lost.server, lost.epoch) == (self.name, self.epoch):
            self._log.warning("taken_for_lost", reason=lost.reason)
            self.epoch = uuid.uuid4().hex[:12]
            await self._announce(policy)

    async def _announce(self, policy: PolicyPublished) -> None:
        fact = ServerServing(
            server=self.name,
            epoch=self.epoch,
            url=self._url,
            version=policy.version,
            canary_error=self.canary_error,
            seconds=self.update_seconds,
        )
        await self._bus.publish(fact)
        self._rollout.note(fact)

    async def _examine(self, client: VllmClient, policy: PolicyPublished) -> None:
        await examine(client, policy, context=self._config.model.max_model_len)
        self._examined = True

    async def _prove(self, client: VllmClient, policy: PolicyPublished) -> None:
        if not self._examined:
            await self._examine(client, policy)
        try:
            result = await handshake(
                client,
                policy,
                self._config.agent.sampling,
                tolerance=self._config.canary_tolerance,
                deadline=CONTROL_SECONDS,
            )
        except HandshakeRefused as refusal:
            if not await self._path.overtaken(client, policy):
                raise
            raise FetchFailed("newer weights came during the handshake", where=self.name) from refusal
        self._proved = True
        self._log.info("handshake", canary_error=result.canary_error, sampling_error=result.sampling_error)


async def adopted_end(client: VllmClient) -> str:
    """Return, with the reason, when a server that we did not start has stopped answering."""
    misses = 0
    while misses < _MISSES:
        await anyio.sleep(ADOPTED_SECONDS)
        misses = 0 if await client.healthy(deadline=_HEALTH_SECONDS) else misses + 1
    return "it does not answer any more"


def main_fault(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return what best explains a server's end: its process's death before what followed from it."""
    leaves = list(_leaves(group))
    deaths = [leaf for leaf in leaves if isinstance(leaf, ServerFailed)]
    ours = [leaf for leaf in leaves if isinstance(leaf, SpadeError)]
    return (deaths or ours)[0] if len(ours) == len(leaves) else group


def _leaves(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from _leaves(inner)
    else:
        yield error
