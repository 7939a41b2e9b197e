"""Operation facts: what kernels cost on a target, without a GPU."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys

import pytest
import torch
from kernel_agent import compiled, draw, forward
from kernel_agent.operations import facts, traffic
from sources import SANDBOX, SCALE_PAIR

CASE = {"id": 0, "dims": {"N": 40}, "seed": 1, "upstream": {"kind": "normal", "seed": 2}}


@pytest.fixture(autouse=True)
def private_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))


def run(path, scratch, cases=(CASE,), target="sm_90", **fields):
    """The cases of operation facts, their kernels compiled from their sources as the daemon has it done."""
    request = {"file": str(path), "target": target, "compile": True, "cases": list(cases), **fields}
    compiled.use(None)
    found = facts.run(request, scratch)["cases"]
    sources = compiled.leave(scratch).get("wanted", [])
    for kernel in (kernel for case in found for kernel in case.get("kernels", []) if "compile" in kernel):
        key = kernel.pop("compile")
        assert key in sources
        entry = compiled.run({"source": (scratch / f"compile-{key}.json").read_text()}, scratch)
        assert entry["key"] == key
        kernel |= entry["facts"] | {"ok": True}
    return found


def test_scale__both_directions__counts_and_compiles(write, tmp_path):
    (case,) = run(write(SCALE_PAIR), tmp_path)
    counted = {"launches": 1, "bytes_read": 160, "bytes_written": 160, "atomics": 0, "programs": 3}
    counted["widest"] = 3
    assert case["forward"] == counted and case["backward"] == counted
    assert [kernel["name"] for kernel in case["kernels"]] == ["scale_kernel", "scale_bwd_kernel"]
    for kernel in case["kernels"]:
        assert kernel["ok"] and kernel["constexprs"] == {"BLOCK": 16} and kernel["num_warps"] == 4
        assert kernel["registers"] >= 8 and kernel["spills"] == 0 and kernel["shared"] == 0
        assert kernel["instructions"] > 10
    assert not list(tmp_path.glob("case-*")), "facts leaves no tensors"


def test_atomics__counted_by_active_lane__and_as_bytes_both_ways(write, tmp_path):
    source = SCALE_PAIR.replace("tl.store(d_x_ptr + offsets, ", "tl.atomic_add(d_x_ptr + offsets, ")
    source = source.replace("d_x = torch.empty_like", "d_x = torch.zeros_like")
    (case,) = run(write(source), tmp_path, compile=False)
    assert case["forward"]["atomics"] == 0 and case["backward"]["atomics"] == 40
    assert (case["backward"]["bytes_read"], case["backward"]["bytes_written"]) == (320, 320)  # with the zeros


@pytest.mark.parametrize(
    ("operation", "read", "written"),
    [
        ("d.clone()", 160, 160),
        ("d.reshape(4, 10).sum(0)", 160, 40),
        ("d.view(4, 10).t()[1:]", 0, 0),
        ("torch.empty_like(d)", 0, 0),
        ("torch.zeros_like(d)", 0, 160),
        ("d.new_empty(40).copy_(d)", 160, 160),
        ("d.add_(1.0)", 160, 160),
        ("d.new_ones(1).expand(40) + d", 164, 164),
        ("torch.stack([d, d])", 320, 320),
    ],
)
def test_torch_operations__count_what_they_read_and_write(operation, read, written):
    d = torch.ones(40)
    with traffic.Counter() as counter:
        eval(operation, {"torch": torch, "d": d})
    assert (counter.bytes_read, counter.bytes_written) == (read, written)


def test_compile__not_asked_for__gives_no_kernels(write, tmp_path):
    (case,) = run(write(SCALE_PAIR), tmp_path, compile=False)
    assert case["kernels"] == [] and case["backward"]["launches"] == 1


def test_shared_memory__of_a_dot__is_reported_and_the_target_matters(write, tmp_path):
    source = SCALE_PAIR.replace(
        "    tl.store(y_ptr + offsets, x * factor, mask=mask)",
        "    tile = tl.dot(x[:, None] + x[None, :], x[:, None] * x[None, :], input_precision='ieee')\n"
        "    tl.store(y_ptr + offsets, x * factor + 0 * tl.sum(tile, 0), mask=mask)",
    )
    path = write(source)
    old, new = (run(path, tmp_path, target=target)[0]["kernels"][0] for target in ("sm_80", "sm_90"))
    assert old["ok"] and new["ok"] and new["shared"] > 0
    assert old["instructions"] != new["instructions"]


def test_kernel_that_runs_but_does_not_compile__names_the_line(write, tmp_path):
    source = SCALE_PAIR.replace(
        "    tl.store(d_x_ptr + offsets, d_y * factor, mask=mask)",
        "    gradient = [d_y * factor for _ in range(1)][0]\n    tl.store(d_x_ptr + offsets, gradient, "
        "mask=mask)",
    )
    kernel = run(write(source), tmp_path)[0]["kernels"][1]
    assert not kernel["ok"] and kernel["registers"] is None
    assert "[d_y * factor for" in source.splitlines()[kernel["error"]["line"] - 1]
    assert kernel["error"]["kind"] == "unsupported_op" and "scale_bwd_kernel" in kernel["error"]["message"]


def test_specialisation__aligned_and_unaligned_sizes__are_different_kernels(write, tmp_path):
    cases = [
        CASE | {"dims": {"N": 48}},
        CASE | {"id": 1, "dims": {"N": 64}},
        CASE | {"id": 2, "dims": {"N": 41}},
    ]
    path = write(SCALE_PAIR.replace("BLOCK=16", "BLOCK=1024"))
    aligned, also_aligned, odd = (c["kernels"][0] for c in run(path, tmp_path, cases))
    assert aligned["instructions"] == also_aligned["instructions"] != odd["instructions"]


def test_failing_case__in_a_child__is_reported_beside_the_others(run_op, write):
    cases = [CASE | {"dims": {"Z": 1}}, CASE | {"id": 1}]
    ran = run_op("facts", write(SCALE_PAIR), compile=False, cases=cases)
    assert [case["ok"] for case in ran.result["cases"]] == [False, True], ran.output
    assert ran.result["cases"][0]["error"]["kind"] == "make_args_raised"


OCCUPANCY = """\
import torch
import triton
import triton.language as tl
from kernel_agent import autodiff

SWEEP = [{"N": 40}]


@triton.jit
def double_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr, num_stages: tl.constexpr):
    for start in tl.range(tl.program_id(0) * BLOCK, n, BLOCK * tl.num_programs(0), num_stages=num_stages):
        offsets = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + offsets, mask=offsets < n)
        tl.store(y_ptr + offsets, 2 * x, mask=offsets < n)


@autodiff(inputs_require_grad=(0,))
def double(x):
    y = torch.empty_like(x)
    device = triton.runtime.driver.active.get_active_torch_device()
    properties = triton.runtime.driver.active.utils.get_device_properties(device.index)
    kernel = double_kernel.warmup(x, y, x.numel(), BLOCK=16, num_stages=4, num_warps=8, grid=(1,))
    kernel._init_handles()
    blocks = properties["max_num_regs"] // (kernel.n_regs * properties["warpSize"] * 8)
    blocks = min(blocks, properties["max_shared_mem"] // max(kernel.metadata.shared, 1))
    kernel[(min(blocks, 2), 1, 1)](x, y, x.numel(), 16, 4)
    return y


def make_args(dims, device="cuda", dtype=torch.float32):
    return (torch.randn(dims["N"], device=device, dtype=dtype),)
"""


def test_warmup__occupancy_as_in_real_files__is_answered_by_compiling(write):
    fwd = forward.load(write(OCCUPANCY))
    (x,), _ = draw.make_inputs(fwd, {"N": 40}, 0)
    seen = []
    with forward.launch_intercept(lambda launch: (seen.append(launch), launch.run())):
        assert torch.equal(fwd.call((x,)), 2 * x)
    assert (seen[0].grid, seen[0].num_warps, seen[0].args["num_stages"]) == ((2, 1, 1), 8, 4)
    (answer,) = [a for a in fwd.device_answers if a["asked"] == "double_kernel.warmup"]
    assert "registers" in answer["answer"]


def test_races_and_gradients_that_no_kernel_made__are_told(write, tmp_path):
    (clean,) = run(write(SCALE_PAIR), tmp_path, compile=False, conduct=True)
    assert (clean["conduct"]["races"], clean["conduct"]["untraced"]) == ([], [])
    (unasked,) = run(write(SCALE_PAIR), tmp_path, compile=False)
    assert "conduct" not in unasked
    shared = SCALE_PAIR.replace("tl.store(d_x_ptr + offsets, ", "tl.store(d_x_ptr + offsets % 7, ")
    (racing,) = run(write(shared), tmp_path, compile=False, conduct=True)
    assert racing["conduct"]["races"]
    line = "return d_x, None"
    assert SCALE_PAIR.count(line) == 1
    (decoy,) = run(
        write(SCALE_PAIR.replace(line, "return d_y * 2, None")), tmp_path, compile=False, conduct=True
    )
    assert decoy["conduct"]["untraced"] == ["x"]
    assert decoy["conduct"]["torch_ops_backward"].get("aten::mul")


@pytest.mark.parametrize(
    ("at", "code", "where"),
    [
        ("d_x = torch.empty_like", "assert d_y.numel() == 0; d_x = torch.empty_like", "host"),
        (
            "tl.store(d_x_ptr",
            "tl.inline_asm_elementwise('', '', [1], tl.float32, True, 1); tl.store(d_x_ptr",
            "kernel",
        ),
        ("y = torch.empty_like", "assert x.numel() == 0; y = torch.empty_like", "forward"),
    ],
)
def test_case_that_raises__says_where(write, tmp_path, at, code, where):
    assert SCALE_PAIR.count(at) == 1, at
    (case,) = run(write(SCALE_PAIR.replace(at, code)), tmp_path, compile=False)
    assert (case["ok"], case["raised_in"]) == (False, where), case["error"]
    assert case["everywhere"] is False, "what an assertion says may hang on the data"


@pytest.mark.parametrize(
    "code",
    [
        "tl.zeroes(3)",
        "contigous(d_y)",
        "scale_bwd_kernel[(1,)](d_y)",
        "scale_bwd_kernel[(1,)](d_y, d_y, 3, BLOK=2)",
    ],
)
def test_case_that_raises__says_that_every_call_would(write, tmp_path, code):
    at = "d_x = torch.empty_like"
    (case,) = run(write(SCALE_PAIR.replace(at, f"{code}; {at}")), tmp_path, compile=False)
    assert case["everywhere"] is True, case


def test_case_whose_forward_raises__is_no_fault_of_the_candidate(write, tmp_path):
    at = "y = torch.empty_like"
    (case,) = run(write(SCALE_PAIR.replace(at, f"contigous(x); {at}")), tmp_path, compile=False)
    assert (case["raised_in"], case["everywhere"]) == ("forward", False), case


def of_real_sizes(path, scratch, dims):
    request = {"file": str(path), "target": "sm_90", "compile": True, "cases": [CASE], "real": [dims]}
    compiled.use(None)
    found = facts.run(request, scratch)
    compiled.leave(scratch)
    return found["kernels"], found["widest"]


def test_sizes_too_large_to_be_run__have_their_kernels(write, tmp_path):
    grown = SCALE_PAIR.replace(
        "d_y.numel(), BLOCK=16", "d_y.numel(), BLOCK=triton.next_power_of_2(d_y.numel())"
    )
    assert grown != SCALE_PAIR
    (kernel,), widest = of_real_sizes(write(grown), tmp_path, {"N": 2**40})  # four tebibytes
    assert widest == 2**36
    assert (kernel["name"], kernel["pass"]) == ("scale_bwd_kernel", "backward") and kernel["constexprs"] == {
        "BLOCK": 2**40
    }


def test_sizes_that_hang_on_values__have_none(write, tmp_path):
    at = "d_x = torch.empty_like"
    source = SCALE_PAIR.replace(at, f"n = int(d_y[0].item()); {at}")
    assert of_real_sizes(write(source), tmp_path, {"N": 2**40}) == ([], None)


SYMBOLS = """
import json, sys
from pathlib import Path
import torch
from kernel_agent import compiled
from kernel_agent.operations import facts

name = "torch.fx.experimental.symbolic_shapes"
file, scratch, n = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
case = {"id": 0, "dims": {"N": 3}, "seed": 1, "upstream": {"kind": "normal", "seed": 2}}


def found():
    compiled.use(None)
    made = facts.run({"file": file, "compile": True, "cases": [case], "real": [{"N": n}]}, scratch)
    kernels = [(kernel["name"], kernel["constexprs"], kernel["compile"]) for kernel in made["kernels"]]
    return kernels, made["widest"]


with facts._without_compiler():
    x = torch.empty(3, 5, device="meta")
    shapes = [made.shape for made in (torch.empty_like(x), x.t().contiguous(), x.sum(0))]
first, light = found(), "sympy" not in sys.modules and name not in sys.modules
with facts._without_compiler():
    sums = torch.empty(3, 5, device="meta") + torch.empty(5, device="meta")  # asks for what is not answered
    whole = type(sys.modules[name]).__name__
again = found()
print(json.dumps([first, again, light, whole, sums.shape, shapes, name in sys.modules]))
"""


def test_sizes_too_large_to_be_run__import_no_symbols__and_have_the_same_kernels(write, tmp_path):
    """Importing sympy takes longer than all else that is asked of a variant of the tuner."""
    grown = SCALE_PAIR.replace(
        "d_y.numel(), BLOCK=16", "d_y.numel(), BLOCK=triton.next_power_of_2(d_y.numel())"
    )
    done = subprocess.run(
        [sys.executable, "-c", SYMBOLS, str(write(grown)), str(tmp_path), "4096"],
        env={**os.environ, "PYTHONPATH": str(SANDBOX)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    first, again, light, whole, sums, shapes, kept = json.loads(done.stdout)
    assert first == again and first[0][0][:2] == ["scale_bwd_kernel", {"BLOCK": 4096}]
    assert light and whole == "module" and kept
    assert sums == [3, 5] and shapes == [[3, 5], [5, 3], [5]]


@pytest.mark.parametrize(
    ("name", "of", "answer"),
    [
        ("expect_true", (False,), False),
        ("guard_or_true", (False,), False),
        ("guard_or_false", (True,), True),
        ("is_nested_int", (3,), False),
        ("sym_eq", ((2, 3), [2, 3]), True),
        ("sym_eq", ((2, 3), (2, 4)), False),
        ("sym_eq", ((2, 3), (2, 3, 1)), False),
    ],
)
def test_what_is_asked_about_plain_numbers__has_the_answer_of_torch(monkeypatch, name, of, answer):
    assert getattr(importlib.import_module(facts._SYMBOLS), name)(*of) is answer
    monkeypatch.setattr(facts, "_symbols", lambda: pytest.fail("asked of torch"))
    assert getattr(facts._Symbols(facts._SYMBOLS), name)(*of) is answer
