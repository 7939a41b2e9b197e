"""Windows turned around: gradients of convolutions gathered by their owners, at every boundary, against the
oracle."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from diff_support import ROOT, assert_right, draft, errors
from kernel_agent.differentiate.schedule import windows

KERNELS = ROOT / "tests/python/kernels"
HEAD = """
import torch
import triton
import triton.language as tl
from kernel_agent import autodiff

SWEEP = [{{"B": 2, "C": 3, "O": 2, "L": 50, "K": 3, "S": 1, "P": 1, "D": 1}}]


@triton.jit
def conv_kernel(
    x_ptr, w_ptr, y_ptr, c, length, o, out, stride, padding, dilation, taps,
    TAPS: tl.constexpr, BLOCK: tl.constexpr,
):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    channel = tl.program_id(1)
    batch = tl.program_id(2)
    mask = at < out
    acc = tl.zeros([BLOCK], dtype=tl.float32)
    for ci in range(c):
{body}
    tl.store(y_ptr + (batch * o + channel) * out + at, acc, mask=mask)


@autodiff(inputs_require_grad=(0, 1))
def conv(x, w, stride, padding, dilation):
    b, c, length = x.shape
    o, _, taps = w.shape
    out = (length + 2 * padding - dilation * (taps - 1) - 1) // stride + 1
    y = torch.zeros((b, o, out), device=x.device, dtype=x.dtype)
    grid = (triton.cdiv(out, 16), o, b)
    conv_kernel[grid](x, w, y, c, length, o, out, stride, padding, dilation, taps, TAPS=taps, BLOCK=16)
    return y


def make_args(dims, device="cuda", dtype=torch.float32):
    x = torch.randn(dims["B"], dims["C"], dims["L"], device=device, dtype=dtype)
    w = torch.randn(dims["O"], dims["C"], dims["K"], device=device, dtype=dtype)
    return x, w, dims["S"], dims["P"], dims["D"]
"""
BODIES = {
    "padded": """
        for k in tl.static_range(TAPS):
            i = at * stride + k * dilation - padding
            inside = mask & (i >= 0) & (i < length)
            x = tl.load(x_ptr + (batch * c + ci) * length + i, mask=inside, other=0.0)
            acc += x * tl.load(w_ptr + (channel * c + ci) * TAPS + k)
""",
    "runtime_taps": """
        for k in range(taps):
            i = at * stride + k * dilation - padding
            x = tl.load(x_ptr + (batch * c + ci) * length + i, mask=mask & (0 <= i) & (i <= length - 1), other=0.0)
            acc += x * tl.load(w_ptr + (channel * c + ci) * taps + k)
""",
    "flipped": """
        for k in range(taps):
            i = at * stride + (taps - 1 - k) * dilation - padding
            x = tl.load(x_ptr + (batch * c + ci) * length + i, mask=mask & (i > -1) & (i < length), other=0.0)
            acc += x * tl.load(w_ptr + (channel * c + ci) * taps + k)
""",
    "in_pieces": """
        base = x_ptr + (batch * c + ci) * length - padding
        for k in tl.static_range(TAPS):
            here = tl.program_id(0) * BLOCK * stride + tl.arange(0, BLOCK) * stride + k * dilation
            x = tl.load(base + here, mask=mask & (here >= padding) & (here < length + padding), other=0.0)
            acc += x * tl.load(w_ptr + (channel * c + ci) * TAPS + k)
""",
    "not_linear": """
        for k in tl.static_range(TAPS):
            i = at * stride + k * dilation - padding
            x = tl.load(x_ptr + (batch * c + ci) * length + i, mask=mask & (i >= 0) & (i < length), other=0.0)
            acc += tl.sin(x * tl.load(w_ptr + (channel * c + ci) * TAPS + k)) * (1 + at + k)
""",
    "unrolled": """
        row = x_ptr + (batch * c + ci) * length
        i = at * stride - padding
        x = tl.load(row + i, mask=mask & (i >= 0) & (i < length), other=0.0)
        acc += x * tl.load(w_ptr + (channel * c + ci) * TAPS)
        i += dilation
        x = tl.load(row + i, mask=mask & (i >= 0) & (i < length), other=0.0)
        acc += x * tl.sin(x) * tl.load(w_ptr + (channel * c + ci) * TAPS + TAPS - 1)
""",
}  # fmt: skip
REFUSED = {  # body, what the reason names
    "lanes_apart": (
        """
        for k in tl.static_range(TAPS):
            i = at * stride + k * dilation - padding
            x = tl.load(x_ptr + (batch * c + ci) * length + i, mask=mask & (i >= 0) & (i < length), other=0.0)
            acc += x * tl.load(w_ptr + (channel * c + ci) * TAPS + k) * tl.arange(0, BLOCK)
""",
        "apart from its position",
    ),
    "program_apart": (
        """
        for k in tl.static_range(TAPS):
            i = at * stride + k * dilation - padding
            x = tl.load(x_ptr + (batch * c + ci) * length + i, mask=mask & (i >= 0) & (i < length), other=0.0)
            acc += x * tl.load(w_ptr + (channel * c + ci) * TAPS + k) * tl.program_id(0)
""",
        "apart from the position",
    ),
    "backwards_without_bounds": (
        """
        for k in range(taps):
            here = at * stride + (taps - 1 - k) * dilation
            x = tl.load(x_ptr + (batch * c + ci) * length + here, mask=mask & (here < length), other=0.0)
            acc += x * tl.load(w_ptr + (channel * c + ci) * taps + k)
""",
        "runs backwards",
    ),
    "limit_of_the_position": (
        """
        for k in range(0, tl.minimum(taps, 1 + tl.program_id(0))):
            i = at * stride + k * dilation - padding
            x = tl.load(x_ptr + (batch * c + ci) * length + i, mask=mask & (i >= 0) & (i < length), other=0.0)
            acc += x * tl.load(w_ptr + (channel * c + ci) * taps + k)
""",
        "differ between programs",
    ),
    "loop_of_the_position": (
        """
        for turn in range(1 + tl.program_id(0)):
            for k in tl.static_range(TAPS):
                i = at * stride + k * dilation - padding
                x = tl.load(x_ptr + (batch * c + ci) * length + i, mask=mask & (i >= 0) & (i < length), other=0.0)
                acc += x * tl.load(w_ptr + (channel * c + ci) * TAPS + k)
""",
        "depends on the position",
    ),
    "order_of_lanes": (
        """
        for k in tl.static_range(TAPS):
            i = at * stride + k * dilation - padding
            x = tl.load(x_ptr + (batch * c + ci) * length + i, mask=mask & (i >= 0) & (i < length), other=0.0)
            acc += tl.cumsum(x, axis=0) * tl.load(w_ptr + (channel * c + ci) * TAPS + k)
""",
        "comes out of",
    ),
}  # fmt: skip
SHAPES = [  # stride, padding, dilation; blocks of 16
    {"B": 2, "C": 3, "O": 2, "L": 50, "K": 3, "S": 1, "P": 1, "D": 1},
    {"B": 1, "C": 2, "O": 2, "L": 49, "K": 3, "S": 2, "P": 2, "D": 3},
    {"B": 1, "C": 1, "O": 2, "L": 32, "K": 1, "S": 1, "P": 0, "D": 1},
    {"B": 1, "C": 1, "O": 1, "L": 4, "K": 7, "S": 1, "P": 3, "D": 1},  # kernel larger than the input
    {"B": 1, "C": 2, "O": 1, "L": 33, "K": 2, "S": 5, "P": 0, "D": 1},  # elements that no window reads
    {"B": 2, "C": 1, "O": 1, "L": 17, "K": 4, "S": 3, "P": 5, "D": 2},
    {"B": 1, "C": 1, "O": 1, "L": 1, "K": 1, "S": 1, "P": 0, "D": 1},
]


def write(folder: Path, body: str, name: str = "conv") -> Path:
    file = folder / f"{name}.py"
    file.write_text(HEAD.format(body=body.strip("\n")))
    return file


def owners(result: dict[str, Any]) -> dict[str, str]:
    """Gradient: proof, of what has an owner."""
    lines = [
        line for line in result["report"]["lines"] if line["class"] == "owner" and line["proof"] != "none"
    ]
    return {line["reason"].partition(":")[0]: line["proof"] for line in lines}


@pytest.mark.parametrize("traced", [0, 1])
@pytest.mark.parametrize("name", sorted(BODIES))
def test_conv__owns_both_gradients_at_every_boundary(name: str, traced: int, tmp_path: Path) -> None:
    """What is traced with one stride is right for another."""
    file = write(tmp_path, BODIES[name])
    result = draft(file, SHAPES[traced])
    assert result["report"]["atomics"] == (2 if name == "unrolled" else 0)  # two taps of w by their names
    assert "window turned around" in owners(result)["d_x"]
    assert_right(file, result, [(dims, "normal") for dims in SHAPES])


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_conv__what_cannot_move_stays_atomic_and_says_why(name: str, tmp_path: Path) -> None:
    body, reason = REFUSED[name]
    file = write(tmp_path, body)
    shapes = [
        dict(SHAPES[i], P=0 if name == "backwards_without_bounds" else SHAPES[i]["P"]) for i in (0, 1, 4)
    ]
    result = draft(file, shapes[0])
    advice = [line for line in result["report"]["lines"] if line["class"] == "schedule"]
    assert "d_x" not in owners(result)
    assert result["report"]["atomics"] == 1
    assert any(reason in line["reason"] and line["reason"].startswith("d_x") for line in advice), advice
    assert "# SCHEDULE: d_x stays atomic" in result["backward"]
    assert_right(file, result, [(dims, "normal") for dims in shapes])


CONDITIONS = [r"\(\w+ >= 0\) & ", r" & \(\w+ % stride == 0\)", r" & \(\w+ < n\)"]


@pytest.mark.parametrize("condition", CONDITIONS)
def test_conv__every_condition_of_a_lane_is_needed(condition: str, tmp_path: Path) -> None:
    """A gather that asks less is wrong on some of these shapes: they reach what each condition guards."""
    file = write(tmp_path, BODIES["padded"])
    text = draft(file, SHAPES[0])["backward"]
    owner, rest = text.split("def conv_kernel_bwd_w")
    broken = re.sub(condition, "", owner) + "def conv_kernel_bwd_w" + rest
    assert broken != text
    try:
        found = errors(file, broken, [(dims, "normal") for dims in SHAPES])
    except AssertionError as failure:
        assert "out of bounds" in str(failure)
    else:
        assert max(found["x"]) > 1e-3


def test_conv__the_range_that_is_owned_reaches_the_last_window(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without bounds in its mask, a window's range comes from its summands; one element less is noticed."""
    file = KERNELS / "conv1d.py"
    dims = {"B": 1, "C": 2, "O": 2, "L": 35, "STRIDE": 1}
    assert max(errors(file, draft(file, dims)["backward"], [(dims, "normal")])["x"]) < 1e-5
    longest = windows.Turn._longest
    monkeypatch.setattr(
        windows.Turn, "_longest", lambda self, entries: {(): {**longest(self, entries)[()], (): -1}}
    )
    assert max(errors(file, draft(file, dims)["backward"], [(dims, "normal")])["x"]) > 1e-3


def test_conv__a_stride_that_is_not_positive_is_refused_by_the_host(tmp_path: Path) -> None:
    text = draft(write(tmp_path, BODIES["padded"]), SHAPES[1])["backward"]
    assert re.search(
        r"if stride < 1:\n +raise ValueError\(\"stride must be positive in the backward\"\)", text
    )


def test_conv2d__both_dimensions_and_all_taps() -> None:
    file = KERNELS / "conv2d.py"
    dims = {"B": 2, "C": 3, "O": 4, "H": 7, "W": 9}
    result = draft(file, dims)
    assert result["report"]["atomics"] == 0
    assert (
        "`row` from the index and the taps `i`; `cols` from the index and the taps `j`"
        in owners(result)["d_x"]
    )
    shapes = [
        dims,
        {**dims, "H": 3, "W": 2},
        {**dims, "B": 1, "C": 1, "W": 17},
        {**dims, "H": 12, "O": 1, "W": 18},
        {**dims, "H": 2},  # outputs without elements: no programs
    ]
    assert_right(file, result, [(shape, "normal") for shape in shapes])


def test_gemm_conv__digits_of_rows_and_columns_are_undone() -> None:
    file = KERNELS / "implicit_gemm_conv.py"
    dims = {"B": 2, "C": 3, "O": 5, "H": 6, "W": 7}
    result = draft(file, dims)
    assert result["report"]["atomics"] == 0
    assert (
        "`oy` from the index and the taps `i`; `ox` from the index and the taps `j`" in owners(result)["d_x"]
    )
    shapes = [
        dims,
        {**dims, "H": 3, "W": 3},
        {**dims, "B": 1, "C": 18, "O": 17},
        {**dims, "H": 4, "W": 21, "C": 1},
        {**dims, "W": 2},  # outputs without elements: no programs
    ]
    assert_right(file, result, [(shape, "normal") for shape in shapes])


@pytest.mark.parametrize(
    ("name", "shapes"),
    [
        (
            "conv_pool/conv2d_nhwc_wgrad_tap_owner",
            [
                {"N": 1, "Y": 7, "X": 13, "C": 16, "K": 24, "R": 3, "s": 1},
                {"N": 2, "Y": 6, "X": 5, "C": 5, "K": 4, "R": 3, "s": 2},
                {"N": 2, "Y": 2, "X": 3, "C": 3, "K": 1, "R": 5, "s": 3},
            ],
        ),
        (
            "conv_pool/conv1d_causal_depthwise_silu_time_tiles",
            [
                {"B": 2, "T": 37, "C": 25, "K": 4},
                {"B": 1, "T": 16, "C": 40, "K": 3},
                {"B": 1, "T": 2, "C": 1, "K": 5},
            ],
        ),
    ],
)
def test_pair__windows_of_forwards_in_the_store(name: str, shapes: list, tmp_path: Path) -> None:
    """Padding, stride and positions split into digits; and a window whose upstream took a loop, which is
    kept."""
    file = tmp_path / "forward.py"
    file.write_text((ROOT / f"dataset/{name}.py").read_text().split("# ---- backward ----")[0])
    result = draft(file, shapes[0])
    assert result["report"]["atomics"] == 0
    assert "window turned around" in owners(result)["d_x"]
    assert_right(file, result, [(shape, "normal") for shape in shapes])


BAND = """
import torch
import triton
import triton.language as tl
from kernel_agent import autodiff

SWEEP = [{"M": 20, "N": 32, "K": 3}]


@triton.jit
def band_kernel(x_ptr, w_ptr, y_ptr, m, n, TAPS: tl.constexpr, BLOCK: tl.constexpr):
    lane = tl.arange(0, BLOCK)
    at = tl.program_id(0) * BLOCK + lane
    col = tl.program_id(1) * BLOCK + lane
    acc = tl.zeros([BLOCK], dtype=tl.float32)
    for k in tl.static_range(TAPS):
        acc += tl.load(x_ptr + (at + k) * n + col % n, mask=at < m, other=0.0) * tl.load(w_ptr + k)
    tl.store(y_ptr + tl.program_id(1) * m + at, acc, mask=at < m)


@autodiff(inputs_require_grad=(0, 1))
def band(x, w):
    n, taps = x.shape[1], w.shape[0]
    m = x.shape[0] - taps + 1
    y = torch.empty((n // 16, m), device=x.device, dtype=x.dtype)
    band_kernel[(triton.cdiv(m, 16), n // 16)](x, w, y, m, n, TAPS=taps, BLOCK=16)
    return y


def make_args(dims, device="cuda", dtype=torch.float32):
    x = torch.randn(dims["M"], dims["N"], device=device, dtype=dtype)
    return x, torch.randn(dims["K"], device=device, dtype=dtype)
"""


def test_band__lanes_that_two_positions_share_do_not_move(tmp_path: Path) -> None:
    """A lane is in one row and one column: a window over rows alone would tear them apart."""
    file = tmp_path / "band.py"
    file.write_text(BAND)
    dims = {"M": 20, "N": 32, "K": 3}
    result = draft(file, dims)
    advice = [line["reason"] for line in result["report"]["lines"] if line["class"] == "schedule"]
    assert any("share a program or a lane" in reason for reason in advice), advice
    assert_right(file, result, [(dims, "normal"), ({"M": 40, "N": 16, "K": 2}, "normal")])


MOVED = """
import torch
import triton
import triton.language as tl
from kernel_agent import autodiff

SWEEP = [{"H": 3, "W": 5, "R": 3}]


@triton.jit
def moved_kernel(x_ptr, w_ptr, y_ptr, pixels, H, W, R, BLOCK: tl.constexpr):
    p = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    acc = tl.zeros([BLOCK], dtype=tl.float32)
    for tap in range(R * R):
        down, across = tap // R - R // 2, tap % R - R // 2
        i, j = p // W % H + down, p % W + across
        inside = (p < pixels) & (i >= 0) & (i < H) & (j >= 0) & (j < W)
        acc += tl.load(x_ptr + p + down * W + across, mask=inside, other=0.0) * tl.load(w_ptr + tap)
    tl.store(y_ptr + p, acc, mask=p < pixels)


@autodiff(inputs_require_grad=(0, 1))
def moved(x, w):
    H, W = x.shape
    y = torch.empty_like(x)
    moved_kernel[(triton.cdiv(H * W, 16),)](x, w, y, H * W, H, W, w.shape[0], BLOCK=16)
    return y


def make_args(dims, device="cuda", dtype=torch.float32):
    R = dims["R"]
    x = torch.randn(dims["H"], dims["W"], device=device, dtype=dtype)
    return x, torch.randn(R, R, device=device, dtype=dtype)
"""


def test_window_whose_mask_does_not_bound_it__is_not_owned(tmp_path: Path) -> None:
    """Its owners would store zeros where nothing is read: before the tensor, and behind it."""
    file = tmp_path / "moved.py"
    file.write_text(MOVED)
    dims = {"H": 3, "W": 5, "R": 3}
    result = draft(file, dims)
    reasons = [line["reason"] for line in result["report"]["lines"]]
    assert any("its mask does not say from where to where its window lies" in reason for reason in reasons)
    assert_right(file, result, [(dims, "normal"), ({"H": 7, "W": 9, "R": 1}, "normal")])


FIRST_AND_LAST = """
import torch
import triton
import triton.language as tl
from kernel_agent import autodiff

SWEEP = [{"M": 3, "N": 18, "T": 3}]


@triton.jit
def gated_kernel(x_ptr, u_ptr, y_ptr, N, T, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    cols = tl.arange(0, BLOCK)
    mask = cols < N
    x = tl.load(x_ptr + row * N + cols, mask=mask, other=-float("inf"))
    likely = tl.softmax(x) > 0.05
    first = tl.load(u_ptr + cols, mask=mask, other=0.0)
    last = tl.load(u_ptr + (T - 1) * N + cols, mask=mask, other=0.0)
    tl.store(y_ptr + row * N + cols, first * likely + last, mask=mask)


@autodiff(inputs_require_grad=(1,))
def gated(x, u):
    M, N = x.shape
    y = torch.empty_like(x)
    gated_kernel[(M,)](x, u, y, N, u.shape[0], BLOCK=32)
    return y


def make_args(dims, device="cuda", dtype=torch.float32):
    x = torch.randn(dims["M"], dims["N"], device=device, dtype=dtype)
    return x, torch.randn(dims["T"], dims["N"], device=device, dtype=dtype)
"""


def test_first_row_and_last__what_hangs_on_a_whole_row_of_lanes_is_not_kept(tmp_path: Path) -> None:
    file = tmp_path / "gated.py"
    file.write_text(FIRST_AND_LAST)
    dims = {"M": 3, "N": 18, "T": 3}
    assert_right(file, draft(file, dims), [(dims, "normal"), ({"M": 6, "N": 5, "T": 1}, "normal")])
