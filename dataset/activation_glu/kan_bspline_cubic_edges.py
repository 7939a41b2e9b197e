"""Spline layer of a Kolmogorov-Arnold network: each edge from an input to an output has its own cubic spline.

Forward    y_mo = sum_ig B_g(x_mi) c_oig,  B_g(x) = b((x + 1) / w - g + 1),  w = 2 / (G - 3): G knots, w
           apart, cover [-1, 1] and one more on each side;  b is the cubic bump
           b(u) = (4 - 6 u^2 + 3 |u|^3) / 6 for |u| < 1,  (2 - |u|)^3 / 6 for |u| < 2,  else 0
Backward   with the matrix F of (m, (i, g)) = B_g(x_mi):  Y = F c^T,  so dc = dY^T F,  dF = dY c,
           dx_mi = sum_g dF_m,ig b'(u) / w,  b'(u) = sgn(u) (-2 |u| + 3 u^2 / 2), or -sgn(u) (2 - |u|)^2 / 2

Forward schedule: the layer is a matrix product whose left operand is a function of x. Of the G splines of an
input only four are not 0 at a time, but to gather just their coefficients is a different gather for each row,
and tensor cores multiply zeros faster than that. So a program owns a tile of y and builds tiles of F in
registers from x, G times smaller. A spline is padded to a power of two of columns, so that tiles hold whole
ones.
Backward schedule: two products again. dc: the owner of a tile of c walks the rows, and F is built, never
stored, as in the forward. dx: the owner of (row tile, whole splines) walks the outputs for its tile of dF, G
times as large as dx, and never stores it either: it multiplies by B' in registers and sums over g, which is
within its tile. Neither takes an atomic, and nothing is saved but x.

op: kan_spline
schedule: swap_owner, recompute_from_stats
difficulty: 5
dtypes: fp32, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


def tiles_of(x, G):
    """Tiles, the precision of dots, and the columns that a spline takes."""
    PRECISION = "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee"
    BLOCK = 32 if x.dtype == torch.float32 else 64
    return {"PRECISION": PRECISION, "GP": triton.next_power_of_2(G), "BLOCK": BLOCK}


@triton.jit
def bump(u):
    """b(u) and b'(u)."""
    size = tl.abs(u)
    rest = tl.where(size < 2, 2 - size, 0.0)
    near = size < 1
    value = tl.where(near, (4 - 6 * u * u + 3 * size * u * u) / 6, rest * rest * rest / 6)
    slope = tl.where(near, 1.5 * size * u - 2 * u, tl.where(u < 0, 0.5, -0.5) * rest * rest)
    return value, slope


@triton.jit
def splines(x_ptr, m, columns, M, I, G, GP: tl.constexpr):
    """A tile of F and of its derivative by x, in fp32; 0 outside."""
    i, g = columns // GP, columns % GP
    inside = (m[:, None] < M) & (i[None, :] < I) & (g[None, :] < G)
    x = tl.load(x_ptr + m[:, None].to(tl.int64) * I + i[None, :], mask=inside, other=0.0).to(tl.float32)
    per_unit = 0.5 * (G - 3)
    value, slope = bump((x + 1) * per_unit - g[None, :] + 1)
    return tl.where(inside, value, 0.0), tl.where(inside, slope * per_unit, 0.0)


@triton.jit
def load_coefficients(c_ptr, o, columns, O, I, G, GP: tl.constexpr):
    """A tile of c, outputs by columns of F."""
    i, g = columns // GP, columns % GP
    mask = (o[:, None] < O) & (i[None, :] < I) & (g[None, :] < G)
    offs = o[:, None].to(tl.int64) * I * G + i[None, :] * G + g[None, :]
    return tl.load(c_ptr + offs, mask=mask, other=0.0)


@triton.jit
def load_tile(ptr, rows, cols, R, C):
    mask = (rows[:, None] < R) & (cols[None, :] < C)
    return tl.load(ptr + rows[:, None].to(tl.int64) * C + cols[None, :], mask=mask, other=0.0)


@triton.jit
def kan_kernel(
    x_ptr, c_ptr, y_ptr, M, I, O, G, PRECISION: tl.constexpr, GP: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    m = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    o = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    y = tl.zeros([BLOCK, BLOCK], dtype=tl.float32)
    for start in range(0, I * GP, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        value, _ = splines(x_ptr, m, columns, M, I, G, GP)
        c = load_coefficients(c_ptr, o, columns, O, I, G, GP)
        y = tl.dot(value.to(c.dtype), tl.trans(c), y, input_precision=PRECISION)
    mask = (m[:, None] < M) & (o[None, :] < O)
    tl.store(y_ptr + m[:, None].to(tl.int64) * O + o[None, :], y.to(y_ptr.dtype.element_ty), mask=mask)


@autodiff(inputs_require_grad=(0, 1))
def kan_spline(x, c):
    """x: (M, I), mostly from -1 to 1; c: (O, I, G); gives (M, O)."""
    (M, I), (O, _, G) = x.shape, c.shape
    if c.shape[1] != I or not 4 <= G <= 32:
        raise ValueError("c is (outputs, inputs, G), and a cubic spline has 4 to 32 bumps")
    x, c, tiles = x.contiguous(), c.contiguous(), tiles_of(x, G)
    y = torch.empty((M, O), device=x.device, dtype=x.dtype)
    grid = (triton.cdiv(M, tiles["BLOCK"]), triton.cdiv(O, tiles["BLOCK"]))
    kan_kernel[grid](x, c, y, M, I, O, G, **tiles)
    return y


def reference(x, c):
    G = c.shape[2]
    u = (x[:, :, None] + 1) * (0.5 * (G - 3)) - torch.arange(G, device=x.device) + 1
    size = u.abs()
    bumps = torch.where(size < 1, (4 - 6 * u * u + 3 * size * u * u) / 6, (2 - size).clamp(min=0) ** 3 / 6)
    return torch.einsum("mig,oig->mo", bumps, c)


SWEEP = [{"M": 16384, "I": 128, "O": 256, "G": 8}, {"M": 8191, "I": 100, "O": 130, "G": 11}]
SWEEP_CPU = [{"M": 23, "I": 9, "O": 11, "G": 8}, {"M": 40, "I": 5, "O": 37, "G": 5}]


def make_args(dims, device="cuda", dtype=torch.float32):
    M, I, O, G = dims["M"], dims["I"], dims["O"], dims["G"]
    x = 1.5 * torch.rand(M, I, device=device, dtype=dtype) - 0.75
    return x, torch.randn(O, I, G, device=device, dtype=dtype) / I**0.5


# ---- backward ----


@triton.jit
def dc_kernel(
    x_ptr, dy_ptr, dc_ptr, M, I, O, G, PRECISION: tl.constexpr, GP: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    o = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    dc = tl.zeros([BLOCK, BLOCK], dtype=tl.float32)
    for start in range(0, M, BLOCK):
        m = start + tl.arange(0, BLOCK)
        dy = load_tile(dy_ptr, m, o, M, O)
        value, _ = splines(x_ptr, m, columns, M, I, G, GP)
        dc = tl.dot(tl.trans(dy), value.to(dy.dtype), dc, input_precision=PRECISION)
    i, g = columns // GP, columns % GP
    mask = (o[:, None] < O) & (i[None, :] < I) & (g[None, :] < G)
    offs = o[:, None].to(tl.int64) * I * G + i[None, :] * G + g[None, :]
    tl.store(dc_ptr + offs, dc.to(dc_ptr.dtype.element_ty), mask=mask)


@triton.jit
def dx_kernel(
    x_ptr, c_ptr, dy_ptr, dx_ptr, M, I, O, G, PRECISION: tl.constexpr, GP: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    m = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    df = tl.zeros([BLOCK, BLOCK], dtype=tl.float32)
    for start in range(0, O, BLOCK):
        o = start + tl.arange(0, BLOCK)
        dy = load_tile(dy_ptr, m, o, M, O)
        c = load_coefficients(c_ptr, o, columns, O, I, G, GP)
        df = tl.dot(dy, c, df, input_precision=PRECISION)
    _, slope = splines(x_ptr, m, columns, M, I, G, GP)
    dx = tl.sum(tl.reshape(df * slope, (BLOCK, BLOCK // GP, GP)), axis=2)
    i = tl.program_id(1) * (BLOCK // GP) + tl.arange(0, BLOCK // GP)
    mask = (m[:, None] < M) & (i[None, :] < I)
    tl.store(dx_ptr + m[:, None].to(tl.int64) * I + i[None, :], dx.to(dx_ptr.dtype.element_ty), mask=mask)


class KANSpline(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, c):
        x, c = x.contiguous(), c.contiguous()
        ctx.save_for_backward(x, c)
        return kan_spline(x, c)

    @staticmethod
    def backward(ctx, dy):
        x, c = ctx.saved_tensors
        (M, I), (O, _, G) = x.shape, c.shape
        dy, tiles = dy.contiguous(), tiles_of(x, G)
        BLOCK = tiles["BLOCK"]
        columns = triton.cdiv(I * tiles["GP"], BLOCK)
        dx = dc = None
        if ctx.needs_input_grad[0]:
            dx = torch.empty_like(x)
            dx_kernel[(triton.cdiv(M, BLOCK), columns)](x, c, dy, dx, M, I, O, G, **tiles)
        if ctx.needs_input_grad[1]:
            dc = torch.empty_like(c)
            dc_kernel[(columns, triton.cdiv(O, BLOCK))](x, dy, dc, M, I, O, G, **tiles)
        return dx, dc


def kan_spline_autograd(x, c):
    return KANSpline.apply(x, c)
