"""For the learner's tests: a tiny random policy on the disk, samples, and the credit that closes a round."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from msgspec.structs import replace

from bus.messages import Credit, DesignSample, EpisodeSample, Message, RoundClosed, Segment, Span
from engine.inference.segments import make_segment
from engine.lineage import Version
from engine.training.samples import CreditedSample, Sampled

VOCABULARY = 64
START = Version(0, 0)


def make_policy(directory: Path, *, seed: int = 0, hidden: int = 64) -> Path:
    """Write a random Llama (2 layers, tied embeddings) with a word tokenizer; returns ``directory``."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
    from transformers.utils import logging

    logging.disable_progress_bar()
    words = {f"w{index}": index for index in range(VOCABULARY - 2)}
    words |= {"<pad>": VOCABULARY - 2, "<eos>": VOCABULARY - 1}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>").save_pretrained(
        directory
    )
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        bos_token_id=None,
        pad_token_id=VOCABULARY - 2,
        eos_token_id=VOCABULARY - 1,
    )
    LlamaForCausalLM(config).save_pretrained(directory)
    return directory


def segment(
    tokens: Sequence[int], mask: Sequence[int], logprobs: Sequence[float] | None = None, version: int = 0
) -> Segment:
    """A segment whose masked tokens were sampled by ``version`` with ``logprobs`` (uniform if None)."""
    if logprobs is None:
        logprobs = [-float(np.log(VOCABULARY)) if bit else 0.0 for bit in mask]
    edges = np.flatnonzero(np.diff([0, *mask, 0]))
    spans = tuple(
        Span(version, int(start), int(stop)) for start, stop in zip(edges[::2], edges[1::2], strict=True)
    )
    return make_segment(tokens, [value for value, bit in zip(logprobs, mask, strict=True) if bit], spans)


def sample(
    name: str,
    *,
    role: str = "agent",
    round_: int = 0,
    advantage: float = 1.0,
    versions: Iterable[Version] = (START,),
    segments: Sequence[Segment] | None = None,
    tokens: int = 4,
    reward: float = 0.5,
    accepted: bool = False,
) -> CreditedSample:
    """A sample with its credit, with one segment per version, or with ``segments``."""
    if segments is None:
        segments = [
            segment([1, 2, *range(3, 3 + tokens)], [0, 0] + [1] * tokens, version=version.pack())
            for version in versions
        ]
    credit = Credit(name, role, "g", reward, advantage, accepted=accepted)  # type: ignore[arg-type]
    return CreditedSample(name, credit.role, round_, credit, tuple(segments))


def sampled(one: CreditedSample) -> Sampled:
    """The message that holds the tokens of ``one``: its round is that of the play, or its cohort."""
    if one.role == "agent":
        return EpisodeSample(episode=one.sample, round=one.round, segments=one.segments)
    return DesignSample(
        design=one.sample, cohort=one.round, attempt=0, skill="logic", valid=True, segments=one.segments
    )


def round_of(
    round_: int, samples: Sequence[CreditedSample], *, settled: int | None = None, **closed: Any
) -> list[Message]:
    """The samples as they were stored, and the close of their round that credits them."""
    messages = [sampled(one) for one in samples]
    credits = [
        replace(one.credit, sample=message.sample) for one, message in zip(samples, messages, strict=True)
    ]
    return [*messages, round_closed(round_, credits, settled=settled, **closed)]


def random_samples(
    count: int, *, seed: int, role: str = "agent", round_: int = 0, version: Version = START
) -> list[CreditedSample]:
    """Samples of random tokens with two turns (a hole in the mask), random advantages and log-probs."""
    chooser = np.random.default_rng(seed)
    result = []
    for index in range(count):
        prompt, first, between, second = chooser.integers(2, 9, size=4)
        mask = [0] * int(prompt) + [1] * int(first) + [0] * int(between) + [1] * int(second)
        tokens = chooser.integers(0, VOCABULARY - 2, size=len(mask)).tolist()
        logprobs = np.where(mask, -chooser.uniform(3.0, 5.5, size=len(mask)), 0.0).tolist()
        result.append(
            sample(
                f"{role}-{round_}-{index:03d}",
                role=role,
                round_=round_,
                advantage=float(chooser.normal()),
                segments=[segment(tokens, mask, logprobs, version.pack())],
            )
        )
    return result


def round_closed(
    round_: int,
    credits: Iterable[Credit] = (),
    *,
    plays: int = 8,
    designs: int = 4,
    settled: int | None = None,
    final: bool = False,
    play_tokens: tuple[int, ...] = (),
) -> RoundClosed:
    """The close of a round; by default the cohorts up to its number are settled."""
    return RoundClosed(
        round=round_,
        plays=plays,
        designs=designs,
        credits=tuple(credits),
        settled=round_ + 1 if settled is None else settled,
        zero_variance_groups=0,
        groups=1,
        final=final,
        play_tokens=play_tokens,
    )
