# rung: lint
# reason: open()
import json
import random


class QuizEnv:
    def reset(self, seed=None):
        with open("questions.json") as file:
            questions = json.load(file)
        self.question, self.answer = random.Random(seed).choice(questions)
        return self.question, {}

    def step(self, action):
        return "ok", float(action == self.answer), True, False, {}
