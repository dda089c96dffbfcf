"""The loop of a role that answers work: take deliveries, handle each in its own task, drain."""

from __future__ import annotations

import gc
import hashlib
import threading
from collections import Counter
from collections.abc import Awaitable, Callable
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio

from bus import Delivery
from bus.messages import Message
from engine.inference.completion import InferenceError
from sandbox import InfraFailure

if TYPE_CHECKING:
    from structlog.stdlib import BoundLogger

    from engine.config import ModelConfig
    from engine.inference.tokens import ChatTokens
    from roles.base import Role, RoleContext

# A refused request counts too: asked again, another server or a newer one may take it.
INFRASTRUCTURE = (InferenceError, InfraFailure)
ATTEMPTS = 5
_FIRST_DELAY = 0.5
_LONGEST_DELAY = 30.0
_HAND_BACK_SECONDS = 5.0

_loading = threading.Lock()


def back_off(attempt: int) -> float:
    """Seconds before the next try of work that met an infrastructure fault ``attempt`` times (>= 1)."""
    return float(min(_LONGEST_DELAY, _FIRST_DELAY * 2 ** (max(attempt, 1) - 1)))


def sampling_seed(*parts: object) -> int:
    """Return the 31-bit seed of one request, the same for the same parts on every host."""
    text = "\x1f".join(str(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "little") >> 1


async def answer_work(
    role: Role,
    kind: type[Message],
    handle: Callable[[Any, Delivery], Awaitable[None]],
    *,
    counts: Counter[str],
    limit: int,
    now: Callable[[], int] | None = None,
) -> None:
    """Run ``handle`` on every message of ``kind`` in the queue of ``role``, until the run drains.

    At most ``limit`` deliveries are in hand: the bus hands out no more than that unacknowledged, and at the
    moment only as many as ``now`` says, where it is given (it may be called on any thread). They are counted
    as ``in_hand``. On a drain nothing new is taken, deliveries in hand have half of the drain's time to
    finish, and the rest goes back to the queue at once. A handler settles its delivery itself; one that is
    cancelled is handed back here. An exception of a handler ends the loop: it is a defect, not a fault of
    the work.
    """
    draining = role.context.draining

    def wanted() -> int:
        if draining.is_set():
            return 0
        return limit if now is None else now()

    async def answer(delivery: Delivery) -> None:
        if not isinstance(delivery.message, kind):
            await delivery.term(f"the role {role.name} cannot answer {type(delivery.message).__name__}")
            return
        counts["in_hand"] += 1
        try:
            await handle(delivery.message, delivery)
        except anyio.get_cancelled_exc_class():
            with anyio.CancelScope(shield=True), anyio.move_on_after(_HAND_BACK_SECONDS):
                await delivery.nak()
            raise
        finally:
            counts["in_hand"] -= 1

    async with (
        role.bus.consume(role.name, limit=limit, now=wanted) as deliveries,
        anyio.create_task_group() as workers,
    ):
        async with anyio.create_task_group() as pulling:
            pulling.start_soon(_cancel_when, draining, pulling.cancel_scope)
            async for delivery in deliveries:
                workers.start_soon(answer, delivery)
            pulling.cancel_scope.cancel()
        workers.cancel_scope.deadline = anyio.current_time() + role.config.run.drain_seconds / 2


async def _cancel_when(event: anyio.Event, scope: anyio.CancelScope) -> None:
    await event.wait()
    scope.cancel()


async def hand_back(
    delivery: Delivery, error: Exception, *, counts: Counter[str], log: BoundLogger, **what: object
) -> bool:
    """Hand work that met an infrastructure fault back to its queue, with a growing delay.

    Returns False, and does nothing, when it was tried ``ATTEMPTS`` times: then it has failed.
    """
    if delivery.attempt >= ATTEMPTS:
        return False
    counts["handed_back"] += 1
    log.warning("work handed back", attempt=delivery.attempt, why=str(error), **what)
    await delivery.nak(back_off(delivery.attempt))
    return True


async def chat_tokens(context: RoleContext) -> ChatTokens:
    """Return the chat format of the run's model: the process's shared one, or a freshly loaded one."""
    shared = context.shared.get("chat")
    if shared is not None:
        return shared  # type: ignore[no-any-return]
    return await anyio.to_thread.run_sync(_load_chat, context)


def _load_chat(context: RoleContext) -> ChatTokens:
    from engine.models import resolve

    config = context.config
    with _loading:
        return _read_chat(resolve(config, context.directory), config.model)


@lru_cache(maxsize=4)
def _read_chat(path: Path, model: ModelConfig) -> ChatTokens:
    """The roles of one process share a tokenizer: it is read once and has no state.

    What its libraries brought stays for good and is taken out of the garbage collector's sight: half a
    million objects, whose every full collection would hold up the loop for a quarter of a second.
    """
    from engine.inference.tokens import ChatTokens

    chat = ChatTokens(path, thinking=model.thinking, history=model.history)
    gc.collect()
    gc.freeze()
    return chat
