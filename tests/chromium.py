"""Chromium without a screen, driven through a pipe, so that pages are tested as people see them."""

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

PROGRAM = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)

_FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--disable-dev-shm-usage", "--hide-scrollbars", "--remote-debugging-pipe"),
)
# The browser reads from 3 and writes to 4, wherever our ends of the pipes happen to be.
_INTO_PLACE = """
import os, sys
os.dup2(int(sys.argv[1]), 3)
os.dup2(int(sys.argv[2]), 4)
os.execv(sys.argv[3], sys.argv[3:])
"""
_PATIENCE = 60.0
"""Seconds after which a browser that does not answer counts as dead."""


class Browser:
    """One page in one browser. Messages are JSON, each ended by a zero byte."""

    def __init__(self, profile: Path) -> None:
        assert PROGRAM is not None
        commands, self._write = os.pipe()
        self._read, answers = os.pipe()
        ends = [fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in (commands, answers)]
        launcher = [sys.executable, "-c", _INTO_PLACE, *map(str, ends)]
        self._process = subprocess.Popen(
            [*launcher, PROGRAM, *_FLAGS, f"--user-data-dir={profile}", "about:blank"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=ends,
            start_new_session=True,
        )
        for end in (commands, answers, *ends):
            os.close(end)
        os.set_blocking(self._read, False)
        self._received = b""
        self._last = 0
        self._session: str | None = None
        self.events: list[dict[str, Any]] = []
        targets = self.call("Target.getTargets")["targetInfos"]
        target = next(one["targetId"] for one in targets if one["type"] == "page")
        found = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = found["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")
        self.call("Page.setLifecycleEventsEnabled", enabled=True)

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command and wait for its answer; what else happens goes to ``events``."""
        self._last += 1
        message: dict[str, Any] = {"id": self._last, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") != self._last:
                self.events.append(answer)
                continue
            assert "error" not in answer, f"{method}: {answer['error']}"
            result: dict[str, Any] = answer["result"]
            return result

    def _next(self) -> dict[str, Any]:
        end = time.monotonic() + _PATIENCE
        while b"\0" not in self._received:
            try:
                part = os.read(self._read, 1 << 20)
                assert part, "the browser has gone"
                self._received += part
            except BlockingIOError:
                assert time.monotonic() < end, "the browser does not answer"
                time.sleep(0.005)
        message, _, self._received = self._received.partition(b"\0")
        found: dict[str, Any] = json.loads(message)
        return found

    def open(self, page: Path | str, fragment: str = "") -> None:
        """Load a page, from a file or an address, again and wait until it has."""
        self.call("Page.navigate", url="about:blank")
        self.events.clear()
        address = page if isinstance(page, str) else page.as_uri()
        loader = self.call("Page.navigate", url=address + fragment)["loaderId"]
        facts = {"loaderId": loader, "name": "load"}.items()
        while not any(facts <= event["params"].items() for event in self._lives()):
            self.events.append(self._next())

    def _lives(self) -> list[dict[str, Any]]:
        return [event for event in self.events if event.get("method") == "Page.lifecycleEvent"]

    def run(self, script: str) -> Any:
        """The value of an expression in the page."""
        found = self.call("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def key(self, name: str) -> None:
        """Press and release a key, such as ``ArrowLeft``."""
        code = {"Tab": 9, " ": 32, "End": 35, "Home": 36, "ArrowLeft": 37, "ArrowRight": 39}[name]
        facts: dict[str, Any] = {"key": name, "windowsVirtualKeyCode": code}
        text = {"text": " "} if name == " " else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", **facts, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", **facts)

    def mouse(self, kind: str, x: float, y: float) -> None:
        """``mouseMoved``, ``mousePressed`` or ``mouseReleased``, at a point of the window."""
        pressed = {} if kind == "mouseMoved" else {"button": "left", "clickCount": 1}
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **pressed)

    def window(self, width: int, height: int, *, dark: bool = False, phone: bool = False) -> None:
        """What the page is seen through."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=phone,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def complaints(self) -> list[str]:
        """Errors that the page has logged or thrown since it was opened."""
        self.run("0")  # so that all that came before has arrived
        kinds = ("Runtime.exceptionThrown", "Log.entryAdded")
        return [json.dumps(event) for event in self.events if event.get("method") in kinds]

    def requests(self) -> list[str]:
        """The addresses that the page has asked for since it was opened."""
        return [
            event["params"]["request"]["url"]
            for event in self.events
            if event.get("method") == "Network.requestWillBeSent"
        ]

    def close(self) -> None:
        """End the browser and all that it has started."""
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        os.close(self._read)
        os.close(self._write)


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """One browser for all tests that look at a page."""
    if PROGRAM is None:
        pytest.skip("no chromium on this machine")
    found = Browser(tmp_path_factory.mktemp("profile"))
    yield found
    found.close()
