"""The page at `/`, as a browser shows it."""

from __future__ import annotations

import base64
import fcntl
import hashlib
import json
import os
import re
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from browser import Browser
from browser import browser as browser  # a fixture
from conftest import Agent
from files import BACKWARD, FORWARD, SMALL, SMALL_BACKWARD, WRONG, fenced
from service import ASKS, Service, asked, variant
from service import serve as serve  # a fixture

TOKEN = "0123456789abcdef-token"
TAB, ENTER = "\ue004", "\ue007"
MARKUP = '<img src=x onerror="window.hit=1"><script>window.hit=1</script><b>bold</b>'
PLACES = {  # and what is there once all is
    "#/": "td a",
    "#/submit": "#source",
    "#/store?words=softmax": ".hit",
    "#/machine": "dl",
}
MISSING = "Failed to load resource: the server responded with a status of 401"


@pytest.fixture
def guarded(agent: Agent, serve: Callable[..., Service]) -> Service:
    """A service on a port, behind the token."""
    token = agent.folder / "token"
    token.write_text(TOKEN)
    token.chmod(0o600)
    return serve("--address", "127.0.0.1:0", "--token-file", str(token), *ASKS)


def enter(browser: Browser, service: Service) -> None:
    browser.open(f"http://{service.address}/")
    browser.type("#token", TOKEN + ENTER)
    browser.shows("live", "#live")


def answer_with(agent: Agent, text: str, number: int) -> None:
    """The number-th question in the mailbox is answered."""
    asked(agent, number)
    open_ = [
        path
        for path in (agent.folder / "box").glob("*.request.md")
        if not Path(str(path).replace(".request.", ".answer.")).exists()
    ]
    Path(str(open_[0]).replace(".request.", ".answer.")).write_text(text)


def test_page_is_open_and_its_policy_allows_it_alone(guarded: Service) -> None:
    reply = guarded.ask("GET", "/")
    assert (reply.status, reply.headers["content-type"]) == (200, "text/html; charset=utf-8")
    rules = dict(rule.strip().split(" ", 1) for rule in reply.headers["content-security-policy"].split(";"))
    assert rules["default-src"] == rules["base-uri"] == rules["frame-ancestors"] == "'none'"
    for tag in ("script", "style"):
        (text,) = re.findall(f"<{tag}>(.*?)</{tag}>".encode(), reply.body, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(text).digest()).decode()
        assert rules[f"{tag}-src"] == f"'sha256-{digest}'"
    assert reply.headers["referrer-policy"] == "no-referrer"
    assert b"https://" not in reply.body and TOKEN.encode() not in reply.body


def test_token_is_typed_once(guarded: Service, browser: Browser) -> None:
    browser.open(f"http://{guarded.address}/")
    browser.type("#token", "not the token at all" + ENTER)
    browser.shows("That was not the token")
    browser.type("#token", TOKEN + ENTER)
    browser.shows("No runs yet")
    browser.open(f"http://{guarded.address}/#/machine")
    browser.shows("Jail: full")
    assert browser.script("return Object.keys(localStorage).map((key) => localStorage[key]).join()") == "auto"
    browser.click("#forget")
    browser.shows("wants its token")
    assert browser.script("return sessionStorage.length") == 0
    assert all(MISSING in line for line in browser.complaints())


def test_run_is_followed_from_its_file_to_its_verdict(
    agent: Agent, guarded: Service, browser: Browser
) -> None:
    enter(browser, guarded)
    browser.click("a[href='#/submit']")
    path = agent.folder / "scale.py"
    path.write_text(FORWARD)
    browser.ask("POST", f"/element/{browser.find('#file')}/value", {"text": str(path)})
    browser.until(lambda: browser.script("return document.querySelector('#name').value") == "scale.py")
    browser.click("button.main")
    browser.shows("running", "h1 + .state")
    browser.shows("draft", ".phases")
    answer_with(agent, fenced(WRONG), 1)
    browser.shows("not verified", ".steps")
    browser.shows("w", "section[aria-label='What is wrong']")
    assert browser.script("return document.querySelectorAll('svg circle.off').length") == 1
    answer_with(agent, fenced(BACKWARD), 2)
    browser.shows("verified", "h1 + .state")
    diff = browser.text(".diff")
    assert "-     for row in range(0, 1):\n+     for row in range(0, M):" in diff
    assert "def scale_dx_kernel" not in diff
    browser.click("[data-key='Whole text']")
    browser.shows("def scale_dx_kernel", "pre")
    browser.click("[data-key='candidate 1']")
    browser.shows("range(0, 1)", "section[aria-label=Candidates] pre")
    browser.shows("candidate 1", "section[aria-label=Gradients]")
    browser.click("[data-key='candidate 2']")
    gradients = browser.text("section[aria-label=Gradients]")
    assert "x" in gradients and "e-" in gradients
    browser.shows("scale_dw_kernel", "section[aria-label=Cost]")
    browser.open(f"http://{guarded.address}/")
    browser.shows("1 verified")
    assert all(MISSING in line for line in browser.complaints())


def times(ours: float, eager: float, compiled: float) -> dict[str, Any]:
    subjects = {"ours": ours, "eager": eager, "compile": compiled}
    return {
        "floor_ms": ours / 2,
        "subjects": {name: {"alone": {"median_ms": ms}} for name, ms in subjects.items()},
    }


BENCH = {
    "shapes": [
        {"dims": {"M": 4, "N": 24}, "passes": {"bwd": times(0.5, 2.0, 1.0), "fwd": times(0.25, 0.75, 0.5)}},
        {"dims": {"M": 3, "N": 33, "name": MARKUP}, "passes": {"bwd": times(0.625, 1.25, 1.5)}},
    ],
    "geomean": {"bwd": {"alone": {"eager": {"ratio": 2.83}, "compile": {"ratio": 2.19}}}},
}


def test_benchmark_of_a_run_is_plotted(agent: Agent, guarded: Service, browser: Browser) -> None:
    run = guarded.ask("POST", "/v1/runs", {"source": SMALL}, token=TOKEN).doc["id"]
    answer_with(agent, fenced(SMALL_BACKWARD), 1)
    enter(browser, guarded)
    browser.script("location.hash = arguments[0]", f"#/runs/{run}")
    browser.shows("verified", "h1 + .state")
    path = f"/v1/runs/{run}"
    assert guarded.ask("GET", f"{path}/bench", token=TOKEN).status == 204
    folder = Path(guarded.ask("GET", path, token=TOKEN).doc["folder"])
    (folder / "bench.json").write_text(json.dumps(BENCH))
    assert guarded.ask("GET", f"{path}/bench", token=TOKEN).doc == BENCH
    browser.open("about:blank")
    browser.open(f"http://{guarded.address}/#/runs/{run}")
    speed = "section[aria-label=Speed]"
    browser.shows("2.83\N{MULTIPLICATION SIGN} as fast as eager, 2.19\N{MULTIPLICATION SIGN} as fast", speed)
    browser.shows("0.500", f"{speed} tr:has(td)")
    assert browser.script(f'return document.querySelectorAll("{speed} circle.ours").length') == 2
    ours, eager = (
        browser.script(f"return Number(document.querySelector('{speed} {mark}').getAttribute('cx'))")
        for mark in ("circle.ours", "circle.eager")
    )
    assert ours < eager
    browser.click("[data-key='pass fwd']")
    browser.shows("0.250", speed)
    assert browser.script(f'return document.querySelectorAll("{speed} circle.ours").length') == 1
    browser.look(360, 740, "light")
    assert browser.script("return document.documentElement.scrollWidth") <= 360
    assert browser.script("return window.hit ?? null") is None
    assert all(MISSING in line for line in browser.complaints())


def test_machine_shows_who_uses_each_gpu(
    agent: Agent, serve: Callable[..., Service], browser: Browser
) -> None:
    agent.env["XDG_RUNTIME_DIR"] = str(agent.folder)
    service = serve(*ASKS, "--device", "cuda", "--gpus", "0,1")
    with (
        forwarded(service) as (address, _),
        (agent.folder / f"kernel-agent-bench-{os.getuid()}-1.lock").open("a+") as lock,
    ):
        fcntl.lockf(lock, fcntl.LOCK_EX)
        browser.open(f"http://{address}/#/machine")
        browser.shows("0: 0 runs, 0 children\n1: 0 runs, 0 children, a benchmark has it alone")


def test_what_others_wrote_is_text(agent: Agent, guarded: Service, browser: Browser) -> None:
    enter(browser, guarded)
    browser.click("a[href='#/submit']")
    for name, source in ((MARKUP + ".py", FORWARD), ("x.py", f"{FORWARD}\nraise ValueError({MARKUP!r})\n")):
        browser.find("#source")
        browser.script("document.querySelector('#source').value = arguments[0]", source)
        browser.type("#name", name)
        browser.click("button.main")
        if name != "x.py":
            browser.shows("not a file name", ".wrong")
    browser.shows("not usable", "h1 + .state")
    browser.shows(MARKUP[:20])
    run = guarded.ask("POST", "/v1/runs", {"source": FORWARD}, token=TOKEN).doc["id"]
    browser.script("location.hash = arguments[0]", f"#/runs/{run}")
    remark = WRONG.replace("class ScaleFunction", f'NOTE = """{MARKUP}"""\n\n\nclass ScaleFunction')
    answer_with(agent, f"{MARKUP}\n\n{fenced(remark)}", 1)
    browser.shows("not verified", ".steps")
    browser.shows(MARKUP, "section[aria-label=Candidates] pre")
    assert browser.script("return window.hit ?? null") is None
    assert browser.script("return document.querySelectorAll('main img, main script, main b > *').length") == 0
    assert (
        browser.script("return [...document.querySelectorAll('b')].some((one) => one.textContent === 'bold')")
        is False
    )
    assert all(MISSING in line or "400" in line for line in browser.complaints())


def test_run_is_cancelled_tried_again_and_deleted_by_keys(
    agent: Agent, guarded: Service, browser: Browser
) -> None:
    run = guarded.ask("POST", "/v1/runs", {"source": variant(0)}, token=TOKEN).doc["id"]
    enter(browser, guarded)
    browser.focus("td a")
    browser.press(ENTER)
    for key, state in (("cancel", "cancelled"), ("retry", "running"), ("cancel", "cancelled")):
        browser.focus(f"[data-key={key}]")
        browser.press(ENTER)
        browser.shows(state, "h1 + .state")
    for _ in range(2):  # it asks once
        browser.focus("[data-key=delete]")
        browser.press(ENTER)
    browser.shows("No runs yet")
    assert guarded.ask("GET", f"/v1/runs/{run}", token=TOKEN).status == 404


def test_keys_reach_everything_and_names_are_there(guarded: Service, browser: Browser) -> None:
    run = guarded.ask("POST", "/v1/runs", {"source": "x = 1\n"}, token=TOKEN).doc["id"]
    enter(browser, guarded)
    named = {
        "button",
        "link",
        "textbox",
        "searchbox",
        "spinbutton",
        "combobox",
        "checkbox",
        "listitem",
        "region",
    }
    for place, last in {**PLACES, f"#/runs/{run}": "[data-key=log]"}.items():
        browser.open("about:blank")
        browser.open(f"http://{guarded.address}/{place}")
        browser.find(last)
        browser.shows("live", "#live")
        stations = (
            "const all = [...document.querySelectorAll('a[href], button, input, select, textarea, summary')]"
            ".filter((one) => one.checkVisibility());"
        )
        count = browser.script(f"{stations} return all.length")
        seen = set()
        for _ in range(count + 12):  # what scrolls is a station too
            browser.press(TAB)
            seen.add(browser.script(f"{stations} return all.indexOf(document.activeElement)"))
        assert seen >= set(range(count)), (place, count, seen)
        tree = browser.emulate("Accessibility.getFullAXTree")["nodes"]
        for node in tree:
            role = node.get("role", {}).get("value")
            if role in named - {"listitem"} and not node["ignored"]:
                assert node.get("name", {}).get("value"), (place, node)


def test_phone_and_both_themes(guarded: Service, browser: Browser) -> None:
    run = guarded.ask("POST", "/v1/runs", {"source": "x = 1\n", "name": "n" * 97 + ".py"}, token=TOKEN).doc[
        "id"
    ]
    enter(browser, guarded)
    back = "return getComputedStyle(document.body).backgroundColor"
    for place, last in {**PLACES, f"#/runs/{run}": "[data-key=log]"}.items():
        browser.script("location.hash = arguments[0]", place)
        browser.find(last)
        browser.look(360, 740, "light")
        assert browser.script("return document.documentElement.scrollWidth") <= 360, place
    light = browser.script(back)
    browser.look(360, 740, "dark")
    dark = browser.script(back)
    assert light != dark
    browser.click("#theme")  # auto -> light
    assert browser.script(back) == light
    browser.click("#theme")
    browser.look(360, 740, "light")
    assert browser.script(back) == dark


@contextmanager
def forwarded(service: Service) -> Iterator[tuple[str, Callable[[], None]]]:
    """The service's socket as a port of this machine, as ssh -L makes one; and what cuts all connections."""
    listener = socket.create_server(("127.0.0.1", 0))
    ends: list[socket.socket] = []

    def copy(a: socket.socket, b: socket.socket) -> None:
        with suppress(OSError):
            while piece := a.recv(65536):
                b.sendall(piece)
            b.shutdown(socket.SHUT_WR)

    def accept() -> None:
        with suppress(OSError):
            while True:
                near, _ = listener.accept()
                far = service.connect()
                ends.extend((near, far))
                for pair in ((near, far), (far, near)):
                    threading.Thread(target=copy, args=pair, daemon=True).start()

    def cut() -> None:
        while ends:
            with suppress(OSError):
                ends.pop().shutdown(socket.SHUT_RDWR)

    threading.Thread(target=accept, daemon=True).start()
    yield f"127.0.0.1:{listener.getsockname()[1]}", cut
    listener.close()
    cut()


def test_page_goes_on_where_it_was_cut_off(serve: Callable[..., Service], browser: Browser) -> None:
    service = serve(*ASKS)
    first = service.submit(variant(0), name="first.py")
    with forwarded(service) as (address, cut):
        browser.open(f"http://{address}/")
        browser.shows("first.py")
        browser.script(
            "window.seen = []; new MutationObserver(() => seen.push($('live').textContent))"
            ".observe($('live'), {childList: true})"
        )
        cut()
        browser.until(
            lambda: browser.script("return seen.includes('reconnecting') && seen.at(-1) === 'live'")
        )
        service.submit(variant(1), name="second.py")
        browser.shows("second.py")
        service.ask("POST", f"/v1/runs/{first['id']}/cancel")
        browser.shows("cancelled")
