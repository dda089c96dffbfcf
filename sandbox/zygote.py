"""Entry of the zygote's process: ``python -s -P -B -m sandbox.zygote FD CONFIG``."""

from __future__ import annotations

import importlib
import json
import os
import socket
import sys


def _ignore(**_: object) -> None:
    """Stand in for os.register_at_fork.

    The standard library re-seeds and re-locks in every child for the sake of threads that we do not have;
    each hook dirties pages, together a quarter of an instance's memory.
    """


def main() -> None:
    """Serve the engine at the descriptor of the first argument."""
    os.register_at_fork = _ignore
    nursery = importlib.import_module("sandbox.fork_server")
    control = socket.socket(fileno=int(sys.argv[1]))
    control.set_inheritable(False)
    nursery.run(control, json.loads(sys.argv[2]))


if __name__ == "__main__":
    main()
