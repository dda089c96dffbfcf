"""The nano tokenizer: byte-level BPE, numbers 10-99 as whole tokens, a chat template that only appends.

Tools stand before the first turn, their results in turns of the system; calls have Python's form.

Numbers as single tokens matter: digit by digit a policy of this size learns no arithmetic (nano.md).
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from engine.native_calls import CallFormat, Tools

PAD, END, USER, ASSISTANT, SYSTEM = "<|pad|>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>"
SPECIALS = (PAD, END, USER, ASSISTANT, SYSTEM)

# Rendering a longer conversation only appends to the shorter one, so contexts grow by ids (invariant I3).
CHAT_TEMPLATE = (
    "{% if tools %}{{ '<|system|>' }}{% for tool in tools %}{{ ' ' if not loop.first }}"
    "{{ tool['function']['name'] }}({{ tool['function']['parameters']['properties'] | join(', ') }})"
    "{% endfor %}{% endif %}"
    "{% for message in messages %}"
    "{{ '<|' + ('system' if message['role'] == 'tool' else message['role']) + '|>' }}{{ message['content'] }}"
    "{% for call in message['tool_calls'] %}[{{ call['function']['name'] }}("
    "{% for name, value in call['function']['arguments'] | items %}{{ name }}={{ value | tojson }}"
    "{% endfor %}"
    ")]{% endfor %}"
    "{% if message['role'] == 'assistant' %}{{ '<|end|>' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
CALLS = CallFormat("pythonic", '[NAME(argument="...")]')

# The box, attribute access, numbers, words with the blank before them, line starts, runs of punctuation.
_PIECES = r" ?\\boxed\{| ?self\.|\d{1,2}| ?[A-Za-z_]+|\n *|[^\sA-Za-z_\d]+|\s+"
_NUMBERS = tuple(str(number) for number in range(10, 100))


def signatures(tools: Tools) -> str:
    """Return the tools as the chat template shows them."""
    made = [(tool["function"]["name"], tool["function"]["parameters"]["properties"]) for tool in tools]
    return " ".join(f"{name}({', '.join(properties)})" for name, properties in made)


def train(texts: Iterable[str], *, vocabulary: int, context: int) -> Any:
    """Return a ``PreTrainedTokenizerFast`` trained on ``texts``; the same texts give the same one.

    ``vocabulary`` counts bytes and merges (at least 256); 90 numbers and the special tokens come on top.
    ``context`` is its ``model_max_length``.
    """
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer = _with_numbers(tokenizer)
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIALS])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        chat_template=CHAT_TEMPLATE,
        model_max_length=context,
        clean_up_tokenization_spaces=False,
    )


def _with_numbers(tokenizer: Tokenizer) -> Tokenizer:
    """Add a merge for every two-digit number that training did not find worth one."""
    state = json.loads(tokenizer.to_str())
    vocabulary: dict[str, int] = state["model"]["vocab"]
    for number in _NUMBERS:
        if number not in vocabulary:
            vocabulary[number] = len(vocabulary)
            state["model"]["merges"].append(list(number))
    return Tokenizer.from_str(json.dumps(state))
