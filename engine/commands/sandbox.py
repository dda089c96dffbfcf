"""``spade sandbox``: the protection of this host, playing a program by hand, validating files."""

from __future__ import annotations

import json
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from engine.errors import ConfigError, SpadeError

if TYPE_CHECKING:
    from sandbox import ProtectionReport, SandboxSettings, Verdict

app = typer.Typer(
    name="sandbox",
    help="Check the sandbox of this host; play and validate environment programs.",
    no_args_is_help=True,
)

RecipeOption = Annotated[Path | None, typer.Option(help=r"Recipe whose \[sandbox] table applies.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Turns = Annotated[int, typer.Option(min=1, help="Turns of an episode.")]

T = TypeVar("T")
_DOCTOR = "Run `spade sandbox doctor` to see the protection of this host."
_CANARY = {
    "open": "open a file",
    "listdir": "list a directory",
    "tcp": "connect by TCP",
    "udp": "send by UDP",
    "fork": "start a process",
    "kill": "signal the zygote",
    "trace": "be traced",
    "shared_memory": "map shared memory",
    "executable_memory": "map executable memory",
    "memfd": "make a memory file",
    "memory": "take twice its memory",
}


@app.command()
def doctor(as_json: AsJson = False, recipe: RecipeOption = None) -> None:
    """Test the walls of this host and list them; status 1 when programs cannot be confined."""
    import msgspec

    from sandbox import SandboxPool, protection

    settings = _settings(recipe)

    async def look() -> tuple[ProtectionReport, dict[str, int]]:
        unrefused = msgspec.structs.replace(settings, allow_unsafe=True, zygotes=1)
        async with SandboxPool(unrefused) as pool:
            return pool.report, pool.bounds

    found, bounds = sandboxed(look, remedy="No program can run on this host until this is fixed.")
    advice = protection.advice(found)
    facts = {"ok": not found.holes, "advice": advice, "bounds": bounds, "max_live": min(bounds.values())}
    print(
        json.dumps(msgspec.to_builtins(found) | facts, indent=2)
        if as_json
        else _examined(found, bounds, advice),
        flush=True,
    )
    if found.holes:
        sys.exit(1)


@app.command()
def run(
    file: Annotated[
        Path, typer.Argument(help="Environment program, or a model's reply.", show_default=False)
    ],
    seed: Annotated[int, typer.Option(help="Seed of the first episode.")] = 0,
    kwargs: Annotated[str, typer.Option(help="Arguments of the constructor, a JSON object.")] = "{}",
    recipe: RecipeOption = None,
) -> None:
    """Play a program by hand, within the sandbox's limits. ``:help`` lists the commands."""
    from engine.commands.play import play

    source = _source(file)
    arguments = _arguments(kwargs)
    settings = _settings(recipe)
    sys.exit(sandboxed(play, source, seed, arguments, settings))


@app.command()
def validate(
    files: Annotated[
        list[Path],
        typer.Argument(
            help="Programs or models' replies: files, directories, - for input.", show_default=False
        ),
    ],
    as_json: AsJson = False,
    strict: Annotated[
        bool, typer.Option(help="Reject exceptions on meaningless actions, and degenerate programs.")
    ] = False,
    max_turns: Turns = 25,
    recipe: RecipeOption = None,
) -> None:
    """Validate programs, rung by rung; status 1 when any is rejected."""
    import msgspec

    from engine.text import clean

    found = (sorted(path.glob("*.py")) if path.is_dir() else [path] for path in files)
    sources = {file: _source(file) for several in found for file in several}
    verdicts = sandboxed(_verdicts, sources, _settings(recipe), strict, max_turns)
    rejected = [file for file, verdict in verdicts.items() if not verdict.ok]
    if as_json:
        rows = [{"file": str(file), **msgspec.to_builtins(verdict)} for file, verdict in verdicts.items()]
        for row in rows:
            del row["episodes"]
        print(json.dumps(rows, indent=2), flush=True)
    else:
        print(clean("\n\n".join(_judged(file, verdict) for file, verdict in verdicts.items())), flush=True)
        if len(sources) > 1:
            print(f"\n{len(sources) - len(rejected)} of {len(sources)} accepted", flush=True)
    if rejected:
        sys.exit(1)


def sandboxed(work: Callable[..., Awaitable[T]], *arguments: Any, remedy: str = _DOCTOR) -> T:
    """Run ``work`` on an event loop. Raises SpadeError with ``remedy`` for errors of the sandbox."""
    import anyio

    from sandbox import SandboxError

    try:
        return anyio.run(work, *arguments, backend_options={"use_uvloop": True})
    except SandboxError as error:
        raise SpadeError(f"{str(error).rstrip('.')}.", remedy=remedy) from error


async def _verdicts(
    sources: dict[Path, str], settings: SandboxSettings, strict: bool, max_turns: int
) -> dict[Path, Verdict]:
    import msgspec

    from sandbox import SandboxPool, Validator, ValidatorSettings

    rules = ValidatorSettings()
    if strict:
        rules = msgspec.structs.replace(rules, garbage="strict", degenerate="reject")
    # two zygotes: results that depend on addresses differ between them
    async with SandboxPool(msgspec.structs.replace(settings, zygotes=max(2, settings.zygotes))) as pool:
        validator = Validator(pool, rules)
        return {
            file: await validator.validate(source, max_turns=max_turns) for file, source in sources.items()
        }


def _source(file: Path) -> str:
    """Return the program in ``file``, which may be a whole reply of a model. Raises ConfigError."""
    from sandbox import extract

    try:
        text = sys.stdin.read() if str(file) == "-" else file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise ConfigError(
            f"The program cannot be read: {why}.", where=str(file), remedy="Name a file with Python source."
        ) from error
    return text if _is_program(text) else extract(text)


def _is_program(text: str) -> bool:
    """Return True when the whole text is Python; a docstring may hold a fenced block that is no program."""
    import ast
    import warnings

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return any(isinstance(node, ast.ClassDef) for node in tree.body)


def _arguments(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ConfigError(
            f"--kwargs is not JSON: {error}.", remedy="Write an object, such as '{\"max_turns\": 5}'."
        ) from error
    if not isinstance(value, dict):
        raise ConfigError(
            "--kwargs is not a JSON object.", remedy="Write an object, such as '{\"max_turns\": 5}'."
        )
    return value


def _settings(recipe: Path | None) -> SandboxSettings:
    from sandbox import SandboxSettings

    if recipe is None:
        return SandboxSettings()
    from engine import recipe as recipes

    return recipes.load(recipe, []).config.sandbox


def _examined(found: ProtectionReport, bounds: dict[str, int], advice: tuple[str, ...]) -> str:
    """Return the protection report as text."""
    verdict = "No program may run here: the filter of system calls has holes." if found.holes else "ok"
    bound = min(bounds, key=lambda name: bounds[name])
    walls = [f"  {name:<14} {state}" for name, state in sorted(found.walls.items())]
    tried = [
        f"  {text:<22} {found.canary.get(name, 'not tried'):<14} {found.bare.get(name, 'not tried')}"
        for name, text in _CANARY.items()
    ]
    allowed = [f"  {name:<28} {count}" for name, count in sorted(bounds.items(), key=lambda row: row[1])]
    holes = [f"  {hole}" for hole in found.holes]
    missing = [f"  {wall}" for wall in found.missing]
    lines = [
        verdict,
        f"kernel {found.kernel}; children's uid: {found.uid_mode}",
        f"at most {bounds[bound]} live instances, bounded by {bound}",
        *("", f"{'Attempt of an instance':<24} {'sandboxed':<14} {'without filter'}", *tried),
        *("", "Walls:", *walls),
        *("", "Live instances allowed by this host:", *allowed),
        *(("", "Holes in the filter:", *holes) if holes else ()),
        *(("", "Walls behind the filter that this host does not give:", *missing) if missing else ()),
        *(("", "For more walls:", *(f"  {line}" for line in advice)) if advice else ()),
    ]
    return "\n".join(lines)


def _judged(file: Path, verdict: Verdict) -> str:
    """Return one verdict as text."""
    rows = {"reason": verdict.reason}
    if verdict.class_name:
        turns = "not given" if verdict.max_turns is None else verdict.max_turns
        rows["class"] = f"{verdict.class_name}, max_turns {turns}"
        if verdict.tools:
            rows["class"] += f", tool environment with {verdict.criteria} instructions"
    if verdict.metadata is not None:
        declared = {name: getattr(verdict.metadata, name) for name in ("skill", "difficulty", "goal")}
        rows["declares"] = ", ".join(
            f"{name}: {value}" for name, value in declared.items() if value is not None
        )
    if verdict.policies:
        low, high = verdict.trivial_interval
        rows["wins"] = ", ".join(f"{name} {rate:.0%}" for name, rate in verdict.policies.items())
        blind = f"trivial policies win {verdict.trivial_win_rate:.0%} ({low:.0%} to {high:.0%})"
        rows["degenerate"] = f"{_yes(verdict.degenerate) if verdict.ok else 'not judged'}: {blind}"
        rows["hack"] = verdict.hack
        facts = {"ends": verdict.ends, "solvable": verdict.solvable}
        rows["episodes"] = ", ".join(f"{name} {_yes(value)}" for name, value in facts.items())
    if verdict.first_observations:
        rows["starts"] = " ".join(verdict.first_observations[0].split())[:200]
    what = "accepted" if verdict.ok else f"rejected at rung {verdict.rung}"
    return "\n".join([f"{file}: {what}", *(f"  {name:<11} {text}" for name, text in rows.items() if text)])


def _yes(value: bool) -> str:
    return "yes" if value else "no"
