"""Counts won episodes and publishes the count of each round."""

from __future__ import annotations

from typing import ClassVar

import anyio
import msgspec

from bus.messages import EpisodeFinished, Message, RoundSummary, register_message
from roles.base import Role


class CounterSettings(msgspec.Struct):
    """The recipe's table ``[plugins.counter]``: an episode is won from this return on."""

    least: float = 0.5


@register_message
class CountRequested(Message, frozen=True, kw_only=True, tag="count_requested.v1"):
    """Work for the queue ``counter``: publish the count of a round."""

    stream: ClassVar[str] = "TASK"
    round: int
    won: int

    @property
    def key(self) -> str:
        """The same task has the same key, so a repetition is stored once."""
        return f"count-request:{self.round}"

    @property
    def tail(self) -> str:
        """The subject: ``task.ROLE.KIND.ID``."""
        return f"task.counter.count.{self.round}"


@register_message
class Counted(Message, frozen=True, kw_only=True, tag="counted.v1"):
    """A fact: the number of episodes won up to the end of a round."""

    round: int
    won: int

    @property
    def key(self) -> str:
        """The same result has the same key."""
        return f"counted:{self.round}"

    @property
    def tail(self) -> str:
        """The subject: ``event.ROLE.TYPE``."""
        return "event.counter.counted"


class Counter(Role):
    """Follows facts, puts work into its own queue, answers it with facts of its own."""

    name = "counter"
    settings_type = CounterSettings
    won = 0

    async def run(self) -> None:
        """Work until the run drains."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._count)
            tasks.start_soon(self._answer)
            await self.context.draining.wait()
            tasks.cancel_scope.cancel()

    async def _count(self) -> None:
        tails = ["event.agent.finished", "event.scorer.round"]
        async with self.bus.follow("EVENT", tails=tails) as records:
            async for record in records:
                match record.message:
                    case EpisodeFinished(returned=returned):
                        self.won += returned >= self.settings.least
                    case RoundSummary(round=round_):
                        await self.bus.publish(CountRequested(round=round_, won=self.won))

    async def _answer(self) -> None:
        async with self.bus.consume("counter", limit=4) as deliveries:
            async for delivery in deliveries:
                task = delivery.message
                if isinstance(task, CountRequested):
                    await self.bus.publish(Counted(round=task.round, won=task.won))
                await delivery.ack()  # after the result is stored

    def statistics(self) -> dict[str, float]:
        """Gauges for heartbeats, the live view and ``spade status``."""
        return {"won": float(self.won)}
