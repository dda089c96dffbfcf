"""A task set of verifiers, and one whose environment plays the user for several turns."""

from __future__ import annotations

from collections.abc import Iterator

import verifiers.v1 as vf

__all__ = ["SumTasks"]


class SumData(vf.TaskData):
    answer: int


class SumTask(vf.Task[SumData]):
    @vf.reward(weight=0.5)
    async def right(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == str(self.data.answer))

    @vf.reward(weight=0.5)
    async def short(self, task: SumData, trace: vf.Trace) -> dict[str, float]:
        return {"short": float(len(trace.last_reply) <= len(str(task.answer)))}


class SumTasks(vf.Taskset[SumTask]):
    def load(self) -> Iterator[SumTask]:
        for left in range(20):
            yield SumTask(SumData(prompt=f"{left} + 30 = ?", system_prompt="Be short.", answer=left + 30))
