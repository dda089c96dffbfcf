"""Same program, seed and actions, same bytes (docs/sandbox.md, cases 26, 28)."""

from __future__ import annotations

import ast
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from sandbox_siege import HOSTS
from scenes.programs import PEAK, attack
from scenes.sandboxes import held_pool, replay

from sandbox import EnvError, SandboxPool, SandboxSettings, Validator
from sandbox.contract import STDLIB

pytestmark = pytest.mark.asyncio(loop_scope="module")

SOURCES = {
    "hash order": 'return list({"a", "b", "c", "longer", "words"}), hash("x"), hash((1, "y"))',
    "random": """
        import random
        return random.random(), random.Random().random(), random.SystemRandom().random()
    """,
    "reseeded": "import random\nrandom.seed()\nreturn random.random(), random.sample(range(99), 5)",
    "secrets": "import secrets\nreturn secrets.token_hex(8), secrets.randbelow(10**9)",
    "urandom": "return os.urandom(40), os.getrandom(4)",
    "uuid": "import uuid\nreturn uuid.uuid4(), uuid.uuid1(), uuid.uuid5(uuid.NAMESPACE_DNS, 'x')",
    "numpy": """
        import numpy as np
        return np.random.rand(), np.random.default_rng().random(), np.random.RandomState().rand()
    """,
    "time": "return time.time(), time.time_ns(), time.monotonic(), time.perf_counter_ns()",
    "calendar": "return time.localtime(), time.ctime(), time.strftime('%c'), time.gmtime(0)",
    "datetime": """
        import datetime as d
        return d.datetime.now(), d.datetime.utcnow(), d.date.today(), d.datetime.now(d.UTC)
    """,
    "numpy clock": "import numpy as np\nreturn [np.datetime64(word) for word in ('now', 'today', 'NOW')]",
    "process": """
        import threading
        return os.getpid(), os.getppid(), threading.current_thread().name, threading.get_native_id()
    """,
    "host": "return os.getuid(), os.getresgid(), os.cpu_count(), os.sched_getaffinity(0), os.times()",
    "modules of modules": """
        import logging, queue, random, threading
        clocks = logging.time.time(), queue.time(), threading._time(), logging.os.times().elapsed
        return clocks, random._os.urandom(4), random._urandom(4), random._os.getuid()
    """,
    "raw modules": """
        import posix, _datetime
        return posix.urandom(4), posix.getpid(), posix.times(), _datetime.datetime.now()
    """,
}


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=HOSTS)
async def pair(request: pytest.FixtureRequest) -> AsyncIterator[SandboxPool]:
    async with held_pool(SandboxSettings(zygotes=2), *request.param) as pool:
        yield pool


async def observed(pool: SandboxPool, source: str, *, seed: int) -> tuple[str, str]:
    """Return the observations of one step in two instances, of two zygotes."""
    one = await pool.spawn(source, seed=seed)
    other = await pool.spawn(source, seed=seed, apart_from=one)
    async with one, other:
        assert one.zygote is not other.zygote
        return (await one.step("x")).observation, (await other.step("x")).observation


@pytest.mark.parametrize("name", SOURCES)
async def test_equal_across_zygotes(pair: SandboxPool, name: str) -> None:
    one, other = await observed(pair, attack(SOURCES[name]), seed=5)
    assert one == other


@pytest.mark.parametrize("name", ["random", "secrets", "urandom", "uuid", "numpy"])
async def test_different_for_another_seed(pair: SandboxPool, name: str) -> None:
    source = attack(SOURCES[name])
    assert (await observed(pair, source, seed=5))[0] != (await observed(pair, source, seed=6))[0]


async def test_reset_starts_the_streams_afresh(pair: SandboxPool) -> None:
    async with await pair.spawn(attack(SOURCES["random"]), seed=1) as instance:
        first = await instance.step("x")
        assert await instance.step("x") != first
        await instance.reset(1)
        assert await instance.step("x") == first


@pytest.mark.parametrize(
    "call",
    [
        "resource.getrusage(0)",
        "os.fstat(3)",
        "platform.uname()",
        "time.pthread_getcpuclockid(1)",
        "os.getloadavg()",
    ],
)
async def test_facts_that_are_no_clock_of_ours_are_refused(pair: SandboxPool, call: str) -> None:
    async with await pair.spawn(attack(f"import platform, resource\nreturn {call}")) as instance:
        with pytest.raises(EnvError, match="Error"):
            await instance.step("x")


# The observation of a step in which nothing fails.
WORKS = {
    "timed waits advance the clock": (
        """
        import queue, threading
        before, lock = time.time(), threading.Condition()
        with lock:
            assert not lock.wait(1000.0) and not lock.wait_for(lambda: False, timeout=1000.0)
        assert not threading.Event().wait(1000.0) and not threading.Semaphore(0).acquire(timeout=1000.0)
        for empty in (queue.Queue(), queue.SimpleQueue()):
            try: empty.get(timeout=1000.0)
            except queue.Empty: pass
        return round(time.time() - before)
        """,
        "6000",
    ),
    "dates of numpy are its own": (
        """
        import numpy as np
        one = np.datetime64("2020-01-02")
        assert isinstance(one, np.datetime64) and one + np.timedelta64(1, "D") == np.datetime64("2020-01-03")
        assert np.dtype(np.datetime64) == np.dtype("M8") and np.isnat(np.datetime64("NaT"))
        assert np.array([one]).dtype == np.dtype("M8[D]") and np.issubdtype(np.dtype("M8[s]"), np.datetime64)
        return np.datetime64("now"), np.datetime64("today", "s")
        """,
        "2026-01-01T00:00:00",
    ),
    "the clock passes and dates work": (
        """
        import datetime as d
        a, b = d.datetime.now(), d.datetime.now()
        assert a < b and isinstance(a, d.date) and isinstance(d.date(2020, 1, 1), d.date)
        assert a + d.timedelta(1) > b and d.datetime.strptime("2020-01-02", "%Y-%m-%d").day == 2
        assert isinstance(d.datetime.combine(d.date.today(), d.time()), d.datetime)
        return b - a
        """,
        "0:00:00.00",
    ),
}


@pytest.mark.parametrize("name", WORKS)
async def test_what_works(pair: SandboxPool, name: str) -> None:
    body, said = WORKS[name]
    async with await pair.spawn(attack(body)) as instance:
        assert said in (await instance.step("x")).observation


DRAWS = """
import random, secrets, time
import numpy as np
COIN = random.random()
class DrawsEnv:
 def __init__(self):
  self.made = random.random(), np.random.rand(), time.time()
 def reset(self, seed):
  self.drawn = random.random(), np.random.rand(), secrets.token_hex(4), time.time()
  return f"{COIN} {self.made} {self.drawn}"
 def step(self, action):
  return f"{random.random()} {time.time()}", 0.0, True, False, {}
"""


async def test_streams_depend_on_the_seed_of_the_reset_alone(pair: SandboxPool) -> None:
    """A program cannot tell by what it draws whether an episode is the first one of its object."""
    async with await pair.spawn(DRAWS, seed=7) as one, await pair.spawn(DRAWS, seed=3) as other:
        assert one.first != other.first
        assert await other.reset(7) == one.first
        assert await other.step("x") == await one.step("x")


# Shows the request that loads it, and is rejected before it is asked for anything else.
SPY = """
import sys
METADATA = 7
class SpyEnv:
 def reset(self, seed):
  frame = sys._getframe()
  while "request" not in frame.f_locals:
   frame = frame.f_back
  return repr(frame.f_locals["request"])
 def step(self, action):
  return "x", 0.0, True, False, {}
"""


async def test_judge_and_play_send_the_same_request(
    pair: SandboxPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def unlinted(source: str) -> None:
        """Let the spy through."""

    monkeypatch.setattr(pair, "lint", unlinted)
    found = await Validator(pair).validate(SPY)
    assert found.rung == "metadata"
    (shown,) = found.first_observations
    request = ast.literal_eval(shown)
    async with await pair.spawn(SPY, seed=request["seed"], kwargs=request["kwargs"]) as instance:
        assert instance.first == shown


async def test_replay_is_byte_equal(pair: SandboxPool) -> None:
    one = await replay(pair, PEAK, 3, ["1", "2"])
    other = await replay(pair, PEAK, 3, ["1", "2"])
    assert one.fingerprint() == other.fingerprint()
    assert one.fingerprint() != (await replay(pair, PEAK, 3, ["2", "1"])).fingerprint()
    assert one.ended
    assert not one.won


async def test_replay_stops_at_an_error(pair: SandboxPool) -> None:
    transcript = await replay(pair, PEAK, 3, ["banana", "2"])
    assert transcript.error_type == "ValueError"
    assert transcript.actions == ("banana",)


async def test_everything_importable_is_there_without_files(pair: SandboxPool) -> None:
    names = [name for name in STDLIB if name != "__future__"]
    body = "\n".join(f"import {name}" for name in names)
    body += """
    import datetime, decimal, numpy as np, numpy.linalg, numpy.fft, dataclasses, enum, typing
    datetime.datetime.strptime("2024-02-03 04:05", "%Y-%m-%d %H:%M").strftime("%A %d %B")
    decimal.Decimal("1.5").sqrt()
    fractions.Fraction("3/7")
    statistics.linear_regression([1, 2], [2, 4])
    np.linalg.svd(np.eye(3))
    np.fft.fft(np.arange(8))
    np.random.default_rng(1).normal()
    np.polyfit([1, 2], [1, 2], 1)
    np.array2string(np.eye(2))
    np.median([1, 2])
    np.unique([1, 1])
    np.einsum("ii", np.eye(2))
    np.ma.masked
    textwrap.fill("a b c", 2)
    pprint.pformat({1: [2] * 50})
    difflib.get_close_matches("a", ["ab"])
    [b"x".decode(c) for c in ("ascii", "latin-1", "cp1252", "idna", "utf-8")]
    "x".encode("utf-32")
    unicodedata.name("a")
    json.loads(json.dumps({"a": 1.5}))
    base64.b64encode(b"x")
    "\\u00e9".encode("utf-16")
    hashlib.sha256(b"").hexdigest()
    hashlib.md5(b"").hexdigest()
    zlib.compress(b"")
    html.escape("<")
    shlex.split("a 'b'")
    string.Template("$a").substitute(a=1)
    locale.str(1.0)
    @dataclasses.dataclass(order=True)
    class D:
        x: int = 0
    class E(enum.Enum):
        A = enum.auto()
    class N(typing.NamedTuple):
        a: int = 0
    assert D() < D(1) and E.A.name == "A" and N().a == 0 and copy.deepcopy([D()]) == [D()]
    warnings.warn("x"); logging.getLogger("x").warning("y"); heapq.merge([1], [2])
    return "all"
    """.replace("\n    ", "\n")
    async with await pair.spawn(attack(body)) as instance:
        assert (await instance.step("x")).observation == "all"


@pytest.mark.parametrize("name", ["requests", "asyncio", "engine", "sqlite3", "msgspec"])
async def test_what_was_not_loaded_cannot_be_imported(pair: SandboxPool, name: str) -> None:
    with pytest.raises(EnvError, match="ModuleNotFoundError"):
        await pair.spawn(f"import {name}\n{PEAK}")


async def test_traceback_shows_the_programs_lines(pair: SandboxPool) -> None:
    async with await pair.spawn(PEAK) as instance:
        with pytest.raises(EnvError) as caught:
            await instance.step("banana")
    assert caught.value.traceback == "line 8 in step: self.t+=1;d=abs(int(a)-self.s);w=d==0"
    assert caught.value.phase == "step"


async def test_names_are_injected(pair: SandboxPool) -> None:
    async with await pair.spawn(PEAK.replace("import random\n", "")) as instance:
        assert instance.first.startswith("kites")
