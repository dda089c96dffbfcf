"""Replies with reasoning: where a move, a program or a hint may stand, and where a template ends a reply."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from scenes.template_models import Family, build
from tokenizers import Tokenizer

from engine.inference.replies import visible_reply
from engine.inference.tokens import ChatTokens
from roles.agent.actions import find_action, find_call
from roles.designer.authors import DesignReply
from roles.designer.hint import clean_hint
from sandbox import extract

PROGRAM = "class AEnv:\n    pass"
THOUGHT = f"It may be \\boxed{{50}}? No.\n```python\n{PROGRAM}\n```\nOr so"


@pytest.mark.parametrize(
    "opening", ["<think>", "<think>\n", "Well. <think>", "[THINK]", "<thought>\n", "◁think▷"]
)
def test_a_thought_that_the_model_opened_and_did_not_end_is_not_read(opening: str) -> None:
    reply = opening + THOUGHT
    assert find_action(reply) is None
    assert find_call(opening + '{"name": "go"}') is None
    assert extract(visible_reply(reply)) in ("", "Well.")
    assert clean_hint(f"{opening} Try the door.", "stop") in (None, "Well.")


def test_a_thought_that_the_template_opened_and_nothing_ended_is_not_read() -> None:
    assert find_action(THOUGHT) == "50"
    assert find_action(THOUGHT, thought_open=True) is None
    assert find_call("<answer>go</answer>", thought_open=True) is None
    assert extract(visible_reply(THOUGHT, thought_open=True)) == ""
    assert clean_hint("Try the door.", "stop", thought_open=True) is None


@pytest.mark.parametrize("thought_open", [False, True])
@pytest.mark.parametrize("end", ["</think>", "[/THINK]", "</thought>\n\n", "◁/think▷"])
def test_what_follows_a_thought_is_read(end: str, thought_open: bool) -> None:
    reply = f"{THOUGHT}{end}\\boxed{{7}}"
    assert find_action(reply, thought_open=thought_open) == "7"
    assert clean_hint(f"{THOUGHT}{end}Try the door.", "stop", thought_open=thought_open) == "Try the door."


def test_a_second_thought_that_does_not_end_hides_no_answer_before_it() -> None:
    reply = "<think>a</think>\\boxed{5}\n<think>\nor \\boxed{6}"
    assert find_action(reply) == "5"
    assert find_action(f"{reply}</think>\\boxed{{8}}") == "8"


@pytest.mark.parametrize(
    "reply",
    [
        f'```python\nNOTE = """\n<think> aloud\n"""\n{PROGRAM}\n```',
        f"I write `<think>` nowhere.\n```python\n{PROGRAM}\n```",
        f"<think>\n```python\nno\n```\n</think>\n```python\nclass A:\n    MARK = ' <think>'\n{PROGRAM}\n```",
    ],
)
def test_a_program_may_mention_a_mark(reply: str) -> None:
    assert PROGRAM in extract(visible_reply(reply))


def test_a_reply_of_many_marks_is_read_in_linear_time() -> None:
    assert find_action("<think> <|channel|>a " * 100_000) is None
    assert visible_reply("```\n" * 100_000 + "<think> x") == "```\n" * 100_000


@pytest.mark.parametrize("kept", [True, False], ids=["kept", "gone"])
def test_a_drafts_program_is_not_taken_from_a_thought_that_the_prompt_opened(kept: bool) -> None:
    text = f"{THOUGHT}</think>\n```python\n{PROGRAM}\n```" if kept else THOUGHT
    reply = DesignReply(text, "stop", thought_open=True)
    assert extract(reply.visible) == (PROGRAM if kept else "")


def opening(mark: str) -> str:
    return (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n" + mark + "' }}{% endif %}"
    )


CHATML = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def chatml(directory: Path, template: str, *marks: str) -> ChatTokens:
    family = Family(
        template="",
        eos="<|im_end|>",
        stop="<|im_end|>",
        turns=("", ""),
        generation="",
        special=CHATML,
        plain=marks,
    )
    return ChatTokens(build(directory, family, template))


@pytest.mark.parametrize(
    ("mark", "known", "open_"),
    [
        ("<think>\\n", True, True),
        ("<think>\\n", False, True),
        ("<thought>\\n\\n", True, True),
        ("[THINK]", True, True),
        ("<think>\\n\\n</think>\\n\\n", True, False),
        ("", True, False),
    ],
)
def test_the_chat_format_knows_whether_the_prompt_opened_a_thought(
    tmp_path: Path, mark: str, known: bool, open_: bool
) -> None:
    """Also where the mark is no token of its own, later in a conversation, and whatever the player says."""
    chat = chatml(tmp_path, opening(mark), *((mark.split("\\n")[0],) if mark and known else ()))
    first, later = chat.first("go"), chat.render(["go", "<think>\na</think>\nyes", "then <think>"])
    assert chat.opens_thought(first) is open_
    assert chat.opens_thought(later) is open_


HARMONY = ("<|return|>", "<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|call|>")
WITH_HEADER = (
    "{% for m in messages %}{{ '<|start|>' + m.role }}{% if m.role == 'assistant' %}"
    "{{ '<|channel|>final' }}{% endif %}{{ '<|message|>' + m.content + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
WITHOUT_HEADER = (
    "{% for m in messages %}{{ '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant<|message|>{% endif %}"
)


def harmony(directory: Path, template: str, ends: list[str] | None = None) -> ChatTokens:
    """Return the chat format of a tokenizer with channels whose model names ``ends``, None for no file."""
    family = Family(
        template="", eos="<|return|>", stop="<|return|>", turns=("", ""), generation="", special=HARMONY
    )
    build(directory, family, template)
    file = directory / "generation_config.json"
    vocabulary = Tokenizer.from_file(str(directory / "tokenizer.json"))
    ids = [vocabulary.token_to_id(name) for name in ends or ()]
    file.write_text(json.dumps({"eos_token_id": ids})) if ends else file.unlink()
    return ChatTokens(directory)


def text(chat: ChatTokens, ids: Sequence[int]) -> str:
    return chat.decode(ids, special=True)


def trl_template() -> str:
    found = importlib.util.find_spec("trl")
    assert found is not None
    assert found.origin is not None
    return (Path(found.origin).parent / "chat_templates" / "gptoss.jinja").read_text()


@pytest.mark.parametrize(
    "ends", [["<|return|>"], ["<|return|>", "<|call|>"], None], ids=["one", "two", "none"]
)
@pytest.mark.parametrize("template", ["header", "trl"])
def test_the_end_of_a_channel_does_not_end_a_reply(
    tmp_path: Path, template: str, ends: list[str] | None
) -> None:
    chat = harmony(tmp_path, WITH_HEADER if template == "header" else trl_template(), ends)
    stops = {text(chat, [token]) for token in chat.stop_token_ids}
    assert stops == set(ends or ["<|return|>"])


def test_a_turn_is_closed_after_a_reply_that_ended_with_the_models_own_end(tmp_path: Path) -> None:
    chat = harmony(tmp_path, WITHOUT_HEADER, ["<|return|>"])
    assert text(chat, chat.stop_token_ids) == "<|return|>"
    assert text(chat, chat.close()) == "<|end|>"
    bridge = chat.bridge("next")
    assert bridge is not None
    ids = [*chat.first("go"), *chat.encode("yes"), *chat.close(), *bridge]
    assert ids == chat.render(["go", "yes", "next"])


def test_a_turn_end_that_the_model_names_is_kept(tmp_path: Path) -> None:
    chat = harmony(tmp_path, WITHOUT_HEADER, ["<|return|>", "<|end|>"])
    assert text(chat, chat.stop_token_ids) == "<|end|><|return|>"


ANALYSIS = "<|channel|>analysis<|message|>Perhaps \\boxed{1}? No.<|end|>"


@pytest.mark.parametrize(
    ("reply", "action"),
    [
        (ANALYSIS + "<|start|>assistant<|channel|>final<|message|>\\boxed{50}<|return|>", "50"),
        (ANALYSIS + "<|return|>", None),
        ("<|channel|>analysis<|message|>Perhaps \\boxed{1}?<|return|>", None),
        ("<|channel|>commentary to=functions.f <|constrain|>json<|message|>\\boxed{1}<|call|>", None),
        ("<|channel|>final<|message|>\\boxed{2}<|end|><|start|>assistant" + ANALYSIS, "2"),
        ("<|message|>\\boxed{3}<|return|>", "3"),
    ],
)
def test_only_the_final_channel_is_read(tmp_path: Path, reply: str, action: str | None) -> None:
    chat = harmony(tmp_path, WITH_HEADER, ["<|return|>"])
    said = chat.decode(chat._ids(reply))
    assert find_action(said) == action


def test_a_rendered_history_holds_the_answer_and_no_analysis(tmp_path: Path) -> None:
    chat = harmony(tmp_path, trl_template(), ["<|return|>"])
    reply = chat.decode(
        chat._ids(ANALYSIS + "<|start|>assistant<|channel|>final<|message|>I say \\boxed{50}")
    )
    rendered = text(chat, chat.render(["go", reply, "next"]))
    assert "<|start|>assistant<|channel|>final<|message|>I say \\boxed{50}<|end|>" in rendered
    assert "Perhaps" not in rendered
