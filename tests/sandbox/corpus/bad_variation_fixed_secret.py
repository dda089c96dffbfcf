# rung: variation
# reason: every seed
class FixedVaultEnv:
    def __init__(self, max_turns=8):
        self.max_turns = max_turns

    def reset(self, seed=None):
        self.secret = 417
        self.turn = 0
        return "A vault with a number between 1 and 1000. Higher or lower is told.", {}

    def step(self, action):
        self.turn += 1
        cut = self.turn >= self.max_turns
        if not action.isdigit():
            return "Digits, please.", 0.0, False, cut, {}
        if int(action) == self.secret:
            return "Open.", 1.0, True, False, {}
        return "Higher." if int(action) < self.secret else "Lower.", 0.0, False, cut, {}

    def solution(self):
        return "417"
