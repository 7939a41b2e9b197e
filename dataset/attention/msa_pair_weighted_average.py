"""Pair-weighted averaging: the rows of an alignment are mixed over positions by weights from the pair map.

Forward    a head:  W_ij = softmax_j(B_ij),  A_si = sum_j W_ij v_sj,  o = g * A,  g = sigmoid(u);
           s runs over the S rows of the alignment, all of which share W
Backward   gate:     dA = do * g,  du = do * A * g (1 - g)
           values:   dv_sj = sum_i W_ij dA_si
           weights:  dW_ij = sum_s <dA_si, v_sj>,  dB_ij = W_ij (dW_ij - delta_i),
                     delta_i = sum_j W_ij dW_ij = sum_s <dA_si, A_si>

Forward schedule: with (row s, channel c) as one wide column axis, A = W v is one product a head, (N x N) by
(N x S C), whose left operand is exp(B - lse), made as it is loaded. lse is a kernel of its own, over rows of
B: it is needed by every chunk of columns. A program then owns (tile of i, chunk of columns) and walks j.
Backward schedule: a product again, twice, with the softmax at its edges. dv owners, (tile of j, chunk of
columns), walk i. dB owners, (tile of i, tile of j), walk the whole column axis to have dW in registers, and
there the correction is applied: W, dW and dB of a tile live in one program, and no N x N tensor but dB is
written. The correction's delta sums over all rows s; the prologue that takes the gate off walks them anyway.

op: pair_weighted_average
schedule: swap_owner, row_reduce_correct, recompute_from_stats
difficulty: 4
dtypes: fp32, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


def tiling(v):
    """Tiles and the precision of dots: products of whole float32 numbers want small tiles."""
    PRECISION = "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee"
    return {"PRECISION": PRECISION, "BLOCK": 32 if v.dtype == torch.float32 else 64, "WIDE": 64}


@triton.jit
def load_weights(bias_ptr, lse_ptr, i, j, N):
    """W of one tile, 0 outside."""
    mask = (i[:, None] < N) & (j[None, :] < N)
    bias = tl.load(bias_ptr + i[:, None].to(tl.int64) * N + j[None, :], mask=mask, other=-float("inf"))
    lse = tl.load(lse_ptr + i, mask=i < N, other=0.0)
    return tl.exp(bias.to(tl.float32) - lse[:, None])


@triton.jit
def places(n, wide, h, N, H, C, columns):
    """Offsets into (S, N, H, C) and mask: positions n by columns s C + c, of head h."""
    s, c = wide // C, wide % C
    offs = ((s[None, :].to(tl.int64) * N + n[:, None]) * H + h) * C + c[None, :]
    return offs, (n[:, None] < N) & (wide[None, :] < columns)


@triton.jit
def lse_kernel(bias_ptr, lse_ptr, N, BLOCK: tl.constexpr):
    """Log-sum-exp of a row of B."""
    row = tl.program_id(0).to(tl.int64)
    m = tl.full([BLOCK], -float("inf"), dtype=tl.float32)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, N, BLOCK):
        j = start + tl.arange(0, BLOCK)
        bias = tl.load(bias_ptr + row * N + j, mask=j < N, other=-1e30).to(tl.float32)
        m_new = tl.maximum(m, bias)
        total = total * tl.exp(m - m_new) + tl.where(j < N, tl.exp(bias - m_new), 0.0)
        m = m_new
    top = tl.max(m, axis=0)
    tl.store(lse_ptr + row, top + tl.log(tl.sum(total * tl.exp(m - top), axis=0)))


@triton.jit
def average_kernel(
    v_ptr, bias_ptr, lse_ptr, u_ptr, a_ptr, o_ptr, N, H, C, columns,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    h = tl.program_id(2).to(tl.int64)
    bias_ptr += h * N * N
    lse_ptr += h * N
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    wide = tl.program_id(1) * WIDE + tl.arange(0, WIDE)
    acc = tl.zeros([BLOCK, WIDE], dtype=tl.float32)
    for start in range(0, N, BLOCK):
        j = start + tl.arange(0, BLOCK)
        w = load_weights(bias_ptr, lse_ptr, i, j, N)
        offs, mask = places(j, wide, h, N, H, C, columns)
        v = tl.load(v_ptr + offs, mask=mask, other=0.0)
        acc = tl.dot(w.to(v.dtype), v, acc, input_precision=PRECISION)
    offs, mask = places(i, wide, h, N, H, C, columns)
    u = tl.load(u_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    tl.store(a_ptr + offs, acc.to(a_ptr.dtype.element_ty), mask=mask)
    tl.store(o_ptr + offs, (acc * tl.sigmoid(u)).to(o_ptr.dtype.element_ty), mask=mask)


def average_forward(v, bias, u):
    S, N, H, C = v.shape
    if u.shape != v.shape or bias.shape != (H, N, N):
        raise ValueError("u and bias do not fit v")
    a, o, tiles = torch.empty_like(v), torch.empty_like(v), tiling(v)
    lse = torch.empty((H, N), device=v.device, dtype=torch.float32)
    lse_kernel[(H * N,)](bias, lse, N, BLOCK=256)
    grid = (triton.cdiv(N, tiles["BLOCK"]), triton.cdiv(S * C, tiles["WIDE"]), H)
    average_kernel[grid](v, bias, lse, u, a, o, N, H, C, S * C, **tiles)
    return o, a, lse


@autodiff(inputs_require_grad=(0, 1, 2))
def pair_weighted_average(v, bias, u):
    """v, u: (S, N, heads, C); bias: (heads, N, N)."""
    return average_forward(v.contiguous(), bias.contiguous(), u.contiguous())[0]


def reference(v, bias, u):
    return torch.sigmoid(u) * torch.einsum("hij,sjhc->sihc", torch.softmax(bias, dim=-1), v)


SWEEP = [{"S": 512, "N": 256, "H": 8, "C": 32}, {"S": 301, "N": 389, "H": 8, "C": 24}]
SWEEP_CPU = [{"S": 7, "N": 22, "H": 2, "C": 8}, {"S": 3, "N": 34, "H": 1, "C": 20}]


def make_args(dims, device="cuda", dtype=torch.float32):
    S, N, H, C = (dims[key] for key in ("S", "N", "H", "C"))
    v, u = (torch.randn(S, N, H, C, device=device, dtype=dtype) for _ in range(2))
    return v, torch.randn(H, N, N, device=device, dtype=dtype), u


# ---- backward ----


@triton.jit
def ungate_kernel(
    do_ptr, u_ptr, a_ptr, da_ptr, du_ptr, delta_ptr, N, H, C, columns,
    BLOCK: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    h = tl.program_id(1).to(tl.int64)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    delta = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, columns, WIDE):
        offs, mask = places(i, start + tl.arange(0, WIDE), h, N, H, C, columns)
        do = tl.load(do_ptr + offs, mask=mask, other=0.0).to(tl.float32)
        a = tl.load(a_ptr + offs, mask=mask, other=0.0).to(tl.float32)
        g = tl.sigmoid(tl.load(u_ptr + offs, mask=mask, other=0.0).to(tl.float32))
        tl.store(da_ptr + offs, (do * g).to(da_ptr.dtype.element_ty), mask=mask)
        tl.store(du_ptr + offs, (do * a * g * (1 - g)).to(du_ptr.dtype.element_ty), mask=mask)
        delta += tl.sum(do * g * a, axis=1)
    tl.store(delta_ptr + h * N + i, delta, mask=i < N)


@triton.jit
def dv_kernel(
    bias_ptr, lse_ptr, da_ptr, dv_ptr, N, H, C, columns,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    h = tl.program_id(2).to(tl.int64)
    bias_ptr += h * N * N
    lse_ptr += h * N
    j = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    wide = tl.program_id(1) * WIDE + tl.arange(0, WIDE)
    dv = tl.zeros([BLOCK, WIDE], dtype=tl.float32)
    for start in range(0, N, BLOCK):
        i = start + tl.arange(0, BLOCK)
        w = load_weights(bias_ptr, lse_ptr, i, j, N)
        offs, mask = places(i, wide, h, N, H, C, columns)
        da = tl.load(da_ptr + offs, mask=mask, other=0.0)
        dv = tl.dot(tl.trans(w.to(da.dtype)), da, dv, input_precision=PRECISION)
    offs, mask = places(j, wide, h, N, H, C, columns)
    tl.store(dv_ptr + offs, dv.to(dv_ptr.dtype.element_ty), mask=mask)


@triton.jit
def dbias_kernel(
    v_ptr, bias_ptr, lse_ptr, da_ptr, delta_ptr, dbias_ptr, N, H, C, columns,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    h = tl.program_id(2).to(tl.int64)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    j = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    dw = tl.zeros([BLOCK, BLOCK], dtype=tl.float32)
    for start in range(0, columns, WIDE):
        wide = start + tl.arange(0, WIDE)
        offs, mask = places(i, wide, h, N, H, C, columns)
        da = tl.load(da_ptr + offs, mask=mask, other=0.0)
        offs, mask = places(j, wide, h, N, H, C, columns)
        v = tl.load(v_ptr + offs, mask=mask, other=0.0)
        dw = tl.dot(da, tl.trans(v), dw, input_precision=PRECISION)
    delta = tl.load(delta_ptr + h * N + i, mask=i < N, other=0.0)
    dbias = load_weights(bias_ptr + h * N * N, lse_ptr + h * N, i, j, N) * (dw - delta[:, None])
    mask = (i[:, None] < N) & (j[None, :] < N)
    offs = (h * N + i[:, None]) * N + j[None, :]
    tl.store(dbias_ptr + offs, dbias.to(dbias_ptr.dtype.element_ty), mask=mask)


class PairWeightedAverage(torch.autograd.Function):
    @staticmethod
    def forward(ctx, v, bias, u):
        v, bias, u = v.contiguous(), bias.contiguous(), u.contiguous()
        o, a, lse = average_forward(v, bias, u)
        ctx.save_for_backward(v, bias, u, a, lse)
        return o

    @staticmethod
    def backward(ctx, do):
        v, bias, u, a, lse = ctx.saved_tensors
        (S, N, H, C), tiles, needs = v.shape, tiling(v), ctx.needs_input_grad
        T, sizes = triton.cdiv(N, tiles["BLOCK"]), (N, H, C, S * C)
        da, du, delta = torch.empty_like(a), torch.empty_like(u), torch.empty_like(lse)
        ungate_kernel[(triton.cdiv(N, 16), H)](
            do.contiguous(), u, a, da, du, delta, *sizes, BLOCK=16, WIDE=tiles["WIDE"]
        )
        dv = dbias = None
        if needs[0]:
            dv = torch.empty_like(v)
            dv_kernel[(T, triton.cdiv(S * C, tiles["WIDE"]), H)](bias, lse, da, dv, *sizes, **tiles)
        if needs[1]:
            dbias = torch.empty_like(bias)
            dbias_kernel[(T, T, H)](v, bias, lse, da, delta, dbias, *sizes, **tiles)
        return dv, dbias, du if needs[2] else None


def pair_weighted_average_autograd(v, bias, u):
    return PairWeightedAverage.apply(v, bias, u)
