"""Causal attention of short sequences: a head's whole score matrix in one tile.

Forward    S = s Q K^T, P = softmax(S with S_ij = -inf for j > i), O = P V
Backward   dV = P^T dO,  dP = dO V^T,  dS = P * (dP - rowsum(P * dP)),  dQ = s dS K,  dK = s dS^T Q

Forward schedule: one program a head, no loops; P is stored.
Backward schedule: the same ownership. P, Q, K, V and dO of a head fit in one tile each, so four dots and
one row sum give all three gradients, with every input read once and every gradient written once. For N up
to 128 (64 in float32, whose products take more registers), storing P (N^2) is about as large as the operands
(4 N D) and saves the recomputation.

op: causal_attention
schedule: row_reduce_correct
difficulty: 2
dtypes: fp32, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


def tiling(q):
    """Tiles and the precision of dots."""
    PRECISION = "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee"
    BLOCK_N, BLOCK_D = (max(16, triton.next_power_of_2(size)) for size in q.shape[2:])
    if q.dtype != torch.float32 and BLOCK_D == 32:
        BLOCK_D = 64  # Triton 3.6 compiles dO V^T of two tiles that are 32 wide wrong for sm_90
    num_warps = 16 if q.dtype == torch.float32 else 8
    return {"PRECISION": PRECISION, "BLOCK_N": BLOCK_N, "BLOCK_D": BLOCK_D, "num_warps": num_warps}


@triton.jit
def load_tile(ptr, rows, cols, R, C):
    mask = (rows[:, None] < R) & (cols[None, :] < C)
    return tl.load(ptr + rows[:, None] * C + cols[None, :], mask=mask, other=0.0)


@triton.jit
def store_tile(ptr, value, rows, cols, R, C):
    mask = (rows[:, None] < R) & (cols[None, :] < C)
    tl.store(ptr + rows[:, None] * C + cols[None, :], value.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def attention_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, p_ptr, N, D, scale,
    PRECISION: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0).to(tl.int64) * N
    n = tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_D)
    q = load_tile(q_ptr + head * D, n, d, N, D)
    k = load_tile(k_ptr + head * D, n, d, N, D)
    v = load_tile(v_ptr + head * D, n, d, N, D)
    s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
    s = tl.where(n[None, :] <= n[:, None], s, -float("inf"))
    e = tl.exp(s - tl.max(s, axis=1)[:, None])
    p = (e / tl.sum(e, axis=1)[:, None]).to(v.dtype)
    store_tile(p_ptr + head * N, p, n, n, N, N)
    store_tile(o_ptr + head * D, tl.dot(p, v, input_precision=PRECISION), n, d, N, D)


def attention_forward(q, k, v):
    if not q.shape == k.shape == v.shape:
        raise ValueError("q, k and v must have one shape")
    B, H, N, D = q.shape
    most = 64 if q.dtype == torch.float32 else 128
    if most < N or D > 128:
        raise ValueError(f"a head of {N} x {D} does not fit one tile")
    o = torch.empty_like(q)
    p = torch.empty((B, H, N, N), device=q.device, dtype=q.dtype)
    attention_kernel[(B * H,)](q, k, v, o, p, N, D, D**-0.5, **tiling(q))
    return o, p


@autodiff(inputs_require_grad=(0, 1, 2))
def causal_attention(q, k, v):
    return attention_forward(q.contiguous(), k.contiguous(), v.contiguous())[0]


def reference(q, k, v):
    N, D = q.shape[-2:]
    future = torch.ones(N, N, device=q.device, dtype=torch.bool).triu(1)
    s = (D**-0.5 * q @ k.transpose(-1, -2)).masked_fill(future, -float("inf"))
    return torch.softmax(s, dim=-1) @ v


SWEEP = [
    {"B": 4096, "H": 6, "N": 49, "D": 32},
    {"B": 512, "H": 12, "N": 64, "D": 64},
    {"B": 511, "H": 7, "N": 61, "D": 40},
]
SWEEP_CPU = [{"B": 3, "H": 2, "N": 37, "D": 16}, {"B": 1, "H": 2, "N": 64, "D": 24}]


def make_args(dims, device="cuda", dtype=torch.float32):
    shape = (dims["B"], dims["H"], dims["N"], dims["D"])
    return tuple(torch.randn(shape, device=device, dtype=dtype) for _ in range(3))


# ---- backward ----


@triton.jit
def attention_backward_kernel(
    q_ptr, k_ptr, v_ptr, p_ptr, do_ptr, dq_ptr, dk_ptr, dv_ptr, N, D, scale,
    PRECISION: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0).to(tl.int64) * N
    n = tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_D)
    p = load_tile(p_ptr + head * N, n, n, N, N)
    do = load_tile(do_ptr + head * D, n, d, N, D)
    store_tile(dv_ptr + head * D, tl.dot(tl.trans(p), do, input_precision=PRECISION), n, d, N, D)
    v = load_tile(v_ptr + head * D, n, d, N, D)
    dp = tl.dot(do, tl.trans(v), input_precision=PRECISION)
    p32 = p.to(tl.float32)
    ds = (p32 * (dp - tl.sum(p32 * dp, axis=1)[:, None]) * scale).to(v.dtype)
    k = load_tile(k_ptr + head * D, n, d, N, D)
    store_tile(dq_ptr + head * D, tl.dot(ds, k, input_precision=PRECISION), n, d, N, D)
    q = load_tile(q_ptr + head * D, n, d, N, D)
    store_tile(dk_ptr + head * D, tl.dot(tl.trans(ds), q, input_precision=PRECISION), n, d, N, D)


class CausalAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v):
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        o, p = attention_forward(q, k, v)
        ctx.save_for_backward(q, k, v, p)
        return o

    @staticmethod
    def backward(ctx, do):
        q, k, v, p = ctx.saved_tensors
        do = do.contiguous()
        B, H, N, D = q.shape
        grads = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        attention_backward_kernel[(B * H,)](q, k, v, p, do, *grads, N, D, D**-0.5, **tiling(q))
        return tuple(g if needed else None for g, needed in zip(grads, ctx.needs_input_grad, strict=True))


def causal_attention_autograd(q, k, v):
    return CausalAttention.apply(q, k, v)
