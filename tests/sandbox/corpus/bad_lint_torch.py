# rung: lint
# reason: import of torch
import torch


class TensorEnv:
    def reset(self, seed=None):
        torch.manual_seed(seed)
        self.x = torch.randint(0, 9, (1,)).item()
        return "Guess 0-9", {}

    def step(self, action):
        return "ok", float(action == str(self.x)), True, False, {}
