"""Chat templates with and without a bridge, and segments as the model saw them."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scenes.template_models import FAMILIES, build

from bus.messages import Segment, Span
from engine.errors import ConfigError
from engine.inference.completion import Completion
from engine.inference.tokens import ChatTokens, SegmentBuilder
from engine.training import samples

UNMARKED = "{% for m in messages %}{{ m['content'] + '\n' }}{% endfor %}"
COUNTING = (
    "{% for m in messages %}{% if m['role'] == 'user' %}"
    "{{ '<obs>' + (messages | length | string if loop.first and messages | length > 3 else '') }}"
    "{{ m['content'] + '<act>' }}"
    "{% else %}{{ m['content'] + '<|eot_id|>' }}{% endif %}{% endfor %}"
)


@pytest.mark.parametrize(
    ("template", "why"), [(UNMARKED, "not one special token"), (COUNTING, "changes earlier turns")]
)
def test_templates_that_rewrite_history_have_no_bridge(tmp_path: Path, template: str, why: str) -> None:
    chat = ChatTokens(build(tmp_path, FAMILIES["llama3"], template))
    assert why in chat.rewrites
    assert chat.bridge("next") is None
    assert chat.render(["a", "b", "c"])


def test_faults_name_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        ChatTokens(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="no tokenizer"):
        ChatTokens(tmp_path)
    build(tmp_path, FAMILIES["llama3"])
    (tmp_path / "chat_template.jinja").unlink()
    with pytest.raises(ConfigError, match=r"chat_template\.jinja"):
        ChatTokens(tmp_path)


# Segments


@st.composite
def completions(draw: st.DrawFn) -> Completion:
    pieces = draw(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5)), max_size=4))
    spans, position = [], 0
    for version, length in pieces:
        spans.append(Span(version, position, position + length))
        position += length
    tokens = draw(st.lists(st.integers(0, 99), min_size=position, max_size=position))
    logprobs = draw(st.lists(st.floats(-9, 0, width=32), min_size=position, max_size=position))
    return Completion(tokens, logprobs, tuple(spans), "stop")


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("prompt"), st.lists(st.integers(0, 99), max_size=6)),
        st.tuples(st.just("rewrite"), st.lists(st.integers(0, 99), max_size=6)),
        st.tuples(st.just("completion"), completions()),
    ),
    max_size=14,
)


def arrays(segment: Segment) -> tuple[list[int], list[int], list[float]]:
    tokens, mask, logprobs = samples.arrays(segment)
    return tokens.tolist(), mask.astype(int).tolist(), logprobs.tolist()


@given(STEPS)
def test_segments_are_what_the_model_saw_and_said(steps: list) -> None:
    builder = SegmentBuilder()
    seen: list[tuple[list[int], Completion]] = []
    for kind, value in steps:
        if kind == "completion":
            if value.tokens:
                seen.append((builder.context, value))
            builder.completion(value)
        else:
            getattr(builder, kind)(value)
    segments = builder.segments()
    # Each non-empty completion stands in exactly one segment, behind exactly the ids it was sampled after.
    remaining = list(seen)
    for segment in segments:
        tokens, mask, logprobs = arrays(segment)
        assert len(tokens) == len(mask) == len(logprobs)
        assert mask[-1] == 1
        position = 0
        sampled: dict[int, int] = {}
        while (
            remaining
            and remaining[0][0] == tokens[: len(remaining[0][0])]
            and (len(remaining[0][0]) >= position)
        ):
            prompt, completion = remaining[0]
            start, stop = len(prompt), len(prompt) + len(completion.tokens)
            if tokens[start:stop] != completion.tokens or mask[start:stop] != [1] * (stop - start):
                break
            assert logprobs[start:stop] == completion.logprobs
            for span in completion.spans:
                sampled |= dict.fromkeys(range(start + span.start, start + span.stop), span.version)
            assert mask[position:start] == [0] * (start - position)
            position = stop
            remaining.pop(0)
        assert position == len(tokens)
        assert all(value == 0.0 for value, masked in zip(logprobs, mask, strict=True) if not masked)
        covered = {index: span.version for span in segment.spans for index in range(span.start, span.stop)}
        assert covered == sampled
        assert sum(span.stop - span.start for span in segment.spans) == sum(mask)
    assert not remaining


def test_adjacent_spans_of_one_version_merge_across_nothing_but_adjacency() -> None:
    builder = SegmentBuilder()
    builder.prompt([1, 2])
    builder.completion(Completion([3, 4], [-1.0, -2.0], (Span(7, 0, 1), Span(7, 1, 2)), "stop"))
    builder.prompt([5])
    builder.completion(Completion([6], [-3.0], (Span(7, 0, 1),), "stop"))
    builder.prompt([8, 9])
    (segment,) = builder.segments()
    assert segment.spans == (Span(7, 2, 4), Span(7, 5, 6))
    assert arrays(segment) == ([1, 2, 3, 4, 5, 6], [0, 0, 1, 1, 0, 1], [0.0, 0.0, -1.0, -2.0, 0.0, -3.0])
    assert builder.context == [1, 2, 3, 4, 5, 6, 8, 9]


@pytest.mark.parametrize(
    "completion",
    [
        Completion([1, 2], [0.0, 0.0], (Span(1, 0, 1),), "stop"),
        Completion([1, 2], [0.0, 0.0], (Span(1, 1, 2),), "stop"),
        Completion([1, 2], [0.0], (Span(1, 0, 2),), "stop"),
        Completion([1], [0.0], (), "stop"),
    ],
)
def test_incomplete_spans_are_refused(completion: Completion) -> None:
    with pytest.raises(ValueError, match=r"spans|tokens"):
        SegmentBuilder().completion(completion)
