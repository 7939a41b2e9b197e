"""Operation candidate: what it writes and reports for right, wrong and dishonest pairs."""

from __future__ import annotations

import _thread
import re
import time

import pytest
import torch
from kernel_agent import draw, forward, fresh_memory, tensors, watching
from kernel_agent.operations import budget, candidate, questions
from sources import SCALE, SCALE_PAIR

CASE = {"id": 0, "dims": {"N": 37}, "seed": 5, "upstream": {"kind": "normal", "seed": 4}}


def run(path, scratch, **fields):
    """One case in this process: its entry of `cases` and its tensors."""
    request = {"file": str(path), "device": "cpu", "target": "sm_90", "dtype": None, "entry": None}
    result = candidate.run(request | {"cases": [CASE | fields]}, scratch)["cases"][0]
    return result, tensors.load(scratch / result["file"]) if result["ok"] else {}


def upstream(shape, at=0, count=1, **spec):
    spec = CASE["upstream"] | spec
    return draw.upstream(
        spec["kind"], spec["seed"], spec.get("layout"), shape, torch.float32, "cpu", at, count
    )


def inputs(path, dims=None):
    return draw.make_inputs(forward.load(path), dims or CASE["dims"], CASE["seed"])


def edit(*changes: tuple[str, str]) -> str:
    source = SCALE_PAIR
    for old, new in changes:
        assert old in source
        source = source.replace(old, new)
    return source


def test_right_pair__writes_outputs_and_gradients(write, tmp_path):
    path = write(SCALE_PAIR)
    result, made = run(path, tmp_path, twice=True, noop=True)
    (x,), _ = inputs(path)
    assert set(made) == {"out/0", "grad/x", "again/x", "noop/x"}
    assert torch.equal(made["out/0"], 2 * x)
    assert torch.equal(made["grad/x"], 2 * upstream((37,)))
    assert torch.equal(made["again/x"], made["grad/x"])
    assert made["noop/x"].isnan().all(), "nothing wrote the poisoned gradient"
    assert (result["launches_forward"], result["launches_backward"]) == (1, 1)
    assert result["modified"] == result["aliases"] == result["none"] == []
    assert result["torch_ops_backward"] == {"aten::empty_like": 1}
    assert result["outputs"] == [
        {"index": 0, "kind": "tensor", "shape": [37], "dtype": "float32", "differentiable": True}
    ]


def test_right_pair__in_a_child_process__writes_the_same(run_op, write, tmp_path):
    path = write(SCALE_PAIR)
    _, here = run(path, tmp_path)
    ran = run_op("candidate", path, entry="scale_autograd", cases=[CASE])
    assert ran.result["ok"] and ran.result["entry"] == "scale_autograd", ran.output
    there = tensors.load(ran.scratch / ran.result["cases"][0]["file"])
    assert all(torch.equal(here[name], there[name]) for name in ("out/0", "grad/x"))


@pytest.mark.parametrize("kind", draw.UPSTREAM_KINDS)
def test_upstream__every_kind__reaches_the_backward(kind, write, tmp_path):
    spec = {"kind": kind, "seed": 9}
    _, made = run(write(SCALE_PAIR), tmp_path, upstream=spec)
    assert torch.equal(made["grad/x"], 2 * upstream((37,), **spec))


@pytest.mark.parametrize("layout", ["stacked", "expanded", "slice"])
def test_upstream__every_layout__reaches_the_backward(layout, write, tmp_path):
    strides = "print(d_y.stride(), file=sys.stderr)"
    path = write("import sys\n" + edit((LAUNCH, f"{strides}; d_y = d_y.contiguous(); {LAUNCH}")))
    _, made = run(path, tmp_path, layouts={"upstream/0": layout})
    assert torch.equal(made["grad/x"], 2 * upstream((37,), layout=layout))


def test_powers__are_of_the_same_graph_and_upstream(write, tmp_path):
    _, made = run(write(SCALE_PAIR), tmp_path, powers=[65536.0, 2.0**-16])
    assert torch.equal(made["power0/x"], 65536 * made["grad/x"])
    assert torch.equal(made["power1/x"], made["grad/x"] / 65536)


LAUNCH = "scale_bwd_kernel[(triton.cdiv(d_y.numel(), 16),)](d_y, d_x, ctx.factor, d_y.numel(), BLOCK=16)"


def test_torch_instead_of_kernels__shows_in_the_record(write, tmp_path):
    result, _ = run(write(edit((LAUNCH, "d_x = d_y * ctx.factor"))), tmp_path)
    assert result["launches_backward"] == 0 and result["torch_ops_backward"]["aten::mul"] == 1


def test_decoy_launch__noop_rerun_changes_nothing(write, tmp_path):
    _, made = run(write(edit(("return d_x, None", "return d_y * ctx.factor, None"))), tmp_path, noop=True)
    assert torch.equal(made["noop/x"], made["grad/x"])


def test_tail_not_written__is_nan(write, tmp_path):
    _, made = run(write(edit((LAUNCH, LAUNCH.replace("triton.cdiv(d_y.numel(), 16)", "2")))), tmp_path)
    assert made["grad/x"][32:].isnan().all() and not made["grad/x"][:32].isnan().any()


@pytest.mark.parametrize(
    ("change", "modified"),
    [
        (("d_x = torch.empty_like(d_y)", "d_x = torch.empty_like(d_y); ctx.x.zero_()"), ["x"]),
        (("d_y = d_y.contiguous()", "d_y.mul_(2)"), ["upstream/0"]),
        (("d_x = torch.empty_like(d_y)", "d_x = torch.empty_like(d_y); ctx.kept.zero_()"), ["saved/0"]),
        (("return scale(x, factor)", "x.mul_(2); return scale(x, factor)"), ["x"]),
    ],
)
def test_modified_tensors__are_listed(change, modified, write, tmp_path):
    keep = ("ctx.factor = factor", "ctx.factor = factor; ctx.x = x; ctx.kept = x.clone()")
    keep = keep if "ctx." in change[1] else ("ctx.factor = factor", "ctx.factor = factor; x = x.detach()")
    result, _ = run(write(edit(keep, change)), tmp_path)
    assert result["modified"] == modified


def test_modified_tensors__by_the_stub_and_then_by_the_backward__are_listed(write, tmp_path):
    """The copy of an input that the stub may update is made anew before the backward."""
    source = edit(
        ("    y = torch.empty_like(x)\n", "    y = torch.empty_like(x)\n    x.data.add_(1)\n"),
        ("ctx.factor = factor", "ctx.factor = factor; ctx.x = x"),
        ("d_x = torch.empty_like(d_y)", "d_x = torch.empty_like(d_y); ctx.x.data.add_(1)"),
    )
    result, _ = run(write(source), tmp_path)
    assert result["modified"] == ["x"]


def test_watch__from_here__copies_only_what_was_modified():
    a, b = torch.zeros(3), torch.zeros(3)
    watch = watching.Watch()
    watch.add("a", a)
    watch.add("b", b)
    a += 1
    later = watch.from_here(watch.modified())
    assert watch.modified() == ["a"] and later.modified() == []
    assert later._seen["b"][1] is watch._seen["b"][1]
    b += 1
    assert later.modified() == ["b"]


def test_engines_own_thread__has_no_frame_but_ours():
    """On a GPU autograd runs a backward on a thread of its own, which no Python began."""
    found: list[bool] = []
    for caller in (map(watching._by_engine, [None]), (watching._by_tuner() for _ in [None])):
        before = len(found)
        _thread.start_new_thread(found.extend, (caller,))
        for _ in range(10_000):
            if len(found) == before:
                time.sleep(0.001)
    assert found == [True, False]


def test_stub_call__keeps_no_values(write):
    fwd = forward.load(write(SCALE_PAIR))
    (output,) = candidate.Case(fwd, fwd.stub, CASE, None).call_stub().outputs
    assert output.value.untyped_storage().nbytes() == 4
    assert (output.shape, output.dtype, output.value.device.type) == ([37], "float32", "cpu")


def test_stub_that_updates_an_input__is_not_the_candidates_doing(write, tmp_path):
    source = edit(("    y = torch.empty_like(x)\n", "    y = torch.empty_like(x)\n    x.data.add_(1)\n"))
    result, _ = run(write(source), tmp_path)
    assert result["modified"] == []


def test_saved_memory__beyond_the_inputs__is_counted(write, tmp_path):
    saving = (
        "ctx.factor = factor",
        "ctx.factor = factor; ctx.save_for_backward(x, x.double()); ctx.k = x.half()",
    )
    result, _ = run(write(edit(saving)), tmp_path)
    assert result["saved_bytes"] == 37 * 8 + 37 * 2


@pytest.mark.parametrize(
    ("returned", "aliases"),
    [("d_y", ["grad/x=upstream/0"]), ("ctx.x", ["grad/x=x"]), ("d_x", [])],
)
def test_gradient_that_shares_memory__is_listed(returned, aliases, write, tmp_path):
    source = edit(("ctx.factor = factor", "ctx.factor = factor; ctx.x = x.detach()"))
    result, _ = run(write(source.replace("return d_x, None", f"return {returned}, None")), tmp_path)
    assert result["aliases"] == aliases


def test_gradients_that_are_one_tensor__are_the_same_and_no_aliases(write, tmp_path):
    source = edit(
        ("inputs_require_grad=(0,)", "inputs_require_grad=(0, 1)"),
        ("def scale(x, factor=2.0):", "def scale(x, r, factor=2.0):"),
        ("    y = torch.empty_like(x)\n", "    x = x + r\n    y = torch.empty_like(x)\n"),
        ("dtype=dtype),)", "dtype=dtype),) * 2"),
        ("def forward(ctx, x, factor):", "def forward(ctx, x, r, factor):"),
        ("return scale(x, factor)", "return scale(x, r, factor)"),
        ("def scale_autograd(x, factor=2.0):", "def scale_autograd(x, r, factor=2.0):"),
        ("Scale.apply(x, factor)", "Scale.apply(x, r, factor)"),
        ("return d_x, None", "return d_x, d_x, None"),
    )
    result, _ = run(write(source), tmp_path)
    assert result["same"] == ["grad/r=grad/x"] and result["aliases"] == []
    result, _ = run(write(source), tmp_path, dims={"N": 0})
    assert result["same"] == []
    source = source.replace("d_x = torch.empty_like(d_y)", "d_x, more = torch.empty((2, *d_y.shape))")
    apart = source.replace("return d_x, d_x, None", "return d_x, more.copy_(d_x), None")
    result, _ = run(write(apart), tmp_path)
    assert result["same"] == result["aliases"] == []
    shifted = source.replace("return d_x, d_x, None", "return d_x, d_x.as_strided((37,), (0,)), None")
    result, _ = run(write(shifted), tmp_path)
    assert result["same"] == [] and result["aliases"] == ["grad/r=grad/x"]


def test_gradient_of_another_type__is_candidate_shape(write, tmp_path):
    lazy = "class Lazy(torch.Tensor):\n    pass\n\n\nclass Scale("
    source = edit(("class Scale(", lazy), ("return d_x, None", "return d_x.as_subclass(Lazy), None"))
    result, _ = run(write(source), tmp_path)
    assert not result["ok"] and result["error"]["kind"] == "candidate_shape"
    assert "Lazy" in result["error"]["message"]


@pytest.mark.parametrize(
    ("change", "kind", "message", "at"),
    [
        (
            ("return Scale.apply(x, factor)", "return Scale.apply(x, factor), 1"),
            "candidate_shape",
            "returns 2",
            None,
        ),
        (
            ("return Scale.apply(x, factor)", "return Scale.apply(x, factor).double()"),
            "candidate_shape",
            r"float64\[37\]",
            None,
        ),
        (
            ("d_y = d_y.contiguous()", "d_y = d_y.view(3, 3)"),
            "candidate_raised",
            "RuntimeError",
            "d_y.view(3, 3)",
        ),
        (
            ("return d_x, None", "raise SystemExit(0)"),
            "candidate_raised",
            "SystemExit: 0",
            "raise SystemExit",
        ),
        (("return d_x, None", "return d_x"), "candidate_raised", "incorrect number of gradients", None),
        (
            (LAUNCH, LAUNCH.replace("d_y.numel(), BLOCK", "99, BLOCK")),
            "candidate_raised",
            "out of bounds",
            "tl.load(d_y",
        ),
    ],
)
def test_failing_candidate__has_kind_and_line(change, kind, message, at, write, tmp_path):
    source = edit(change)
    result, _ = run(write(source), tmp_path)
    error = result["error"]
    assert error["kind"] == kind and re.search(message, error["message"]), error
    if at is not None:
        assert at in source.splitlines()[error["line"] - 1]
        assert "sandbox/kernel_agent" not in error["traceback"]


def test_cases__one_fails__the_others_are_run(write, tmp_path):
    request = {"file": str(write(SCALE_PAIR)), "device": "cpu", "entry": "scale_autograd"}
    bad = CASE | {"id": 1, "dims": {"Z": 3}}
    result = candidate.run(request | {"cases": [CASE, bad, CASE | {"id": 2}]}, tmp_path)
    assert [(c["id"], c["ok"]) for c in result["cases"]] == [(0, True), (1, False), (2, True)]
    assert result["cases"][1]["error"]["kind"] == "make_args_raised"


def test_cases__one_leaves_the_gpu_unusable__the_others_are_not_run(write, tmp_path, monkeypatch):
    monkeypatch.setattr(budget, "is_lost", lambda device: True)
    request = {"file": str(write(SCALE_PAIR)), "device": "cpu", "entry": "scale_autograd"}
    bad = CASE | {"id": 1, "dims": {"Z": 3}}
    first, second, third = candidate.run(request | {"cases": [CASE, bad, CASE | {"id": 2}]}, tmp_path)[
        "cases"
    ]
    assert first["ok"] and second["error"]["kind"] == "make_args_raised"
    assert third["error"]["message"] == 'not run: a case of {"Z": 3} before it left the GPU unusable'


@pytest.mark.parametrize(
    ("source", "entry", "message"),
    [
        (SCALE, None, "no function scale_autograd"),
        (SCALE_PAIR, "other_autograd", "no function other_autograd"),
        (
            SCALE_PAIR.replace("scale_autograd(x, factor=2.0)", "scale_autograd(x)"),
            None,
            r"scale_autograd\(x\)",
        ),
    ],
)
def test_entry__missing_or_other_parameters__is_refused(source, entry, message, write, tmp_path):
    with pytest.raises(forward.Unusable, match=message):
        candidate.run({"file": str(write(source)), "entry": entry, "cases": [CASE]}, tmp_path)


MANY = """\
import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):
    return lambda stub: stub


SWEEP = [{"N": 8}]


@triton.jit
def product_kernel(x_ptr, w_ptr, a_ptr, b_ptr, n, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    mask = offsets < n
    x = tl.load(x_ptr + offsets, mask=mask)
    w = tl.load(w_ptr + offsets, mask=mask)
    tl.store(a_ptr + offsets, x * w, mask=mask)
    tl.store(b_ptr + offsets, x + w, mask=mask)


@autodiff(inputs_require_grad=(0, 2))
def product(x, flag, w, *, bias=None, dtype=torch.float32):
    a, b = torch.empty_like(x), torch.empty_like(x)
    product_kernel[(1,)](x, w, a, b, x.numel(), BLOCK=64)
    return (a, {"b": b}), None, x.numel(), x, a.detach().clone().detach(), b.to(torch.int32), "text"


def make_args(dims, device="cuda", dtype=torch.float32):
    x, w = (torch.randn(dims["N"], device=device, dtype=dtype) for _ in range(2))
    return (x, True, w), {"bias": None, "dtype": torch.float32}


# ---- backward ----


@triton.jit
def product_bwd_kernel(x_ptr, w_ptr, d_a_ptr, d_b_ptr, d_x_ptr, d_w_ptr, n, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    mask = offsets < n
    d_a = tl.load(d_a_ptr + offsets, mask=mask) if d_a_ptr is not None else tl.zeros([BLOCK], tl.float32)
    d_b = tl.load(d_b_ptr + offsets, mask=mask) if d_b_ptr is not None else tl.zeros([BLOCK], tl.float32)
    if d_x_ptr is not None:
        tl.store(d_x_ptr + offsets, d_a * tl.load(w_ptr + offsets, mask=mask) + d_b, mask=mask)
    if d_w_ptr is not None:
        tl.store(d_w_ptr + offsets, d_a * tl.load(x_ptr + offsets, mask=mask) + d_b, mask=mask)


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, flag):
        (a, extra), _, n, _, detached, ints, text = product(x, flag, w)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(detached, ints)
        ctx.save_for_backward(x, w)
        return a, extra["b"], detached, ints

    @staticmethod
    def backward(ctx, d_a, d_b, d_detached, d_ints):
        x, w = ctx.saved_tensors
        d_x = torch.empty_like(x) if ctx.needs_input_grad[0] else None
        d_w = torch.empty_like(w) if ctx.needs_input_grad[1] else None
        product_bwd_kernel[(1,)](x, w, d_a, d_b, d_x, d_w, x.numel(), BLOCK=64)
        return d_x, d_w, None


def product_autograd(x, flag, w, *, bias=None, dtype=torch.float32):
    a, b, detached, ints = Product.apply(x, w, flag)
    return (a, {"b": b}), None, x.numel(), x, detached, ints, "text"
"""
MANY_DIMS = {"N": 8}


def test_mixed_outputs__are_flattened_and_classified(write, tmp_path):
    result, made = run(write(MANY), tmp_path, dims=MANY_DIMS)
    assert result["ok"], result
    assert [(o["kind"], o["differentiable"]) for o in result["outputs"]] == [
        ("tensor", True),
        ("tensor", True),
        ("none", False),
        ("int", False),
        ("input", False),
        ("tensor", False),
        ("tensor", False),
        ("other", False),
    ]
    assert result["outputs"][3]["value"] == 8
    assert {"out/0", "out/1", "out/4", "out/5", "out/6", "grad/x", "grad/w"} == set(made)
    assert made["out/6"].dtype == torch.int32


@pytest.mark.parametrize("seed", [4, 5])
def test_none_one__two_outputs__leaves_one_out(seed, write, tmp_path):
    path = write(MANY)
    spec = {"kind": "none_one", "seed": seed}
    _, made = run(path, tmp_path, dims=MANY_DIMS, upstream=spec)
    (x, _, w), _ = inputs(path, MANY_DIMS)
    d_a, d_b = (upstream((8,), at, 2, **spec) for at in range(2))
    assert (d_a is None) == (seed % 2 == 0) and (d_b is None) == (seed % 2 == 1)
    d_a, d_b = (torch.zeros(8) if d is None else d for d in (d_a, d_b))
    assert torch.allclose(made["grad/x"], d_a * w + d_b)
    assert torch.allclose(made["grad/w"], d_a * x + d_b)


@pytest.mark.parametrize("needs", [["x"], ["w"], ["x", "w"]])
def test_needs__subset__only_those_gradients(needs, write, tmp_path):
    path = write(MANY)
    _, made = run(path, tmp_path, dims=MANY_DIMS, needs=needs)
    _, full = run(path, tmp_path, dims=MANY_DIMS)
    assert {name for name in made if name.startswith("grad/")} == {f"grad/{name}" for name in needs}
    assert all(torch.equal(made[f"grad/{name}"], full[f"grad/{name}"]) for name in needs)


def test_gradient_that_is_none__is_listed_and_has_no_tensor(write, tmp_path):
    result, made = run(
        write(MANY.replace("return d_x, d_w, None", "return d_x, None, None")), tmp_path, dims=MANY_DIMS
    )
    assert result["none"] == ["w"] and "grad/w" not in made


def test_facts__when_asked__count_forward_and_backward(write, tmp_path):
    result, _ = run(write(MANY), tmp_path, dims=MANY_DIMS, facts=True)
    assert result["facts"]["forward"] == {
        "launches": 1,
        "programs": 1,
        "widest": 1,
        "bytes_read": 128,  # 8 floats: x and w by the kernel, the copy and the cast by torch
        "bytes_written": 128,
        "atomics": 0,
    }
    assert result["facts"]["backward"]["bytes_read"] == 4 * 32
    assert "facts" not in run(write(MANY), tmp_path, dims=MANY_DIMS)[0]


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, torch.int64, torch.int32, torch.uint8, torch.bool]
)
def test_poison__every_dtype__fills_with_something_recognisable(dtype):
    tensor = torch.zeros(4, dtype=dtype)
    fresh_memory.poison(tensor)
    assert tensor.isnan().all() if dtype.is_floating_point else (tensor != 0).all()


def test_float16__on_request__gradients_have_the_inputs_dtype(write, tmp_path):
    request = {"file": str(write(SCALE_PAIR)), "dtype": "float16", "cases": [CASE]}
    result = candidate.run(request, tmp_path)["cases"][0]
    assert result["outputs"][0]["dtype"] == "float16"
    assert tensors.load(tmp_path / result["file"])["grad/x"].dtype == torch.float16


def test_one_element__with_a_stride__has_bytes(tmp_path):
    """A single element counts as contiguous whatever its stride, and cannot be viewed as bytes."""
    one = torch.arange(4.0)[2::3]
    assert one.stride() == (3,) and watching.same_bytes(one, torch.tensor([2.0]))
    tensors.save(tmp_path / "one.safetensors", {"one": one})
    assert tensors.load(tmp_path / "one.safetensors")["one"].item() == 2.0


def test_repeats_and_linearity__give_gradients_over_the_same_graph(write, tmp_path):
    case = {"id": 0, "dims": {"N": 8}, "seed": 1, "upstream": {"kind": "normal", "seed": 2}}
    case |= {"repeats": 2, "linear": [3.0, 2.0]}
    request = {"file": str(write(SCALE_PAIR)), "device": "cpu", "cases": [case]}
    (result,) = candidate.run(request, tmp_path)["cases"]
    found = tensors.load(tmp_path / result["file"])
    first, other = found["grad/x"], found["other/x"]
    assert torch.equal(found["repeat0/x"], first) and torch.equal(found["repeat1/x"], first)
    assert not torch.equal(other, first)
    assert torch.allclose(found["sum/x"], 3 * first + 2 * other)


def test_linearity__in_half_precision__asks_for_a_sum_that_is_not_rounded(write, tmp_path):
    """A gradient in float32 of outputs in bfloat16 would be off by the rounding of the sum."""
    request = {"file": str(write(SCALE_PAIR)), "dtype": "bfloat16", "cases": [CASE | {"linear": [3.0, 2.0]}]}
    (result,) = candidate.run(request, tmp_path)["cases"]
    found = tensors.load(tmp_path / result["file"])
    first, other, both = (found[f"{part}/x"].double() for part in ("grad", "other", "sum"))
    assert torch.equal(both, 3 * first + 2 * other)
    assert len((other / first).unique()) == 4


def test_cases_of_one_shape__call_the_plain_stub_once(write, tmp_path, monkeypatch):
    calls = []
    right = candidate.Case.call_stub
    monkeypatch.setattr(candidate.Case, "call_stub", lambda case: calls.append(case.id) or right(case))
    dims = [{"N": 8}, {"N": 8}, {"N": 5}, {"N": 8}]
    cases = [
        {"id": at, "dims": d, "seed": at, "upstream": {"kind": "normal", "seed": 2}}
        for at, d in enumerate(dims)
    ]
    results = candidate.run({"file": str(write(SCALE_PAIR)), "device": "cpu", "cases": cases}, tmp_path)[
        "cases"
    ]
    assert all(result["ok"] for result in results)
    assert calls == [0, 2]


def test_output_that_depends_on_the_data__is_found_out_anew(write, tmp_path):
    """The number of positive inputs is an output: of another seed it is another number, which is no fault of
    the candidate."""
    source = SCALE_PAIR.replace("    return y\n\n", "    return y, int((x > 0).sum())\n\n", 1)
    source = source.replace("def backward(ctx, d_y):", "def backward(ctx, d_y, _):")
    cases = [
        {"id": at, "dims": {"N": 8}, "seed": at, "upstream": {"kind": "normal", "seed": 2}} for at in range(4)
    ]
    results = candidate.run({"file": str(write(source)), "device": "cpu", "cases": cases}, tmp_path)["cases"]
    assert all(result["ok"] for result in results), [result.get("error") for result in results]
    assert len({result["outputs"][1]["value"] for result in results}) > 1


def test_operation_of_the_stub__spent_on_something_else__is_no_operation_of_the_stub(write, tmp_path):
    """The stub doubles its output by torch. A forward that multiplies another tensor, as often, does what the
    stub does not."""
    source = SCALE_PAIR.replace("    return y\n\n", "    return y * 2\n\n", 1)
    entry = "        return scale(x, factor)\n"
    assert source.count(entry) == 1
    case = {"id": 0, "dims": {"N": 8}, "seed": 1, "upstream": {"kind": "normal", "seed": 2}}
    for spent, reported in ((entry, []), ("        return x * 3\n", ["aten::mul"])):
        file = write(source.replace(entry, spent))
        (result,) = candidate.run({"file": str(file), "device": "cpu", "cases": [case]}, tmp_path)["cases"]
        assert result["torch_ops_forward"].keys() == set(reported), result


@pytest.mark.parametrize(("other", "alike"), [(1.001, True), (-1.0, False), (1.1, False), (0.0, False)])
def test_computed__is_told_by_its_values(other, alike):
    x = torch.linspace(-1, 1, 50)
    (a,), (b,) = (watching.Computed.of("aten::mul", value) for value in (x, x * other))
    assert a.is_like(b) is alike
    assert not a.is_like(*watching.Computed.of("aten::mul", x.flip(0) * 0.5 + x * 0.5 + x.roll(7)))
    assert not a.is_like(*watching.Computed.of("aten::mul", x.view(5, 10)))


OTHER = {"id": 1, "dims": {"N": 37}, "seed": 6, "upstream": {"kind": "normal", "seed": 8}}


def gradient_of_other():
    spec = OTHER["upstream"]
    return 2 * draw.upstream(spec["kind"], spec["seed"], None, (37,), torch.float32, "cpu", 0, 1)


def test_right_pair__two_graphs_alive__each_has_its_own_gradients(write, tmp_path):
    result, made = run(write(SCALE_PAIR), tmp_path, beside=OTHER, kept=True, stepped=OTHER, stale=OTHER)
    assert all(torch.equal(made[f"{part}/x"], made["grad/x"]) for part in ("held", "kept"))
    assert all(torch.equal(made[f"{part}/x"], gradient_of_other()) for part in ("beside", "after", "stepped"))
    assert torch.equal(made["stale.x/x"], gradient_of_other()), "it hangs on the upstream alone"
    assert result["stale_refused"] == [] and result["unnamed"] == []
    assert not torch.equal(made["beside_out/0"], made["kept_out/0"])
    assert torch.equal(made["kept_out/0"], made["out/0"])


def test_gradient_in_a_buffer_of_the_module__shows_later(write, tmp_path):
    source = edit(("d_x = torch.empty_like(d_y)", "d_x = KEPT.setdefault(d_y.shape, torch.empty_like(d_y))"))
    _, made = run(write(source + "\n\nKEPT = {}\n"), tmp_path, beside=OTHER, kept=True)
    assert torch.equal(made["held/x"], made["grad/x"])
    assert not torch.equal(made["kept/x"], made["grad/x"])


@pytest.mark.parametrize("saved", [True, False])
def test_input_changed_before_the_backward__raises_where_autograd_watches_it(saved, write, tmp_path):
    keep = "ctx.save_for_backward(x)" if saved else "ctx.x = x"
    kept = "ctx.saved_tensors[0]" if saved else "ctx.x"
    source = edit(
        ("ctx.factor = factor", f"ctx.factor = factor; {keep}"),
        ("d_x, ctx.factor, d_y", "d_x, ctx.factor, d_y"),
        ("(d_y, d_x,", f"({kept}, d_x,"),
    )
    result, made = run(write(source), tmp_path, beside=OTHER, stepped=OTHER, stale=OTHER)
    assert result["stale_refused"] == (["x"] if saved else [])
    assert ("stale.x/x" in made) is not saved


def test_saved_tensor_that_the_entry_changes_afterwards__raises_as_autograd_does(write, tmp_path):
    source = edit(
        ("ctx.factor = factor", "ctx.factor = factor; ctx.save_for_backward(x)"),
        ("    def backward(ctx, d_y):\n", "    def backward(ctx, d_y):\n        ctx.saved_tensors\n"),
        (
            "    return Scale.apply(x, factor)",
            "    z = x * 1\n    y = Scale.apply(z, factor)\n    z.zero_()\n    return y",
        ),
    )
    request = {"file": str(write(source)), "device": "cpu", "cases": [CASE]}
    error = candidate.run(request, tmp_path)["cases"][0]["error"]
    assert error["kind"] == "candidate_raised" and "changed in place" in error["message"]
    assert "ctx.saved_tensors" in source.splitlines()[error["line"] - 1]


def test_many_calls__are_counted_and_the_answer_is_the_same(write, tmp_path):
    result, made = run(write(SCALE_PAIR), tmp_path, calls=OTHER | {"dims": {"N": 1}})
    assert torch.equal(made["worn/x"], made["grad/x"])
    assert 1 <= result["calls"] <= questions.CALLS
    assert (result["launches_forward"], result["launches_backward"]) == (1, 1)


@pytest.mark.parametrize("memory", sorted(fresh_memory.MEMORY))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64, torch.int32, torch.bool])
def test_fresh_memory__every_kind__fills_every_dtype(memory, dtype):
    tensor = torch.full((7, 5), 3).to(dtype)
    fresh_memory.poison(tensor, memory)
    if dtype.is_floating_point:
        assert bool(tensor.isnan().all()) is (memory == "nan")
        assert bool(tensor.isfinite().all()) is (memory != "nan")
        assert (tensor.nan_to_num().unique().numel() > 1) is (memory in ("large", "bits"))
    assert bool((tensor == 0).all()) is (memory == "zero")


def test_another_default_than_the_stubs__is_refused(write, tmp_path):
    source = edit(("def scale_autograd(x, factor=2.0)", "def scale_autograd(x, factor=3.0)"))
    with pytest.raises(
        Exception, match=re.escape("scale_autograd() has factor=3.0 where scale() has factor=2.0")
    ):
        run(write(source), tmp_path)


def test_scalar__has_another_value__in_the_candidate(write, tmp_path):
    _, made = run(write(SCALE_PAIR), tmp_path, scalar={"name": "factor", "way": 0})
    assert torch.equal(made["grad/x"], 3 * upstream((37,)))


@pytest.mark.parametrize(
    ("layouts", "holds"),
    [
        ({}, "x.data_ptr() % 512 == 0 and x.untyped_storage().nbytes() == 4 * 37"),
        ({"x": "slice"}, "x.untyped_storage().nbytes() > 4 * 37"),
    ],
)
def test_input__that_is_whole__lies_as_a_gpu_allocator_would_have_it(layouts, holds, write, tmp_path):
    """An address must not tell a check from use; a part of another tensor lies where it lies."""
    before = "        ctx.factor = factor\n"
    path = write(edit((before, before + f"        assert {holds}\n")))
    result, made = run(path, tmp_path, layouts=layouts)
    assert result["ok"], result
    assert "grad/x" in made


def test_proportional__multiples__are_told_from_the_rest():
    a = torch.randn(5, 7)
    assert candidate.proportional(a, -3 * a.clone()) and candidate.proportional(a.view(-1), a.half())
    assert not candidate.proportional(a, a + 0.1 * torch.randn(5, 7))
    assert not candidate.proportional(a, torch.zeros(5, 7)) and not candidate.proportional(a, a[:3])
    assert not candidate.proportional(torch.ones(4), torch.ones(4)), (
        "what is the same everywhere says nothing"
    )
    assert not candidate.proportional(a, torch.full((5, 7), float("nan")))
