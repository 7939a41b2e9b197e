"""Dense retrieval: a query against its own passages and those of all other queries in the batch.

Forward    q (M, D), passages c (M H, D), of which H i is query i's right one and the H - 1 after it its hard
           negatives;  s_ij = <q_i, c_j> / T,  l_i = lse_j(s_ij) - s_{i, H i}, one loss a query
Backward   g_ij = (dl_i / T) (exp(s_ij - lse_i) - [j = H i]):  dQ = G C,  dC = G^T Q

Forward schedule: a program owns a tile of queries and walks all passages with an online log-sum-exp; the
right passage's score is picked up as its tile comes by. Scores are never stored, so a batch may be as large
as memory for embeddings allows, which is what makes in-batch negatives good.
Backward schedule: one direction of softmax only, over a matrix H times as wide as it is tall. lse_i belongs
to rows, so both owners need it of the queries alone: those of dQ hold it and walk the passages, those of dC
walk the queries and load it with them. A program owns (rows, chunk of columns) and rebuilds its tile of
scores from dots over all of D; with the chunk as wide as registers allow, that is once or a few times a tile.
There are H times as many owners of dC, each with a walk 1 / H as long, so no side waits for the other.

op: inbatch_contrastive
schedule: swap_owner, recompute_from_stats
difficulty: 4
dtypes: fp32, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


def tiles_of(q):
    """Tiles and the precision of dots: products of whole float32 numbers want small tiles."""
    PRECISION = "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee"
    return {"PRECISION": PRECISION, "BLOCK": 32 if q.dtype == torch.float32 else 64}


@triton.jit
def load_tile(ptr, rows, cols, R, C):
    mask = (rows[:, None] < R) & (cols[None, :] < C)
    return tl.load(ptr + rows[:, None].to(tl.int64) * C + cols[None, :], mask=mask, other=0.0)


@triton.jit
def scores(
    q_ptr, c_ptr, i, j, M, passages, D, temperature, PRECISION: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    s = tl.zeros([BLOCK, BLOCK], dtype=tl.float32)
    for start in range(0, D, BLOCK):
        d = start + tl.arange(0, BLOCK)
        c = tl.trans(load_tile(c_ptr, j, d, passages, D))
        s = tl.dot(load_tile(q_ptr, i, d, M, D), c, s, input_precision=PRECISION)
    return s / temperature


@triton.jit
def inbatch_kernel(
    q_ptr, c_ptr, loss_ptr, lse_ptr, M, H, D, temperature, PRECISION: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m = tl.full([BLOCK], -float("inf"), dtype=tl.float32)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    right = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, M * H, BLOCK):
        j = start + tl.arange(0, BLOCK)
        s = scores(q_ptr, c_ptr, i, j, M, M * H, D, temperature, PRECISION, BLOCK)
        right += tl.sum(tl.where(j[None, :] == H * i[:, None], s, 0.0), axis=1)
        s = tl.where(j[None, :] < M * H, s, -float("inf"))
        m_new = tl.maximum(m, tl.max(s, axis=1))
        total = total * tl.exp(m - m_new) + tl.sum(tl.exp(s - m_new[:, None]), axis=1)
        m = m_new
    lse = m + tl.log(total)
    tl.store(lse_ptr + i, lse, mask=i < M)
    tl.store(loss_ptr + i, lse - right, mask=i < M)


def inbatch_forward(q, c, temperature):
    (M, D), tiles = q.shape, tiles_of(q)
    if c.shape[1] != D or c.shape[0] % M or not c.shape[0]:
        raise ValueError("each query has the same number of passages, as wide as it")
    loss, lse = (torch.empty(M, device=q.device, dtype=torch.float32) for _ in range(2))
    grid = (triton.cdiv(M, tiles["BLOCK"]),)
    inbatch_kernel[grid](q, c, loss, lse, M, c.shape[0] // M, D, temperature, **tiles)
    return loss, lse


@autodiff(inputs_require_grad=(0, 1))
def inbatch_contrastive(q, c, temperature=0.05):
    """q: (M, D); c: (M H, D), a query's H passages together, the right one first; gives (M) in float32."""
    return inbatch_forward(q.contiguous(), c.contiguous(), temperature)[0]


def reference(q, c, temperature=0.05):
    s = q @ c.t() / temperature
    right = torch.arange(q.shape[0], device=q.device) * (c.shape[0] // q.shape[0])
    return torch.nn.functional.cross_entropy(s, right, reduction="none")


SWEEP = [{"M": 1024, "H": 8, "D": 768}, {"M": 509, "H": 5, "D": 384}]
SWEEP_CPU = [{"M": 21, "H": 3, "D": 24}, {"M": 35, "H": 2, "D": 70}]


def make_args(dims, device="cuda", dtype=torch.float32):
    M, H, D = dims["M"], dims["H"], dims["D"]
    q, c = (torch.nn.functional.normalize(torch.randn(n, D, device=device), dim=-1) for n in (M, M * H))
    return q.to(dtype), c.to(dtype), 0.1


# ---- backward ----


@triton.jit
def score_gradient(
    q_ptr, c_ptr, lse_ptr, dloss_ptr, i, j, M, H, D, temperature,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A tile of G, queries by passages; 0 outside."""
    s = scores(q_ptr, c_ptr, i, j, M, M * H, D, temperature, PRECISION, BLOCK)
    lse = tl.load(lse_ptr + i, mask=i < M, other=0.0)
    dloss = tl.load(dloss_ptr + i, mask=i < M, other=0.0) / temperature
    inside = (i[:, None] < M) & (j[None, :] < M * H)
    p = tl.exp(tl.where(inside, s - lse[:, None], 0.0))
    g = dloss[:, None] * (p - tl.where(j[None, :] == H * i[:, None], 1.0, 0.0))
    return tl.where(inside, g, 0.0).to(q_ptr.dtype.element_ty)


@triton.jit
def dq_kernel(
    q_ptr, c_ptr, lse_ptr, dloss_ptr, dq_ptr, M, H, D, temperature,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    dq = tl.zeros([BLOCK, BLOCK_D], dtype=tl.float32)
    for start in range(0, M * H, BLOCK):
        j = start + tl.arange(0, BLOCK)
        g = score_gradient(q_ptr, c_ptr, lse_ptr, dloss_ptr, i, j, M, H, D, temperature, PRECISION, BLOCK)
        dq = tl.dot(g, load_tile(c_ptr, j, d, M * H, D), dq, input_precision=PRECISION)
    mask = (i[:, None] < M) & (d[None, :] < D)
    tl.store(dq_ptr + i[:, None].to(tl.int64) * D + d[None, :], dq.to(dq_ptr.dtype.element_ty), mask=mask)


@triton.jit
def dc_kernel(
    q_ptr, c_ptr, lse_ptr, dloss_ptr, dc_ptr, M, H, D, temperature,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    j = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    dc = tl.zeros([BLOCK, BLOCK_D], dtype=tl.float32)
    for start in range(0, M, BLOCK):
        i = start + tl.arange(0, BLOCK)
        g = score_gradient(q_ptr, c_ptr, lse_ptr, dloss_ptr, i, j, M, H, D, temperature, PRECISION, BLOCK)
        dc = tl.dot(tl.trans(g), load_tile(q_ptr, i, d, M, D), dc, input_precision=PRECISION)
    mask = (j[:, None] < M * H) & (d[None, :] < D)
    tl.store(dc_ptr + j[:, None].to(tl.int64) * D + d[None, :], dc.to(dc_ptr.dtype.element_ty), mask=mask)


class InbatchContrastive(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, c, temperature):
        q, c = q.contiguous(), c.contiguous()
        loss, lse = inbatch_forward(q, c, temperature)
        ctx.save_for_backward(q, c, lse)
        ctx.temperature = temperature
        return loss

    @staticmethod
    def backward(ctx, dloss):
        q, c, lse = ctx.saved_tensors
        (M, D), H = q.shape, c.shape[0] // q.shape[0]
        tiles = {**tiles_of(q), "BLOCK_D": 64 if q.dtype == torch.float32 else 256, "num_warps": 8}
        tiles["BLOCK_D"] = min(tiles["BLOCK_D"], max(16, triton.next_power_of_2(D)))
        args = (q, c, lse, dloss.contiguous())
        chunks = triton.cdiv(D, tiles["BLOCK_D"])
        dq = dc = None
        if ctx.needs_input_grad[0]:
            dq = torch.empty_like(q)
            dq_kernel[(triton.cdiv(M, tiles["BLOCK"]), chunks)](*args, dq, M, H, D, ctx.temperature, **tiles)
        if ctx.needs_input_grad[1]:
            dc = torch.empty_like(c)
            grid = (triton.cdiv(M * H, tiles["BLOCK"]), chunks)
            dc_kernel[grid](*args, dc, M, H, D, ctx.temperature, **tiles)
        return dq, dc, None


def inbatch_contrastive_autograd(q, c, temperature=0.05):
    return InbatchContrastive.apply(q, c, temperature)
