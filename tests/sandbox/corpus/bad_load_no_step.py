# rung: load
# reason: no method step
class StoryEnv:
    def reset(self, seed=None):
        return "Once upon a time", {}

    def act(self, action):
        return "and then", 0.0, False, False, {}
