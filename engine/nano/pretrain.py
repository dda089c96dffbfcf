"""Supervised training of the nano policy: packed rows, Muon for matrices, AdamW for the rest.

Rows have one length and one count a step, because on a CPU every new tensor shape costs a kernel
compilation. Examples that share a row do not see each other.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

ROW = 256

_WARM_UP = 20
_FLOOR = 0.03
_CLIP = 1.0
_POOL = 96
_TRIAL_STEPS = 4
_RECENT = 16
_COLLAPSE = 2.0

# The drills come first, until their loss (nats a token) is this low or this share of the steps is used up.
_DRILLED = 0.3
DRILL_SHARE = 0.25
_DRILL_WINDOW = 5


@dataclass(frozen=True)
class Tokens:
    """One tokenised example: ``tokens`` int32 (T,), ``weights`` float32 (T,) of each token's own loss."""

    tokens: NDArray[np.int32]
    weights: NDArray[np.float32]


@dataclass(frozen=True)
class Progress:
    """Progress of the warm start; ``seconds_left`` is an estimate from the newest steps."""

    step: int
    steps: int
    loss: float
    tokens_per_second: float
    seconds_left: float
    threads: int


@dataclass(frozen=True)
class Schedule:
    """``steps`` optimiser steps of ``rows`` rows; the rate is constant for half of them, then falls."""

    steps: int
    rows: int
    muon_learning_rate: float
    adamw_learning_rate: float

    @property
    def drill_rows(self) -> int:
        """Rows of a drill step. Copying is found after a number of steps, not of tokens: half suffice."""
        return max(1, self.rows // 2)

    def factor(self, step: int) -> float:
        """Return the learning-rate factor of ``step``, counted from 0."""
        warm = (step + 1) / _WARM_UP
        half = self.steps / 2
        fall = 1.0 if step < half else 1.0 - (1.0 - _FLOOR) * (step - half) / max(half, 1.0)
        return min(1.0, warm, fall)


@dataclass(frozen=True)
class Pack:
    """One step's input: ``tokens``, ``positions``, ``document`` int64 (rows, ROW), ``weights`` float32."""

    tokens: torch.Tensor
    positions: torch.Tensor
    document: torch.Tensor
    weights: torch.Tensor
    filled: int


def pack(sequences: Sequence[Tokens], rows: int, *, pad: int, seed: int) -> Iterator[Pack]:
    """Yield packs for ever, in shuffled passes over ``sequences``; a row takes what still fits in it.

    Raises ValueError for a sequence longer than a row.
    """
    longest = max(len(item.tokens) for item in sequences)
    if longest > ROW:
        raise ValueError(f"an example of {longest} tokens does not fit a row of {ROW}")
    stream = _shuffled(sequences, Random(seed))
    pool = [next(stream) for _ in range(_POOL)]
    while True:
        tokens = np.full((rows, ROW), pad, np.int64)
        positions = np.zeros((rows, ROW), np.int64)
        document = np.zeros((rows, ROW), np.int64)
        weights = np.zeros((rows, ROW), np.float32)
        filled = 0
        for row in range(rows):
            at, index = 0, 0
            while (found := _longest(pool, ROW - at)) is not None:
                item, pool[found] = pool[found], next(stream)
                index += 1
                end = at + len(item.tokens)
                tokens[row, at:end] = item.tokens
                positions[row, at:end] = np.arange(end - at)
                document[row, at:end] = index
                weights[row, at:end] = item.weights
                at = end
            filled += at
        yield Pack(
            torch.from_numpy(tokens),
            torch.from_numpy(positions),
            torch.from_numpy(document),
            torch.from_numpy(weights),
            filled,
        )


def _longest(pool: Sequence[Tokens], room: int) -> int | None:
    """Return the place of the longest example that fits, but of the first one in an empty row."""
    if room == ROW:
        return 0
    fitting = [(len(item.tokens), place) for place, item in enumerate(pool) if len(item.tokens) <= room]
    return max(fitting)[1] if fitting else None


def _shuffled(sequences: Sequence[Tokens], rng: Random) -> Iterator[Tokens]:
    order = list(range(len(sequences)))
    while True:
        rng.shuffle(order)
        yield from (sequences[index] for index in order)


def loss(model: Any, batch: Pack) -> torch.Tensor:
    """Return the weighted mean negative log-likelihood of a pack, under bfloat16 autocast."""
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(
            input_ids=batch.tokens,
            position_ids=batch.positions,
            attention_mask=_mask(batch.document),
            use_cache=False,
        ).logits
    nll = torch.nn.functional.cross_entropy(
        logits[:, :-1].float().flatten(0, 1), batch.tokens[:, 1:].flatten(), reduction="none"
    )
    weights = batch.weights[:, 1:].flatten()
    return (nll * weights).sum() / weights.sum().clamp_min(1.0)


def _mask(document: torch.Tensor) -> torch.Tensor:
    """Return the additive mask (rows, 1, ROW, ROW): causal, and within one example only."""
    same = document[:, :, None] == document[:, None, :]
    causal = torch.ones(ROW, ROW, dtype=torch.bool).tril()
    blocked = ~(same & causal)
    return torch.zeros(blocked.shape).masked_fill(blocked, -1e9)[:, None]


def train(
    model: Any,
    drills: Iterator[Pack],
    packs: Iterator[Pack],
    schedule: Schedule,
    *,
    threads: int,
    progress: Callable[[Progress], None] | None = None,
) -> dict[str, float]:
    """Train ``model`` in place, on drills first, and return its metrics (losses, tokens, seconds, threads).

    A few steps of drills alone bring about copying from the context, which the same drills mixed into the
    corpus do not in ten times as many.
    With more than one thread the first steps are timed with all of them and with one; where other
    processes hold the cores, several threads wait for each other and one is faster.
    """
    optimizers = _optimizers(model, schedule)
    pace = _Pace(threads)
    losses: list[float] = []
    tokens, drilled, drilling = 0, 0, True
    started = time.monotonic()
    row_seconds = deque[float](maxlen=_RECENT)
    model.train()
    for step in range(schedule.steps):
        begun = time.monotonic()
        pace.before(step)
        drilling = drilling and not _drilled(losses, schedule.steps)
        drilled += drilling
        batch = next(drills if drilling else packs)
        value = loss(model, batch)
        value.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), _CLIP)
        for optimizer, rate in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate * schedule.factor(step)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        losses.append(value.item())
        tokens += batch.filled
        pace.after(step)
        if progress is not None:
            seconds = time.monotonic() - started
            if step == 1:
                row_seconds.clear()  # the first step compiles kernels
            row_seconds.append((time.monotonic() - begun) / batch.tokens.shape[0])
            # drills have fewer rows than the steps after them
            left = statistics.median(row_seconds) * schedule.rows * (schedule.steps - step - 1)
            progress(Progress(step + 1, schedule.steps, losses[-1], tokens / seconds, left, pace.threads))
    model.eval()
    tail = losses[-max(1, schedule.steps // 20) :]
    return {
        "loss_first": losses[0],
        "loss": sum(tail) / len(tail),
        "tokens": float(tokens),
        "drill_steps": float(drilled),
        "seconds": round(time.monotonic() - started, 1),
        "threads": float(pace.threads),
    }


def _drilled(losses: Sequence[float], steps: int) -> bool:
    recent = losses[-_DRILL_WINDOW:]
    enough = len(recent) == _DRILL_WINDOW and sum(recent) / _DRILL_WINDOW < _DRILLED
    return enough or len(losses) >= steps * DRILL_SHARE


def _optimizers(model: Any, schedule: Schedule) -> list[tuple[torch.optim.Optimizer, float]]:
    matrices: list[torch.nn.Parameter] = []
    others: list[torch.nn.Parameter] = []
    for name, parameter in model.named_parameters():
        hidden = parameter.ndim == 2 and "embed" not in name and "lm_head" not in name
        (matrices if hidden else others).append(parameter)
    muon = torch.optim.Muon(matrices, lr=schedule.muon_learning_rate, momentum=0.95, weight_decay=0.0)
    adamw = torch.optim.AdamW(others, lr=schedule.adamw_learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
    return [(muon, schedule.muon_learning_rate), (adamw, schedule.adamw_learning_rate)]


class _Pace:
    """Chooses between all threads and one, by timing steps of each in turn; restores nothing itself.

    Where other processes hold the cores, threads that wait for each other make a step ten times slower, so
    the trial ends at the first clear sign, and a later collapse ends the use of several threads for good.
    """

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self._many = threads
        self._spent: dict[int, list[float]] = {threads: [], 1: []}
        self._began = 0.0
        torch.set_num_threads(threads)

    def before(self, step: int) -> None:
        # The first step compiles kernels and is not counted.
        if self._many > 1 and step:
            self._use(self._choice(step))
        self._began = time.monotonic()

    def after(self, step: int) -> None:
        if step:
            self._spent[self.threads].append(time.monotonic() - self._began)

    def _choice(self, step: int) -> int:
        many, one = self._spent[self._many], self._spent[1]
        if step <= 2 * _TRIAL_STEPS and not (len(many) > 1 and min(many) > _COLLAPSE * min(one)):
            return self._many if step % 2 == 0 else 1
        if len(many) > 1 and max(many[-2:]) > _COLLAPSE * min(one) and min(many[-2:]) > min(one):
            return 1
        return self._many if min(many) < min(one) else 1

    def _use(self, threads: int) -> None:
        self.threads = threads
        torch.set_num_threads(threads)
