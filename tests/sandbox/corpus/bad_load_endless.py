# rung: load
# reason: CPU time
def primes():
    found = []
    n = 2
    while len(found) >= 0:
        if all(n % p for p in found):
            found.append(n)
        n += 1
    return found


PRIMES = primes()


class PrimeEnv:
    def reset(self, seed=None):
        return "Name a prime", {}

    def step(self, action):
        return "ok", 0.0, False, False, {}
