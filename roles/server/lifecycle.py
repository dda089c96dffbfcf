"""The life of one server process: load the newest version, prove it, announce it, watch the server."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from functools import partial

import anyio
import structlog

from bus import Bus, BusError
from bus.messages import Message, PolicyPublished, ServerLost, ServerServing
from engine.config import Config
from engine.errors import SpadeError
from engine.inference.completion import InferenceError
from engine.inference.process import Ended, ServerFailed
from engine.inference.server_checks import HandshakeRefused, examine, handshake, require_experts
from engine.inference.vllm import CONTROL_SECONDS, VllmClient
from engine.inference.vllm_schema import UNLABELLED
from engine.lineage import Version
from engine.weights.loaders import NcclLoader, WeightLoader
from engine.weights.proof import Proof
from engine.weights.update import FetchFailed, UpdateRefused, update
from roles.server.rolling_update import RollingUpdate

PROBE_SECONDS = 15.0
_FETCH_SECONDS = (0.5, 10.0)  # pauses between attempts to fetch: the first, the longest
_REFUSED = 4.0  # a pause after a refusal is longer by this factor: all of the weights were read for it


class Unserved(UpdateRefused):
    """No server took a version in time."""

    @classmethod
    def after(cls, seconds: float, policy: PolicyPublished, refusal: UpdateRefused) -> Unserved:
        """Return the error of ``policy``; ``refusal`` is the last one."""
        remedy = f"Its weights are {policy.uri}. Mend the cause and run the same command again: the "
        return cls(
            f"no server took version {Version.unpack(policy.version)} within {seconds:.0f} s: {refusal.what}",
            where=refusal.where,
            remedy=refusal.remedy or f"{remedy}learner publishes its last checkpoint again.",
        )


def _fence(policy: PolicyPublished) -> int:
    return Version.unpack(policy.version).fence


class NewestPolicy:
    """``policy`` is the one published last, None before the first; servers wait for another than theirs."""

    def __init__(self) -> None:
        self.policy: PolicyPublished | None = None
        self._sequence = 0
        self._changed = anyio.Event()

    def offer(self, message: Message, sequence: int = 0) -> None:
        """Take in a message of the stream at ``sequence`` (0: just now).

        Of one learner the later message is the newer, whatever its number; those of a replaced learner are
        ignored.
        """
        if isinstance(message, PolicyPublished):
            fence, known = _fence(message), -1 if self.policy is None else _fence(self.policy)
            if fence < known or (fence == known and 0 < sequence <= self._sequence):
                return
            self.policy, self._sequence = message, sequence or self._sequence
            changed, self._changed = self._changed, anyio.Event()
            changed.set()

    async def ask(self, bus: Bus) -> None:
        """Read the last policy from the bus: after an outage the stream may be behind. Raises BusError."""
        last = await bus.last(PolicyPublished.tail_form)
        if last is not None:
            self.offer(last.message, last.sequence)

    async def other_than(self, policy: PolicyPublished | None) -> PolicyPublished:
        """Return the newest policy as soon as it is not ``policy``."""
        while self.policy is None or self.policy == policy:
            await self._changed.wait()
        return self.policy


class _Attempts:
    """Pauses and deadlines of the attempts to bring a version; times are ``time.monotonic`` seconds."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._fetch_end = time.monotonic() + seconds
        self.delay, self._longest = _FETCH_SECONDS
        self.refused_since: float | None = None

    @property
    def fetch_overdue(self) -> bool:
        return time.monotonic() > self._fetch_end

    def refused(self, *, newest_known: bool) -> None:
        """Note a refusal; its time counts only while the newest policy is known."""
        now = time.monotonic()
        self._fetch_end = now + self._seconds
        first = now if self.refused_since is None else self.refused_since
        self.refused_since = first if newest_known else None

    def next(self, *, same_policy: bool) -> None:
        """Begin the next attempt."""
        if not same_policy:
            self.refused_since = None
        self.delay = min(2 * self.delay, self._longest)


class ServerLifecycle:
    """One server process from its start to its end.

    ``serving`` is the announced policy, None before the first proof. ``epoch`` names the process on the bus;
    it gets a new one after others announced it as lost.
    """

    def __init__(
        self,
        name: str,
        config: Config,
        bus: Bus,
        newest: NewestPolicy,
        log: structlog.stdlib.BoundLogger,
        loader: WeightLoader,
        rollout: RollingUpdate,
    ) -> None:
        self.name, self.epoch = name, uuid.uuid4().hex[:12]
        self._config, self._bus, self._newest, self._loader = config, bus, newest, loader
        self._rollout = rollout
        self._log = log.bind(server=name)
        self._proof = None if config.adapters else Proof(seconds=config.server.start_seconds)
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
        """Return the gauges of this server."""
        return {
            "step": float(self.step),
            "updates": float(self.updates),
            "update_seconds": self.update_seconds,
            "paused_seconds": self.paused_seconds,
        }

    async def run(self, client: VllmClient, ended: Ended) -> None:
        """Follow the newest policy until cancelled.

        Raises ServerFailed when the server ends or makes no progress, ServerBroken when it cannot prove a
        version, UpdateRefused when it does not take one (:meth:`bring_newest`), and HandshakeRefused for a
        fault that a restart cannot cure.
        """
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._watch_end, ended)
                tasks.start_soon(self._watch_progress, client)
                policy: PolicyPublished | None = None
                while True:
                    policy = await self.bring_newest(client, await self._newest.other_than(policy))
        except BaseExceptionGroup as group:
            error = main_fault(group)
            self.reason = str(error)
            if isinstance(error, SpadeError):
                raise error from error.__cause__
            raise

    async def _watch_end(self, ended: Ended) -> None:
        raise ServerFailed(await ended(), where=self.name)

    async def _watch_progress(self, client: VllmClient) -> None:
        """Sample a token every PROBE_SECONDS: a live process may still be stuck (invariant I10)."""
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
        """Check the version label: a server that was restarted by others answers with other weights."""
        before = self.serving
        if before is None or self._updating:
            return
        found = await client.version()
        if self._updating or self.serving != before or found == before.version:
            return
        if isinstance(self._loader, NcclLoader) and found > before.version:
            return  # the learner loads weights into servers before it announces them
        label = "none" if found == UNLABELLED else str(Version.unpack(found))
        raise ServerFailed(
            f"its weights are not those it was given: version {label}, not {Version.unpack(before.version)}",
            where=self.name,
        )

    async def bring_newest(self, client: VllmClient, policy: PolicyPublished) -> PolicyPublished:
        """Bring ``policy``, or a newer one when it fails, and return the one that the server took.

        A server that serves keeps its old weights until one succeeds. Raises FetchFailed when the server has
        nothing to serve and ``[server] start_seconds`` are over; UpdateRefused or Unserved when refusals do
        not end (:meth:`_after_refusal`). The time for fetching starts again after a refusal, the time for
        refusals after a failed fetch and with each other policy.
        """
        attempts = _Attempts(self._config.server.start_seconds)
        while True:
            before = policy
            try:
                await self._bring(client, policy)
                return policy
            except FetchFailed as error:
                policy = await self._after_failed_fetch(policy, error, attempts)
            except UpdateRefused as error:
                policy = await self._after_refusal(policy, error, attempts)
            attempts.next(same_policy=policy == before)

    async def _after_failed_fetch(
        self, policy: PolicyPublished, error: FetchFailed, attempts: _Attempts
    ) -> PolicyPublished:
        """Return the policy to bring next: ``policy`` after a pause, or a newer one at once."""
        delay = attempts.delay
        self._log.warning("fetch_failed", version=policy.version, reason=str(error), again_in=delay)
        if attempts.fetch_overdue and self.serving is None:
            raise error
        attempts.refused_since = None
        with anyio.move_on_after(delay):
            return await self._newest.other_than(policy)
        return policy

    async def _after_refusal(
        self, policy: PolicyPublished, refusal: UpdateRefused, attempts: _Attempts
    ) -> PolicyPublished:
        """Return the policy to bring next: a newer one at once, else ``policy`` after a pause.

        The cause may be a fault of this server, files that were removed meanwhile, the last policy of a
        former learner, or bad weights. While the bus cannot say which policy is the newest, it is only
        repeated. Else raises the errors of :meth:`_refusal_time_left`.
        """
        self._log.warning("update_refused", version=policy.version, reason=str(refusal))
        self._rollout.refused(self.name)
        attempts.refused(newest_known=await self._ask_newest())
        if self._newest.policy == policy:
            pause = _REFUSED * attempts.delay
            if attempts.refused_since is not None:
                left = self._refusal_time_left(policy, refusal, attempts.refused_since)
                pause = min(pause, left)
            await self._pause(policy, pause)
        return self._newest.policy or policy

    async def _ask_newest(self) -> bool:
        """Read the newest policy from the bus; return False when the bus does not answer."""
        try:
            await self._newest.ask(self._bus)
        except BusError as error:
            self._log.warning("newest_unknown", reason=str(error))
            return False
        return True

    def _refusal_time_left(self, policy: PolicyPublished, refusal: UpdateRefused, since: float) -> float:
        """Return the seconds for which ``policy``, the newest, may still be refused; ``since`` is the first.

        Raises ``refusal`` where another server serves ``policy``, because then the fault is this server's.
        Raises Unserved when no server took it for ``[server] start_seconds`` and the time that other servers
        wait for their turn.
        """
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
            if self._proof is not None and not self._proved:
                await self._proof.note(client)
            updated = await update(
                client,
                policy,
                cache=server.pause_cache,
                tolerance=self._config.canary_tolerance,
                load_seconds=server.start_seconds,
                loader=self._loader,
                turn=partial(self._turn, policy.version),
                proof=self._proof,
                fresh=self.serving is None,
            )
            if not self._proved:
                await self._prove(client, policy)
        finally:
            self._updating = False
        if updated.attempts > 1:
            # Tokens between the two loads had a wrong label. With a new epoch no pool waits for this one's
            # acknowledgement, so they are all discarded.
            self.epoch = uuid.uuid4().hex[:12]
        self.canary_error, self.paused_seconds = updated.canary_error, updated.paused
        self.update_seconds = time.perf_counter() - started - self._waited
        self.updates += 1
        self.serving, self._url = policy, client.url
        await self._announce(policy)
        await self._loader.settled(client, policy)
        self._log.info(
            "serving",
            version=str(Version.unpack(policy.version)),
            canary_error=updated.canary_error,
            paused=round(updated.paused, 4),
            seconds=round(self.update_seconds, 4),
        )

    async def _turn(self, version: int) -> None:
        """Keep sampling until the servers that have to load first have loaded."""
        started, self._updating = time.perf_counter(), False
        await self._rollout.turn(self.name, version)
        self._updating = True
        self._waited += time.perf_counter() - started

    async def contradict(self, lost: ServerLost) -> None:
        """Announce the server again, as a new epoch, when it was announced as lost while it serves."""
        policy = self.serving
        if policy is not None and (lost.server, lost.epoch) == (self.name, self.epoch):
            self._log.warning("announced_as_lost", reason=lost.reason)
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
            if self._config.learner.router_replay:
                await require_experts(client, deadline=CONTROL_SECONDS)
            result = await handshake(
                client,
                policy,
                self._config.agent.sampling,
                tolerance=self._config.canary_tolerance,
                deadline=CONTROL_SECONDS,
            )
        except HandshakeRefused as refusal:
            if not await self._loader.overtaken(client, policy):
                raise
            raise FetchFailed("newer weights came during the handshake", where=self.name) from refusal
        self._proved = True
        self._log.info("handshake", canary_error=result.canary_error, sampling_error=result.sampling_error)


def main_fault(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return the error that best explains a server's end: the death of its process before its effects."""
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
