"""Results that no honest process leaves: each ends in `not verified` with a reason, in bounded time and
memory.

Most are left by a Python that is the attacker's altogether: a copy of the package whose child does, once it
has run the candidate, what the comment `# hostile: NAME` in the pair says. That is the most that a candidate
could reach.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, Agent, copied_share

sys.path.insert(0, str(ROOT / "tests" / "attacks"))
import suite

HOSTILE = """
def _wish(request):
    text = Path(request["file"]).read_text() if request["op"] == "candidate" else ""
    return text.partition("# hostile: ")[2].split("\\n")[0]


def _run(request, scratch, honest=_run):
    result = honest(request, scratch)
    wish = _wish(request)
    files = list(scratch.glob("case-*.safetensors"))
    if wish == "longer file":
        for file in files:
            _lengthen(file)
    elif wish == "sparse tensor":
        size = 1 << 29
        header = {"grad/x": {"dtype": "F32", "shape": [size // 4], "data_offsets": [0, size]}}
        text = json.dumps(header).encode()
        for file in files:
            file.write_bytes(len(text).to_bytes(8, "little") + text)
            os.truncate(file, 8 + len(text) + size)
    elif wish == "names":
        for case in result["cases"]:
            case["aliases"] = [f"grad/x=upstream/{i}" for i in range(4000)]
            case["torch_ops_backward"] = {f"aten::mul{i}" + "\\u20ac" * 40: 1 for i in range(4000)}
    elif wish == "cases":
        result["cases"] *= 5000
    elif wish == "same id":
        result["cases"] += [dict(case, modified=["x"] * 9) for case in result["cases"]]
        result["cases"].reverse()
    elif wish == "long texts":
        for case in result["cases"]:
            error = {"message": "\\u20ac" * (1 << 20), "traceback": "a\\u20ac" * (1 << 20)}
            case.update(ok=False, error=error)
    return result


def _lengthen(file):
    for size in (8 << 30, 1 << 30):  # the second where the jail allows no more
        try:
            os.truncate(file, size)
            return
        except OSError:
            pass


def _all_raise(message):
    cases = (f'{{"id": {i}, "ok": false, "error": {{"message": "{message}"}}}}' for i in range(1000))
    return ', "cases": [' + ", ".join(cases) + "]}"


def _write(path, result, honest=_write):
    request = json.loads((path.parent / "request.json").read_text())
    own = json.dumps({"op": result["op"], "nonce": result["nonce"], "ok": True})[:-1]
    texts = {
        "values": own + ', "cases": [' + "{}," * (4 << 20) + "{}]}",
        "bytes": own + ', "cases": [], "x": "' + "x" * (64 << 20) + '"}',
        "nesting": own + ', "cases": ' + "[" * 100000 + "]" * 100000 + "}",
        "surrogates": own + _all_raise("cut \\\\ud83d \\\\u0000 off"),
        "no utf-8": own + _all_raise("cut \\xff off"),
    }
    wish = _wish(request)
    if wish not in texts:
        return honest(path, result)
    path.write_bytes(texts[wish].encode("latin-1"))
    return 0


if __name__"""

# name: (the rule that the failures name, what else they say unless it was found on a hidden shape)
FORGED = {
    "longer file": ("unreadable", ["of which its tensors take"]),
    "sparse tensor": ("gradient of x", []),
    "names": ("alias", ["shares memory", "aten::mul0", "more"]),
    "cases": ("no valid result", ["cases, more than"]),
    "same id": ("modified", ["modified in place"]),
    "long texts": ("raised", ["€€€"]),
    "values": ("no valid result", ["values allowed"]),
    "bytes": ("no valid result", ["bytes allowed"]),
    "nesting": ("no valid result", ["not valid JSON"]),
    "surrogates": ("raised", ["cut \ufffd \ufffd off"]),
    "no utf-8": ("raised", ["cut ? off"]),
}


def assert_says(failures: str, rule: str, words: list[str]) -> None:
    """The rule in any case; of a hidden shape nothing else is told, which shape comes first being left to
    chance."""
    assert rule in failures, failures[:2000]
    for word in words if "On a hidden shape" not in failures else []:
        assert word in failures, failures[:2000]
    assert len(failures) < 40_000


@pytest.fixture
def share(agent: Agent) -> Path:
    """The package, with a child that obeys the comment."""
    folder = copied_share(agent.folder / "share")
    child = folder / "sandbox" / "kernel_agent" / "child.py"
    child.write_text(child.read_text().replace("if __name__", HOSTILE, 1))
    return folder


def checked(agent: Agent, backwards: dict[str, str], share: Path | None = None) -> list[dict[str, Any]]:
    """The results of one `check` of pairs of one forward; none is verified, and each says so in a result of
    its own."""
    files = []
    for name, backward in backwards.items():
        files.append(agent.folder / f"{name.replace(' ', '_')}.py")
        files[-1].write_text(suite.pair("scale_atomics", backward))
    command = agent.command("check", *files, "--json", "--fail-fast", "--python", sys.executable)
    env = {**agent.env, **({"KA_SHARE": str(share)} if share else {})}
    done = subprocess.run(
        command, cwd=agent.folder, env=env, capture_output=True, text=True, errors="replace", check=False
    )
    results = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 4, done.stderr[-2000:]
    assert [result["verdict"] for result in results] == ["not_verified"] * len(backwards), done.stderr
    return results


def test_forged_results__are_not_verified_and_the_reason_is_said(agent: Agent, share: Path):
    right = suite.control("scale_atomics")
    pairs = {name: f"{right}\n# hostile: {name}\n" for name in FORGED}
    for name, result in zip(FORGED, checked(agent, pairs, share), strict=True):
        assert_says(result["failures"], *FORGED[name])


def test_candidates__that_modify_thousands_of_tensors_or_raise_odd_texts__are_not_verified(agent: Agent):
    right = suite.control("scale_atomics")
    keeps = right.replace(
        "ctx.save_for_backward(x, s)", "ctx.save_for_backward(x, s, *[s.clone() for _ in range(4000)])"
    ).replace(
        "x, s = ctx.saved_tensors\n",
        "x, s, *kept = ctx.saved_tensors\n        for one in kept:\n            one.zero_()\n",
    )
    odd = "        return dx, ds\n", "        raise ValueError({})\n"
    pairs = {
        "keeps": keeps,
        "surrogate": right.replace(odd[0], odd[1].format(r'"\ud83d" + "a\u20ac" * 2000')),
        "nul": right.replace(odd[0], odd[1].format(r'"\x00\udc80\x1b[31m" + "\u20ac" * 2000')),
    }
    assert right not in pairs.values()
    kept, surrogate, nul = (result["failures"] for result in checked(agent, pairs))
    assert_says(kept, "modified", ["was modified in place, and 3999 more"])
    assert_says(surrogate, "raised", ["a€a€"])
    assert_says(nul, "raised", ["€€"])
