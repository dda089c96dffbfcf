"""Headless Chromium, driven over its debugging protocol."""

from __future__ import annotations

import itertools
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
from aiohttp import ClientSession, ClientWebSocketResponse
from anyio.streams.text import TextReceiveStream

_SECONDS = 60.0
_FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--remote-debugging-port=0")


class Tab:
    """One page of a browser."""

    def __init__(self, socket: ClientWebSocketResponse) -> None:
        self._socket = socket
        self._numbers = itertools.count(1)

    async def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Return the browser's answer to one command."""
        number = next(self._numbers)
        with anyio.fail_after(_SECONDS):
            await self._socket.send_json({"id": number, "method": method, "params": parameters})
            while (answer := await self._socket.receive_json()).get("id") != number:
                pass
        assert "error" not in answer, answer
        found: dict[str, Any] = answer["result"]
        return found

    async def value(self, script: str) -> Any:
        """Return what an expression of the page is."""
        answer = await self.call("Runtime.evaluate", expression=script, returnByValue=True, userGesture=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    async def until(self, script: str, *, seconds: float = _SECONDS) -> float:
        """Return after how many seconds an expression of the page was true."""
        begun = anyio.current_time()
        with anyio.move_on_after(seconds):
            while not await self.value(script):  # noqa: ASYNC110 - it is another process
                await anyio.sleep(0.05)
            return anyio.current_time() - begun
        raise AssertionError(f"{script} is still false: {await self.value('document.body.innerText')}")

    async def resize(self, width: int) -> None:
        """Make the page so wide, as a phone or a desktop has it."""
        await self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=1000, deviceScaleFactor=1, mobile=False
        )


@asynccontextmanager
async def browsing(address: str, profile: Path) -> AsyncIterator[Tab]:
    """Open a page in a browser of its own."""
    command = ["chromium", *_FLAGS, f"--user-data-dir={profile}", "about:blank"]
    async with await anyio.open_process(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL
    ) as browser:
        try:
            with anyio.fail_after(_SECONDS):
                port = await _port(browser)
            async with ClientSession() as session:
                async with session.get(f"http://127.0.0.1:{port}/json/list") as answer:
                    (page,) = [one for one in await answer.json() if one["type"] == "page"]
                async with session.ws_connect(page["webSocketDebuggerUrl"], max_msg_size=0) as socket:
                    tab = Tab(socket)
                    await tab.call("Page.navigate", url=address)
                    yield tab
        finally:
            browser.kill()


async def _port(browser: anyio.abc.Process) -> int:
    assert browser.stderr is not None
    said = ""
    async for text in TextReceiveStream(browser.stderr):
        said += text
        if "DevTools listening on ws://" in said and "/devtools" in said:
            return int(said.partition("ws://127.0.0.1:")[2].partition("/")[0])
    raise AssertionError(said)
