"""Every way in which a user's file can be unusable: its kind, its line, in a process of its own and loaded
here."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest
from kernel_agent import autodiff, draw, errors, forward
from sources import SANDBOX, SCALE, SCALE_PAIR

MARK = "@autodiff(inputs_require_grad=(0,))"
SWEEP = 'SWEEP = [{"N": 8}, {"N": 100, "required": False}]'


def line_of(source: str, text: str) -> int:
    return source[: source.index(text)].count("\n") + 1


def caught(path) -> errors.Unusable:
    with pytest.raises(errors.Unusable) as info:
        fwd = forward.load(path)
        args, kwargs = draw.make_inputs(fwd, fwd.sweep[0].dims, 1)
        fwd.call(args, kwargs)
    return info.value


BAD = {
    "syntax": (SCALE.replace("y = torch.empty_like(x)", "y = = 1"), "y = = 1", "SyntaxError"),
    "import": (
        SCALE.replace("SWEEP =", "import no_such_module\nSWEEP ="),
        "import no_such",
        "ModuleNotFoundError",
    ),
    "no_stub": (SCALE.replace(MARK, ""), None, "no function is decorated"),
    "two_stubs": (
        SCALE + f"\n\n{MARK}\ndef second(x):\n    return x\n",
        "def second",
        r"scale \(line 18\), second \(line \d+\)",
    ),
    "sweep_missing": (SCALE.replace(SWEEP, ""), None, "has no SWEEP"),
    "sweep_type": (SCALE.replace(SWEEP, "SWEEP = {'N': 8}"), "SWEEP =", "not dict"),
    "sweep_empty": (SCALE.replace(SWEEP, "SWEEP = []"), "SWEEP =", "no entry"),
    "make_args_missing": (
        SCALE.replace("def make_args", "def make_arguments"),
        None,
        "no function make_args",
    ),
    "make_args_raised": (SCALE.replace('dims["N"]', 'dims["Z"]'), 'dims["Z"]', "KeyError: 'Z'"),
    "make_args_type": (
        SCALE.replace("    return (torch", "    return 3 or (torch"),
        "def make_args",
        "not int",
    ),
    "stub_raised": (SCALE.replace("    return y\n", "    return y[10_000]\n"), "y[10_000]", "IndexError"),
    "needs_gpu": (
        SCALE.replace("    return y\n", "    torch.cuda.Event()\n    return y\n"),
        "torch.cuda.Event",
        "Event",
    ),
}


@pytest.mark.parametrize("kind", BAD)
def test_bad_file__by_kind__says_what_and_where(kind, write):
    source, at, message = BAD[kind]
    error = caught(write(source))
    assert error.kind == kind
    assert error.file.endswith("file.py")
    assert error.line == (line_of(source, at) if at else None)
    assert re.search(message, error.message), error.message


@pytest.mark.parametrize(
    ("decorator", "message"),
    [
        ("@autodiff", "without parentheses"),
        ("@autodiff()", "one tuple"),
        ("@autodiff(inputs_require_grad=())", r"names no input|got \(\)"),
        ("@autodiff(inputs_require_grad=(2,))", "position 2 is outside the stub's 2 parameters"),
        ("@autodiff(inputs_require_grad=(-1,))", "position -1|got"),
        ("@autodiff(inputs_require_grad=('x',))", "'x'"),
        ("@autodiff(inputs_require_grad=(0, 0))", "repeat"),
        ("@autodiff(inputs=(0,))", "inputs"),
        ("@autodiff(inputs_require_grad=NOTHING)", "NOTHING"),
    ],
)
def test_bad_decorator__any_way__is_stub_args_at_its_line(decorator, message, write):
    for plain in (SCALE, SCALE_PAIR):
        source = plain.replace(MARK, decorator)
        error = caught(write(source))
        kind = "import" if "NOTHING" in decorator else "stub_args"
        assert error.kind == kind and error.line == line_of(source, decorator)
        assert re.search(message, error.message), error.message


@pytest.mark.parametrize(
    ("sweep", "kind", "message"),
    [
        ("[8]", "sweep_type", r"SWEEP\[0\] is a dict of dimensions, not int"),
        ("[{'N': 8}, {'N': 8, 'required': 1}]", "sweep_type", r"SWEEP\[1\] has required=1"),
        ("[{'required': True}]", "sweep_type", "no dimensions"),
        ("[{'N': float('nan')}]", "sweep_type", "N=nan"),
        ("[{'N': torch.strided}]", "sweep_type", "torch.strided"),
        ("[{3: 8}]", "sweep_type", "not a string"),
        ("()", "sweep_empty", "no entry"),
    ],
)
def test_bad_sweep__entry_by_entry__is_named(sweep, kind, message, write):
    error = caught(write(SCALE.replace(SWEEP, f"SWEEP = {sweep}")))
    assert error.kind == kind and re.search(message, error.message), error.message


def test_make_args__arguments_that_do_not_fit__say_so(write):
    error = caught(write(SCALE.replace("dtype=dtype),)", "dtype=dtype), 1, 2, 3)")))
    assert error.kind == "make_args_type" and "too many positional arguments" in error.message


def test_setup__that_raises__is_make_args_raised(write):
    source = SCALE + "\n\ndef setup():\n    raise OSError('no data')\n"
    error = caught(write(source))
    assert error.kind == "make_args_raised" and "setup() raised OSError: no data" in error.message
    assert error.line == line_of(source, "raise OSError")


@pytest.mark.parametrize(
    ("place", "kind"), [("    return y", "stub_raised"), ("    return (torch", "make_args_raised")]
)
def test_exit__out_of_the_users_functions__is_an_error(place, kind, write):
    error = caught(write(SCALE.replace(place, f"    raise SystemExit(0)\n{place}")))
    assert error.kind == kind and "SystemExit: 0" in error.message


def test_import__that_exits__is_an_error_not_an_exit(run_op, write):
    ran = run_op("inspect", write(SCALE.replace("SWEEP =", "raise SystemExit(3)\nSWEEP =")))
    assert ran.code == 0 and ran.result["ok"] is False and ran.result["error"]["kind"] == "import"


def test_traceback__of_a_failing_stub__has_only_the_users_frames(write):
    source = (
        SCALE.replace("    return y\n", "    return helper(y)\n")
        + "\n\ndef helper(y):\n    return y.view(3, 3, 3)\n"
    )
    error = caught(write(source))
    assert error.traceback.count("File ") == 2 and "kernel_agent/" not in error.traceback
    assert error.traceback.rstrip().splitlines()[-1].startswith("RuntimeError: ")


def test_kernel_error__inside_the_kernel__names_its_line(write):
    source = SCALE.replace(
        "x = tl.load(x_ptr + offsets, mask=mask)", "x = tl.load(x_ptr + offsets, mask=missing)"
    )
    error = caught(write(source))
    assert (
        error.kind == "stub_raised"
        and "missing" in error.message
        and error.line == line_of(source, "mask=missing")
    )


def test_child__unknown_operation__is_internal(run_op, write):
    ran = run_op("dance", write(SCALE))
    assert ran.code == 0 and ran.result["error"]["kind"] == "internal" and ran.result["nonce"] == "00000001"


def test_child__unreadable_request__still_writes_a_result(tmp_path):
    (tmp_path / "request.json").write_text("{")
    done = subprocess.run(
        [sys.executable, "-m", "kernel_agent.child", str(tmp_path)],
        env={"PYTHONPATH": str(SANDBOX), "PATH": ""},
        check=False,
    )
    result = json.loads((tmp_path / "result.json").read_text())
    assert done.returncode == 0 and result["ok"] is False and result["error"]["kind"] == "internal"


def test_child__scratch_that_cannot_be_written__exits_nonzero(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "kernel_agent.child", str(tmp_path / "missing")],
        env={"PYTHONPATH": str(SANDBOX), "PATH": ""},
        capture_output=True,
        check=False,
    )
    assert done.returncode == 1


def test_child__successful_operation__echoes_op_and_nonce(run_op, write):
    ran = run_op("scan", write(SCALE_PAIR))
    assert ran.code == 0, ran.output
    assert (ran.result["op"], ran.result["nonce"], ran.result["ok"]) == ("scan", "00000001", True)
    assert ran.result["seconds"] >= 0


def test_unusable__unknown_kind__is_refused():
    with pytest.raises(ValueError, match="unknown error kind"):
        errors.Unusable("strange", "")


@pytest.mark.parametrize("given", [lambda x: x, (), (1.5,), "0", (-1,), (True,)])
def test_autodiff__misused_in_a_script__raises_type_error(given):
    with pytest.raises(TypeError, match="autodiff"):
        autodiff(given)


def test_autodiff__both_spellings__mark_and_return_the_same_function():
    from kernel_agent.autodiff import autodiff as by_module

    def stub(x, y):
        return x

    assert by_module is autodiff
    assert autodiff(inputs_require_grad=(0, 1))(stub) is stub
    assert stub.__kernel_agent__ == {"inputs_require_grad": (0, 1)}
    assert autodiff(idxs_buffers=[1])(stub).__kernel_agent__ == {"inputs_require_grad": (1,)}
    with pytest.raises(TypeError):
        autodiff((0,), idxs_buffers=(1,))


@pytest.mark.parametrize(
    "spelling",
    [
        "from kernel_agent import autodiff",
        "from kernel_agent.autodiff import autodiff",
        "import kernel_agent\nautodiff = kernel_agent.autodiff",
        "from kernel_agent import autodiff as mark",
        "import kernel_agent.autodiff as ad\nautodiff = ad",
    ],
)
def test_import__every_spelling__finds_the_stub(spelling, write):
    source = SCALE.replace("from kernel_agent import autodiff", spelling)
    if "as mark" in spelling:
        source = source.replace("@autodiff", "@mark")
    fwd = forward.load(write(source.replace("inputs_require_grad", "idxs_buffers")))
    assert fwd.stub_name == "scale" and fwd.grads == ("x",)
