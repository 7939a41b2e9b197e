"""What wrong input gets: exit code, and a message that names the file, the place and the remedy."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import Agent
from files import FORWARD

SECOND_STUB = "\n\n@autodiff(inputs_require_grad=(0,))\ndef other(x):\n    return x\n"

# name: (how the forward file is changed, expected words of the error)
UNUSABLE: dict[str, tuple[Callable[[str], str], list[str]]] = {
    "not python": (lambda text: "def broken(:\n" + text, ["syntax", "line"]),
    "no stub": (lambda text: text.replace("@autodiff(inputs_require_grad=(0, 1))\n", ""), ["autodiff"]),
    "two stubs": (lambda text: text + SECOND_STUB, ["scale", "other"]),
    "sweep missing": (lambda text: text.replace("SWEEP =", "SHAPES ="), ["SWEEP"]),
    "sweep empty": (
        lambda text: text.replace('SWEEP = [{"M": 4, "N": 24}, {"M": 3, "N": 33}]', "SWEEP = []"),
        ["SWEEP"],
    ),
    "sweep of wrong type": (
        lambda text: text.replace('SWEEP = [{"M": 4, "N": 24}, {"M": 3, "N": 33}]', "SWEEP = 7"),
        ["SWEEP"],
    ),
    "make_args missing": (lambda text: text.replace("def make_args", "def make_arguments"), ["make_args"]),
    "make_args raises": (
        lambda text: text.replace("    x = torch.randn(", "    raise KeyError('Q')\n    x = torch.randn("),
        ["make_args", "Q"],
    ),
    "make_args returns nonsense": (
        lambda text: text.replace("return (x, torch", "return 7\n    return (x, torch"),
        ["make_args"],
    ),
    "stub raises": (
        lambda text: text.replace(
            "    M, N = x.shape", "    raise ValueError('no such luck')\n    M, N = x.shape"
        ),
        ["no such luck"],
    ),
    "import fails": (lambda text: "import no_such_module_at_all\n" + text, ["no_such_module_at_all"]),
    "unsupported op": (
        lambda text: text.replace(
            "tl.store(y_ptr",
            'x = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], tl.float32, True, 1)\n'
            "    tl.store(y_ptr",
        ),
        ["inline_asm_elementwise"],
    ),
    "input overwritten": (
        lambda text: text.replace("    return y\n", "    x.copy_(y)\n    return y\n", 1),
        ["scale() overwrites x", "new tensor"],
    ),
    "gradient that is no number": (  # the root of x - x: infinity less infinity
        lambda text: text.replace("x * w, mask=mask)", "x * w + tl.sqrt(x - x), mask=mask)"),
        ["gradient of x", "NaN at its element 0", "harmless"],
    ),
    "forward out of bounds": (
        lambda text: text.replace(
            "tl.load(w_ptr + cols, mask=mask, other=0.0)", "tl.load(w_ptr + cols + 1, mask=mask, other=0.0)"
        ),
        ["w_ptr"],
    ),
}


@pytest.fixture(scope="module")
def unusable(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """The results for all of them: of one batch, for which Python starts once, and alone what a batch does
    not take for a forward file."""
    agent = Agent(tmp_path_factory.mktemp("unusable"))
    kernels = agent.folder / "kernels"
    kernels.mkdir()
    options = ("--backend", "none", "--json")
    found = {}
    for name, (change, _) in UNUSABLE.items():
        text = change(FORWARD)
        assert text != FORWARD
        if "@autodiff" in text and "SWEEP" in text:
            (kernels / f"{name}.py").write_text(text)
            continue
        (agent.folder / "forward.py").write_text(text)
        done = agent("--file-path", "forward.py", *options)
        assert done.code == 3 and "Traceback (most recent call last)" not in done.out, done.err
        found[name] = done.result
    done = agent("batch", kernels, *options)
    assert done.code == 3 and "Traceback (most recent call last)" not in done.out, done.err
    return found | {Path(item["file"]).stem: item["result"] for item in done.result["files"]}


@pytest.mark.parametrize("name", UNUSABLE)
def test_forward_file_that_cannot_be_used(unusable: dict[str, dict[str, Any]], name: str) -> None:
    result = unusable[name]
    assert (result["verdict"], result["exit_code"]) == ("unusable", 3), result
    error = result["error"]
    for word in UNUSABLE[name][1]:
        assert word.lower() in str(error).lower(), error


def test_missing_file(agent: Agent) -> None:
    done = agent("--file-path", "nowhere.py")
    assert done.code == 3
    assert "nowhere.py" in done.err and "No such file" in done.err


def test_folder_instead_of_file(agent: Agent) -> None:
    done = agent("--file-path", agent.folder)
    assert done.code == 2
    assert "not a regular file" in done.err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--topk", "0"], ["topk", "out of range"]),
        (["--min-sim", "2"], ["min-sim", "out of range"]),
        (["--topk", "many"], ["topk", "whole number"]),
        (["--frobnicate"], ["unknown option", "--frobnicate"]),
        (["--backend", "oracle"], ["--backend", "mailbox"]),
        (["--device", "abacus"], ["--device", "cpu"]),
        (["--draft", "llm", "--backend", "none"], ["--draft llm"]),
        (["--max-iters"], ["wants a value"]),
        (["--python", "/no/such/python"], ["/no/such/python"]),
        (["--config", "no-such-config"], ["no-such-config"]),
        (["--resume"], ["--resume"]),
        (["--resume", "no-such-run"], ["no-such-run"]),
        (["--api-key-file", "no-key"], ["no-key"]),
        (["--sweep", "some"], ["--sweep", "some", "required"]),
        (["--sweep", "[]"], ["--sweep", "JSON list"]),
        (["--sweep", "[4]"], ["--sweep", "JSON list"]),
        (["--target", "hopper"], ["--target", "hopper", "sm_90"]),
        (["--target", "sm_9"], ["--target", "sm_90"]),
        (["other.py"], ["other.py", "one word too many"]),
    ],
)
def test_usage_errors_have_exit_code_2(agent: Agent, arguments: list[str], words: list[str]) -> None:
    path = agent.folder / "forward.py"
    path.write_text(FORWARD)
    done = agent("--file-path", path, *arguments)
    assert done.code == 2, done.err
    for word in words:
        assert word in done.err
    assert not agent.run_dirs()


def test_unknown_command_and_no_arguments(agent: Agent) -> None:
    assert agent("frobnicate").code == 2
    (agent.folder / "attn.py").write_text(FORWARD)
    assert "--file-path attn.py" in agent("attn.py").err
    assert "DIR" in agent("batch").err and "RUN" in agent("verify").err
    assert agent().code == 2
    assert agent("--help").code == 0
    assert agent("--version").out.startswith("kernel-agent ")


def test_configuration_errors_name_file_and_line(agent: Agent) -> None:
    path = agent.folder / "config"
    path.write_text("topk = 4\nmin_sim = 7\n")
    done = agent("--file-path", "x.py", "--config", path)
    assert done.code == 2 and f"{path}:2:" in done.err
    path.write_text('api_key = "sk-1"\n')
    done = agent("--file-path", "x.py", "--config", path)
    assert done.code == 2 and "api_key_file" in done.err


def test_named_store_that_is_missing_or_damaged(agent: Agent) -> None:
    path = agent.folder / "forward.py"
    path.write_text(FORWARD)
    done = agent("--file-path", path, "--store", "no.db", "--backend", "mailbox:box")
    assert done.code == 2 and "no.db" in done.err
    broken = agent.folder / "broken.db"
    broken.write_bytes(b"SQLite format 3\0" + b"\xff" * 4000)
    done = agent("--file-path", path, "--store", broken, "--backend", "mailbox:box")
    assert done.code == 2 and "broken.db" in done.err


@pytest.mark.skipif(os.getuid() == 0, reason="root may write anywhere")
def test_output_folder_that_may_not_be_written(agent: Agent) -> None:
    path, out = agent.folder / "forward.py", agent.folder / "out"
    path.write_text(FORWARD)
    out.mkdir()
    out.chmod(stat.S_IRUSR | stat.S_IXUSR)
    done = agent("--file-path", path, "--out", out)
    assert done.code == 2 and "out" in done.err


def test_output_folder_that_is_a_file(agent: Agent) -> None:
    path, out = agent.folder / "forward.py", agent.folder / "out"
    path.write_text(FORWARD)
    out.write_text("")
    done = agent("--file-path", path, "--out", out)
    assert done.code == 2 and str(out) in done.err


def test_full_disk(agent: Agent) -> None:
    path = agent.folder / "forward.py"
    path.write_text(FORWARD)
    done = agent("--file-path", path, "--out", "/dev/full/out")
    assert done.code == 2
    assert Path("/dev/full").is_char_device()
