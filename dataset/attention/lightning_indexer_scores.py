"""Scores of a lightning indexer: a few light heads say which keys a sparse attention should keep.

Forward    x_hij = <q_hi, k_j>,   I_ij = sum_h w_ih relu(x_hij) for j <= i, 0 elsewhere
           (one key a token for all heads, a weight for each head and query; I is what the choice, and in
           training a divergence from the attention's own weights, reads)
Backward   with D_ij = dI_ij for j <= i:   dw_ih = sum_j D_ij relu(x_hij),   e_hij = D_ij w_ih [x_hij > 0],
           dq_hi = sum_j e_hij k_j,   dk_j = sum_h sum_i e_hij q_hi

Forward schedule: a program owns a tile of I and loops over the heads: x of a head is one dot, its relu is
weighted and added, and no head's scores are stored. Tiles above the diagonal are stored as zeros.
Backward schedule: x is rebuilt a tile at a time by two owners. The owner of (query tile, head) walks the keys
for dq and dw. k is read by all heads and all later queries: the owner of a key tile loops over both, with dk
in registers, so that no gradient of keys for each head is stored, H of them for one. The relu needs the sign
of x alone for dq and dk, but its value for dw, so a saved mask would not spare the product; and it would be
H numbers a pair where I has one.

op: indexer_scores
schedule: swap_owner, recompute_from_stats
difficulty: 4
dtypes: fp32, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


def tiling(q):
    return {
        "PRECISION": "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee",
        "BLOCK": 32 if q.dtype == torch.float32 else 64,
        "BLOCK_D": max(16, triton.next_power_of_2(q.shape[3])),
    }


@triton.jit
def load_tile(ptr, rows, cols, R, C):
    mask = (rows[:, None] < R) & (cols[None, :] < C)
    return tl.load(ptr + rows[:, None].to(tl.int64) * C + cols[None, :], mask=mask, other=0.0)


@triton.jit
def store_tile(ptr, value, rows, cols, R, C):
    mask = (rows[:, None] < R) & (cols[None, :] < C)
    offs = rows[:, None].to(tl.int64) * C + cols[None, :]
    tl.store(ptr + offs, value.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def scores_kernel(
    q_ptr, k_ptr, w_ptr, out_ptr, H, T, D,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    batch = tl.program_id(2).to(tl.int64) * T
    rows = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    cols = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    d = tl.arange(0, BLOCK_D)
    scores = tl.zeros([BLOCK, BLOCK], dtype=tl.float32)
    if tl.program_id(0) <= tl.program_id(1):
        k = tl.trans(load_tile(k_ptr + batch * D, cols, d, T, D))
        for h in range(H):
            q = load_tile(q_ptr + (batch * H + h * T) * D, rows, d, T, D)
            w = tl.load(w_ptr + (batch + rows) * H + h, mask=rows < T, other=0.0).to(tl.float32)
            x = tl.dot(q, k, input_precision=PRECISION)
            scores += w[:, None] * tl.where(x > 0, x, 0.0)
    scores = tl.where(cols[None, :] <= rows[:, None], scores, 0.0)
    store_tile(out_ptr + batch * T, scores, rows, cols, T, T)


@autodiff(inputs_require_grad=(0, 1, 2))
def indexer_scores(q, k, w):
    """q: (B, H, T, D); k: (B, T, D); w: (B, T, H); gives (B, T, T) in float32."""
    q, k, w = q.contiguous(), k.contiguous(), w.contiguous()
    B, H, T, D = q.shape
    if k.shape != (B, T, D) or w.shape != (B, T, H):
        raise ValueError("k must have one row a token, and w one number a token and head")
    if D > 128:
        raise ValueError(f"head dimension {D} does not fit one tile")
    out = torch.empty((B, T, T), device=q.device, dtype=torch.float32)
    tiles = tiling(q)
    count = triton.cdiv(T, tiles["BLOCK"])
    scores_kernel[(count, count, B)](q, k, w, out, H, T, D, **tiles)
    return out


def reference(q, k, w):
    dtype = torch.promote_types(q.dtype, torch.float32)
    x = torch.relu(q.to(dtype) @ k.to(dtype)[:, None].transpose(-1, -2))
    return torch.einsum("bhij,bih->bij", x, w.to(dtype)).tril()


SWEEP = [{"B": 1, "H": 32, "T": 4096, "D": 128}, {"B": 2, "H": 5, "T": 1021, "D": 64}]
SWEEP_CPU = [{"B": 2, "H": 3, "T": 41, "D": 16}, {"B": 1, "H": 2, "T": 70, "D": 20}]


def make_args(dims, device="cuda", dtype=torch.float32):
    B, H, T, D = (dims[name] for name in ("B", "H", "T", "D"))
    q = torch.randn(B, H, T, D, device=device, dtype=dtype)
    k = torch.randn(B, T, D, device=device, dtype=dtype) / max(1, D) ** 0.5
    return q, k, torch.randn(B, T, H, device=device, dtype=dtype) / max(1, H) ** 0.5


# ---- backward ----


@triton.jit
def query_kernel(
    q_ptr, k_ptr, w_ptr, dout_ptr, dq_ptr, dw_ptr, H, T, D,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    h = tl.program_id(1)
    batch = tl.program_id(2).to(tl.int64) * T
    head = (batch * H + h * T) * D
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    d = tl.arange(0, BLOCK_D)
    q = load_tile(q_ptr + head, rows, d, T, D)
    w = tl.load(w_ptr + (batch + rows) * H + h, mask=rows < T, other=0.0).to(tl.float32)
    dq = tl.zeros([BLOCK, BLOCK_D], dtype=tl.float32)
    dw = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, (tl.program_id(0) + 1) * BLOCK, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        k = load_tile(k_ptr + batch * D, cols, d, T, D)
        x = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        dout = load_tile(dout_ptr + batch * T, rows, cols, T, T)
        on = tl.where((cols[None, :] <= rows[:, None]) & (x > 0), dout, 0.0)
        dw += tl.sum(on * x, axis=1)
        dq = tl.dot((on * w[:, None]).to(k.dtype), k, dq, input_precision=PRECISION)
    store_tile(dq_ptr + head, dq, rows, d, T, D)
    tl.store(dw_ptr + (batch + rows) * H + h, dw.to(dw_ptr.dtype.element_ty), mask=rows < T)


@triton.jit
def key_kernel(
    q_ptr, k_ptr, w_ptr, dout_ptr, dk_ptr, H, T, D,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    batch = tl.program_id(1).to(tl.int64) * T
    cols = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    d = tl.arange(0, BLOCK_D)
    k = tl.trans(load_tile(k_ptr + batch * D, cols, d, T, D))
    dk = tl.zeros([BLOCK, BLOCK_D], dtype=tl.float32)
    for start in range(tl.program_id(0) * BLOCK, T, BLOCK):
        rows = start + tl.arange(0, BLOCK)
        dout = load_tile(dout_ptr + batch * T, rows, cols, T, T)
        dout = tl.where(cols[None, :] <= rows[:, None], dout, 0.0)
        for h in range(H):
            q = load_tile(q_ptr + (batch * H + h * T) * D, rows, d, T, D)
            w = tl.load(w_ptr + (batch + rows) * H + h, mask=rows < T, other=0.0).to(tl.float32)
            x = tl.dot(q, k, input_precision=PRECISION)
            e = tl.where(x > 0, dout * w[:, None], 0.0)
            dk = tl.dot(tl.trans(e.to(q.dtype)), q, dk, input_precision=PRECISION)
    store_tile(dk_ptr + batch * D, dk, cols, d, T, D)


class IndexerScores(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, w):
        q, k, w = q.contiguous(), k.contiguous(), w.contiguous()
        ctx.save_for_backward(q, k, w)
        return indexer_scores(q, k, w)

    @staticmethod
    def backward(ctx, dout):
        q, k, w = ctx.saved_tensors
        B, H, T, D = q.shape
        dout, tiles, needs = dout.contiguous(), tiling(q), ctx.needs_input_grad
        count = triton.cdiv(T, tiles["BLOCK"])
        dq, dk, dw = torch.empty_like(q), torch.empty_like(k), torch.empty_like(w)
        if needs[0] or needs[2]:
            query_kernel[(count, H, B)](q, k, w, dout, dq, dw, H, T, D, **tiles)
        if needs[1]:
            key_kernel[(count, B)](q, k, w, dout, dk, H, T, D, **tiles)
        return dq if needs[0] else None, dk if needs[1] else None, dw if needs[2] else None


def indexer_scores_autograd(q, k, w):
    return IndexerScores.apply(q, k, w)
