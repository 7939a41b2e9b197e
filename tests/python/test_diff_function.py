"""Derivatives of plain Triton functions: called in a small kernel, compared with torch's autograd in
float64."""

from __future__ import annotations

import os
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from kernel_agent import launches
from kernel_agent.differentiate import Refusal, grad
from sources import SANDBOX
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompilationError
from triton.compiler.errors import CompileTimeAssertionFailure

BOUND = 1e-12
M, N = 8, 16
torch_tl = types.SimpleNamespace(
    exp=torch.exp, erf=torch.erf, sum=lambda x, axis: x.sum(axis), where=torch.where
)


@pytest.fixture(autouse=True)
def interpreted():
    launches.set_mode("interpret")


@triton.jit
def gelu(x, w):
    return 0.5 * x * (1 + tl.erf(x * 0.7071067811865476)) * w


@triton.jit
def fan_out(x, y):
    a = tl.exp(x * y)
    b = a + x
    return a * b / (1 + b * b)


@triton.jit
def kinks(x, y):
    return tl.where(x > 0.2, tl.maximum(x, y), x * y)


@triton.jit
def squashed(x):
    return 1 / (1 + tl.exp(-x))


@triton.jit
def gated(x, y):
    h = squashed(x) * y
    return h + squashed(h)


@triton.jit
def horner(x, c):
    y = c
    for i in tl.static_range(4):
        y = y * x + (i + 1)
    return y


@triton.jit
def scaled(x, w, s):
    """Rows of x with one weight per column, and a scalar."""
    centred = x - tl.sum(x, axis=1)[:, None] * s
    return centred * w


@triton.jit
def softmax(x):
    e = tl.exp(x - tl.max(x, axis=1)[:, None])
    z = tl.zeros([8, 16], tl.float64) + e
    return z / tl.sum(e, axis=1)[:, None]


@triton.jit
def total(x, w):
    return tl.sum(x * w * tl.broadcast_to(w, [8, 16]))


@triton.jit
def summed(x):
    """The adjoint of the sum does not change in the loop: the loop stays one, and nothing is taped."""
    acc = tl.zeros_like(x)
    for i in range(3):
        acc += x * x * i
    return acc


@triton.jit
def switched(x, FLAG: tl.constexpr = True):
    y = x.to(tl.float64)
    if FLAG:
        y = tl.exp(y)
    return y


@triton.jit
def linear(a1, b1, a2, b2):
    return a1 * a2, b1 * a2 + b2


@triton.jit
def recurrence(a, b):
    _, h = tl.associative_scan((a, b), 0, linear)
    return h


@triton.jit
def running_product(x):
    return tl.cumprod(x, 0)


@triton.jit
def pair(x, y):
    return x * y, tl.exp(x) + y


@triton.jit
def powered(x, K: tl.constexpr):
    total = x
    for _ in tl.static_range(K):
        total += x * x
    return total if K > 1 else total * x


@triton.jit
def along(x, AXIS: tl.constexpr):
    return x / tl.sum(x * x, axis=AXIS, keep_dims=True)


mask = tl.constexpr(3.0)


@triton.jit
def named_as_gradients(x, d_x, d_out):
    return x * d_x + tl.exp(d_x * d_out) * x


@triton.jit
def named_as_ours(x, y):
    return tl.where(x > 0, x * mask, y * x * mask)


@triton.jit
def typed(x):
    if x.dtype == tl.float64:
        y = x * x
    else:
        y = x
    return y.to(x.dtype)


@triton.jit
def over_rows(x):
    y = x
    for _ in tl.static_range(x.shape[0]):
        y = y * x
    return y


@triton.jit
def taped(x, K: tl.constexpr):
    y = x
    for _ in range(K):
        y = tl.exp(y) * x
    return y


@triton.jit
def ignoring(x, y):
    return x * 2 + tl.floor(y)


def plain(x, y):
    return x / y


@triton.jit
def loading(x_ptr, n):
    at = tl.arange(0, 16)
    return tl.load(x_ptr + at) * n


@triton.jit
def helper_with_a_store(x, p):
    tl.store(p, x)
    return x


@triton.jit
def storing(x, p):
    return helper_with_a_store(x, p) * 2


@triton.jit
def numbered(x):
    return x * tl.program_id(0)


@triton.jit
def counting(x):
    return tl.atomic_add(x, 1)


@triton.jit
def nothing(x):
    y = x * 2  # noqa: F841


def launching(x):
    gelu[(1,)](x)
    return x


KERNEL = """
import triton
import triton.language as tl
@triton.jit
def kernel({pointers}):
    rows, cols = tl.arange(0, {M})[:, None], tl.arange(0, {N})
    block = rows * {N} + cols
    {assigned} = call({loads})
    {stores}
"""
AT = {(): "0", (N,): "cols", (M, N): "block", (M, 1): "rows"}


def run(
    tmp_path: Path,
    bwd: Any,
    inputs: list[torch.Tensor],
    upstream: list[torch.Tensor],
    wrt: list[int],
    tail: str = "",
):
    """What `bwd` returns for one block of each input, stored by a kernel."""
    given = [*inputs, *upstream]
    outputs = [torch.full_like(inputs[i], float("nan")) for i in wrt]
    pointers = [f"p{i}" for i in range(len(given))] + [f"q{i}" for i in range(len(outputs))]
    loads = ", ".join(f"tl.load(p{i} + {AT[tuple(t.shape)]})" for i, t in enumerate(given))
    stores = "\n    ".join(f"tl.store(q{i} + {AT[tuple(t.shape)]}, d{i})" for i, t in enumerate(outputs))
    assigned = ", ".join(f"d{i}" for i in range(len(outputs)))
    text = KERNEL.format(
        M=M, N=N, pointers=", ".join(pointers), assigned=assigned, loads=loads + tail, stores=stores
    )
    file = tmp_path / "kernel.py"
    file.write_text(text)
    names: dict[str, Any] = {"call": bwd, "__name__": "kernel_of_a_test"}
    exec(compile(text, str(file), "exec"), names)  # noqa: S102 (the text is written above)
    names["kernel"][(1,)](*given, *outputs)
    return outputs


def as_torch(fn: Any, **names: Any) -> Any:
    """The same function over torch's operations."""
    names = {"tl": torch_tl, "squashed": torch.sigmoid, **names}
    return types.FunctionType(fn.fn.__code__, {**names, "__builtins__": __builtins__})


def horner_torch(x: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    return c * x**4 + x**3 + 2 * x**2 + 3 * x + 4


def recurrence_torch(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    steps = [b[0]]
    for i in range(1, N):
        steps.append(steps[-1] * a[i] + b[i])
    return torch.stack(steps)


def kinks_torch(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.where(x > 0.2, torch.maximum(x, y), x * y)


CASES: dict[str, tuple[Any, Any, dict[str, Any] | None]] = {
    "gelu": (gelu, as_torch(gelu), None),
    "fan_out": (fan_out, as_torch(fan_out), None),
    "kinks": (kinks, kinks_torch, None),
    "nested_helper": (gated, as_torch(gated), None),
    "static_loop": (horner, horner_torch, {"x": (M, N), "c": ()}),
    "broadcast": (scaled, as_torch(scaled), {"x": (M, N), "w": (N,), "s": ()}),
    "column": (fan_out, as_torch(fan_out), {"x": (M, N), "y": (M, 1)}),
    "scan": (recurrence, recurrence_torch, None),
    "scan_with_a_generated_step": (running_product, lambda x: x.cumprod(0), None),
    "softmax": (softmax, lambda x: torch.softmax(x, 1), {"x": (M, N)}),
    "scalar_result": (total, lambda x, w: (x * w * w).sum(), {"x": (M, N), "w": (N,)}),
    "loop": (summed, lambda x: 3 * x * x, {"x": (N,)}),
    "default_of_a_constexpr": (switched, lambda x: torch.exp(x), {"x": (N,)}),
    "inputs_called_as_gradients_are": (named_as_gradients, as_torch(named_as_gradients), None),
    "constant_called_as_ours_are": (named_as_ours, lambda x, y: torch.where(x > 0, 3 * x, 3 * y * x), None),
    "two_results": (pair, as_torch(pair), {"x": (M, N), "y": (N,)}),
}


@pytest.mark.parametrize("name", sorted(CASES))
def test_function__gradients__equal_autograd(name: str, tmp_path: Path) -> None:
    fn, reference, shapes = CASES[name]
    bwd = grad(fn, shapes=shapes, dtype="float64")
    torch.manual_seed(len(name))
    sizes = [(N,)] * len(fn.arg_names) if shapes is None else list(shapes.values())
    inputs = [torch.randn(shape, dtype=torch.float64).requires_grad_() for shape in sizes]
    out = reference(*inputs)
    outs = out if isinstance(out, tuple) else (out,)
    upstream = [torch.randn_like(o) for o in outs]
    want = torch.autograd.grad(outs, inputs, upstream)
    got = run(tmp_path, bwd, [i.detach() for i in inputs], upstream, list(range(len(inputs))))
    for mine, theirs in zip(got, want, strict=True):
        assert (mine - theirs).norm() <= BOUND * theirs.norm(), bwd.source


def test_function__wrt__chooses_and_orders(tmp_path: Path) -> None:
    x, w, d = (torch.randn(N, dtype=torch.float64) for _ in range(3))
    both = run(tmp_path, grad(gelu, wrt=("w", 0), dtype="float64"), [x, w], [d], [1, 0])
    (only,) = run(tmp_path, grad(gelu, wrt="x", dtype="float64"), [x, w], [d], [0])
    assert torch.equal(only, both[1])
    assert torch.allclose(both[0], d * torch.nn.functional.gelu(x), rtol=BOUND)


def test_function__without_a_decorator__is_differentiated(tmp_path: Path) -> None:
    x, d = torch.randn(N), torch.randn(N)
    y = torch.rand(N) + 1
    dx, dy = run(tmp_path, grad(plain), [x, y], [d], [0, 1])
    assert torch.allclose(dx, d / y) and torch.allclose(dy, -d * x / y**2)


def test_function__constexpr_parameter__is_passed_by_name(tmp_path: Path) -> None:
    x, d = (torch.randn(N, dtype=torch.float64) for _ in range(2))
    for dims, k in (({}, 1), ({}, 3), ({"K": 3}, 3), ({"K": 3}, 1)):
        (dx,) = run(tmp_path, grad(powered, dims, dtype="float64"), [x], [d], [0], f", K={k}")
        want = 1 + 2 * k * x if k > 1 else 2 * x + 3 * x * x
        assert (dx - d * want).norm() <= BOUND * dx.norm(), (dims, k)


def test_function__number_that_the_text_depends_on__is_asserted(tmp_path: Path) -> None:
    x, d = torch.rand(M, N, dtype=torch.float64) + 1, torch.randn(M, N, dtype=torch.float64)
    bwd = grad(along, {"AXIS": 1}, shapes={"x": (M, N)}, dtype="float64")
    (dx,) = run(tmp_path, bwd, [x], [d], [0], ", AXIS=1")
    x.requires_grad_()
    (want,) = torch.autograd.grad(x / (x * x).sum(1, keepdim=True), x, d)
    assert (dx - want).norm() <= BOUND * want.norm()
    with pytest.raises(AssertionError):
        run(tmp_path, bwd, [x.detach()], [d], [0], ", AXIS=0")
    assert "static_assert(x.shape[0] == 5)" in grad(over_rows, shapes={"x": (5, 7)}).source


def test_function__question_about_a_type__is_asked_of_the_value(tmp_path: Path) -> None:
    bwd = grad(typed)
    for dtype in (torch.float32, torch.float64):
        x, d = torch.randn(N, dtype=dtype), torch.randn(N, dtype=dtype)
        (dx,) = run(tmp_path, bwd, [x], [d], [0])
        assert torch.allclose(dx, 2 * d * x if dtype == torch.float64 else d, atol=1e-6)


def test_function__derivative_of_the_derivative(tmp_path: Path) -> None:
    first = grad(squashed, dtype="float64")
    second = grad(first, wrt="x", dtype="float64")
    x, one, d = (
        torch.randn(N, dtype=torch.float64),
        torch.ones(N, dtype=torch.float64),
        torch.randn(N, dtype=torch.float64),
    )
    (dx,) = run(tmp_path, second, [x, one], [d], [0])
    s = torch.sigmoid(x)
    assert (dx - d * s * (1 - s) * (1 - 2 * s)).norm() <= 1e-6 * dx.norm()


def test_function__parameter_without_influence__gets_zeros(tmp_path: Path) -> None:
    x, y, d = (torch.randn(N) for _ in range(3))
    _, dy = run(tmp_path, grad(ignoring), [x, y], [d], [0, 1])
    assert torch.equal(dy, torch.zeros(N))


def test_function__called_with_another_broadcast__fails_loudly(tmp_path: Path) -> None:
    bwd = grad(gelu)
    with pytest.raises(AssertionError):
        run(tmp_path, bwd, [torch.randn(M, N), torch.randn(N)], [torch.randn(M, N)], [0, 1])


def test_source__is_a_module_that_compiles_and_is_commented() -> None:
    bwd = grad(fan_out)
    compile(bwd.source, "fan_out_bwd.py", "exec")
    assert "import triton\n" in bwd.source and "def fan_out_bwd(x, y, d_out):" in bwd.source
    assert "# a = tl.exp(x * y)" in bwd.source and "# reverse" in bwd.source
    assert Path(bwd.fn.__code__.co_filename).read_text() == bwd.source


COMPILED = """
import triton
import triton.language as tl
@triton.jit
def kernel(x, w, d, dx, dw, M: tl.constexpr, N: tl.constexpr):
    rows, cols = tl.arange(0, M)[:, None], tl.arange(0, N)
    at = rows * N + cols
    d_x, d_w = call(tl.load(x + at), tl.load(w + cols), tl.load(d + at))
    tl.store(dx + at, d_x)
    tl.store(dw + cols, d_w)
"""


def lowered(tmp_path: Path, bwd: Any) -> str:
    """Triton's own intermediate text of a kernel that calls `bwd`; no device takes part in it."""
    file = tmp_path / "compiled.py"
    file.write_text(COMPILED)
    names: dict[str, Any] = {"call": bwd, "__name__": "compiled_kernel_of_a_test"}
    exec(compile(COMPILED, str(file), "exec"), names)  # noqa: S102 (the text is written above)
    pointers = dict.fromkeys(("x", "w", "d", "dx", "dw"), "*fp32")
    constants: dict[Any, Any] = {"M": 32, "N": 64}
    source = ASTSource(names["kernel"], {**pointers, "M": "constexpr", "N": "constexpr"}, constants)
    return str(ir_of(source))


def ir_of(source: ASTSource) -> Any:
    from triton._C.libtriton import ir
    from triton.compiler import make_backend

    target = GPUTarget("cuda", 90, 32)
    backend = make_backend(target)
    options = backend.parse_options({})
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    codegen = backend.get_codegen_implementation(options)
    return source.make_ir(target, options, codegen, backend.get_module_map(), context)


def test_function__in_a_compiled_kernel__is_lowered_for_its_pattern_only(tmp_path: Path) -> None:
    text = lowered(tmp_path, grad(gelu, shapes={"x": (16, 32), "w": (32,)}))
    assert "math.erf" in text and "tt.reduce" in text and "tensor<32x64xf32" in text
    with pytest.raises(CompilationError) as caught:
        lowered(tmp_path, grad(gelu))
    assert isinstance(caught.value.__cause__, CompileTimeAssertionFailure)


SCRIPT = """
import torch, triton, triton.language as tl
import test_diff_function as functions
from kernel_agent.differentiate import grad

nested = grad(functions.gated)
bwd = grad(functions.gelu)
assert type(bwd).__name__ == "InterpretedFunction", type(bwd)

@triton.jit
def kernel(x, w, d, dx, dw):
    at = tl.arange(0, 16)
    d_x, d_w = bwd(tl.load(x + at), tl.load(w + at), tl.load(d + at))
    tl.store(dx + at, d_x)
    tl.store(dw + at, d_w)

x, w = torch.randn(16, requires_grad=True), torch.randn(16, requires_grad=True)
d, dx, dw = torch.randn(16), torch.empty(16), torch.empty(16)
kernel[(1,)](x.detach(), w.detach(), d, dx, dw)
(torch.nn.functional.gelu(x) * w).backward(d)
assert torch.allclose(dx, x.grad, atol=1e-6) and torch.allclose(dw, w.grad, atol=1e-6)
"""


def test_function__in_a_script_with_triton_interpret(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    folders = os.pathsep.join((str(SANDBOX), str(Path(__file__).parent)))
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": folders, "OMP_NUM_THREADS": "1"}
    environment["TMPDIR"] = str(tmp_path)
    done = subprocess.run(
        [sys.executable, str(script)], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert not list(tmp_path.glob("kernel-agent-*")), "generated files go with their process"


def line_of(text: str) -> int:
    """The line of this file that a text stands in first."""
    lines = Path(__file__).read_text().splitlines()
    return next(i for i, line in enumerate(lines, 1) if text in line)


REFUSED: dict[str, tuple[Any, str, int, str, str]] = {
    "load": (loading, "    return tl.load(x_ptr + at) * n", 11, "tl.load: a plain function takes and returns values", "the stub"),
    "store_in_a_helper": (storing, "    tl.store(p, x)", 4, "tl.store: a plain function takes", "the stub"),
    "program_id": (numbered, "    return x * tl.program_id(0)", 15, "which program runs it", "the stub"),
    "atomic": (counting, "    return tl.atomic_add(x, 1)", 11, "tl.atomic_add: a plain function takes", "the stub"),
    "launch": (launching, "    gelu[(1,)](x)", 4, "launch: a plain function launches nothing", "@autodiff"),
    "no_value": (nothing, "def nothing(x):", 0, "`nothing` returns nothing", ""),
    "unknown_axis": (along, "    return x / tl.sum(x * x, axis=AXIS, keep_dims=True)", 15, "the value of `AXIS`", '{"AXIS": ...}'),
    "tape": (taped, "    for _ in range(K):", 0, "the backward needs `y` of every step", "tl.static_range"),
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_refusal__names_place_and_remedy(name: str) -> None:
    fn, line, column, message, remedy = REFUSED[name]
    with pytest.raises(Refusal) as caught:
        grad(fn)
    assert str(caught.value).startswith(f"{__file__}:{line_of(line)}:{column}: ")
    assert message in str(caught.value) and remedy in caught.value.remedy


WRONG: dict[str, tuple[Any, str]] = {
    "wrt": (lambda: grad(gelu, wrt=("z",)), r"wrt: gelu\(x, w\) has no value 'z'"),
    "constexpr": (lambda: grad(powered, wrt=("K",)), r"wrt: powered\(x, K\) has no value 'K'"),
    "shapes": (lambda: grad(gelu, shapes={"x": (4,)}), "shapes: gelu takes the values x, w, not x"),
    "dtype": (lambda: grad(gelu, dtype="int32"), "dtype 'int32' is none of float8e4nv"),
    "dims": (lambda: grad(gelu, {"K": 3}), "gelu has no constexpr parameter K"),
}


@pytest.mark.parametrize("name", sorted(WRONG))
def test_wrong_use__says_what_is_expected(name: str) -> None:
    use, message = WRONG[name]
    with pytest.raises(ValueError, match=message):
        use()


def test_lambda__is_no_function_with_a_text() -> None:
    with pytest.raises(TypeError, match="not a lambda"):
        grad(lambda x: x)
