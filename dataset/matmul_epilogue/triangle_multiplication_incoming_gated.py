"""Triangle multiplication on incoming edges, channels first, with the output gate in its epilogue.

Forward    P_cij = sum_k A_cki B_ckj,   O = s * P,   s = sigmoid(Z)
Backward   dP = dO * s,   dZ = dO * P * s (1 - s),
           dA_cki = sum_j B_ckj dP_cij,   dB_ckj = sum_i A_cki dP_cij

Forward schedule: a program owns (channel, tile of i and j), walks k for A^T B, and gates the finished tile.
P, as large as O, is not stored.
Backward schedule: dZ needs P once more and the two products need dP, at the same places. The owner of a tile
makes P again, from it dZ, and dP on the way: one kernel for all that is pointwise, where a saved P would cost
its memory from forward to backward. Then A and B, which every tile of a row or column of O has read, get
owners of their own tiles, (channel, tile), who walk j or i. Both are batched products over the channels, by a
kernel that takes strides; dP is read transposed for one of them.

op: triangle_mult
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
    return {"PRECISION": PRECISION, "BLOCK": 32 if x.dtype == torch.float32 else 64}


@triton.jit
def load_tile(ptr, rows, cols, R, C, stride_r, stride_c):
    mask = (rows[:, None] < R) & (cols[None, :] < C)
    return tl.load(ptr + rows[:, None] * stride_r + cols[None, :] * stride_c, mask=mask, other=0.0)


@triton.jit
def store_tile(ptr, value, rows, cols, R, C):
    mask = (rows[:, None] < R) & (cols[None, :] < C)
    tl.store(ptr + rows[:, None] * C + cols[None, :], value.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def product_tile(
    a_ptr, b_ptr, r, s, R, S, T, stride_ar, stride_at, stride_bt, stride_bs,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Tile (r, s) of sum_t a_rt b_ts, in float32."""
    acc = tl.zeros([BLOCK, BLOCK], dtype=tl.float32)
    for start in range(0, T, BLOCK):
        t = start + tl.arange(0, BLOCK)
        a = load_tile(a_ptr, r, t, R, T, stride_ar, stride_at)
        b = load_tile(b_ptr, t, s, T, S, stride_bt, stride_bs)
        acc = tl.dot(a, b, acc, input_precision=PRECISION)
    return acc


@triton.jit
def gated_kernel(a_ptr, b_ptr, z_ptr, o_ptr, I, J, K, PRECISION: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    j = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    c = tl.program_id(2).to(tl.int64)
    p = product_tile(a_ptr + c * K * I, b_ptr + c * K * J, i, j, I, J, K, 1, I, J, 1, PRECISION, BLOCK)
    z = load_tile(z_ptr + c * I * J, i, j, I, J, J, 1).to(tl.float32)
    store_tile(o_ptr + c * I * J, p * tl.sigmoid(z), i, j, I, J)


@autodiff(inputs_require_grad=(0, 1, 2))
def gated_triangle(a, b, z):
    """a: (C, K, I); b: (C, K, J); z: (C, I, J), the gate before its sigmoid; gives (C, I, J)."""
    (C, K, I), J, tiles = a.shape, b.shape[2], tiling(a)
    if b.shape[:2] != (C, K) or z.shape != (C, I, J):
        raise ValueError(f"a {tuple(a.shape)}, b {tuple(b.shape)} and z {tuple(z.shape)} do not fit")
    o = torch.empty((C, I, J), device=a.device, dtype=a.dtype)
    grid = (triton.cdiv(I, tiles["BLOCK"]), triton.cdiv(J, tiles["BLOCK"]), C)
    gated_kernel[grid](a.contiguous(), b.contiguous(), z.contiguous(), o, I, J, K, **tiles)
    return o


def reference(a, b, z):
    return torch.sigmoid(z) * torch.einsum("cki,ckj->cij", a, b)


SWEEP = [{"C": 128, "K": 384, "I": 384, "J": 384}, {"C": 64, "K": 250, "I": 300, "J": 131}]
SWEEP_CPU = [{"C": 2, "K": 18, "I": 40, "J": 9}, {"C": 3, "K": 35, "I": 7, "J": 33}]


def make_args(dims, device="cuda", dtype=torch.float32):
    C, K, I, J = (dims[name] for name in ("C", "K", "I", "J"))
    a, b = (torch.randn(C, K, size, device=device, dtype=dtype) / max(1, K) ** 0.25 for size in (I, J))
    return a, b, torch.randn(C, I, J, device=device, dtype=dtype)


# ---- backward ----


@triton.jit
def gate_backward_kernel(
    a_ptr, b_ptr, z_ptr, do_ptr, dz_ptr, dp_ptr, I, J, K, PRECISION: tl.constexpr, BLOCK: tl.constexpr
):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    j = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    c = tl.program_id(2).to(tl.int64)
    p = product_tile(a_ptr + c * K * I, b_ptr + c * K * J, i, j, I, J, K, 1, I, J, 1, PRECISION, BLOCK)
    s = tl.sigmoid(load_tile(z_ptr + c * I * J, i, j, I, J, J, 1).to(tl.float32))
    do = load_tile(do_ptr + c * I * J, i, j, I, J, J, 1).to(tl.float32)
    store_tile(dz_ptr + c * I * J, do * p * s * (1 - s), i, j, I, J)
    store_tile(dp_ptr + c * I * J, do * s, i, j, I, J)


@triton.jit
def product_kernel(
    a_ptr, b_ptr, out_ptr, R, S, T, stride_ac, stride_ar, stride_at, stride_bc, stride_bt, stride_bs,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    r = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    s = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    c = tl.program_id(2).to(tl.int64)
    out = product_tile(
        a_ptr + c * stride_ac, b_ptr + c * stride_bc, r, s, R, S, T,
        stride_ar, stride_at, stride_bt, stride_bs, PRECISION, BLOCK,
    )  # fmt: skip
    store_tile(out_ptr + c * R * S, out, r, s, R, S)


def product(a, b):
    """A_c B_c for every channel, of any strided views, in a new contiguous tensor."""
    (C, R, T), S, tiles = a.shape, b.shape[2], tiling(a)
    out = torch.empty((C, R, S), device=a.device, dtype=a.dtype)
    grid = (triton.cdiv(R, tiles["BLOCK"]), triton.cdiv(S, tiles["BLOCK"]), C)
    product_kernel[grid](a, b, out, R, S, T, *a.stride(), *b.stride(), **tiles)
    return out


class GatedTriangle(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, b, z):
        a, b, z = a.contiguous(), b.contiguous(), z.contiguous()
        ctx.save_for_backward(a, b, z)
        return gated_triangle(a, b, z)

    @staticmethod
    def backward(ctx, do):
        a, b, z = ctx.saved_tensors
        do, (C, K, I), J, tiles, needs = do.contiguous(), a.shape, b.shape[2], tiling(a), ctx.needs_input_grad
        dz, dp = torch.empty_like(z), torch.empty_like(do)
        grid = (triton.cdiv(I, tiles["BLOCK"]), triton.cdiv(J, tiles["BLOCK"]), C)
        gate_backward_kernel[grid](a, b, z, do, dz, dp, I, J, K, **tiles)
        da = product(b, dp.transpose(1, 2)) if needs[0] else None
        db = product(a, dp) if needs[1] else None
        return da, db, dz if needs[2] else None


def gated_triangle_autograd(a, b, z):
    return GatedTriangle.apply(a, b, z)
