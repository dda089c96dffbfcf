"""Settings of all tests."""

import re
from functools import cache
from pathlib import Path

import pytest
from hypothesis import settings

# A shared machine can be slow at any moment: the timeout of each test bounds them, not hypothesis.
settings.register_profile("spade", deadline=None)
settings.load_profile("spade")


# TRL, or all of transformers, takes seconds to import: one worker has the files that do, by these words.
HEAVY = re.compile(
    r"roles\.learner\.role|training\.(trainer|export)|training import .*(trainer|export)|template_models"
    r"|AutoTokenizer|AutoModel|ForCausalLM|from test_learner import|(from|import) (trl|accelerate|peft)\b"
)


@cache
def heavy(path: Path) -> bool:
    return HEAVY.search(path.read_text()) is not None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tell `--dist loadgroup` which tests share a worker: those of a file, and those that import TRL.

    The first of those pays for the import, which takes half a minute where others are busy.
    """
    for item in items:
        trains = heavy(item.path)
        if trains and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(150))
        item.add_marker(pytest.mark.xdist_group("trl" if trains else item.nodeid.split("::")[0]))


def pytest_addoption(parser: pytest.Parser) -> None:
    """Options of the tests marked ``chaos`` and ``fuzz``, and of the long forms of others."""
    group = parser.getgroup("spade")
    group.addoption("--kills", type=int, default=3, help="kill so many parts of a whole run (default 3)")
    # of the first three points of seed 18 none waits for a vLLM to start or for the lease of an agent's work
    group.addoption("--kill-seed", type=int, default=18, help="kill them at the points of this seed")
    group.addoption("--chaos-kills", type=int, default=12, help="kill -9 so many processes (default 12)")
    group.addoption("--chaos-seed", type=int, default=0, help="repeat the schedule of this seed")
    group.addoption(
        "--fuzz-programs", type=int, default=300, help="mutated programs to validate (default 300)"
    )
    group.addoption(
        "--fuzz-schedules", type=int, default=1000, help="schedules of the loop to draw (default 1000)"
    )
    group.addoption("--fuzz-frames", type=int, default=300, help="mutated frames to send (default 300)")
    group.addoption("--fuzz-seed", type=int, default=0, help="make the mutations of this seed")
