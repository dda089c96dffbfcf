# rung: parse
# reason: SyntaxError
```python
import random


class FencedEnv:
    def reset(self, seed=None):
        return "go", {}
