"""A tokenizer is read without torch where transformers would choose its plain class, and as it would."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from markov_policy import _tokenizer

from engine.errors import ConfigError
from engine.inference.tokens import ChatTokens

READ = """
import sys
from engine.inference.tokens import ChatTokens
chat = ChatTokens(sys.argv[1])
assert chat.bridge("on") is not None
print(chat.first("a b"), sorted({"torch", "sklearn", "pandas"} & {*sys.modules}))
"""


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    _tokenizer().save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    return tmp_path


def change(path: Path, **values: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_bytes()), **values}))


def read(directory: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-c", READ, str(directory)], capture_output=True, text=True, timeout=100, check=True
    )
    return done.stdout.strip()


def test_a_plain_one_is_read_without_torch(directory: Path) -> None:
    assert read(directory) == f"{ChatTokens(directory).first('a b')} []"


@pytest.mark.parametrize("model", [{"model_type": "llama"}, None], ids=["llama", "no model"])
@pytest.mark.parametrize("name", ["TokenizersBackend", "PreTrainedTokenizerFast"])
def test_it_is_what_transformers_chooses(directory: Path, model: dict[str, str] | None, name: str) -> None:
    from transformers import AutoTokenizer

    change(directory / "tokenizer_config.json", tokenizer_class=name)
    if model is None:
        (directory / "config.json").unlink()
    ours = ChatTokens(directory)._tokenizer
    theirs = AutoTokenizer.from_pretrained(str(directory), local_files_only=True)
    assert type(ours) is type(theirs)
    assert ours.backend_tokenizer.to_str() == theirs.backend_tokenizer.to_str()
    assert ours.chat_template == theirs.chat_template
    assert ours.special_tokens_map == theirs.special_tokens_map
    assert ours.model_max_length == theirs.model_max_length


@pytest.mark.parametrize(
    ("text", "model"),
    [
        *((json.dumps({"tokenizer_class": "TokenizersBackend"}), model) for model in ("qwen2", "mistral")),
        *((json.dumps({"tokenizer_class": name}), "llama") for name in ("LlamaTokenizerFast", ["a"])),
        *((text, "llama") for text in ("", "[]", "{}", "3")),
    ],
)
def test_where_the_files_do_not_settle_it_transformers_chooses(
    directory: Path, text: str, model: str
) -> None:
    from transformers import AutoTokenizer

    from engine.inference import tokens

    (directory / "tokenizer_config.json").write_text(text)
    change(directory / "config.json", model_type=model)
    assert tokens._class(directory) is AutoTokenizer


def test_a_directory_without_a_tokenizer_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="tokenizer"):
        ChatTokens(tmp_path)
