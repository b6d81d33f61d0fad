"""Drives a headless Chromium over the DevTools protocol, as far as tests need it to use a page."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import shutil
import tempfile
import time
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import websocket

EXECUTABLE = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
DEADLINE_S = 100.0
_KEYS = {"Tab": 9, "Enter": 13, "Escape": 27}


class Page:
    """One tab."""

    def __init__(self, socket: websocket.WebSocket) -> None:
        self._socket = socket
        self._number = 0
        self.problems: list[str] = []
        """Exceptions, console errors and violations of the content security policy."""

    async def call(self, method: str, **params: Any) -> Any:
        """Run one protocol command and return its result."""
        return await asyncio.to_thread(self._call, method, params)

    def _call(self, method: str, params: dict[str, Any]) -> Any:
        self._number += 1
        self._socket.send(json.dumps({"id": self._number, "method": method, "params": params}))
        while True:
            message = json.loads(self._socket.recv())
            if message.get("id") == self._number:
                assert "error" not in message, message["error"]
                return message["result"]
            self._note(message)

    def _note(self, event: dict[str, Any]) -> None:
        name, params = event.get("method"), event.get("params", {})
        if name == "Runtime.exceptionThrown":
            self.problems.append(json.dumps(params["exceptionDetails"])[:500])
        elif name == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.problems.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")

    async def goto(self, url: str) -> None:
        await self.call("Page.navigate", url=url)

    async def js(self, expression: str) -> Any:
        """Return the value of a JavaScript expression."""
        result = await self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    async def until(self, expression: str) -> Any:
        """Wait until a JavaScript expression is truthy; return its value."""
        async with asyncio.timeout(DEADLINE_S):
            while True:
                if value := await self.js(expression):
                    return value
                await asyncio.sleep(0.05)

    async def type(self, text: str) -> None:
        await self.call("Input.insertText", text=text)

    async def press(self, key: str) -> None:
        code = _KEYS[key]
        text = {"text": "\r"} if key == "Enter" else {}
        for kind in ("keyDown", "keyUp"):
            extra = text if kind == "keyDown" else {}
            await self.call(
                "Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code, **extra
            )

    async def look(self, *, dark: bool = False, width: int = 1360, height: int = 860) -> None:
        """Set the colour scheme and the window's size."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.call("Emulation.setEmulatedMedia", features=[scheme])
        await self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )

    async def screenshot(self) -> bytes:
        """Return the window as a PNG."""
        shot = await self.call("Page.captureScreenshot", format="png", captureBeyondViewport=False)
        return base64.b64decode(shot["data"])


@contextlib.asynccontextmanager
async def browser() -> AsyncIterator[Page]:
    """Start a fresh browser with one tab; requires `EXECUTABLE`."""
    assert EXECUTABLE is not None
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as home:
        process = await asyncio.create_subprocess_exec(
            EXECUTABLE,
            *("--headless=new", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"),
            *("--disable-background-networking", "--disable-component-update", "--disable-extensions"),
            *(["--no-sandbox"] if os.geteuid() == 0 else []),
            *(
                "--remote-debugging-port=0",
                "--remote-allow-origins=*",
                f"--user-data-dir={home}",
                "about:blank",
            ),
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            socket = await asyncio.to_thread(_open_first_page, Path(home) / "DevToolsActivePort")
            page = Page(socket)
            for domain in ("Page", "Runtime", "Log"):
                await page.call(f"{domain}.enable")
            yield page
            socket.close()
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, 9)
            await process.wait()


def _open_first_page(port_file: Path) -> websocket.WebSocket:
    """Connect to the first tab, once the browser has written its port."""
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError, IndexError):
            port = int(port_file.read_text().splitlines()[0])
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/json/list", timeout=DEADLINE_S) as answer:
                pages = [target for target in json.load(answer) if target["type"] == "page"]
            return websocket.create_connection(pages[0]["webSocketDebuggerUrl"], timeout=DEADLINE_S)
        time.sleep(0.05)
    raise TimeoutError("the browser did not start")
