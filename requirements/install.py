"""Make `.venv` hold exactly what the lock names. Standard library only: it runs before anything is installed.

Call it through `make setup`. It does nothing (in some 50 ms) when the lock, the project's metadata and the
interpreter are those of the last complete installation.

torch is asked for by its local version label (`+cpu`). No public index may hold such a version unless it is
the CPU build, so a CUDA build can never be the answer.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
LOCK = ROOT / "requirements" / "cpu.lock"
# Benchmarks that `spade eval` plays. Without them the suites say what is missing; nothing else needs them.
BENCHMARKS = ROOT / "requirements" / "evals.lock"
BUILT = "pycosat==0.6.6"
STAMP = VENV / "spade-setup.json"
TORCH = "torch==2.13.0+cpu"
OLDEST, NEWEST = (3, 11), (3, 14)


class SetupError(Exception):
    """Something the person at the keyboard can mend; the text says how."""


def interpreter() -> str:
    """Return a Python the lock has wheels for: the running one, else the newest suitable one on PATH."""
    if OLDEST <= sys.version_info[:2] <= NEWEST:
        return sys.executable
    for minor in range(NEWEST[1], OLDEST[1] - 1, -1):
        found = shutil.which(f"python3.{minor}")
        if found and subprocess.run([found, "-c", ""], capture_output=True).returncode == 0:
            return found
    raise SetupError(
        f"Python {OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]} is needed, this is "
        f"{sys.version.split()[0]}. Install one, or name it: make setup PYTHON=/path/to/python3.11"
    )


def wanted(python: str) -> dict[str, str]:
    """Return what the stamp of a complete installation must say."""
    version = subprocess.run([python, "-c", "import sys; print(sys.version)"], capture_output=True, text=True)
    metadata = (ROOT / "pyproject.toml").read_text().split("[tool.ruff]")[0]
    return {
        "python": version.stdout.strip(),
        "lock": hashlib.sha256(LOCK.read_bytes()).hexdigest(),
        "benchmarks": hashlib.sha256(BENCHMARKS.read_bytes()).hexdigest(),
        "torch": TORCH,
        "project": hashlib.sha256(metadata.encode()).hexdigest(),
        "root": str(ROOT),
    }


def stamped() -> dict[str, str]:
    """Return the stamp of the last complete installation, or {}."""
    try:
        stamp = json.loads(STAMP.read_text())
    except (OSError, ValueError):
        return {}
    return stamp if isinstance(stamp, dict) and (VENV / "bin" / "spade").exists() else {}


class Installer:
    """Runs one installer command at a time: pip of the new environment, or uv when asked for by --uv."""

    def __init__(self, *, uv: bool) -> None:
        python = str(VENV / "bin" / "python")
        if uv and not shutil.which("uv"):
            raise SetupError(
                "uv was asked for and is not on PATH. Install it, or run `make setup` without UV=1."
            )
        self.command = (
            ["uv", "pip", "install", "--quiet", "--python", python]
            if uv
            else [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        )

    def install(self, *arguments: str) -> bool:
        """Install without dependencies; return whether it worked (the installer has said why not)."""
        return subprocess.run([*self.command, "--no-deps", *arguments], cwd=ROOT).returncode == 0


def make_venv(python: str, target: dict[str, str], stamp: dict[str, str]) -> None:
    """Create the environment, anew when it is broken, moved, or made by another interpreter."""
    alive = (VENV / "bin" / "python").exists() and (
        subprocess.run([VENV / "bin" / "python", "-m", "pip", "--version"], capture_output=True).returncode
        == 0
    )
    same = not stamp or all(stamp.get(key) == target[key] for key in ("python", "root"))
    if alive and same:
        return
    shutil.rmtree(VENV, ignore_errors=True)
    print(f"Creating {VENV.name} with {target['python'].split()[0]}", flush=True)
    if subprocess.run([python, "-m", "venv", str(VENV)]).returncode != 0:
        raise SetupError(
            "Python could not create a virtual environment. On Debian and Ubuntu its venv module is a "
            "package of its own (python3-venv): install that and run `make setup` again."
        )


def install_torch(installer: Installer, index: str) -> None:
    """Install the CPU build of torch, or refuse."""
    print(f"Installing {TORCH}", flush=True)
    if not installer.install(TORCH, *(["--index-url", index] if index else [])):
        raise SetupError(
            f"No CPU build of torch ({TORCH}) was found "
            + (f"at {index}. " if index else "where pip looks. ")
            + "The default build carries CUDA (several GB), so it is not installed in its place. Name an "
            "index that has CPU builds (PyTorch's installation page gives one): make setup TORCH_INDEX=URL"
        )


def setup(*, uv: bool, torch_index: str) -> None:
    """Bring `.venv` to the state the lock names; write the stamp last."""
    if sys.platform != "linux":
        raise SetupError(
            f"spade runs on Linux (its sandbox and its CPU engine need it), this is {sys.platform}."
        )
    python = interpreter()
    target, stamp = wanted(python), stamped()
    if stamp == target:
        return
    make_venv(python, target, stamp)
    stamp = stamped()
    installer = Installer(uv=uv)
    STAMP.unlink(missing_ok=True)
    if stamp.get("torch") != TORCH:
        install_torch(installer, torch_index)
    if stamp.get("lock") != target["lock"]:
        count = sum(1 for line in LOCK.read_text().splitlines() if "==" in line)
        print(
            f"Installing {count} pinned packages from {LOCK.relative_to(ROOT)} (a minute or two)", flush=True
        )
        if not installer.install("--requirement", str(LOCK)):
            raise SetupError(
                "The pinned packages could not be installed; the installer's message above names the one. "
                "When it was the network, `make setup` goes on from where it stopped."
            )
    if stamp.get("benchmarks") != target["benchmarks"]:
        print(f"Installing the benchmarks of {BENCHMARKS.relative_to(ROOT)}", flush=True)
        if not (installer.install("--requirement", str(BENCHMARKS)) and installer.install(BUILT)):
            print("Not all could be installed: `spade eval list` says what each suite lacks.", flush=True)
    if not installer.install("--no-build-isolation", "--editable", "."):
        raise SetupError("The project itself could not be installed; the installer's message above says why.")
    temporary = STAMP.with_suffix(".tmp")
    temporary.write_text(json.dumps(target, indent=2))
    temporary.replace(STAMP)
    print("Ready: .venv/bin/spade", flush=True)


def main() -> int:
    """Parse the switches, hold the lock against a second setup, run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--uv", action="store_true", help="install with uv instead of pip")
    parser.add_argument(
        "--torch-index", default=os.environ.get("TORCH_INDEX", ""), help="index with CPU torch"
    )
    arguments = parser.parse_args()
    with open(ROOT / "requirements" / "install.py") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            setup(uv=arguments.uv, torch_index=arguments.torch_index)
        except SetupError as error:
            print(f"setup: {error}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
