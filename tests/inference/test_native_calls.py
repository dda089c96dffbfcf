"""Calls in the formats of chat templates: what is written is read, and what cannot be read gets an answer."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest
from scenes.template_models import FAMILIES, GPT_OSS, build

from engine.errors import ConfigError
from engine.inference.tokens import ChatTokens
from engine.native_calls import TAGGED, CallFormat

Call = dict[str, Any]
TEXTS = (
    "plain",
    "",
    "Zürich, naïve 東京 🦊",
    'she said "no"',
    "it's",
    "{braces} } ]",
    "a\nb\tc",
    "back\\slash",
    "12",
    "true",
    "null",
    "[1, 2]",
    " blank ",
)
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "d",
            "parameters": {
                "type": "object",
                "properties": {
                    "text": {"type": "string"},
                    "way": {"enum": ["on", "off"]},
                    "number": {"type": "number"},
                    "flag": {"type": "boolean"},
                    "things": {"type": "array"},
                    "nested": {"type": "object"},
                    "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
                },
            },
        },
    }
    for name in ("find_it", "put-away", "x")
]


def value(rng: Random, depth: int = 0) -> Any:
    kind = rng.randrange(7 if depth < 3 else 5)
    if kind == 5:
        return [value(rng, depth + 1) for _ in range(rng.randrange(3))]
    if kind == 6:
        return {rng.choice(("k", "a b", "Ä")): value(rng, depth + 1) for _ in range(rng.randrange(3))}
    return (rng.choice(TEXTS), rng.randint(-9, 999), 2.5, rng.random() < 0.5, None)[kind]


def made(rng: Random) -> Call:
    drawn: Call = {
        "text": rng.choice(TEXTS),
        "way": rng.choice(("on", "off")),
        "number": rng.choice((0, -3, 2.5, 10**12)),
        "flag": rng.random() < 0.5,
        "things": [value(rng, 1) for _ in range(rng.randrange(3))],
        "nested": {key: value(rng, 1) for key in rng.sample(("a", "b c", "}"), rng.randrange(3))},
        "maybe": None,
    }
    chosen = rng.sample(sorted(drawn), rng.randint(0, 5))
    return {"name": rng.choice(("find_it", "x")), "arguments": {key: drawn[key] for key in chosen}}


def turns() -> list[list[Call]]:
    rng = Random(4)
    return [[made(rng) for _ in range(1 + (number % 4 == 3))] for number in range(200)]


def spelled(given: Any) -> str:
    return given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)


def hermes(calls: Sequence[Call]) -> str:
    return "\n".join(f"<tool_call>\n{json.dumps(call, ensure_ascii=False)}\n</tool_call>" for call in calls)


def coder(calls: Sequence[Call]) -> str:
    return "\n".join(
        f"<tool_call>\n<function={call['name']}>\n"
        + "".join(
            f"<parameter={key}>\n{spelled(given)}\n</parameter>\n" for key, given in call["arguments"].items()
        )
        + "</function>\n</tool_call>"
        for call in calls
    )


def glm(calls: Sequence[Call]) -> str:
    return "\n".join(
        f"<tool_call>{call['name']}\n"
        + "".join(
            f"<arg_key>{key}</arg_key>\n<arg_value>{spelled(given)}</arg_value>\n"
            for key, given in call["arguments"].items()
        )
        + "</tool_call>"
        for call in calls
    )


def llama(calls: Sequence[Call]) -> str:
    return "; ".join(json.dumps({"name": one["name"], "parameters": one["arguments"]}) for one in calls)


def mistral(calls: Sequence[Call]) -> str:
    return f"[TOOL_CALLS]{json.dumps(calls)}"


def mistral_named(calls: Sequence[Call]) -> str:
    return "".join(f"[TOOL_CALLS]{one['name']}[ARGS]{json.dumps(one['arguments'])}" for one in calls)


def pythonic(calls: Sequence[Call]) -> str:
    written = (
        f"{call['name']}({', '.join(f'{key}={given!r}' for key, given in call['arguments'].items())})"
        for call in calls
    )
    return f"[{', '.join(written)}]"


def deepseek(calls: Sequence[Call]) -> str:
    return framed(calls, "function<|tool▁sep|>{}\n```json\n{}\n```")


def deepseek_bare(calls: Sequence[Call]) -> str:
    return framed(calls, "{}<|tool▁sep|>{}")


def framed(calls: Sequence[Call], form: str) -> str:
    begin, one, end = (
        text.replace("|", "\uff5c")
        for text in (
            "<|tool▁calls▁begin|>",
            f"<|tool▁call▁begin|>{form}<|tool▁call▁end|>",
            "<|tool▁calls▁end|>",
        )
    )
    return begin + messages(calls, one) + end


def harmony(calls: Sequence[Call]) -> str:
    """As the model writes it; the marks between its messages are not decoded."""
    written = "assistant<|channel|>commentary to=functions.{} <|constrain|>json<|message|>{}<|call|>"
    return "<|channel|>analysis<|message|>I call to=functions.x, then" + messages(calls, written)


def harmony_rendered(calls: Sequence[Call]) -> str:
    return messages(calls, " to=functions.{}<|channel|>commentary json<|message|>{}<|call|>")


def messages(calls: Sequence[Call], form: str) -> str:
    return "".join(form.format(one["name"], json.dumps(one["arguments"])) for one in calls)


MADE: Call = {"name": "x", "arguments": {}}
WRITERS: list[tuple[str, Callable[[Sequence[Call]], str]]] = [
    ("tagged", hermes),
    ("tagged", coder),
    ("tagged", glm),
    ("json", llama),
    ("mistral", mistral),
    ("mistral", mistral_named),
    ("pythonic", pythonic),
    ("deepseek", deepseek),
    ("deepseek", deepseek_bare),
    ("harmony", harmony),
    ("harmony", harmony_rendered),
]
NAMES = [write.__name__ for _, write in WRITERS]


@pytest.mark.parametrize(("name", "write"), WRITERS, ids=NAMES)
def test_two_hundred_turns_come_back_as_they_were_written(name: str, write: Any) -> None:
    form = CallFormat(name, "...")
    for calls in turns():
        assert json.loads(form.action(write(calls), TOOLS, write(calls))) == calls


@pytest.mark.parametrize(("name", "write"), WRITERS, ids=NAMES)
def test_a_torn_call_gets_an_answer_and_never_runs_with_other_arguments(name: str, write: Any) -> None:
    form, rng = CallFormat(name, "LIKE THIS"), Random(1)
    for calls in turns()[:60]:
        text = write(calls)
        torn = text[: rng.randrange(len(text) // 2, len(text) - 1)]
        found = json.loads(form.action(torn, TOOLS, torn))
        if isinstance(found, list):  # what is complete before the tear may run
            assert found == calls[: len(found)]
        else:
            assert set(found) in ({"unreadable"}, {"reply"})
            assert "unreadable" not in found or "LIKE THIS" in found["unreadable"]


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("tagged", '<tool_call>{"arguments": {}}</tool_call>', '"name" and "arguments"'),
        ("tagged", '<tool_call>{"name": "x", "arguments": [1]}</tool_call>', "must be an object"),
        ("tagged", '<tool_call>{"name": "x", "arguments": {"a": {"b": 1}}</tool_call>', "not valid JSON"),
        ("tagged", '<tool_call>{"name": "x", "arguments": {}}', "not closed"),
        ("tagged", '<tool_call>{"name": "x", "arguments": {"a": 1, "a": 2}}</tool_call>', "twice"),
        ("tagged", '{"name": "x", "arguments": {}}', "not marked"),
        ("tagged", "<tool_call><function=x><parameter=a>1</function></tool_call>", "is not closed"),
        (
            "tagged",
            "<tool_call><function=x>a<parameter=a>1</parameter></function></tool_call>",
            "between the",
        ),
        (
            "tagged",
            "<tool_call>f" + "<arg_key>a</arg_key><arg_value>1</arg_value>" * 30 + "x</tool_call>",
            "between",
        ),
        (
            "tagged",
            "<tool_call>f" + "<arg_key>a</arg_key><arg_value>" * 3000 + "</tool_call>",
            "is not closed",
        ),
        ("tagged", "<tool_call><function=f>" + "\n" * 30_000 + "x</tool_call>", "is not closed"),
        ("json", '{"name": "x", "parameters": {}} and more', "behind the calls"),
        ("json", '{"name": "x", "parameters": {}, "why": 1}', "'why'"),
        ("mistral", '[TOOL_CALLS][{"name": "x", "arguments": {}}', "not valid JSON"),
        ("mistral", "[TOOL_CALLS]x[ARGS]1", "not valid JSON"),
        ("deepseek", deepseek([MADE]).replace("json", ""), "not valid JSON"),
        ("deepseek", deepseek([MADE]).replace("{", "[").replace("}", "]"), "an object"),
        ("deepseek", deepseek_bare([MADE]).replace("call▁end", "end"), "not closed"),
        ("harmony", harmony([MADE]).replace("{", "{,"), "not valid JSON"),
        ("harmony", harmony([MADE]).replace("<|message|>{", "{"), "without the head"),
        ("harmony", harmony([MADE]).replace("functions.", ""), "without the head"),
        ("harmony", harmony([MADE]).replace("{}", "12"), "an object"),
        ("harmony", harmony([MADE]).replace("<|call|>", ", {}"), "not closed"),
        ("pythonic", "[x(1)]", "not a list of calls"),
        ("pythonic", "[x(a=f())]", "Python's form"),
        ("pythonic", "[x(a=1)", "Python's form"),
        ("pythonic", "[x(a=...)]", "Python's form"),
        ("pythonic", "[x(a={1, 2})]", "Python's form"),
        ("pythonic", "[x(a=b'a')]", "Python's form"),
        ("pythonic", "[x(a=1, a=2)]", "given twice"),
        ("pythonic", "[x(a=" + "[" * 5000, "Python's form"),
    ],
)
def test_malformed_calls_are_told_what_is_wrong(name: str, text: str, words: str) -> None:
    assert words in json.loads(CallFormat(name, "...").action(text, TOOLS, text))["unreadable"]


@pytest.mark.parametrize("name", ["tagged", "json", "mistral", "pythonic", "deepseek", "harmony"])
def test_words_are_a_reply_and_a_final_answer_stays_one(name: str) -> None:
    form = CallFormat(name, "...")
    assert json.loads(form.action("Which one?", TOOLS)) == {"reply": "Which one?"}
    assert form.action(' {"answer": "4"} ', TOOLS) == '{"answer": "4"}'
    assert form.action("so <answer>4</answer>", TOOLS) == "so <answer>4</answer>"


def test_marks_inside_of_strings_are_text() -> None:
    call = {"name": "x", "arguments": {"text": "</tool_call><tool_call>{"}}
    assert json.loads(TAGGED.action(f"so {hermes([call, call])}", TOOLS)) == [call, call]


LIBRARY = importlib.util.find_spec("trl")
TEMPLATES = Path(LIBRARY.origin or "").parent / "chat_templates" if LIBRARY else Path()
KNOWN = {
    "qwen2_5": ("tagged", "tool"),
    "qwen3": ("tagged", "tool"),
    "qwen3_instruct_2507": ("tagged", "tool"),
    "qwen3_5_nothink": ("tagged", "tool"),
    "glm4moe": ("tagged", "tool"),
    "llama3_1": ("json", "tool"),
    "lfm2_2_5_v2": ("pythonic", "tool"),
    "gemma3": ("tagged", "user"),
    "deepseekv3": ("deepseek", "user"),
    "gptoss": ("harmony", "tool"),
}


def chat_of(template: str, path: Path) -> ChatTokens:
    family = GPT_OSS if template == "gptoss" else FAMILIES["qwen3"]
    build(path, family, (TEMPLATES / f"{template}.jinja").read_text())
    return ChatTokens(path)


@pytest.mark.parametrize("template", KNOWN)
def test_models_own_templates_are_recognised_and_what_they_write_is_read(
    template: str, tmp_path: Path
) -> None:
    chat = chat_of(template, tmp_path)
    style = chat.tool_style
    assert (style.calls.name, style.results) == KNOWN[template]
    assert style.lists is (template not in ("gemma3", "deepseekv3"))
    assert "NAME" in style.calls.example or style.calls == TAGGED
    for calls in turns()[:40]:
        if (
            not style.lists
            or style.calls.name == "pythonic"
            or (template in ("llama3_1", "gptoss") and len(calls) > 1)
        ):
            continue  # lfm2 escapes nothing, those of Llama 3.1 and gpt-oss write one call a turn
        called = [{"type": "function", "function": call} for call in calls]
        messages = [
            {"role": "user", "content": "u"},
            {"role": "assistant", "content": "", "tool_calls": called},
        ]
        text = chat._tried(messages, ending=False)
        assert text is not None
        reply = text.rpartition("assistant")[2].replace("<|im_end|>", "").replace("<|eot_id|>", "")
        if style.calls.name == "json":
            reply = reply.partition("\n\n")[2]
        assert json.loads(style.calls.action(reply.strip(), TOOLS, reply)) == calls


@pytest.mark.parametrize("template", ["gemma4_v5", "muse_glimmer"])
def test_a_format_that_is_not_read_is_refused_at_the_start(template: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="calls of tools") as caught:
        chat_of(template, tmp_path).tool_style  # noqa: B018
    assert "box" in caught.value.remedy
