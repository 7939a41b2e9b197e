"""What steps of a loop do with a product in front of a sum, done once behind the loop."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from diff_support import MARKER, ROOT, assert_right, draft, edits_of

SCALED = """
import torch
import triton
import triton.language as tl
from kernel_agent import autodiff

SWEEP = [{"M": 70, "N": 45, "K": 20}]


def make_args(dims, device="cuda", dtype=torch.float32):
    m, n, k = (dims[name] for name in ("M", "N", "K"))
    shapes = ((m, k), (k, n), (n,), (triton.cdiv(m, 32),))
    return tuple(torch.randn(shape, device=device, dtype=dtype) for shape in shapes)


@triton.jit
def product_kernel(
    x_ptr, w_ptr, s_ptr, t_ptr, y_ptr, M, N, K,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    inside = (k[:, None] < K) & (n[None, :] < N)
    x = tl.load(x_ptr + m[:, None] * K + k[None, :], mask=(m[:, None] < M) & (k[None, :] < K), other=0.0)
    w = tl.load(w_ptr + k[:, None] * N + n[None, :], mask=inside, other=0.0)
    s = tl.load(s_ptr + n, mask=n < N, other=0.0)
    t = tl.load(t_ptr + tl.program_id(0))
    scaled = w * s[None, :]
    y = tl.dot(x, scaled, input_precision="ieee")
    tl.store(y_ptr + m[:, None] * N + n[None, :], y, mask=(m[:, None] < M) & (n[None, :] < N))


@autodiff(inputs_require_grad=(0, 2))
def product(x, w, s, t):
    (M, K), N = x.shape, w.shape[1]
    y = torch.empty((M, N), device=x.device, dtype=x.dtype)
    grid = (triton.cdiv(M, 32), triton.cdiv(N, 16))
    product_kernel[grid](
        x, w, s, t, y, M, N, K, BLOCK_M=32, BLOCK_N=16, BLOCK_K=triton.next_power_of_2(max(K, 16))
    )
    return y
"""
DIMS = {"M": 70, "N": 45, "K": 20}
CASES = [({"M": m, "N": n, "K": k}, "normal") for m, n, k in ((70, 45, 20), (33, 16, 40), (5, 3, 16))]
VALUE = "scaled = w * s[None, :]"


@pytest.fixture
def changed(tmp_path: Path) -> Callable[..., Path]:
    return edits_of(SCALED, tmp_path / "product.py")


def of_s(backward: str) -> tuple[str, str]:
    """The kernel of d_s: the body of its loop, and what is behind that."""
    kernel = next(
        one for one in backward.split("@triton.jit\n") if one.startswith("def product_kernel_bwd_s(")
    )
    _, _, loop = kernel.partition("    for ")
    body = loop.splitlines()[1:]
    end = next(at for at, line in enumerate(body) if line.strip() and not line.startswith("        "))
    return "\n".join(body[:end]), "\n".join(body[end:])


LINEAR = {
    "a factor": VALUE,
    "a sum of two": "scaled = w * s[None, :] + s[None, :] * 0.5",
    "a quotient": "scaled = s[None, :] / (1.0 + w * w)",
    "a mask": "scaled = tl.where(w > 0, w * s[None, :], 0.0)",
    "what is taken away": "scaled = w - s[None, :]",
    "turned around": "scaled = tl.trans(tl.trans(w) * s[:, None])",
}


@pytest.mark.parametrize("value", LINEAR.values(), ids=LINEAR)
def test_what_is_linear_in_a_product__is_done_to_the_sum_of_products(changed, value: str) -> None:
    file = changed((VALUE, value))
    result = draft(file, DIMS)
    body, behind = of_s(result["backward"])
    assert "tl.dot(" in body and "tl.sum(" not in body and "tl.sum(" in behind
    assert_right(file, result, CASES)


OTHERS = {
    "a factor of each step": "scaled = w * s[None, :] * t",
    "a mask of each step": "scaled = tl.where(t > 0, w * s[None, :], 0.0)",
}


@pytest.mark.parametrize("value", OTHERS.values(), ids=OTHERS)
def test_what_is_not_the_same_in_each_step__stays_in_the_loop(changed, value: str) -> None:
    file = changed((VALUE, value))
    result = draft(file, DIMS)
    body, behind = of_s(result["backward"])
    assert "tl.sum(" in body and "tl.sum(" not in behind
    assert_right(file, result, CASES)


def test_two_products__stay_in_the_loop(changed) -> None:
    """A program would hold a tile more for each of them."""
    file = changed(
        (
            "    tl.store(y_ptr",
            '    y += tl.dot(x * x, scaled * s[None, :], input_precision="ieee")\n    tl.store(y_ptr',
        ),
    )
    result = draft(file, DIMS)
    body, _ = of_s(result["backward"])
    assert body.count("tl.dot(") > 1 and "tl.sum(" in body
    assert_right(file, result, CASES)


STORE = {
    "norm/layer_norm_linear_fused_input.py": ({"M": 33, "K": 40, "N": 37}, "d_a_sum"),
    "quantised_ste/int4_packed_groupwise_linear.py": ({"M": 70, "groups": 3, "size": 24, "N": 45}, "d_sum"),
}


@pytest.mark.parametrize("pair", STORE)
def test_forwards_of_the_store__sum_behind_the_loop_in_which_they_multiply(pair: str, tmp_path: Path) -> None:
    """Two loops, one in the other, with sums of both; several gradients of one product."""
    file = edits_of((ROOT / "dataset" / pair).read_text().partition(MARKER)[0], tmp_path / Path(pair).name)()
    dims, name = STORE[pair]
    result = draft(file, dims)
    assert result["report"]["atomics"] == 0 and f"{name} += " in result["backward"]
    assert_right(file, result, [(dims, "normal"), ({**dims, "M": 5}, "normal")])


def test_tile_of_whole_numbers_that_is_used_behind_a_loop__is_loaded_there(tmp_path: Path) -> None:
    """Held in registers through the loop, it would take the place of a tile of the sum."""
    pair = "quantised_ste/int4_packed_groupwise_linear.py"
    file = edits_of((ROOT / "dataset" / pair).read_text().partition(MARKER)[0], tmp_path / Path(pair).name)()
    backward = draft(file, STORE[pair][0])["backward"]
    kernel = backward.split("def linear_kernel_bwd_z_s(")[1].split("@triton.jit")[0]
    assert kernel.index("    for program_0 in ") < kernel.index("    word = tl.load(")
