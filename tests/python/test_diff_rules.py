"""One test per rule, on random data, with broadcasting and a block that is not square; and random
compositions of rules."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from diff_support import assert_right, draft
from kernel_agent.differentiate.read import functions
from kernel_agent.differentiate.reverse import derivatives

TEMPLATE = """
import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice
from kernel_agent import autodiff


@triton.jit
def affine(a1, b1, a2, b2):
    return a1 * a2, b1 * a2 + b2


@triton.jit
def plus(a, b):
    return a + b


@triton.jit
def times(a, b):
    return a * b


@triton.jit
def larger(a, b):
    return tl.where(a > b, a, b)


@triton.jit
def smaller(a, b):
    return tl.minimum(a, b)


@triton.jit
def log_sum(a, b):
    top = tl.maximum(a, b)
    return top + tl.log(tl.exp(a - top) + tl.exp(b - top))


@triton.jit
def speeds(a, b):
    return (a + b) / (1 + a * b)


@triton.jit
def merge(mean_a, m2_a, n_a, mean_b, m2_b, n_b):
    gap = mean_b - mean_a
    n = n_a + n_b
    share = tl.where(n == 0.0, 0.0, n_b / n)
    return mean_a + gap * share, m2_a + m2_b + gap * gap * n_a * share, n


@triton.jit
def merge_of_ones_or_more(mean_a, m2_a, n_a, mean_b, m2_b, n_b):
    n = n_a + n_b
    scaled_a, scaled_b = mean_a * n_a, mean_b * n_b
    mean = (scaled_a + scaled_b) / tl.maximum(n, 1)
    return mean, m2_a + m2_b + scaled_a * mean_a + scaled_b * mean_b - n * mean * mean, n


@triton.jit
def merge_of_others(a1, b1, n1, a2, b2, n2):
    return a1 * n2 + a2 * n1, b1 + b2, n1 * n2


@triton.jit
def sum_and_larger(sum_a, top_a, sum_b, top_b):
    return sum_a + sum_b, tl.maximum(top_a, top_b)


@triton.jit
def product(re_a, im_a, re_b, im_b):
    return re_a * re_b - im_a * im_b, re_a * im_b + im_a * re_b


@triton.jit
def applied_later(a1, b1, a2, b2):
    return a1 * a2, a1 * b2 + b1


@triton.jit
def largest_with_place(value_a, at_a, value_b, at_b):
    is_first = (value_a > value_b) | ((value_a == value_b) & (at_a < at_b))
    return tl.where(is_first, value_a, value_b), tl.where(is_first, at_a, at_b)


@triton.jit
def log_sum_of_two(top_a, sum_a, top_b, sum_b):
    top = tl.maximum(top_a, top_b)
    return top, sum_a * tl.exp(top_a - top) + sum_b * tl.exp(top_b - top)


@triton.jit
def rule_kernel(x_ptr, y_ptr, z_ptr, out_ptr, m, n, M: tl.constexpr, N: tl.constexpr):
    rows = tl.arange(0, M)
    cols = tl.program_id(0) * N + tl.arange(0, N)
    at = rows[:, None] * n + cols[None, :]
    mask = (rows[:, None] < m) & (cols[None, :] < n)
    x = tl.load(x_ptr + at, mask=mask, other=0.5)
    y = tl.load(y_ptr + cols, mask=cols < n, other=0.5)
    z = tl.load(z_ptr + rows, mask=rows < m, other=0.5)
{body}
    tl.store(out_ptr + at, out, mask=mask)


@autodiff(inputs_require_grad=(0, 1, 2))
def rule(x, y, z):
    out = torch.empty_like(x)
    m, n = x.shape
    rule_kernel[(triton.cdiv(n, 32),)](x, y, z, out, m, n, M=16, N=32)
    return out


SWEEP = [{{"M": 16, "N": 32}}, {{"M": 13, "N": 45}}]


def make_args(dims, device="cuda", dtype=torch.float32):
    low, high = {low}, {high}
    shapes = ((dims["M"], dims["N"]), (dims["N"],), (dims["M"],))
    return tuple(low + (high - low) * torch.rand(s, device=device, dtype=dtype) for s in shapes)
"""

# expression -> range of the inputs
RULES: dict[str, tuple[str, float, float]] = {
    "add": ("x + y[None, :]", -2, 2),
    "sub": ("z[:, None] - x", -2, 2),
    "mul": ("x * y[None, :] * z[:, None]", -2, 2),
    "square": ("x * x + y[None, :] * z[:, None]", -2, 2),
    "div": ("(x + z[:, None]) / y[None, :]", 0.5, 2),
    "neg": ("-x * y[None, :] + z[:, None]", -2, 2),
    "scalar": ("2.5 * x - y[None, :] / 3 + 1 - z[:, None]", -2, 2),
    "maximum": ("tl.maximum(x, y[None, :]) * z[:, None]", -2, 2),
    "minimum": ("tl.minimum(x, z[:, None]) + y[None, :]", -2, 2),
    "relu": ("tl.maximum(x, 0.0) * y[None, :] * z[:, None]", -2, 2),
    "clamp": ("tl.clamp(x, -0.5, 0.7) * y[None, :] + z[:, None]", -2, 2),
    "where": ("tl.where(x > y[None, :], x * y[None, :], z[:, None])", -2, 2),
    "abs": ("tl.abs(x - y[None, :]) * z[:, None]", -2, 2),
    "exp": ("tl.exp(x - y[None, :]) * z[:, None]", -2, 2),
    "exp2": ("tl.exp2(x * z[:, None]) + y[None, :]", -2, 2),
    "log": ("tl.log(x) * y[None, :] * z[:, None]", 0.5, 2),
    "log2": ("tl.log2(x * y[None, :]) + z[:, None]", 0.5, 2),
    "sqrt": ("tl.sqrt(x * y[None, :] + z[:, None])", 0.5, 2),
    "rsqrt": ("tl.rsqrt(x + y[None, :]) * z[:, None]", 0.5, 2),
    "sin": ("tl.sin(x * y[None, :]) + z[:, None]", -2, 2),
    "cos": ("tl.cos(x + y[None, :]) * z[:, None]", -2, 2),
    "erf": ("tl.erf(x * y[None, :]) + z[:, None]", -2, 2),
    "sigmoid": ("tl.sigmoid(x * y[None, :]) * z[:, None]", -2, 2),
    "tanh": ("libdevice.tanh(x + y[None, :]) * z[:, None]", -2, 2),
    "expm1": ("libdevice.expm1(x * y[None, :]) + z[:, None]", -2, 2),
    "erfc": ("libdevice.erfc(x * y[None, :]) + z[:, None]", -1, 1),
    "asinh": ("libdevice.asinh(x * y[None, :]) + z[:, None]", -2, 2),
    "atanh": ("libdevice.atanh(x * y[None, :]) + z[:, None]", -0.7, 0.7),
    "log1p": ("libdevice.log1p(x * y[None, :]) + z[:, None]", 0.5, 2),
    "pow": ("libdevice.pow(x, y[None, :] + z[:, None])", 0.5, 2),
    "fma": ("tl.fma(x, y[None, :] + x, z[:, None] + x)", -2, 2),
    "cast": ("(x.to(tl.float16).to(tl.float32) * 0.0 + x) * y[None, :] + z[:, None]", -2, 2),
    "floor": ("tl.floor(x) * y[None, :] + tl.ceil(z)[:, None] * x", -2, 2),
    "sum": ("x * tl.sum(x * y[None, :], axis=1)[:, None] + z[:, None]", -2, 2),
    "sum0": ("x + tl.sum(x * z[:, None], axis=0)[None, :] * y[None, :]", -2, 2),
    "sum_all": ("x * tl.sum(x * z[:, None]) + y[None, :]", -2, 2),
    "keep_dims": ("x - tl.sum(x * y[None, :], axis=1, keep_dims=True) * z[:, None]", -2, 2),
    "max": ("x * tl.max(x * y[None, :], axis=1)[:, None] + z[:, None]", -2, 2),
    "min": ("x + tl.min(x + z[:, None], axis=0)[None, :] * y[None, :]", -2, 2),
    "dot": ("tl.dot(x, tl.trans(x * y[None, :]), input_precision='ieee') @ 0 if False else x * y[None, :] + z[:, None]", -2, 2),
    "trans": ("tl.trans(tl.trans(x) * y[:, None]) + z[:, None]", -2, 2),
    "reshape": ("tl.reshape(tl.reshape(x, [M * N]) * 2.0, [M, N]) * y[None, :] + z[:, None]", -2, 2),
    "expand_dims": ("x * tl.expand_dims(y, 0) + tl.expand_dims(z, 1)", -2, 2),
    "broadcast_to": ("tl.broadcast_to(y[None, :], [M, N]) * x + tl.broadcast_to(z[:, None], [M, N])", -2, 2),
    "flip": ("tl.flip(x, 1) * y[None, :] + z[:, None]", -2, 2),
    "cumsum": ("tl.cumsum(x * y[None, :], axis=1) + z[:, None]", -2, 2),
    "cumsum_reverse": ("tl.cumsum(x, axis=0, reverse=True) * y[None, :] + z[:, None]", -2, 2),
    "cumprod": ("tl.cumprod(x * y[None, :], axis=1) + z[:, None]", 0.5, 1.5),
    "cumprod_reverse": ("tl.cumprod(x, axis=0, reverse=True) * y[None, :] + z[:, None]", 0.5, 1.5),
    "cumprod_of_zeros": ("tl.cumprod(tl.where(cols[None, :] % 7 == 3, 0.0 * x, x), axis=1) * y[None, :] + z[:, None]", 0.5, 1.5),
    "softmax": ("tl.softmax(x * z[:, None], dim=1, keep_dims=True) * y[None, :]", -2, 2),
    "constant_divisor": ("x / 3 + 2 / y[None, :] - z[:, None] / 7.0", 0.5, 2),
}  # fmt: skip

BODIES: dict[str, tuple[str, float, float]] = {
    "dot": ("    p = tl.dot(x, tl.trans(x * y[None, :]), input_precision='ieee')\n    out = tl.dot(p, x, input_precision='ieee') + z[:, None]", -1, 1),
    "dot_acc": ("    out = tl.dot(x * z[:, None], tl.trans(x), input_precision='ieee')\n    out = tl.dot(out, x, x * y[None, :], input_precision='ieee')", -1, 1),
    "join_split": ("    a, b = tl.split(tl.join(x * y[None, :], x + z[:, None]))\n    out = a * b", -2, 2),
    "interleave": ("    w = tl.interleave(x, x * y[None, :])\n    out = tl.sum(tl.reshape(w, [M, N, 2]), axis=2) * z[:, None]", -2, 2),
    "affine_scan": ("    _, h = tl.associative_scan((x * 0 + z[:, None], x * y[None, :]), 1, affine)\n    out = h", -1, 1),
    "affine_scan_reverse": ("    _, h = tl.associative_scan((x, x * y[None, :]), 1, affine, reverse=True)\n    out = h + z[:, None]", -1, 1),
    "scan_of_maximum": ("    out = tl.associative_scan(x * y[None, :], 1, larger) + z[:, None]", -2, 2),
    "scan_of_maximum_reverse": ("    out = tl.associative_scan(x, 0, larger, reverse=True) * y[None, :] + z[:, None]", -2, 2),
    "scan_of_log_sum": ("    out = tl.associative_scan(x * z[:, None], 1, log_sum) * y[None, :]", -2, 2),
    "scan_of_log_sum_reverse": ("    out = tl.associative_scan(x * z[:, None], 0, log_sum, reverse=True) * y[None, :]", -2, 2),
    "scan_of_speeds": ("    out = tl.associative_scan(x * y[None, :], 1, speeds) + z[:, None]", 0.1, 0.6),
    "scan_of_product": ("    out = tl.associative_scan(x * y[None, :], 1, times) + z[:, None]", 0.5, 1.5),
    "reduce_sum": ("    out = x * tl.reduce(x * y[None, :], 1, plus)[:, None] + z[:, None]", -2, 2),
    "reduce_sum_all": ("    out = x * tl.reduce(x * z[:, None], None, plus) + y[None, :]", -2, 2),
    "reduce_maximum": ("    out = x * tl.reduce(x * y[None, :], 1, larger, keep_dims=True) + z[:, None]", -2, 2),
    "reduce_minimum": ("    out = x + tl.reduce(x * z[:, None], 0, smaller)[None, :] * y[None, :]", -2, 2),
    "reduce_product": ("    out = x * tl.reduce(x * y[None, :], 0, times)[None, :] + z[:, None]", 0.7, 1.3),
    "reduce_log_sum": ("    out = x * tl.reduce(x * y[None, :], 1, log_sum)[:, None] + z[:, None]", -2, 2),
    "reduce_of_triton": ("    out = x * tl.reduce(x * y[None, :], 1, tl.standard._sum_combine)[:, None] + z[:, None]", -2, 2),
    "reduce_welford": ("    mean, m2, count = tl.reduce((x * y[None, :], x * 0, x * 0 + 1), 1, merge)\n    out = (x - mean[:, None]) * tl.rsqrt(m2 / count + 0.1)[:, None] + z[:, None]", -2, 2),
    "reduce_welford_of_what_is_there": ("    there = (cols < n)[None, :] & (rows < m)[:, None]\n    mean, m2, count = tl.reduce((tl.where(there, x, 0.0), x * 0, there.to(tl.float32)), 1, merge)\n    out = (x - mean[:, None]) * tl.rsqrt(m2 + 0.1)[:, None] * y[None, :] + z[:, None]", -2, 2),
    "reduce_welford_of_rows": ("    mean, m2, _ = tl.reduce((x, x * 0, x * 0 + 1), 0, merge, keep_dims=True)\n    out = mean * y[None, :] + m2 * x + z[:, None]", -2, 2),
    "reduce_welford_of_all": ("    mean, m2, _ = tl.reduce((x * z[:, None], x * 0, x * 0 + 1), None, merge)\n    out = mean * y[None, :] + x * m2", -2, 2),
    "reduce_welford_of_parts": ("    mean, m2, count = tl.reduce((x * y[None, :], x * x, tl.abs(x) + z[:, None] * z[:, None]), 1, merge)\n    out = (x - mean[:, None]) * tl.rsqrt(m2 / count + 0.1)[:, None]", -2, 2),
    "reduce_welford_after_a_loop": ("    mean = tl.zeros([M, N], tl.float32)\n    m2 = tl.zeros([M, N], tl.float32)\n    n = tl.zeros([M, N], tl.float32)\n    for i in range(3):\n        v = x * (i + 1) + y[None, :]\n        n += (cols >= 0)[None, :]\n        new = mean + (v - mean) / tl.maximum(n, 1)\n        m2 += (v - mean) * (v - new)\n        mean = new\n    mean, m2, n = tl.reduce((mean, m2, n), axis=1, combine_fn=merge_of_ones_or_more)\n    out = (x - mean[:, None]) * tl.rsqrt(m2 / n + 0.1)[:, None] + z[:, None]", -2, 2),
    "reduce_merge_of_others": ("    mean, m2, n = tl.reduce((x * y[None, :], x * 0, x * 0 + 1), 1, merge_of_others)\n    out = mean[:, None] * x + m2[:, None] * y[None, :] + z[:, None] * n[:, None]", 0.3, 0.5),
    "reduce_apart": ("    total, top = tl.reduce((x * y[None, :], x + z[:, None]), 1, sum_and_larger)\n    out = x * total[:, None] + top[:, None]", -2, 2),
    "reduce_complex": ("    re, im = tl.reduce((x, 0.3 * x * y[None, :]), 1, product)\n    out = x + (re * im)[:, None] + z[:, None]", 0.8, 1.1),
    "reduce_last_state": ("    _, h = tl.reduce((x, x * y[None, :]), 1, affine)\n    out = h[:, None] + x * z[:, None]", -1, 1),
    "reduce_in_order": ("    a, h = tl.reduce((x, x * y[None, :]), 1, applied_later)\n    out = h[:, None] + x * z[:, None] + a[:, None]", -1.1, 1.1),
    "reduce_with_place": ("    top, place = tl.reduce((x * y[None, :], (cols[None, :] + rows[:, None] * 0).to(tl.int32)), 1, largest_with_place)\n    out = x * top[:, None] + z[:, None] * place[:, None]", -2, 2),
    "reduce_log_sum_of_two": ("    top, total = tl.reduce((x * y[None, :], x * 0 + 1), 1, log_sum_of_two)\n    out = x * (top + tl.log(total))[:, None] + z[:, None]", -2, 2),
    "gather": ("    place = (rows[:, None] * 5 + cols[None, :] * 3) % N\n    out = tl.gather(x * y[None, :], place, 1) * z[:, None]", -2, 2),
    "gather_rows": ("    place = (rows[:, None] + cols[None, :]) % M // 2\n    out = tl.gather(x * y[None, :], place, 0) + z[:, None]", -2, 2),
    "loop_sum": ("    out = x * 0.0\n    for i in range(3):\n        out += x * y[None, :] * i\n    out += z[:, None]", -2, 2),
    "loop_product": ("    out = x\n    for i in range(3):\n        out = out * (y[None, :] + i)\n    out += z[:, None]", -2, 2),
    "loop_nonlinear": ("    out = x\n    for i in range(4):\n        out = tl.sin(out * z[:, None]) + y[None, :]", -2, 2),
    "loop_nested": ("    out = x\n    for i in range(2):\n        s = y[None, :] + out * 0.5\n        for j in range(3):\n            s = s * tl.cos(s) + z[:, None]\n        out = out + s", -2, 2),
    "loop_swap": ("    out = x\n    b = x * y[None, :]\n    for i in range(3):\n        c = out\n        out = b * z[:, None]\n        b = c + 1.0", -2, 2),
    "loop_last": ("    out = x\n    for i in range(3):\n        out = x * i + y[None, :] * z[:, None]", -2, 2),
    "running_maximum": ("    best = x\n    for i in range(3):\n        best = tl.maximum(best, x * y[None, :] * i)\n    out = best * z[:, None]", -2, 2),
    "steps_of_an_online_softmax": ("    top = x\n    low = x * 0.0\n    high = x * 0.0\n    for i in range(3):\n        s = tl.sin(x * y[None, :] + i) * z[:, None]\n        best = tl.maximum(top, s)\n        r = tl.exp(top - best)\n        p = tl.exp(s - best)\n        low = low * r + p\n        high = high * r + p * tl.sin(x + i * y[None, :])\n        top = best\n    v = high / low\n    out = x + v + tl.floor(v) * 0.5", -2, 2),
    "runtime_if": ("    out = x * y[None, :]\n    if n > 40:\n        out = out * out + z[:, None]\n    else:\n        out = out - z[:, None]", -2, 2),
    "if_in_loop": ("    out = x\n    for i in range(4):\n        if i % 2 == 0:\n            out = out * y[None, :]\n        else:\n            out = tl.sin(out) + z[:, None]", -2, 2),
    "fan_out": ("    a = tl.exp(x)\n    b = a * y[None, :]\n    out = a * b + a - b * b * z[:, None]", -1, 1),
    "while_loop": ("    out = x\n    i = 0\n    while i < 3:\n        out = out * y[None, :] + z[:, None]\n        i += 1", -2, 2),
}  # fmt: skip
del RULES["dot"]


def write(folder: Path, body: str, low: float, high: float) -> Path:
    file = folder / "rule.py"
    file.write_text(TEMPLATE.format(body=body, low=low, high=high))
    return file


def check(folder: Path, body: str, low: float, high: float) -> None:
    file = write(folder, body, low, high)
    result = draft(file, {"M": 16, "N": 32})
    assert_right(file, result, [({"M": 16, "N": 32}, "normal"), ({"M": 13, "N": 45}, "normal")], 2e-5)


@pytest.mark.parametrize("name", sorted(RULES))
def test_rule(name: str, tmp_path: Path) -> None:
    expression, low, high = RULES[name]
    check(tmp_path, f"    out = {expression}", low, high)


@pytest.mark.parametrize("name", sorted(BODIES))
def test_body(name: str, tmp_path: Path) -> None:
    check(tmp_path, *BODIES[name])


@pytest.mark.parametrize("name", [name for name in BODIES if "welford" in name])
def test_merge_of_means__is_sums(name: str, tmp_path: Path) -> None:
    backward = draft(write(tmp_path, *BODIES[name]), {"M": 16, "N": 32})["backward"]
    assert "tl.sum" in backward and "associative_scan" not in backward and "merge)[" not in backward


def test_places_beside_values__are_whole_numbers_in_the_backward(tmp_path: Path) -> None:
    """As float32 those above 2^24 would be others."""
    body, low, high = BODIES["reduce_with_place"]
    far = "cols[None, :] + rows[:, None] * 0 + 33554432"
    file = write(
        tmp_path,
        body.replace("cols[None, :] + rows[:, None] * 0", far).replace("place[:, None]", "0.5"),
        low,
        high,
    )
    backward = draft(file, {"M": 16, "N": 32})["backward"]
    scans = [
        part for part in backward.split("tl.where(")[1:] if "associative_scan" in part and ")[1]" in part
    ]
    assert scans and all("0.0" not in part.partition("tl.gather")[0] for part in scans), backward


def test_merge_that_is_right_for_whole_counts__is_not_taken_to_be_right_for_others(tmp_path: Path) -> None:
    body = BODIES["reduce_welford"][0].replace("merge)", "merge_of_ones_or_more)")
    counts = {
        "x * 0 + 1": False,
        "(cols < n)[None, :].to(tl.float32) + x * 0": False,
        "tl.abs(x) * 0.1": True,
    }
    for count, apart in counts.items():
        file = write(tmp_path, body.replace("x * 0 + 1", count), -2, 2)
        assert ("merge_of_ones_or_more)[" in draft(file, {"M": 16, "N": 32})["backward"]) is apart, count


# In lanes that are masked off inputs are 0 here, where the derivative or the value is no number.
DEAD = [
    "tl.log(x * y[None, :]) + z[:, None]",
    "x / z[:, None] / y[None, :]",
    "z[:, None] * (1.0 / x) + y[None, :]",
    "tl.sqrt(x * y[None, :]) * z[:, None]",
    "tl.rsqrt(x * y[None, :]) + z[:, None]",
    "libdevice.pow(x, y[None, :]) * z[:, None]",
    "libdevice.acosh(1 + x * y[None, :]) + z[:, None]",
    "libdevice.fmod(x + z[:, None], y[None, :])",
    "libdevice.atan2(x * z[:, None], y[None, :])",
    "x / tl.sqrt(tl.sum(x * x, axis=1))[:, None] * y[None, :] + z[:, None]",
]


DEAD_LOOPS = """    total = tl.zeros([M], tl.float32)
    for i in range(3):
        total += tl.sum(x * x, axis=1) * (i + 1)
    out = x / total[:, None] * y[None, :] + tl.log(total)[:, None] * z[:, None]"""


def test_masked_lanes__of_what_a_loop_made__contribute_nothing(tmp_path: Path) -> None:
    file = write(tmp_path, DEAD_LOOPS, 0.5, 2)
    file.write_text(file.read_text().replace("other=0.5", "other=0.0"))
    result = draft(file, {"M": 16, "N": 32})
    assert_right(file, result, [({"M": 16, "N": 32}, "normal"), ({"M": 13, "N": 45}, "normal")], 5e-5)


@pytest.mark.parametrize("expression", DEAD)
def test_masked_lanes__contribute_nothing(expression: str, tmp_path: Path) -> None:
    file = write(tmp_path, f"    out = {expression}", 0.5, 2)
    file.write_text(file.read_text().replace("other=0.5", "other=0.0"))
    result = draft(file, {"M": 16, "N": 32})
    assert_right(file, result, [({"M": 16, "N": 32}, "normal"), ({"M": 13, "N": 45}, "normal")], 5e-5)


def test_masked_lanes__need_nothing_where_their_values_are_harmless(tmp_path: Path) -> None:
    file = write(tmp_path, "    out = tl.sqrt(x + 1.5) * tl.exp(y)[None, :] / (z + 0.1)[:, None]", 0.5, 2)
    assert "== 0.0" not in draft(file, {"M": 16, "N": 32})["backward"]


def test_text__is_the_same_every_time(tmp_path: Path) -> None:
    """Nothing may hang on the addresses of objects: a loop in a loop once lost its tape to a reused one."""
    file = write(tmp_path, *BODIES["loop_nested"])
    texts = {draft(file, {"M": 16, "N": 32})["backward"] for _ in range(12)}
    assert len(texts) == 1


def test_every_unary_rule__has_a_forward() -> None:
    assert set(derivatives.UNARY) == set(functions.UNARY)
    assert set(derivatives.BINARY) == set(functions.BINARY)


SAFE_UNARY = [
    "tl.sin({})",
    "tl.cos({})",
    "tl.sigmoid({})",
    "tl.exp(-tl.abs({}))",
    "tl.sqrt({0} * {0} + 1.0)",
    "tl.erf({})",
]
SAFE_BINARY = [
    "({} + {})",
    "({} - {})",
    "({} * {})",
    "tl.maximum({}, {})",
    "tl.minimum({}, {})",
    "({} / (1.5 + tl.abs({})))",
]
REDUCTIONS = [
    "tl.sum({}, axis=1)[:, None] * 0.1",
    "tl.max({}, axis=0)[None, :]",
    "tl.sum({}, axis=0)[None, :] * 0.1",
]


def expression(pick: random.Random, depth: int) -> str:
    """A random expression of the shape of x."""
    if depth == 0:
        return pick.choice(["x", "x * y[None, :]", "x + z[:, None]", "(x - 0.3)"])
    kind = pick.random()
    if kind < 0.35:
        return pick.choice(SAFE_UNARY).format(expression(pick, depth - 1))
    if kind < 0.8:
        return pick.choice(SAFE_BINARY).format(expression(pick, depth - 1), expression(pick, depth - 1))
    if kind < 0.9:
        return (
            f"({expression(pick, depth - 1)} + {pick.choice(REDUCTIONS).format(expression(pick, depth - 1))})"
        )
    left, right = expression(pick, depth - 1), expression(pick, depth - 1)
    return f"tl.where({expression(pick, 0)} > 0.1, {left}, {right})"


@pytest.mark.parametrize("seed", range(8))
def test_random_expression(seed: int, tmp_path: Path) -> None:
    pick = random.Random(seed)
    lines = [f"    a = {expression(pick, 2)}", f"    b = a * {expression(pick, 2)}"]
    if seed % 2:
        lines += [
            f"    for i in range({2 + seed % 3}):",
            f"        b = tl.sin(b) * 0.7 + {expression(pick, 1)}",
        ]
    lines += [f"    out = b + a * {expression(pick, 1)}"]
    check(tmp_path, "\n".join(lines), -1.5, 1.5)


def test_divisor_of_a_row__is_inverted_once(tmp_path: Path) -> None:
    rows = "    total = tl.sum(x * x, axis=1) + 1.0\n    out = x / total[:, None] * y[None, :] + z[:, None]"
    file = write(tmp_path, rows, 0.0, 2)
    result = draft(file, {"M": 16, "N": 32})
    lines = [line.split("#")[0] for line in result["backward"].splitlines()]
    assert sum("1.0 / total" in line for line in lines) == 1  # for x and for total
    assert sum("/ total[:, None]" in line for line in lines) == 1  # the forward's own
    assert_right(file, result, [({"M": 16, "N": 32}, "normal"), ({"M": 13, "N": 45}, "normal")])
