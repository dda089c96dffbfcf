"""A small Llama that is known exactly: a Markov chain over letters that ends each reply with a move.

One-hot embeddings and an output head that holds the chain's log-probs; the layers between add a little noise.
So plays of many turns need no training, and every tensor may be changed a little without changing the play.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

PAD, START, STOP = "<pad>", "<|im_start|>", "<|im_end|>"
LETTERS = "acfghijklmnpqrstuvwyz"
MOVE = "\\boxed{1}"
WIDTH, HEADS = 288, 9
_FLOOR = -14.0
_TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def build(directory: Path, *, letters: float = 40.0, positions: int = 2048) -> Any:
    """Write tokenizer and model to ``directory``, and return the model.

    A reply has ``letters`` letters on average, then the move and the stop token.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = _tokenizer()
    tokenizer.save_pretrained(directory)
    torch.manual_seed(3)
    torch.set_num_threads(1)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=WIDTH,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        head_dim=WIDTH // HEADS,
        max_position_embeddings=positions,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.convert_tokens_to_ids(STOP),
        pad_token_id=tokenizer.convert_tokens_to_ids(PAD),
    )
    model = LlamaForCausalLM(config).eval()
    state = model.state_dict()
    for name, tensor in state.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor.mul_(0.02)
    state["model.embed_tokens.weight"].copy_(torch.eye(len(tokenizer), WIDTH))
    chain = torch.tensor(_chain(tokenizer, letters))
    head = state["lm_head.weight"].zero_()
    head[:, : len(chain)] = chain.T / math.sqrt(WIDTH)  # a normed one-hot vector has length sqrt(WIDTH)
    model.save_pretrained(directory)
    return model


def perturb(model: Any, seed: int, size: float = 0.001) -> None:
    """Change every tensor a little."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(size * torch.randn(parameter.shape, generator=generator))


def _tokenizer() -> Any:
    """One token a byte, and the marks of the chat."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    names = [PAD, START, STOP, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE({name: index for index, name in enumerate(names)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=STOP,
        pad_token=PAD,
        additional_special_tokens=[START],
        chat_template=_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def _chain(tokenizer: Any, letters: float) -> list[list[float]]:
    """Log-probs by token, next token (V, V); what no reply holds is followed by anything."""
    size = len(tokenizer)

    def id_of(text: str) -> int:
        (token,) = tokenizer.encode(text, add_special_tokens=False)
        return int(token)

    rows = [[0.0] * size for _ in range(size)]

    def only(token: int, shares: dict[int, float]) -> None:
        rows[token] = [_FLOOR] * size
        for following, share in shares.items():
            rows[token][following] = math.log(share)

    fillers = [id_of(letter) for letter in LETTERS]
    move = [id_of(letter) for letter in MOVE]
    only(id_of("\n"), dict.fromkeys(fillers, 1 / len(fillers)))
    again = (1 - 1 / letters) / len(fillers)
    for token in fillers:
        only(token, {**dict.fromkeys(fillers, again), move[0]: 1 / letters})
    for token, following in zip(move, [*move[1:], id_of(STOP)], strict=True):
        only(token, {following: 1.0})
    return rows
