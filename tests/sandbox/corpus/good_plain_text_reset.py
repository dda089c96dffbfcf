# rung: accepted
class ParityEnv:
    def reset(self, seed):
        r = random.Random(seed)
        self.numbers = [r.randint(10, 99) for _ in range(4)]
        self.left = 4
        return "Type the sum of these modulo 7: " + " ".join(map(str, self.numbers))

    def step(self, action):
        self.left -= 1
        right = str(action).strip() == str(sum(self.numbers) % 7) and self.left >= 0
        if right:
            self.numbers.append(13)
        done = right and len(self.numbers) == 6
        return None if done else "again, with one more 13" if right else "no", done, done, self.left <= 0, None
