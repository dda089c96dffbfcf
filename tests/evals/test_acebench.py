"""ACEBench's agent categories on records and state machines in its form, written here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from eval_scene import CONFIG, seat, table

from engine.config import SamplingConfig
from engine.evals import acebench

BASE = """
class BaseApi:
    def __init__(self):
        self.wifi, self.logged_in = False, True
    def _load_scenario(self, scenario, long_context=False):
        self.wifi = scenario.get("wifi", False)
    def turn_on_wifi(self):
        self.wifi = True
        return {"status": True}
"""
MESSAGE = """
from model_inference.multi_step.scenariosen.phone_platform.base_api import BaseApi

class MessageApi(BaseApi):
    def __init__(self):
        super().__init__()
        self.inbox = {1: "hello"}
    def _load_scenario(self, scenario, long_context=False):
        super()._load_scenario(scenario)
    def send(self, text):
        if not self.wifi:
            raise RuntimeError("no Wi-Fi")
        self.inbox[len(self.inbox) + 1] = text
        return "sent"
    def _secret(self):
        self.inbox = {}
"""
FUNCTIONS = [
    {"name": "turn_on_wifi", "description": "", "parameters": {"type": "object", "properties": {}}},
    {
        "name": "send",
        "description": "Send a message.",
        "parameters": {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]},
    },
]
RIGHT = [{"BaseApi": {"wifi": True, "logged_in": True}}, {"MessageApi": {"inbox": {"2": "good night"}}}]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    machines = tmp_path / "model_inference" / "multi_step" / "scenariosen" / "phone_platform"
    for place in (machines, machines.parent.parent / "scenarioszh" / "phone_platform"):
        place.mkdir(parents=True)
        (place / "base_api.py").write_text(BASE if place == machines else "raise ImportError")
        (place / "message.py").write_text(MESSAGE)
    for kind in acebench.KINDS:
        entry = {
            "id": f"agent_{kind}_0",
            "question": "Turn Wi-Fi on and send good night.",
            "function": FUNCTIONS,
            "initial_config": {"BaseApi": {"wifi": False}},
            "involved_classes": ["BaseApi", "MessageApi"],
        }
        for place, record in (
            ("data_en", entry),
            ("possible_answer_en", {"id": entry["id"], "ground_truth": RIGHT}),
        ):
            file = tmp_path / "data_all" / place / f"data_agent_{kind}.json"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps(record) + "\n")
    return tmp_path


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def item(folder: Path, kind: str) -> tuple[acebench.AceBench, Any]:
    suite = acebench.agent(str(folder), CONFIG)
    assert suite.available() == ""
    (found,) = [one for one in suite.items(0, 0) if one.group == kind]
    return suite, found


async def test_a_task_in_steps(folder: Path) -> None:
    suite, found = item(folder, "multi_step")
    asked = seat(
        call("send", text="good night"),
        "What now?",
        call("turn_on_wifi"),
        call("send", text="good night"),
        acebench.FINISH,
    )
    assert (await suite.play(found, asked)).score == 1.0
    assert "no Wi-Fi" in asked.asked[1][0]
    assert (await suite.play(found, seat(call("turn_on_wifi"), acebench.FINISH))).score == 0.0
    assert (await suite.null(found, seat("never asked"))).score == 0.0


async def test_hidden_functions_are_not_called(folder: Path) -> None:
    suite, found = item(folder, "multi_step")
    asked = seat(call("_secret"), call("__init__"), acebench.FINISH)
    await suite.play(found, asked)
    assert "there is no function _secret" in asked.asked[1][0]


async def test_a_user_talks_with_the_agent(folder: Path) -> None:
    suite, found = item(folder, "multi_turn")
    agent = iter([call("turn_on_wifi"), "What shall I send?", call("send", text="good night"), "Sent."])
    user = iter(["Wi-Fi on, please.", "Good night.", acebench.FINISH])

    def reply(key: str, messages: list[str]) -> str:
        return next(user if key.endswith("/user") else agent)

    outcome = await suite.play(found, table(reply).seat("sample", SamplingConfig()))
    assert outcome.score == 1.0
    assert [one["name"] for step in outcome.detail["steps"] for one in step] == ["turn_on_wifi", "send"]


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    assert "name a checkout" in acebench.agent("", CONFIG).available()
    assert "there is no data_agent_multi_step.json" in acebench.agent(str(tmp_path), CONFIG).available()
