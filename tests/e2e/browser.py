"""A headless Chromium, driven by the W3C WebDriver protocol over http.client."""

from __future__ import annotations

import base64
import http.client
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

ELEMENT = "element-6066-11e4-a52e-4f735466cecf"
SECONDS = 120.0  # after which a page that hangs is given up


class Refused(Exception):
    """What the driver says it could not do."""


class Browser:
    """One window. Its profile is in `folder`, and it reaches this machine alone."""

    def __init__(self, folder: Path, width: int = 1280, height: int = 900) -> None:
        driver, browser = shutil.which("chromedriver"), shutil.which("chromium")
        assert driver and browser
        self.process = subprocess.Popen(
            [driver, "--port=0"],
            cwd=folder,
            env={**os.environ, "HOME": str(folder), "TMPDIR": str(folder)},
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert self.process.stdout
        started = next(line for line in self.process.stdout if "started successfully on port" in line)
        self.port = int(started.rstrip(".\n").rpartition(" ")[2])
        options = {
            "binary": browser,
            "args": [
                "--headless=new",
                "--no-sandbox",  # its own, which wants no root; the page is ours
                "--disable-dev-shm-usage",
                "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
                f"--user-data-dir={folder / 'profile'}",
                f"--window-size={width},{height}",
            ],
        }
        capabilities = {"browserName": "chrome", "goog:chromeOptions": options}
        capabilities["goog:loggingPrefs"] = {"browser": "ALL"}
        self.session = ""
        try:
            made = self.ask("POST", "/session", {"capabilities": {"alwaysMatch": capabilities}})
        except BaseException:
            self.close()
            raise
        self.session = f"/session/{made['sessionId']}"

    def ask(self, method: str, path: str, doc: dict[str, Any] | None = None) -> Any:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=SECONDS)
        body = json.dumps(doc or {}) if method == "POST" else None
        connection.request(method, self.session + path, body, {"Content-Type": "application/json"})
        said = json.loads(connection.getresponse().read())["value"]
        connection.close()
        if isinstance(said, dict) and "error" in said:
            raise Refused(f"{said['error']}: {said['message']}")
        return said

    def open(self, url: str) -> None:
        self.ask("POST", "/url", {"url": url})

    def script(self, text: str, *args: object) -> Any:
        """What a function with this body returns."""
        return self.ask("POST", "/execute/sync", {"script": text, "args": args})

    def find(self, css: str) -> str:
        """The element's id for the driver, once there is one."""
        return str(
            self.until(lambda: self.ask("POST", "/element", {"using": "css selector", "value": css})[ELEMENT])
        )

    def click(self, css: str) -> None:
        self.ask("POST", f"/element/{self.find(css)}/click")

    def type(self, css: str, text: str) -> None:
        element = self.find(css)
        self.ask("POST", f"/element/{element}/clear")
        self.ask("POST", f"/element/{element}/value", {"text": text})

    def focus(self, css: str) -> None:
        self.find(css)
        self.until(
            lambda: self.script(
                "const one = document.querySelector(arguments[0]); one?.focus();"
                "return one !== null && one === document.activeElement",
                css,
            )
        )

    def press(self, key: str) -> None:
        """One key to whatever has the focus."""
        actions = [{"type": "keyDown", "value": key}, {"type": "keyUp", "value": key}]
        self.ask("POST", "/actions", {"actions": [{"type": "key", "id": "keys", "actions": actions}]})

    def text(self, css: str = "body") -> str:
        """As it is seen."""
        return str(self.script("return document.querySelector(arguments[0])?.innerText ?? ''", css))

    def shows(self, text: str, css: str = "body") -> None:
        """Wait until it does."""
        self.until(lambda: text in self.text(css), f"{text!r} in {css}")

    def until(self, test: Callable[[], Any], what: str = "") -> Any:
        end = time.monotonic() + SECONDS
        while time.monotonic() < end:
            try:
                if found := test():
                    return found
            except Refused as exc:
                what = str(exc)
            time.sleep(0.05)
        raise AssertionError(f"not within {SECONDS:.0f} s: {what}\n{self.text()}")

    def complaints(self) -> list[str]:
        """What the browser has to say about the page: errors of its script, breaches of its policy."""
        return [
            entry["message"]
            for entry in self.ask("POST", "/se/log", {"type": "browser"})
            if entry["level"] in ("SEVERE", "WARNING")
        ]

    def emulate(self, command: str, **parameters: object) -> Any:
        """A command of the browser's own debugging protocol."""
        return self.ask("POST", "/goog/cdp/execute", {"cmd": command, "params": parameters})

    def look(self, width: int, height: int, theme: str) -> None:
        """Pretend a screen."""
        self.emulate(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        features = [{"name": "prefers-color-scheme", "value": theme}]
        self.emulate("Emulation.setEmulatedMedia", features=features)

    def picture(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.ask("GET", "/screenshot")))

    def close(self) -> None:
        if self.session:
            self.ask("DELETE", "")
        self.process.terminate()
        self.process.wait()


@pytest.fixture
def browser() -> Iterator[Browser]:
    if not (shutil.which("chromium") and shutil.which("chromedriver")):
        pytest.skip("chromium and chromedriver are not installed (apt-get install chromium chromium-driver)")
    with tempfile.TemporaryDirectory(
        prefix="ka-", ignore_cleanup_errors=True
    ) as folder:  # a socket's path is short
        made = Browser(Path(folder))
        yield made
        made.close()
