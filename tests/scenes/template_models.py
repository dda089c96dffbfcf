"""Tokenizers with merges for the chat templates under tests/data/templates, and what those templates say.

The models' own templates behave as these do; the words and the code are ours. Each ``Family`` also says in
plain Python what its template renders, so that the code under test is not its own judge.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

TEMPLATES = Path(__file__).parents[1] / "data" / "templates"
_WORDS = r" ?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|\s*[\r\n]+|\s+"
TEXT = (
    "You are playing a text game. Each turn you read an observation and make one move. Think step by step "
    "about what you know and what the next move should achieve. Then end your reply with exactly one move in "
    "the form \\boxed{move}. Only the last \\boxed{...} of a reply is played. user assistant system\n\n "
) * 3


@dataclass(frozen=True)
class Family:
    """A chat template and, in plain Python, what it renders.

    ``turns`` is the text of a turn by role, ``trims`` whether contents are trimmed, ``opening`` the text
    before the first turn without a system message.
    """

    template: str
    eos: str
    stop: str
    turns: tuple[str, str]
    generation: str
    opening: str = ""
    trims: bool = False
    bos: str | None = None
    special: tuple[str, ...] = ()
    plain: tuple[str, ...] = ()
    also_stops: tuple[str, ...] = field(default=())

    def content(self, text: str) -> str:
        return text.strip() if self.trims else text

    def first(self, text: str) -> str:
        return self.opening + self.turns[0].format(self.content(text)) + self.stop

    def bridge(self, observation: str) -> str:
        """Return the text that follows the stop token of a reply."""
        return self.between + self.turns[0].format(self.content(observation)) + self.stop + self.generation

    @property
    def between(self) -> str:
        return self.generation[: len(self.generation) - len(self.generation.lstrip("\n"))]

    def render(self, messages: Sequence[str]) -> str:
        """The whole conversation, replies as their contents."""
        text = self.first(messages[0]) + self.generation
        for reply, observation in zip(messages[1::2], messages[2::2], strict=True):
            text += self.content(reply) + self.stop + self.bridge(observation)
        return text


def _chatml(template: str, system: str, **more: Any) -> Family:
    opening = f"<|im_start|>system\n{system}<|im_end|>\n" if system else ""
    return Family(
        template=template,
        eos="<|im_end|>",
        stop="<|im_end|>",
        turns=("<|im_start|>user\n{}", "<|im_start|>assistant\n{}"),
        generation="\n<|im_start|>assistant\n",
        opening=opening,
        special=("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
        also_stops=("<|endoftext|>",),
        **more,
    )


def _llama(template: str, opening: str) -> Family:
    return Family(
        template=template,
        eos="<|end_of_text|>",
        stop="<|eot_id|>",
        turns=(
            "<|start_header_id|>user<|end_header_id|>\n\n{}",
            "<|start_header_id|>assistant<|end_header_id|>\n\n{}",
        ),
        generation="<|start_header_id|>assistant<|end_header_id|>\n\n",
        opening="<|begin_of_text|>" + opening,
        trims=True,
        bos="<|begin_of_text|>",
        special=(
            *("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>"),
            *("<|eot_id|>", "<|eom_id|>"),
        ),
        also_stops=("<|end_of_text|>", "<|eom_id|>"),
    )


FAMILIES = {
    "qwen2_5": _chatml("qwen2_5", "You answer briefly and politely.", plain=("<tool_call>", "</tool_call>")),
    "smollm2": _chatml("smollm2", "You are a small model that helps."),
    "qwen3": _chatml("qwen3", "", plain=("<think>", "</think>", "<tool_call>", "</tool_call>")),
    "llama3": _llama("llama3", ""),
    "llama3_2": _llama(
        "llama3_2",
        "<|start_header_id|>system<|end_header_id|>\n\n"
        "Cutting Knowledge Date: December 2023\nToday Date: 26 Jul 2024\n\n<|eot_id|>",
    ),
    "strict": Family(
        template="strict",
        eos="<eos>",
        stop="<end_of_turn>",
        turns=("<start_of_turn>user\n{}", "<start_of_turn>model\n{}"),
        generation="\n<start_of_turn>model\n",
        opening="<bos>",
        trims=True,
        bos="<bos>",
        special=("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"),
        also_stops=("<eos>",),
    ),
}

# Its template comes with TRL.
GPT_OSS = Family(
    template="",
    eos="<|return|>",
    stop="<|return|>",
    turns=("", ""),
    generation="<|start|>assistant",
    special=("<|start|>", "<|end|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|call|>", "<|return|>"),
    also_stops=("<|call|>",),
)


def build(directory: Path, family: Family, template: str | None = None) -> Path:
    """Write a byte-level BPE tokenizer of some 400 tokens, with the family's marks, and its template."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=alphabet, show_progress=False, special_tokens=["<pad>"]
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    tokenizer.add_special_tokens(
        [AddedToken(name, special=True, normalized=False) for name in family.special]
    )
    tokenizer.add_tokens([AddedToken(name, special=False, normalized=False) for name in family.plain])
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=family.eos,
        bos_token=family.bos,
        pad_token="<pad>",
        chat_template=template or (TEMPLATES / f"{family.template}.jinja").read_text(),
        clean_up_tokenization_spaces=False,
    ).save_pretrained(directory)
    stops = [tokenizer.token_to_id(name) for name in (family.stop, *family.also_stops)]
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": stops}))
    return directory


class Bytes:
    """The bytes that ids stand for, without any decoder in between."""

    def __init__(self, directory: Path) -> None:
        from transformers import AutoTokenizer

        fast = AutoTokenizer.from_pretrained(directory, local_files_only=True)
        self.added = {token: str(name) for token, name in fast.added_tokens_decoder.items()}
        self.special = {token for token, name in fast.added_tokens_decoder.items() if name.special}
        self.size = len(fast)
        self._words = {token: word for word, token in fast.get_vocab().items()}
        self._letters = _letters()

    def __call__(self, ids: Sequence[int]) -> bytes:
        return b"".join(
            self.added[token].encode()
            if token in self.added
            else bytes(self._letters[letter] for letter in self._words[token])
            for token in ids
        )


def _letters() -> dict[str, int]:
    """The alphabet of byte-level BPE: printable Latin-1 stands for itself, the others follow from 256 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    letters = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in printable]
    return letters | {chr(256 + index): byte for index, byte in enumerate(others)}
