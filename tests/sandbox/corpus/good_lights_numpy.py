# rung: accepted
import numpy as np


class LightsEnv:
    """Lights out on a 3 x 3 board, with numpy; the flags are numpy's booleans."""

    def __init__(self, max_turns=12):
        self.max_turns = max_turns
        self.board = np.zeros((3, 3), dtype=int)

    def _press(self, row, col):
        for r, c in ((row, col), (row - 1, col), (row + 1, col), (row, col - 1), (row, col + 1)):
            if 0 <= r < 3 and 0 <= c < 3:
                self.board[r, c] ^= 1

    def _show(self):
        return "\n".join("".join("#" if v else "." for v in row) for row in self.board)

    def reset(self, seed=None):
        rng = np.random.default_rng(seed)
        self.board[:] = 0
        self.turn = 0
        self.presses = rng.choice(9, size=4, replace=False).tolist()
        for cell in self.presses:
            self._press(cell // 3, cell % 3)
        return f"Put all lights out. Press a cell 1-9.\n{self._show()}", {}

    def step(self, action):
        self.turn += 1
        text = str(action).strip()
        if not text.isdigit() or not 1 <= int(text) <= 9:
            return "Press a cell 1-9.", 0.0, False, self.turn >= self.max_turns, {}
        self._press((int(text) - 1) // 3, (int(text) - 1) % 3)
        dark = self.board.sum() == 0
        cut = np.bool_(self.turn >= self.max_turns) & ~dark
        return f"Now:\n{self._show()}", float(dark), dark, cut, {"lit": self.board.sum()}

    def solution(self):
        return [str(cell + 1) for cell in self.presses]
