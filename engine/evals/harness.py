"""Plays the items of a suite at one model, a bounded number of them at a time."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence

import anyio
import structlog

from engine.config import SamplingConfig
from engine.errors import SpadeError
from engine.evals.records import Policy, Sample
from engine.evals.suite import Item, Seat, Suite
from engine.inference.completion import InferenceError
from sandbox import EnvQuarantined, InfraFailure

ATTEMPTS = 5
# A refused request counts too: asked again, another server or a newer one may take it.
INFRASTRUCTURE = (InferenceError, InfraFailure, TimeoutError, anyio.BrokenWorkerProcess)
_LONGEST_DELAY = 30.0
BackOff = Callable[[int], float]

log = structlog.get_logger("spade.eval")


def _delay(attempt: int) -> float:
    return float(min(_LONGEST_DELAY, 0.5 * 2 ** (attempt - 1)))


class Harness:
    """Plays suites at one model: ``seat`` returns a fresh seat at it for the key of a sample.

    ``keep`` is called with each finished sample.

    A sample that met ``ATTEMPTS`` faults of servers or sandbox is lost: it has no outcome, and the evaluation
    is partial. So is one whose suite raises something else; an error that concerns all samples is raised.
    """

    def __init__(
        self,
        seat: Callable[[str, SamplingConfig], Seat],
        *,
        policy: Policy = "model",
        concurrency: int,
        keep: Callable[[Sample], None],
        delay: BackOff = _delay,
    ) -> None:
        self._seat, self._policy, self._places = seat, policy, max(1, concurrency)
        self._keep, self._delay = keep, delay

    async def play(
        self,
        name: str,
        suite: Suite,
        items: Sequence[Item],
        *,
        sampling: SamplingConfig,
        samples: int = 1,
        done: Collection[tuple[str, int]] = (),
    ) -> int:
        """Play each of ``items`` ``samples`` times but for those ``done``; return the number of lost ones."""
        waiting = deque(
            (item, index) for index in range(samples) for item in items if (item.name, index) not in done
        )
        lost = 0

        async def worker() -> None:
            nonlocal lost
            while waiting:
                item, index = waiting.popleft()
                sample = await self._sample(name, suite, item, index, sampling)
                if sample is None:
                    lost += 1
                else:
                    self._keep(sample)

        async with anyio.create_task_group() as workers:
            for _ in range(min(len(waiting), self._places)):
                workers.start_soon(worker)
        return lost

    async def _sample(
        self, name: str, suite: Suite, item: Item, index: int, sampling: SamplingConfig
    ) -> Sample | None:
        key = f"{self._policy}/{name}/{item.name}/{index}"
        for attempt in range(1, ATTEMPTS + 1):
            started = time.monotonic()
            seat = self._seat(key, sampling)
            try:
                outcome = await (suite.null if self._policy == "null" else suite.play)(item, seat)
            except EnvQuarantined as error:
                log.warning("sample_lost", sample=key, why=str(error))
                return None
            except INFRASTRUCTURE as error:
                log.debug("sample_repeated", sample=key, attempt=attempt, why=str(error))
                if attempt < ATTEMPTS:
                    await anyio.sleep(self._delay(attempt))
                else:
                    log.warning("sample_lost", sample=key, why=str(error))
                continue
            except SpadeError:
                raise  # such as a key that is wrong: no sample will have an outcome
            except Exception as error:
                log.exception("sample_lost", sample=key, why=f"{type(error).__name__}: {error}")
                return None
            return Sample(
                suite=name,
                policy=self._policy,
                item=item.name,
                group=item.group,
                sample=index,
                score=outcome.score,
                reason=outcome.reason,
                tokens=seat.tokens,
                versions=seat.versions,
                seconds=time.monotonic() - started,
                asked=seat.asked,
                detail=outcome.detail,
            )
        return None


def require_names(items: Iterable[Item], suite: str) -> None:
    """Check that the names of a suite's items are unique. Raises SpadeError."""
    names = [item.name for item in items]
    if len(names) != len(set(names)):
        raise SpadeError(
            "Two items of the suite have one name", where=suite, remedy="Report it to its author."
        )
