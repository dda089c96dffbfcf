"""A task set of verifiers whose environment plays the user for several turns."""

from __future__ import annotations

from collections.abc import Iterator

import verifiers.v1 as vf

__all__ = ["GuessEnv", "GuessTasks"]


class GuessData(vf.TaskData):
    secret: int


class GuessTask(vf.Task[GuessData]): ...


class GuessTasks(vf.Taskset[GuessTask]):
    def load(self) -> Iterator[GuessTask]:
        for secret in range(1, 6):
            yield GuessTask(GuessData(secret=secret))


class GuessConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()


class GuessEnv(vf.Env[GuessConfig]):
    async def run(self, task: GuessTask, agents: vf.Agents) -> None:
        async with agents.player.interaction(task) as interaction:
            segment = await interaction.turn("Guess, 1 to 5.")
            while segment.last_reply != str(task.data.secret):
                segment = await interaction.turn("No.")
        interaction.trace.record_reward("guessed", 1.0)
