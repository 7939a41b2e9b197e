"""The interpreter after its repairs, and the memory checks of interpreted kernels."""

from __future__ import annotations

import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from kernel_agent import accesses, compat, launches
from kernel_agent.launches import launch_intercept
from sources import SANDBOX
from triton.language.extra import libdevice
from triton.language.extra.cuda.libdevice import floor as cuda_floor
from triton.language.extra.libdevice import rsqrt as reciprocal_root
from triton.language.extra.libdevice import tanh


@pytest.fixture(autouse=True)
def interpreted():
    launches.set_mode("interpret")


@triton.jit
def runtime_range_kernel(x_ptr, y_ptr, k, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for i in range(k):
        total += tl.load(x_ptr + i * BLOCK + offsets)
    if k > 2:
        total = -total
    tl.store(y_ptr + offsets, total)


def test_runtime_range__one_element_arrays__need_no_deprecated_conversion():
    """NumPy >= 2.4 raises where this version only warns."""
    x, y = torch.randn(3, 8), torch.empty(8)
    with warnings.catch_warnings():
        warnings.simplefilter("error", DeprecationWarning)
        runtime_range_kernel[(1,)](x, y, 3, BLOCK=8)
    assert torch.allclose(y, -x.sum(0))


def test_tensor_index__of_a_block__is_refused():
    class Handle:
        data = np.zeros(4)

    class Tensor:
        handle = Handle()

    with pytest.raises(TypeError, match="not a scalar"):
        compat._scalar(Tensor())


@triton.jit
def bf16_kernel(x_ptr, y_ptr, o_ptr, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    at = offsets[:, None] * BLOCK + offsets[None, :]
    x = tl.load(x_ptr + at)
    y = tl.load(y_ptr + at)
    product = tl.dot(x, y).to(tl.bfloat16)
    tl.store(o_ptr + at, product * x + y)


def test_bf16__dot_and_arithmetic__match_torch():
    x, y = (torch.randn(16, 16).bfloat16() for _ in range(2))
    out = torch.empty_like(x)
    bf16_kernel[(1,)](x, y, out, BLOCK=16)
    expected = (x.float() @ y.float()).bfloat16() * x + y
    assert (out.float() - expected.float()).abs().max() <= 0.04 * expected.float().abs().max()
    assert torch.isfinite(out.float()).all()


@triton.jit
def dot_onto_f32_kernel(x_ptr, o_ptr, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    at = offsets[:, None] * BLOCK + offsets[None, :]
    x = tl.load(x_ptr + at)
    product = tl.dot(x, x, tl.zeros([BLOCK, BLOCK], dtype=tl.float32))
    tl.store(o_ptr + at, product.to(o_ptr.dtype.element_ty))


def test_f64__dot_onto_float32_zeros__is_a_product_in_float64():
    x = torch.randn(16, 16, dtype=torch.float64)
    out = torch.empty_like(x)
    dot_onto_f32_kernel[(1,)](x, out, BLOCK=16)
    assert torch.allclose(out, x @ x, rtol=1e-12, atol=1e-12)


def test_f32_to_bf16__all_kinds_of_values__round_like_torch():
    values = torch.cat([torch.randn(1000) * 10.0**e for e in range(-30, 30, 7)])
    values = torch.cat(
        [values, torch.tensor([0.0, -0.0, torch.inf, -torch.inf, 3.0e38, 1.00390625, 1.01171875])]
    )
    bits = compat.f32_to_bf16(values.numpy())
    assert np.array_equal(bits, values.bfloat16().view(torch.int16).numpy().view(np.uint16))
    assert np.isnan(compat.bf16_to_f32(compat.f32_to_bf16(np.array([np.nan], np.float32))))[0]


@triton.jit
def libdevice_kernel(x_ptr, y_ptr, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offsets)
    tl.store(
        y_ptr + offsets, libdevice.tanh(x) + tl.extra.cuda.libdevice.pow(x, 2.0) + libdevice.rsqrt(x * x + 1)
    )


def test_libdevice__both_spellings__run():
    x, y = torch.randn(16), torch.empty(16)
    libdevice_kernel[(1,)](x, y, BLOCK=16)
    assert torch.allclose(y, x.tanh() + x**2 + (x * x + 1).rsqrt(), atol=1e-6)


@triton.jit
def by_name_kernel(x_ptr, y_ptr, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offsets)
    tl.store(y_ptr + offsets, tanh(x) + reciprocal_root(x * x + 1) + helped(x))


@triton.jit
def helped(x):
    return cuda_floor(x)


def test_libdevice__imported_by_name__runs():
    x, y = torch.randn(16), torch.empty(16)
    by_name_kernel[(1,)](x, y, BLOCK=16)
    assert torch.allclose(y, x.tanh() + (x * x + 1).rsqrt() + x.floor(), atol=1e-6)


@triton.jit
def float_argument_kernel(y_ptr, scale, flag, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    value = scale.to(tl.float32) * 2
    if flag:
        value = value + 1
    tl.store(y_ptr + offsets, tl.full([BLOCK], 1.0, tl.float32) * value)


def test_number_arguments__floats_and_flags__are_typed_scalars():
    y = torch.empty(4)
    float_argument_kernel[(1,)](y, 0.25, True, BLOCK=4)
    assert torch.equal(y, torch.full((4,), 1.5))


@triton.jit
def accumulate_kernel(x_ptr, total_ptr, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offsets, mask=offsets < n, other=0.0)
    tl.atomic_add(total_ptr, tl.sum(x, 0))


class Seen:
    def __init__(self):
        self.loads = self.stores = self.atomics = 0

    def load(self, addresses, size):
        self.loads += addresses.size * size

    def store(self, addresses, size):
        self.stores += addresses.size * size

    def atomic(self, addresses, size):
        self.atomics += addresses.size


def test_observer__masked_kernel__sees_active_lanes_only():
    x, total, seen = torch.ones(20), torch.zeros(1), Seen()
    with accesses.observe(seen):
        accumulate_kernel[(2,)](x, total, 20, BLOCK=16)
    assert total.item() == 20
    assert (seen.loads, seen.stores, seen.atomics) == (80, 0, 2)


@pytest.mark.parametrize(("n", "verb"), [(21, "reads"), (20, None)])
def test_bounds__one_element_too_many__is_found(n, verb):
    x, total = torch.ones(20), torch.zeros(1)
    if verb is None:
        accumulate_kernel[(2,)](x, total, n, BLOCK=16)
        return
    with pytest.raises(
        accesses.OutOfBounds, match=rf"program \(1, 0, 0\) {verb} out of bounds: 1 of 5 elements"
    ):
        accumulate_kernel[(2,)](x, total, n, BLOCK=16)


@triton.jit
def unmasked_kernel(x_ptr, y_ptr, at):
    tl.store(y_ptr, tl.load(x_ptr + at))


@pytest.mark.parametrize("at", [20, 1000, -1000])
def test_bounds__of_a_load_without_a_mask__are_checked(at):
    x, y = torch.ones(20), torch.zeros(1)
    with pytest.raises(accesses.OutOfBounds, match="reads out of bounds"):
        unmasked_kernel[(1,)](x, y, at)


def test_observer__load_without_a_mask__is_seen():
    x, y, seen = torch.ones(20), torch.zeros(1), Seen()
    with accesses.observe(seen):
        unmasked_kernel[(3,)](x, y, 7)
    assert (y.item(), seen.loads, seen.stores) == (1, 12, 12)


@triton.jit
def pointer_table_kernel(table_ptr, y_ptr, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    x_ptr = tl.load(table_ptr).to(tl.pointer_type(tl.float32))
    tl.store(y_ptr + offsets, tl.load(x_ptr + offsets))


def test_bounds__table_of_addresses__is_not_checked():
    x, y = torch.randn(8), torch.empty(8)
    pointer_table_kernel[(1,)](torch.tensor([x.data_ptr()]), y, BLOCK=8)
    assert torch.equal(x, y)


@triton.jit
def chained_kernel(y_ptr):
    a = b = 1.0
    tl.store(y_ptr, a + b)


def test_chained_assignment__refused_as_on_a_gpu():
    with pytest.raises(SyntaxError, match="chained"):
        chained_kernel[(1,)](torch.empty(1))


def test_language__after_a_launch__is_restored():
    before = {name: getattr(tl, name) for name in ("load", "sum", "range", "program_id")}
    accumulate_kernel[(1,)](torch.ones(4), torch.zeros(1), 4, BLOCK=4)
    assert all(getattr(tl, name) is value for name, value in before.items())
    with pytest.raises(Exception, match="jit"):
        tl.program_id(0)


def test_language__after_a_failing_launch__is_restored():
    before = tl.load
    with pytest.raises(accesses.OutOfBounds):
        accumulate_kernel[(2,)](torch.ones(4), torch.zeros(1), 99, BLOCK=4)
    assert tl.load is before and not accesses.running()


@triton.jit
def block_pointer_kernel(x_ptr, y_ptr, M, N, BLOCK: tl.constexpr):
    x = tl.make_block_ptr(x_ptr, (M, N), (N, 1), (0, 0), (BLOCK, BLOCK), (1, 0))
    y = tl.make_block_ptr(y_ptr, (M, N), (N, 1), (0, 0), (BLOCK, BLOCK), (1, 0))
    tl.store(y, tl.load(x, boundary_check=(0, 1), padding_option="zero") + 1, boundary_check=(0, 1))


def test_block_pointers__ragged__load_and_store():
    x, y = torch.randn(5, 7), torch.empty(5, 7)
    block_pointer_kernel[(1,)](x, y, 5, 7, BLOCK=8)
    assert torch.equal(y, x + 1)


def test_interpreted_functions__from_the_environment__run_the_same_way():
    """A test suite may set TRITON_INTERPRET before Triton is imported."""
    folders = [str(Path(__file__).parent), str(SANDBOX)]
    code = f"""
import sys
sys.path[:0] = {folders!r}
import torch, test_compat
y, x, seen = torch.empty(8), torch.randn(3, 8), []
test_compat.launches.set_mode("interpret")
with test_compat.launch_intercept(lambda launch: (seen.append(launch), launch.run())):
    test_compat.runtime_range_kernel[(1,)](x, y, 3, BLOCK=8)
assert type(test_compat.runtime_range_kernel).__name__ == "InterpretedFunction"
assert torch.allclose(y, -x.sum(0)) and seen[0].name == "runtime_range_kernel"
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"TRITON_INTERPRET": "1", "PATH": "", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_launch_intercept__is_left__when_the_body_raises():
    with pytest.raises(ZeroDivisionError), launch_intercept(lambda launch: None):
        raise ZeroDivisionError
    y = torch.zeros(1)
    accumulate_kernel[(1,)](torch.ones(4), y, 4, BLOCK=4)
    assert y.item() == 4
