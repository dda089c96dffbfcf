"""A class as TRL's trainers take it for ``environment_factory``."""

from __future__ import annotations

import random


class Till:
    """A basket that must hold as much as was asked for."""

    def reset(self, **_: object) -> str:
        self.want, self.basket = random.randint(2, 9), 0
        return f"Put {self.want} figs into the basket, then say so."

    def add(self, count: int) -> str:
        """Put figs into the basket.

        Args:
            count: How many.

        Returns:
            What the basket holds.
        """
        if count < 1:
            raise ValueError("count must be at least 1")
        self.basket += count
        return f"{self.basket} figs"

    def get_reward(self) -> float:
        return float(self.basket == self.want)


class Rewardless:
    def reset(self) -> None: ...

    def look(self) -> str:
        """Look."""
        return "nothing"
