"""Everything of a preloaded package is there, its lazy parts too (case 28)."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from scenes.programs import attack
from scenes.sandboxes import held_pool

from sandbox import SandboxPool, SandboxSettings

pytestmark = pytest.mark.asyncio(loop_scope="module")

# ruff: noqa: E501 (a program of a few statements stands on one line)
PARTS = {
    "html": "import html.parser, html.entities\nhtml.parser.HTMLParser().feed('<b>x</b>')",
    "json": "import json.decoder\njson.decoder.JSONDecoder().decode('1')",
    "numpy.char": "import numpy as np\nnp.char.upper('x')",
    "numpy.testing": "import numpy as np\nnp.testing.assert_allclose(np.ones(3), 1.0)",
    "numpy.typing": "import numpy.typing as npt\nnpt.NDArray[int]",
    "numpy.strings": "import numpy as np\nnp.strings.lower('X'), np.rec.array([(1, 2)])",
    "numpy.*": "names = {}\nexec('from numpy import *', names)\nnames['zeros'](3), names['char']",
    "numpy.recfunctions": "import numpy.lib.recfunctions, numpy.matlib, numpy.ctypeslib",
    "sympy.solve": "import sympy as s\nx = s.Symbol('x')\ns.solve(x**3 - x - 1, x), s.solve([x**2 - 1], [x])",
    "sympy.dsolve": "import sympy as s\nx = s.Symbol('x'); f = s.Function('f')\ns.dsolve(f(x).diff(x) - f(x))",
    "sympy.parse_expr": "import sympy.parsing.sympy_parser as p\np.parse_expr('2*x + sin(x)**2').simplify()",
    "sympy.calculus": "import sympy as s\nx = s.Symbol('x')\ns.integrate(s.exp(-x**2), x), s.limit(s.sin(x)/x, x, 0)",
    "sympy.stats": "import sympy.stats as t\nt.E(t.Die('D', 6))",
    "sympy.logic": "import sympy as s\nx, y = s.symbols('x y')\ns.satisfiable(x & ~y), s.latex(s.simplify_logic(x | y))",
    "sympy.combinatorics": "from sympy.combinatorics import Permutation, SymmetricGroup\nSymmetricGroup(4).order()",
    "networkx": "import networkx as nx\ng = nx.cycle_graph(5)\nnx.shortest_path(g, 0, 2), nx.is_planar(g), nx.find_cycle(g)",
    "networkx.community": "import networkx as nx\nnx.community.louvain_communities(nx.karate_club_graph(), seed=1)",
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def whole() -> AsyncIterator[SandboxPool]:
    settings = SandboxSettings(
        zygotes=1,
        preload=("numpy", "sympy", "networkx"),
        cpu_call_seconds=60.0,
        wall_call_seconds=120.0,
        strikes=0,
    )
    async with held_pool(settings) as pool:
        yield pool


@pytest.mark.slow
@pytest.mark.parametrize("part", PARTS)
async def test_lazy_parts_are_there(whole: SandboxPool, part: str) -> None:
    async with await whole.spawn(attack(f"{PARTS[part]}\nreturn 'there'")) as instance:
        assert (await instance.step("x")).observation == "there"


async def test_default_packages_are_whole(pool: SandboxPool) -> None:
    parts = [body for name, body in PARTS.items() if name.startswith(("html", "json", "numpy"))]
    async with await pool.spawn(attack("\n".join([*parts, "return 'there'"]))) as instance:
        assert (await instance.step("x")).observation == "there"
