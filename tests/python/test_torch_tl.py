"""Every operation of the torch-backed triton.language: values against Triton's interpreter, gradients against
differences."""

from __future__ import annotations

import importlib.util
import itertools
import linecache
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from triton._C.libtriton import ir
from triton.language import float32

os.environ.setdefault("OMP_NUM_THREADS", "1")
torch.set_num_threads(1)

from kernel_agent import compat, interpret, launches
from kernel_agent.torch_tl import EXACT, NATIVE, Cell, KernelError, Launch, Memory, run_launch
from kernel_agent.torch_tl.builder import Builder, tf32
from kernel_agent.torch_tl.handles import Handle, Pointer
from kernel_agent.torch_tl.launch import TensorArg
from kernel_agent.torch_tl.memory import cell_values

HEAD = """\
import triton
import triton.language as tl
from triton.language.extra import libdevice as portable
from triton.language.extra.cuda import libdevice


@triton.jit
def weighted(a, b):
    return a + b * 0.5


@triton.jit
def product(a, b):
    return a * b


@triton.jit
def affine(a1, b1, a2, b2):
    return a1 * a2, b1 * a2 + b2


"""
N = 16
counter = itertools.count()


def compile_kernel(source: str, folder: Path, name: str = "kernel") -> Any:
    """The jitted function `name` of a module written from `source`."""
    compat.decorate_as_compiled()
    launches.set_mode("interpret")
    path = folder / f"kernels_{next(counter)}.py"
    path.write_text(HEAD + source)
    linecache.checkcache(str(path))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, name)


class Evaluation:
    """One memory with named tensors, on which launches are evaluated."""

    def __init__(self, precision: str, **tensors: torch.Tensor) -> None:
        self.memory = Memory(precision)
        self.tensors = tensors
        self.cells: dict[str, Cell] = {}
        self.leaves: dict[str, torch.Tensor] = {}
        for name, tensor in tensors.items():
            flat = cell_values(tensor.detach().reshape(-1), precision)
            if tensor.requires_grad:
                self.leaves[name] = flat.requires_grad_()
            self.cells[name] = self.memory.add(Cell(flat, tensor.dtype, tensor.data_ptr()))

    def launch(self, kernel: Any, grid: tuple[int, ...] = (1,), **numbers: Any) -> bool:
        args = {name: TensorArg(cell, cell.base, cell.dtype) for name, cell in self.cells.items()}
        return run_launch(Launch(kernel.fn, grid, args | numbers), self.memory)

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.cells[name].flat.reshape(self.tensors[name].shape)


def interpreted(
    kernel: Any, tensors: dict[str, torch.Tensor], grid: tuple[int, ...] = (1,), **numbers: Any
) -> dict[str, torch.Tensor]:
    """Run the kernel in Triton's interpreter on copies of the tensors."""
    copies = {name: tensor.detach().clone() for name, tensor in tensors.items()}
    interpret.run(kernel, grid, copies | numbers)
    return copies


def inputs(seed: int = 0) -> dict[str, torch.Tensor]:
    """x and z random (z positive), i and j random integers, j positive."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "x_ptr": torch.randn(N, generator=generator),
        "z_ptr": torch.rand(N, generator=generator) + 0.25,
        "i_ptr": torch.randint(-50, 50, (N,), generator=generator, dtype=torch.int32),
        "j_ptr": torch.randint(1, 9, (N,), generator=generator, dtype=torch.int32),
    }


SNIPPET = """
@triton.jit
def kernel(x_ptr, z_ptr, i_ptr, j_ptr, y_ptr):
    at = tl.arange(0, 16)
    x = tl.load(x_ptr + at)
    z = tl.load(z_ptr + at)
    i = tl.load(i_ptr + at)
    j = tl.load(j_ptr + at)
    {body}
    to = tl.arange(0, {size})
    tl.store(y_ptr + to, tl.reshape(y, [{size}]){cast})
"""

# Expressions on x (signed), z (positive), i (signed integers), j (positive integers) that give `size` floats.
FLOAT_OPS: dict[str, tuple[str, int]] = {
    "add": ("y = x + z", 16),
    "scalar arithmetic": ("y = (2.0 * x - 1) / 3 + (1 - x) * z", 16),
    "subtract": ("y = x - z", 16),
    "multiply": ("y = x * z", 16),
    "divide": ("y = x / z", 16),
    "remainder": ("y = x % z", 16),
    "negative": ("y = -x", 16),
    "maximum": ("y = tl.maximum(x, z)", 16),
    "minimum": ("y = tl.minimum(x, 0.3)", 16),
    "clamp": ("y = tl.clamp(x, -0.5, 0.5)", 16),
    "where": ("y = tl.where(x > 0, x * z, z)", 16),
    "abs": ("y = tl.abs(x)", 16),
    "exp": ("y = tl.exp(x)", 16),
    "exp2": ("y = tl.exp2(x)", 16),
    "log": ("y = tl.log(z)", 16),
    "log2": ("y = tl.log2(z)", 16),
    "sqrt": ("y = tl.sqrt(z)", 16),
    "sqrt_rn": ("y = tl.sqrt_rn(z)", 16),
    "rsqrt": ("y = tl.rsqrt(z)", 16),
    "sin": ("y = tl.sin(x)", 16),
    "cos": ("y = tl.math.cos(x)", 16),
    "erf": ("y = tl.erf(x)", 16),
    "floor": ("y = tl.floor(3 * x) + x", 16),
    "ceil": ("y = tl.ceil(3 * x) * x", 16),
    "fma": ("y = tl.fma(x, z, x)", 16),
    "fdiv": ("y = tl.fdiv(x, z)", 16),
    "div_rn": ("y = tl.div_rn(x, z)", 16),
    "sigmoid": ("y = tl.sigmoid(x)", 16),
    "softmax": ("y = tl.softmax(x)", 16),
    "integer to float": ("y = i.to(tl.float32) * x", 16),
    "half rounding": ("y = x.to(tl.float16).to(tl.float32) * z", 16),
    "sum": ("y = tl.sum(x * z, 0) + x", 16),
    "sum keep_dims": ("y = tl.sum(tl.reshape(x, [4, 4]), 1, keep_dims=True) * tl.reshape(z, [4, 4])", 16),
    "sum of all": ("y = tl.sum(tl.reshape(x, [4, 4])) * z", 16),
    "max": ("y = tl.max(x, 0) * z", 16),
    "min of axis": ("y = tl.min(tl.reshape(x * z, [4, 4]), 1)", 4),
    "max with indices": ("v, at2 = tl.max(tl.reshape(x, [2, 8]), 1, return_indices=True)\n    y = v * (at2 + 1)", 2),
    "argmax": ("y = tl.argmax(x, 0).to(tl.float32) + x", 16),
    "argmin": ("y = tl.argmin(x, 0).to(tl.float32) + x", 16),
    "custom reduce": ("y = tl.reduce(tl.reshape(z, [4, 4]), 1, product)", 4),
    "reduce of several": ("a, y = tl.reduce((tl.reshape(z, [4, 4]), tl.reshape(x, [4, 4])), 1, affine)\n    y += a", 4),
    "reduce of several keep_dims": ("a, y = tl.reduce((tl.reshape(z, [4, 4]), tl.reshape(x, [4, 4])), 0, affine, keep_dims=True)\n    y += a", 4),
    "cumsum": ("y = tl.cumsum(x, 0)", 16),
    "cumsum reversed": ("y = tl.cumsum(tl.reshape(x, [4, 4]), 1, reverse=True)", 16),
    "cumprod": ("y = tl.cumprod(z, 0)", 16),
    "associative scan": ("a, y = tl.associative_scan((z, x), 0, affine)\n    y += a", 16),
    "associative scan reversed": ("a, y = tl.associative_scan((z, x), 0, affine, reverse=True)", 16),
    "dot": ("y = tl.dot(tl.reshape(x, [4, 4]), tl.reshape(z, [4, 4]), input_precision='ieee')", 16),
    "dot with accumulator": ("m = tl.reshape(x, [4, 4])\n    y = tl.dot(m, tl.trans(m), acc=m, allow_tf32=False)", 16),
    "batched dot": ("m = tl.reshape(x, [4, 2, 2])\n    y = tl.dot(m, tl.reshape(z, [4, 2, 2]), input_precision='ieee')", 16),
    "transpose": ("y = tl.trans(tl.reshape(x, [2, 8])) * tl.reshape(z, [8, 2])", 16),
    "T": ("y = tl.reshape(x, [2, 8]).T * tl.reshape(z, [8, 2])", 16),
    "permute": ("y = tl.permute(tl.reshape(x, [2, 4, 2]), (2, 0, 1))", 16),
    "view": ("y = tl.view(x, [4, 4])", 16),
    "broadcast_to": ("y = tl.broadcast_to(x[:, None], [16, 2])", 32),
    "implicit broadcast": ("y = x[:, None] * z[None, :]", 256),
    "broadcast": ("a, b = tl.broadcast(x[:, None], z[None, :])\n    y = a * b", 256),
    "cast": ("y = tl.cast(i, tl.float32) * x + tl.cast(z, tl.float32)", 16),
    "expand_dims": ("y = tl.expand_dims(x, 1) + tl.expand_dims(z, 0)", 256),
    "join": ("y = tl.join(x, z)", 32),
    "split": ("a, b = tl.split(tl.reshape(x, [8, 2]))\n    y = a * b", 8),
    "interleave": ("y = tl.interleave(x, z)", 32),
    "flip": ("y = tl.flip(x, 0) * z", 16),
    "cat": ("y = tl.cat(x, z, can_reorder=True)", 32),
    "ravel": ("y = tl.ravel(tl.reshape(x, [4, 4]))", 16),
    "gather": ("y = tl.gather(x, j, 0) * z", 16),
    "sort": ("y = tl.sort(tl.reshape(x, [2, 8])) * tl.reshape(z, [2, 8])", 16),
    "sort descending": ("y = tl.sort(x, descending=True) * z", 16),
    "topk": ("y = tl.topk(x, 4)", 4),
    "zeros_like and full": ("y = tl.zeros_like(x) + tl.full([16], 1.5, tl.float32) * x", 16),
    "helper": ("y = weighted(x, z)", 16),
    "constants": ("w: tl.constexpr = 4\n    y = tl.reshape(x, [w, 16 // w]) * w", 16),
    "static loop": ("y = x\n    for k in tl.static_range(3):\n        y = y * z + k", 16),
    "runtime loop": ("y = x\n    for k in range(0, tl.load(j_ptr)):\n        y = y * 0.5 + k", 16),
    "loop with step": ("y = x\n    for k in tl.range(6, 0, -2):\n        y += k * z", 16),
    "while": ("y = x\n    k = 0\n    while k < 3:\n        y = y * z\n        k += 1", 16),
    "runtime if": ("y = x\n    if tl.load(i_ptr) < 100:\n        y = x * x\n    else:\n        y = z", 16),
    "conditional expression": ("y = x * (2 if tl.load(i_ptr) < 100 else 3)", 16),
    "masked load": ("y = tl.load(x_ptr + at, mask=at < 5, other=2.0) * z", 16),
    "masked load without other": ("y = tl.load(x_ptr + at, mask=at < 5) * z", 16),
    "hints": ("y = x_ptr + tl.max_constancy(tl.max_contiguous(tl.multiple_of(at, 16), 16), 1)\n    y = tl.load(y)", 16),
    "no-ops": ("tl.static_assert(16 > 3)\n    tl.assume(tl.load(j_ptr) > 0)\n    tl.debug_barrier()\n    tl.device_assert(z > 0)\n    y = x", 16),
    "block pointer": (
        ("p = tl.make_block_ptr(x_ptr, (3, 5), (5, 1), (0, 0), (4, 8), (1, 0))\n"
        "    p = tl.advance(p, (1, 1))\n"
        "    y = tl.load(p, boundary_check=(0, 1), padding_option='zero')"),
        32,
    ),
}  # fmt: skip
# What Triton's interpreter cannot do, or does differently from compiled code.
TORCH_OPS: dict[str, tuple[str, Callable[..., torch.Tensor]]] = {
    "builtin max": ("y = max(x, z)", lambda x, z, i: torch.maximum(x, z)),
    "builtin min": ("y = min(x, z)", lambda x, z, i: torch.minimum(x, z)),
    "tanh": ("y = libdevice.tanh(x)", lambda x, z, i: torch.tanh(x)),
    "pow": ("y = libdevice.pow(z, x)", lambda x, z, i: torch.pow(z, x)),
    "log1p": ("y = libdevice.log1p(z)", lambda x, z, i: torch.log1p(z)),
    "atan2": ("y = libdevice.atan2(x, z)", lambda x, z, i: torch.atan2(x, z)),
    "erfinv": ("y = libdevice.erfinv(x * 0.1)", lambda x, z, i: torch.erfinv(x * 0.1)),
    "rounding division": ("y = libdevice.div_rn(x, z)", lambda x, z, i: x / z),
    "member functions": (
        "y = x.reshape(4, 4).sum(1)[:, None] + z.reshape(4, 4)",
        lambda x, z, i: (x.reshape(4, 4).sum(1)[:, None] + z.reshape(4, 4)).reshape(-1),
    ),
    "portable libdevice": ("y = portable.asinh(x)", lambda x, z, i: torch.asinh(x)),
    "and, or, not": (
        "y = tl.where((x > 0 and z > 0.5) or not (i > 0), x, z)",
        lambda x, z, i: torch.where(((x > 0) & (z > 0.5)) | ~(i > 0), x, z),
    ),
    "comparison of a block and None": ("y = x if x is not None else z", lambda x, z, i: x * 1),
    "variable of a negated constant": ("k = -3.0\n    y = x * k", lambda x, z, i: x * -3.0),
    "tuple assignment": ("a, b = x, z\n    y = a * b", lambda x, z, i: x * z),
    "loop with a 64-bit bound": (
        "y = x\n    for k in range(0, tl.full([], 3, tl.int64)):\n        y += 1.0 if k.dtype == tl.int64 "
        "else 0.0",
        lambda x, z, i: x + 3.0,
    ),
    "string constant": ("mode: tl.constexpr = 'up'\n    y = x if mode == 'up' else z", lambda x, z, i: x * 1),
    "type of a value": ("y = x.to(z.dtype) * (2 if x.dtype == tl.float32 else 3)", lambda x, z, i: x * 2),
}
INTEGER_OPS: dict[str, str] = {
    "floor division": "y = i // j",
    "remainder": "y = i % j",
    "division of negatives by negatives": "y = i // (-j) + i % (-j)",
    "shifts": "y = (i << 3) + (i >> 1)",
    "bits": "y = (i & j) | (i ^ 21) | ~j",
    "unsigned shift": "y = (i.to(tl.uint32) >> 3).to(tl.int32)",
    "unsigned division": "y = (i.to(tl.uint32) // 7).to(tl.int32)",
    "unsigned remainder": "y = (i.to(tl.uint32) % 7).to(tl.int32)",
    "unsigned comparison": "y = (i.to(tl.uint32) > j.to(tl.uint32)).to(tl.int32)",
    "unsigned 64-bit division": "y = (i.to(tl.uint64) // 3).to(tl.int32)",
    "wrap around": "y = i * 2000000011 + i * i * i * 1000003",
    "narrowing": "y = (i * 77).to(tl.int8).to(tl.int32) + (i * 77).to(tl.uint8).to(tl.int32)",
    "64-bit": "y = ((i.to(tl.int64) * 4000000007) >> 20).to(tl.int32)",
    "umulhi": "y = tl.umulhi(i.to(tl.uint32), 3528531795).to(tl.int32)",
    "umulhi 64": "y = tl.umulhi(i.to(tl.uint64), 15178456137457528684).to(tl.int32)",
    "integer minimum and maximum": "y = tl.minimum(i, j) + tl.maximum(i, 3)",
    "xor_sum": "y = tl.xor_sum(i, 0) + i",
    "integer sum": "y = tl.sum(i, 0) + j",
    "float to integer": "y = (x * 10).to(tl.int32)",
    "cdiv": "y = tl.cdiv(i + 60, j)",
    "swizzle2d": "a, b = tl.swizzle2d(j, j, 16, 16, 4)\n    y = a * 100 + b",
    "histogram": "y = tl.histogram(j, 16)",
    "comparisons": "y = (x > z).to(tl.int32) + 2 * (i <= j).to(tl.int32) + 4 * (i != j).to(tl.int32)",
    "randint": "y = tl.randint(7, at)",
    "randint of a long seed": "y = tl.randint(123456789123, i)",
    "randint4x": "a, b, c, d = tl.randint4x(5, at)\n    y = a ^ b ^ c ^ d",
}
RANDOM_OPS = {
    "rand": "y = tl.rand(42, at)",
    "rand 64": "y = tl.rand(3, i.to(tl.int64))",
    "randn": "y = tl.randn(42, at)",
    "rand4x": "a, b, c, d = tl.rand4x(5, at)\n    y = a + 2 * b + 3 * c + 4 * d",
    "randn4x": (
        "a, b, c, d = tl.randn4x(5, at)\n"
        "    y = tl.where(at < 8, tl.where(at < 4, a, b), tl.where(at < 12, c, d))"
    ),
}


def snippet(body: str, size: int, folder: Path, cast: str = "") -> Any:
    return compile_kernel(SNIPPET.format(body=body, size=size, cast=cast), folder)


def exact_function(kernel: Any, fixed: dict[str, torch.Tensor], size: int) -> Callable[..., torch.Tensor]:
    """The kernel as a differentiable function of x and z."""

    def run(x: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        evaluation = Evaluation(EXACT, **fixed, y_ptr=torch.zeros(size))
        evaluation.cells["x_ptr"].flat = x
        evaluation.cells["z_ptr"].flat = z
        evaluation.launch(kernel)
        return evaluation["y_ptr"]

    return run


@pytest.mark.parametrize("name", FLOAT_OPS)
def test_float_op__equals_the_interpreter_and_finite_differences(name: str, tmp_path: Path) -> None:
    body, size = FLOAT_OPS[name]
    kernel = snippet(body, size, tmp_path)
    tensors = inputs() | {"y_ptr": torch.zeros(size)}
    expected = interpreted(kernel, tensors)["y_ptr"]
    native = Evaluation(NATIVE, **tensors)
    native.launch(kernel)
    torch.testing.assert_close(native["y_ptr"], expected, rtol=2e-6, atol=1e-6)
    run = exact_function(kernel, inputs(), size)
    x, z = (inputs()[key].double().requires_grad_() for key in ("x_ptr", "z_ptr"))
    torch.testing.assert_close(run(x, z).float(), expected, rtol=2e-3 if "half" in name else 1e-5, atol=1e-5)
    assert torch.autograd.gradcheck(run, (x, z), eps=1e-6, atol=1e-5)


@pytest.mark.parametrize("name", TORCH_OPS)
def test_op_beyond_the_interpreter__equals_torch(name: str, tmp_path: Path) -> None:
    body, expected = TORCH_OPS[name]
    run = exact_function(snippet(body, N, tmp_path), inputs(), N)
    x, z = (inputs()[key].double().requires_grad_() for key in ("x_ptr", "z_ptr"))
    want = expected(x, z, inputs()["i_ptr"])
    torch.testing.assert_close(run(x, z), want, rtol=1e-7, atol=1e-8)
    for got, right in zip(
        torch.autograd.grad(run(x, z).sin().sum(), (x, z), allow_unused=True),
        torch.autograd.grad(want.sin().sum(), (x, z), allow_unused=True),
        strict=True,
    ):
        torch.testing.assert_close(
            torch.zeros(N) if got is None else got.float(), torch.zeros(N) if right is None else right.float()
        )


@pytest.mark.parametrize("name", INTEGER_OPS)
def test_integer_op__equals_the_interpreter(name: str, tmp_path: Path) -> None:
    kernel = snippet(INTEGER_OPS[name], N, tmp_path)
    tensors = inputs(3) | {"y_ptr": torch.zeros(N, dtype=torch.int32)}
    expected = interpreted(kernel, tensors)["y_ptr"]
    for precision in (NATIVE, EXACT):
        evaluation = Evaluation(precision, **tensors)
        evaluation.launch(kernel)
        assert evaluation["y_ptr"].tolist() == expected.tolist()


@pytest.mark.parametrize("name", RANDOM_OPS)
def test_random_numbers__are_those_of_triton(name: str, tmp_path: Path) -> None:
    kernel = snippet(RANDOM_OPS[name], N, tmp_path)
    tensors = inputs(3) | {"y_ptr": torch.zeros(N)}
    expected = interpreted(kernel, tensors)["y_ptr"]
    evaluation = Evaluation(EXACT, **tensors)
    evaluation.launch(kernel)
    torch.testing.assert_close(evaluation["y_ptr"].float(), expected, rtol=1e-5, atol=1e-6)
    assert len(set(expected.tolist())) > N // 2


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_native_precision__rounds_as_the_kernel_says(dtype: torch.dtype, tmp_path: Path) -> None:
    kernel = compile_kernel(
        """
@triton.jit
def kernel(x_ptr, y_ptr):
    at = tl.arange(0, 16)
    x = tl.load(x_ptr + at)
    tl.store(y_ptr + at, (x * x).to(tl.float16) + 1)
""",
        tmp_path,
    )
    tensors = {"x_ptr": torch.randn(N, dtype=dtype), "y_ptr": torch.zeros(N, dtype=dtype)}
    native = Evaluation(NATIVE, **tensors)
    native.launch(kernel)
    expected = ((tensors["x_ptr"] * tensors["x_ptr"]).half() + 1).to(dtype)
    torch.testing.assert_close(native["y_ptr"].to(dtype), expected, rtol=0, atol=0)
    exact = Evaluation(EXACT, **tensors)
    exact.launch(kernel)
    torch.testing.assert_close(exact["y_ptr"], tensors["x_ptr"].double() ** 2 + 1, rtol=1e-14, atol=0)


def test_ties__follow_the_documented_rules(tmp_path: Path) -> None:
    kernel = compile_kernel(
        """
@triton.jit
def kernel(x_ptr, y_ptr):
    at = tl.arange(0, 4)
    x = tl.load(x_ptr + at)
    tl.store(y_ptr + at, tl.maximum(x, 1.0) + tl.abs(x - 1) + tl.clamp(x, 0.0, 1.0))
    tl.store(y_ptr + 4, tl.max(x, 0))
""",
        tmp_path,
    )
    evaluation = Evaluation(EXACT, x_ptr=torch.ones(4, requires_grad=True), y_ptr=torch.zeros(5))
    evaluation.launch(kernel)
    values = evaluation["y_ptr"]
    leaf = evaluation.leaves["x_ptr"]
    elementwise = torch.autograd.grad(values[:4].sum(), leaf, retain_graph=True)[0]
    assert elementwise.tolist() == [1.0] * 4, "maximum: second operand, abs: 0, clamp: inside"
    assert torch.autograd.grad(values[4], leaf)[0].tolist() == [1.0, 0.0, 0.0, 0.0]


# ---- programs: divergence, order, races

DIVERGING = """
@triton.jit
def kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    pid = tl.program_id(0)
    at = pid * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < n, other=0.0)
    tl.store(y_ptr + at, tl.load(y_ptr + at, mask=at < n) + 1, mask=at < n)
    if pid % 3 == 1:
        x = x * 2
    for step in range(pid):
        x += step
    k = pid
    while k > 2:
        x = x * 0.5
        k -= 1
    if pid == 5:
        return
    tl.store(y_ptr + at, x + tl.load(y_ptr + at, mask=at < n), mask=at < n)
"""


def test_programs_that_diverge__are_evaluated_in_groups(tmp_path: Path) -> None:
    kernel = compile_kernel(DIVERGING, tmp_path)
    tensors = {"x_ptr": torch.randn(60, requires_grad=True), "y_ptr": torch.zeros(60)}
    expected = interpreted(kernel, tensors, (8,), n=60, BLOCK=8)["y_ptr"]
    evaluation = Evaluation(EXACT, **tensors)
    assert evaluation.launch(kernel, (8,), n=60, BLOCK=8) is False, "no program depends on another"
    torch.testing.assert_close(evaluation["y_ptr"].float(), expected)
    evaluation["y_ptr"].sum().backward()
    assert evaluation.leaves["x_ptr"].grad[40:48].tolist() == [0.0] * 8
    assert evaluation.memory.counts.races == []
    assert evaluation.memory.counts.bytes_read == 4 * (60 + 60 + 52), "program 5 returns before its last load"


LOGICAL = """
@triton.jit
def kernel(x_ptr, y_ptr, rows, cols, EXTRA: tl.constexpr):
    i = tl.arange(0, 4)[:, None]
    j = tl.arange(0, 8)[None, :]
    inside = i < rows and j < cols
    x = tl.load(x_ptr + i * cols + j, mask=inside, other=0.0)
    y = tl.where(not inside or (EXTRA and x > 0), 7.0, x)
    if not EXTRA and (rows > 2 and cols > 2):
        y = y + 1
    tl.store(y_ptr + i * 8 + j, y)
"""


@pytest.mark.parametrize("extra", [False, True])
def test_and_or_not__of_blocks__are_elementwise_as_compiled(extra: bool, tmp_path: Path) -> None:
    kernel = compile_kernel(LOGICAL, tmp_path)
    x = torch.randn(3, 5, generator=torch.Generator().manual_seed(1))
    tensors = {"x_ptr": x, "y_ptr": torch.zeros(4, 8)}
    numbers = {"rows": 3, "cols": 5, "EXTRA": extra}
    expected = torch.full((4, 8), 7.0)
    expected[:3, :5] = torch.where(x > 0, 7.0, x) if extra else x
    expected += 0 if extra else 1
    torch.testing.assert_close(interpreted(kernel, tensors, **numbers)["y_ptr"], expected)
    evaluation = Evaluation(NATIVE, **tensors)
    evaluation.launch(kernel, **numbers)
    torch.testing.assert_close(evaluation["y_ptr"], expected)


CHAIN = """
@triton.jit
def kernel(y_ptr):
    pid = tl.program_id(0)
    before = tl.load(y_ptr + pid)
    tl.store(y_ptr + pid + 1, before * 2)
"""


def test_program_that_reads_another_ones_result__runs_in_order_and_is_reported(tmp_path: Path) -> None:
    kernel = compile_kernel(CHAIN, tmp_path)
    tensors = {"y_ptr": torch.tensor([1.0] + [0.0] * 5, requires_grad=True)}
    evaluation = Evaluation(EXACT, **tensors)
    assert evaluation.launch(kernel, (5,)) is True
    assert evaluation["y_ptr"].tolist() == [1.0, 2.0, 4.0, 8.0, 16.0, 32.0]
    assert torch.autograd.grad(evaluation["y_ptr"][5], evaluation.leaves["y_ptr"])[0][0] == 32.0
    (race,) = evaluation.memory.counts.races
    assert "reads what another program writes" in race and "y_ptr" in race and "line" in race


RACES = {
    "last reader writes": (
        "v = tl.load(y_ptr)\n    if pid == 3:\n        tl.store(y_ptr, v + 1)",
        "writes what another",
    ),
    "store and atomic": (
        "if pid == 0:\n        tl.store(y_ptr, 5.0)\n    tl.atomic_add(y_ptr, 1.0)",
        "atomically",
    ),
    "write and write": ("tl.store(y_ptr, pid * 1.0)", "another value where another program"),
    "read, then overwritten": (
        "v = tl.load(y_ptr + 3 - pid)\n    tl.store(y_ptr + pid, v + 1)",
        "another program",
    ),
    "read of an atomic": (
        "tl.atomic_add(y_ptr, 1.0)\n    tl.store(y_ptr + 1 + pid, tl.load(y_ptr))",
        "atomically",
    ),
}


@pytest.mark.parametrize("name", RACES)
def test_race__is_found_and_the_result_is_that_of_program_order(name: str, tmp_path: Path) -> None:
    body, sentence = RACES[name]
    kernel = compile_kernel(
        f"\n@triton.jit\ndef kernel(y_ptr):\n    pid = tl.program_id(0)\n    {body}\n", tmp_path
    )
    tensors = {"y_ptr": torch.arange(8.0)}
    evaluation = Evaluation(EXACT, **tensors)
    assert evaluation.launch(kernel, (4,)) is True
    torch.testing.assert_close(evaluation["y_ptr"].float(), interpreted(kernel, tensors, (4,))["y_ptr"])
    assert any(sentence in race for race in evaluation.memory.counts.races)


HARMLESS = {
    "same value by all": "tl.store(y_ptr, 7.0)",
    "own element updated in place": "v = tl.load(y_ptr + pid)\n    tl.store(y_ptr + pid, v * v)",
    "atomic sum": "tl.atomic_add(y_ptr, 1.5)",
    "atomic maximum": "tl.atomic_max(y_ptr, pid * 1.0)",
    "neighbouring elements": "tl.store(y_ptr + 2 * pid + tl.arange(0, 2), pid * 1.0)",
}


@pytest.mark.parametrize("name", HARMLESS)
def test_harmless_access__is_no_race_and_needs_no_order(name: str, tmp_path: Path) -> None:
    source = f"\n@triton.jit\ndef kernel(y_ptr):\n    pid = tl.program_id(0)\n    {HARMLESS[name]}\n"
    kernel = compile_kernel(source, tmp_path)
    tensors = {"y_ptr": torch.arange(8.0)}
    evaluation = Evaluation(EXACT, **tensors)
    assert evaluation.launch(kernel, (4,)) is False
    assert evaluation.memory.counts.races == []
    torch.testing.assert_close(evaluation["y_ptr"].float(), interpreted(kernel, tensors, (4,))["y_ptr"])


def test_ticket_from_an_atomic__orders_the_programs_without_a_race(tmp_path: Path) -> None:
    kernel = compile_kernel(
        """
@triton.jit
def kernel(x_ptr, part_ptr, count_ptr, y_ptr):
    pid = tl.program_id(0)
    tl.store(part_ptr + pid, tl.load(x_ptr + pid) * 2)
    ticket = tl.atomic_add(count_ptr, 1)
    if ticket == tl.num_programs(0) - 1:
        tl.store(y_ptr, tl.sum(tl.load(part_ptr + tl.arange(0, 4)), 0))
""",
        tmp_path,
    )
    tensors = {
        "x_ptr": torch.randn(4, requires_grad=True),
        "part_ptr": torch.zeros(4),
        "count_ptr": torch.zeros(1, dtype=torch.int32),
        "y_ptr": torch.zeros(1),
    }
    evaluation = Evaluation(EXACT, **tensors)
    assert evaluation.launch(kernel, (4,)) is True
    assert evaluation.memory.counts.races == []
    evaluation["y_ptr"].sum().backward()
    assert evaluation.leaves["x_ptr"].grad.tolist() == [2.0] * 4


def test_lock_around_an_update__orders_the_programs_without_a_race(tmp_path: Path) -> None:
    kernel = compile_kernel(
        """
@triton.jit
def kernel(x_ptr, y_ptr, lock_ptr):
    pid = tl.program_id(0)
    while tl.atomic_cas(lock_ptr, 0, 1) == 1:
        pass
    tl.store(y_ptr, tl.load(y_ptr) * 2 + tl.load(x_ptr + pid))
    tl.atomic_xchg(lock_ptr, 0)
""",
        tmp_path,
    )
    tensors = {
        "x_ptr": torch.ones(3, requires_grad=True),
        "y_ptr": torch.zeros(1),
        "lock_ptr": torch.zeros(1, dtype=torch.int32),
    }
    evaluation = Evaluation(EXACT, **tensors)
    assert evaluation.launch(kernel, (3,)) is True
    assert evaluation["y_ptr"].item() == 7.0 and evaluation["lock_ptr"].item() == 0
    assert evaluation.memory.counts.races == []
    evaluation["y_ptr"].sum().backward()
    assert evaluation.leaves["x_ptr"].grad.tolist() == [4.0, 2.0, 1.0]


def test_slots_from_an_atomic__are_given_lane_by_lane(tmp_path: Path) -> None:
    kernel = compile_kernel(
        """
@triton.jit
def kernel(count_ptr, y_ptr):
    at = tl.arange(0, 8)
    slot = tl.atomic_add(count_ptr + at % 2, 1, mask=at < 7)
    tl.store(y_ptr + at, slot, mask=at < 7)
""",
        tmp_path,
    )
    tensors = {
        "count_ptr": torch.zeros(2, dtype=torch.int32),
        "y_ptr": torch.full((8,), -1, dtype=torch.int32),
    }
    evaluation = Evaluation(EXACT, **tensors)
    evaluation.launch(kernel)
    assert evaluation["y_ptr"].tolist() == [0, 0, 1, 1, 2, 2, 3, -1]
    assert evaluation["count_ptr"].tolist() == [4, 3]


def test_tf32__cuts_off_at_ten_bits_and_passes_the_gradient() -> None:
    data = torch.tensor([1.0, 1 + 2**-10, 2 - 2**-12, -3.14159274, float("inf")], requires_grad=True)
    rounded = tf32(data)
    assert rounded.tolist() == [1.0, 1 + 2**-10, 2 - 2**-10, -3.140625, float("inf")]
    rounded[:4].sum().backward()
    assert data.grad.tolist() == [1.0, 1.0, 1.0, 1.0, 0.0]


def test_product_in_tf32__gradients_are_of_cut_operands_too() -> None:
    builder = Builder(Memory("native", "cpu", compiled=True))
    left = torch.tensor([[[1 + 2**-12]]], requires_grad=True)
    right = torch.tensor([[[3.0]]], requires_grad=True)
    product = builder.create_dot(
        Handle(left), Handle(right), Handle(torch.zeros(1, 1, 1)), ir.INPUT_PRECISION.TF32, None
    )
    product.data.backward(torch.tensor([[[2 - 2**-12]]]))
    cut = 2 - 2**-10
    assert product.data.item() == 3 and left.grad.item() == 3 * cut and right.grad.item() == cut
    assert builder.memory.in_tf32


def test_atomic_add__accumulates_colliding_lanes_with_gradients(tmp_path: Path) -> None:
    kernel = compile_kernel(
        """
@triton.jit
def kernel(x_ptr, i_ptr, y_ptr):
    at = tl.program_id(0) * 8 + tl.arange(0, 8)
    tl.atomic_add(y_ptr + tl.load(i_ptr + at), tl.load(x_ptr + at), mask=at < 14)
""",
        tmp_path,
    )
    index = torch.tensor([0, 1, 2, 0, 1, 2, 0, 0, 1, 1, 2, 2, 0, 1, 2, 0], dtype=torch.int64)
    tensors = {"x_ptr": torch.randn(16, requires_grad=True), "i_ptr": index, "y_ptr": torch.zeros(3)}
    evaluation = Evaluation(EXACT, **tensors)
    evaluation.launch(kernel, (2,))
    expected = torch.zeros(3, dtype=torch.float64).index_add_(
        0, index[:14], tensors["x_ptr"].detach().double()[:14]
    )
    torch.testing.assert_close(evaluation["y_ptr"], expected)
    (evaluation["y_ptr"] * torch.tensor([1.0, 2.0, 3.0])).sum().backward()
    assert evaluation.leaves["x_ptr"].grad.tolist() == [float(i + 1) for i in index[:14]] + [0.0, 0.0]
    assert evaluation.memory.counts.atomics == 14


# ---- what is wrong with a kernel is said with its place

BROKEN = {
    "read out of bounds": ("tl.store(y_ptr, tl.load(y_ptr + 8))", "reads y_ptr[8]", "stub_raised"),
    "write out of bounds": ("tl.store(y_ptr - 1, 0.0)", "writes y_ptr[-1]", "stub_raised"),
    "bit cast": (
        "tl.store(y_ptr, tl.load(y_ptr).to(tl.int32, bitcast=True).to(tl.float32))",
        "bit cast",
        "unsupported_op",
    ),
    "reinterpreted pointer": (
        "tl.store(y_ptr.to(tl.pointer_type(tl.int32)), 1)",
        "pointer to int32",
        "unsupported_op",
    ),
    "block as a condition": (
        "if tl.load(y_ptr + tl.arange(0, 8)) > 0:\n        pass",
        "block decides",
        "unsupported_op",
    ),
    "static_assert": ("tl.static_assert(1 > 2, 'no')", "static_assert failed: no", "stub_raised"),
    "type error": ("tl.store(y_ptr, y_ptr)", "", "stub_raised"),
    "inline assembly": (
        "tl.store(y_ptr, tl.inline_asm_elementwise('x', '=r,r', [tl.load(y_ptr)], tl.float32, True, 1))",
        "inline_asm is not supported",
        "unsupported_op",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_kernel__is_reported_with_file_line_and_kind(name: str, tmp_path: Path) -> None:
    body, sentence, kind = BROKEN[name]
    kernel = compile_kernel(f"\n@triton.jit\ndef kernel(y_ptr):\n    {body}\n", tmp_path)
    with pytest.raises(KernelError) as caught:
        Evaluation(EXACT, y_ptr=torch.zeros(8)).launch(kernel)
    error = caught.value
    first = kernel.fn.__code__.co_firstlineno + 2
    assert sentence in error.message
    assert (error.kind, error.file, error.line) == (kind, kernel.fn.__code__.co_filename, first)


def test_out_of_bounds_lane_that_is_masked__is_fine(tmp_path: Path) -> None:
    kernel = compile_kernel(
        """
@triton.jit
def kernel(y_ptr, n):
    at = tl.arange(0, 16)
    tl.store(y_ptr + at, tl.load(y_ptr + at, mask=at < n, other=0.0) + 1, mask=at < n)
""",
        tmp_path,
    )
    evaluation = Evaluation(EXACT, y_ptr=torch.zeros(5))
    evaluation.launch(kernel, n=5)
    assert evaluation["y_ptr"].tolist() == [1.0] * 5


def test_descriptor_in_a_kernel__loads_and_stores_blocks(tmp_path: Path) -> None:
    kernel = compile_kernel(
        """
@triton.jit
def kernel(x_ptr, y_ptr, rows, cols):
    source = tl.make_tensor_descriptor(x_ptr, [rows, cols], [cols, 1], [4, 8])
    target = tl.make_tensor_descriptor(y_ptr, [rows, cols], [cols, 1], [4, 8])
    pid = tl.program_id(0)
    target.store([pid * 4, 0], source.load([pid * 4, 0]) * 3)
""",
        tmp_path,
    )
    tensors = {"x_ptr": torch.randn(6, 8, requires_grad=True), "y_ptr": torch.zeros(6, 8)}
    evaluation = Evaluation(EXACT, **tensors)
    evaluation.launch(kernel, (2,), rows=6, cols=8)
    torch.testing.assert_close(evaluation["y_ptr"], 3 * tensors["x_ptr"].detach().double())
    evaluation["y_ptr"].sum().backward()
    assert evaluation.leaves["x_ptr"].grad.tolist() == [3.0] * 48


def test_scalar_arguments_that_are_floats__have_the_precision_of_the_launch(tmp_path: Path) -> None:
    kernel = compile_kernel(
        "\n@triton.jit\ndef kernel(y_ptr, s):\n    tl.store(y_ptr, tl.load(y_ptr) * s)\n", tmp_path
    )
    evaluation = Evaluation(EXACT, y_ptr=torch.ones(1, dtype=torch.float64))
    evaluation.launch(kernel, s=0.1)
    assert evaluation["y_ptr"].item() == float(torch.tensor(0.1, dtype=torch.float32))


def test_an_evaluation_that_looks_at_nothing__gives_what_one_that_looks_gives() -> None:
    # Addresses were checked before: the second evaluation only computes, also where programs come one by one.
    for ordered in (False, True):
        made: list[tuple[torch.Tensor, torch.Tensor]] = []
        seen: list[bool] | None = None
        for checked in (True, False):
            met = None if checked else seen
            memory = Memory(EXACT, "cpu", checked, met)
            x = memory.add(Cell(torch.arange(8, dtype=torch.float64), torch.float32, 1024))
            pointer = Pointer(torch.tensor([[1024 + 4 * i for i in (3, 1, 1)]]), float32, x)
            memory.begin_launch(1, ordered)
            memory.begin_group(torch.zeros(1, dtype=torch.int32))
            mask = torch.tensor([[True, True, False]])
            loaded = memory.load(pointer, mask, None)
            memory.store(pointer, loaded * 10, mask)
            made.append((loaded, x.flat))
            seen = memory.met
            assert seen == [False]
            assert bool(memory.counts.bytes_read) is checked
        assert torch.equal(made[0][0], made[1][0])
        assert torch.equal(made[0][1], made[1][1])


def test_an_address_outside__is_told_by_the_evaluation_that_looks__and_brought_inside_by_the_other() -> None:
    for checked in (True, False):
        memory = Memory(EXACT, "cpu", checked=checked)
        x = memory.add(Cell(torch.arange(4, dtype=torch.float64), torch.float32, 1024))
        memory.begin_launch(1, False)
        memory.begin_group(torch.zeros(1, dtype=torch.int32))
        beyond = Pointer(torch.tensor([[1024 + 4 * 9]]), float32, x)
        if checked:
            with pytest.raises(KernelError, match="out of bounds"):
                memory.load(beyond, None, None)
        else:
            assert memory.load(beyond, None, None).item() == 3


@pytest.mark.parametrize("masked", [False, True])
def test_lanes_that_meet__the_last_one_wins_in_every_evaluation(masked: bool) -> None:
    seen: list[bool] | None = None
    for _ in range(2):
        memory = Memory(EXACT, "cpu", seen is None, seen)
        x = memory.add(Cell(torch.zeros(6, dtype=torch.float64), torch.float32, 1024))
        memory.begin_launch(2, True)
        memory.begin_group(torch.tensor([0], dtype=torch.int32))
        pointer = Pointer(torch.tensor([[1024 + 4 * i for i in (2, 5, 2, 0)]]), float32, x)
        mask = torch.tensor([[True, True, True, False]]) if masked else None
        memory.store(pointer, torch.tensor([[1.0, 2.0, 3.0, 4.0]]), mask)
        apart = Pointer(torch.tensor([[1024 + 4 * i for i in (1, 3, 4, 0)]]), float32, x)
        memory.store(apart, torch.tensor([[7.0, 8.0, 9.0, 6.0]]), mask)
        seen = memory.met
        assert seen == [True, False]
        assert x.flat.tolist() == [0.0 if masked else 6.0, 7.0, 3.0, 8.0, 9.0, 2.0]
