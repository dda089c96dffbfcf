"""Reads a reply without its reasoning: the part in which a move, a program or a hint may stand.

All roles use it. Reasoning stands between marks such as ``<think>`` and ``</think>``, or in
channels (``<|channel|>analysis<|message|>``). The opening mark may be the last part of the prompt instead of
the first part of the reply, so the caller passes ``thought_open`` (:meth:`ChatTokens.opens_thought`).
"""

from __future__ import annotations

import re

THOUGHT_NAMES = "think|thinking|thought|reasoning"
CHANNEL_MARKS = ("<|channel|>", "<|message|>")
_ANSWER_CHANNEL = "final"
_MARKS = re.compile(
    rf"(?P<close><\|?/(?:seed:)?(?:{THOUGHT_NAMES})\|?>|\[/THINK\]|◁/think▷)"
    rf"|(?<!\S)(?P<open><\|?(?:seed:)?(?:{THOUGHT_NAMES})\|?>|\[THINK\]|◁think▷)"
    r"|<\|channel\|>[ \t]*(?P<channel>\w*)[^<\n]{0,80}(?:<\|message\|>)?"
    r"|^[ \t]*(?P<fence>```|~~~)",
    re.MULTILINE,
)


def visible_reply(reply: str, *, thought_open: bool = False) -> str:
    """Return the text of ``reply`` outside its reasoning, "" when all of it is reasoning.

    The result begins after the last closing mark, or after the header of the channel ``final``, and ends
    where reasoning begins again. Reasoning that does not end is reasoning up to the end of the reply. An
    opening mark counts at the start of a word and outside code fences, so a program may mention one.
    ``thought_open`` says that the prompt ended inside a thought. Linear in the length of the reply.
    """
    thinks, fenced = thought_open, False
    begin, end = 0, 0 if thought_open else len(reply)
    for mark in _MARKS.finditer(reply):
        if mark["close"] or mark["channel"] == _ANSWER_CHANNEL:
            thinks, fenced = False, False
            begin, end = mark.end(), len(reply)
        elif mark["fence"]:
            fenced = fenced if thinks else not fenced
        elif not thinks and not fenced:
            thinks, end = True, mark.start()
    return reply[begin:end]


def opens_thought(prompt: str) -> bool:
    """Return whether ``prompt``, or the end of one, ends with a mark that opens reasoning."""
    last = None
    for mark in _MARKS.finditer(prompt):
        last = mark
    if last is None or prompt[last.end() :].strip():
        return False
    return bool(last["open"]) or (last["channel"] is not None and last["channel"] != _ANSWER_CHANNEL)
