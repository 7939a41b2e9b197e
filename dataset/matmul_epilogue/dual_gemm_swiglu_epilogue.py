"""Two linear layers and SwiGLU in one kernel.

Forward    G = X Wg^T,  U = X Wu^T,  H = silu(G) * U
Backward   with s = sigmoid(G):  dG = dH * U s (1 + G (1 - s)),  dU = dH * G s;
           dX = dG Wg + dU Wu,  dWg = dG^T X,  dWu = dU^T X

Forward schedule: a program owns a tile of H and carries two accumulators over K, so that X is loaded once
for both and neither G nor U is stored.
Backward schedule: the same owner rebuilds G and U and emits dG and dU; two more products follow, each with
two factors: dX's owner adds both products in one accumulator, without a temporary; the weights' owner
carries two accumulators over one walk of X. Nothing but the inputs is kept from the forward, at the price
of one recomputed product.

op: gated_linear
schedule: recompute_from_stats, swap_owner
difficulty: 4
dtypes: fp32, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


def tiling(x):
    """Tiles and the precision of dots: products of whole float32 numbers want small tiles."""
    PRECISION = "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee"
    return {"PRECISION": PRECISION, "BLOCK": 32 if x.dtype == torch.float32 else 64, "num_warps": 8}


@triton.jit
def load_tile(ptr, rows, cols, R, C):
    mask = (rows[:, None] < R) & (cols[None, :] < C)
    return tl.load(ptr + rows[:, None].to(tl.int64) * C + cols[None, :], mask=mask, other=0.0)


@triton.jit
def store_tile(ptr, value, rows, cols, R, C):
    mask = (rows[:, None] < R) & (cols[None, :] < C)
    tl.store(ptr + rows[:, None].to(tl.int64) * C + cols[None, :], value.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def gate_up_tile(x_ptr, wg_ptr, wu_ptr, m, n, M, N, K, PRECISION: tl.constexpr, BLOCK: tl.constexpr):
    g = tl.zeros([BLOCK, BLOCK], dtype=tl.float32)
    u = tl.zeros([BLOCK, BLOCK], dtype=tl.float32)
    for start in range(0, K, BLOCK):
        k = start + tl.arange(0, BLOCK)
        x = load_tile(x_ptr, m, k, M, K)
        g = tl.dot(x, tl.trans(load_tile(wg_ptr, n, k, N, K)), g, input_precision=PRECISION)
        u = tl.dot(x, tl.trans(load_tile(wu_ptr, n, k, N, K)), u, input_precision=PRECISION)
    return g, u


@triton.jit
def gated_linear_kernel(
    x_ptr, wg_ptr, wu_ptr, h_ptr, M, N, K,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    g, u = gate_up_tile(x_ptr, wg_ptr, wu_ptr, m, n, M, N, K, PRECISION, BLOCK)
    store_tile(h_ptr, g * tl.sigmoid(g) * u, m, n, M, N)


@autodiff(inputs_require_grad=(0, 1, 2))
def gated_linear(x, wg, wu):
    """x: (M, K); wg, wu: (N, K)."""
    if wg.shape != wu.shape or x.shape[1] != wg.shape[1]:
        raise ValueError(f"x {tuple(x.shape)}, wg {tuple(wg.shape)} and wu {tuple(wu.shape)} do not fit")
    x, wg, wu = x.contiguous(), wg.contiguous(), wu.contiguous()
    (M, K), N = x.shape, wg.shape[0]
    h = torch.empty((M, N), device=x.device, dtype=x.dtype)
    tiles = tiling(x)
    grid = (triton.cdiv(M, tiles["BLOCK"]), triton.cdiv(N, tiles["BLOCK"]))
    gated_linear_kernel[grid](x, wg, wu, h, M, N, K, **tiles)
    return h


def reference(x, wg, wu):
    return torch.nn.functional.silu(x @ wg.t()) * (x @ wu.t())


SWEEP = [
    {"M": 4096, "K": 2048, "N": 5632},
    {"M": 2048, "K": 4096, "N": 8192},
    {"M": 4095, "K": 1000, "N": 2731},
]
SWEEP_CPU = [{"M": 31, "K": 36, "N": 40}, {"M": 64, "K": 16, "N": 7}]


def make_args(dims, device="cuda", dtype=torch.float32):
    x = torch.randn(dims["M"], dims["K"], device=device, dtype=dtype)
    wg, wu = (
        torch.randn(dims["N"], dims["K"], device=device, dtype=dtype) / dims["K"] ** 0.5 for _ in range(2)
    )
    return x, wg, wu


# ---- backward ----


@triton.jit
def dg_du_kernel(
    x_ptr, wg_ptr, wu_ptr, dh_ptr, dg_ptr, du_ptr, M, N, K,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    g, u = gate_up_tile(x_ptr, wg_ptr, wu_ptr, m, n, M, N, K, PRECISION, BLOCK)
    dh = load_tile(dh_ptr, m, n, M, N).to(tl.float32)
    s = tl.sigmoid(g)
    store_tile(dg_ptr, dh * u * s * (1 + g * (1 - s)), m, n, M, N)
    store_tile(du_ptr, dh * g * s, m, n, M, N)


@triton.jit
def dx_kernel(
    dg_ptr, du_ptr, wg_ptr, wu_ptr, dx_ptr, M, N, K,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    dx = tl.zeros([BLOCK, BLOCK], dtype=tl.float32)
    for start in range(0, N, BLOCK):
        n = start + tl.arange(0, BLOCK)
        dx = tl.dot(
            load_tile(dg_ptr, m, n, M, N), load_tile(wg_ptr, n, k, N, K), dx, input_precision=PRECISION
        )
        dx = tl.dot(
            load_tile(du_ptr, m, n, M, N), load_tile(wu_ptr, n, k, N, K), dx, input_precision=PRECISION
        )
    store_tile(dx_ptr, dx, m, k, M, K)


@triton.jit
def dw_kernel(
    dg_ptr, du_ptr, x_ptr, dwg_ptr, dwu_ptr, M, N, K,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    dwg = tl.zeros([BLOCK, BLOCK], dtype=tl.float32)
    dwu = tl.zeros([BLOCK, BLOCK], dtype=tl.float32)
    for start in range(0, M, BLOCK):
        m = start + tl.arange(0, BLOCK)
        x = load_tile(x_ptr, m, k, M, K)
        dwg = tl.dot(tl.trans(load_tile(dg_ptr, m, n, M, N)), x, dwg, input_precision=PRECISION)
        dwu = tl.dot(tl.trans(load_tile(du_ptr, m, n, M, N)), x, dwu, input_precision=PRECISION)
    store_tile(dwg_ptr, dwg, n, k, N, K)
    store_tile(dwu_ptr, dwu, n, k, N, K)


class GatedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, wg, wu):
        x, wg, wu = x.contiguous(), wg.contiguous(), wu.contiguous()
        ctx.save_for_backward(x, wg, wu)
        return gated_linear(x, wg, wu)

    @staticmethod
    def backward(ctx, dh):
        x, wg, wu = ctx.saved_tensors
        dh = dh.contiguous()
        (M, K), N = x.shape, wg.shape[0]
        tiles = tiling(x)
        tiles_m, tiles_n, tiles_k = (triton.cdiv(size, tiles["BLOCK"]) for size in (M, N, K))
        dg, du = torch.empty_like(dh), torch.empty_like(dh)
        dg_du_kernel[(tiles_m, tiles_n)](x, wg, wu, dh, dg, du, M, N, K, **tiles)
        dx = dwg = dwu = None
        if ctx.needs_input_grad[0]:
            dx = torch.empty_like(x)
            dx_kernel[(tiles_m, tiles_k)](dg, du, wg, wu, dx, M, N, K, **tiles)
        if ctx.needs_input_grad[1] or ctx.needs_input_grad[2]:
            dwg, dwu = torch.empty_like(wg), torch.empty_like(wu)
            dw_kernel[(tiles_n, tiles_k)](dg, du, x, dwg, dwu, M, N, K, **tiles)
        return dx, dwg if ctx.needs_input_grad[1] else None, dwu if ctx.needs_input_grad[2] else None


def gated_linear_autograd(x, wg, wu):
    return GatedLinear.apply(x, wg, wu)
