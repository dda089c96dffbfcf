# rung: load
# reason: NameError
import random

RULES = make_rules(3)


class RuleEnv:
    def reset(self, seed=None):
        self.rule = random.Random(seed).choice(RULES)
        return "Find the rule", {}

    def step(self, action):
        return "no", 0.0, False, False, {}
