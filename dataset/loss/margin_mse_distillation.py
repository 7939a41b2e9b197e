"""Margin distillation of a retriever: the score margin of two passages shall be a cross-encoder's.

Forward    r_i = <q_i, p_i - n_i> - t_i,  l_i = r_i^2, one loss a triple;  t the teacher's margin, a constant
Backward   dr = 2 dl r:  dq = dr (p - n),  dp = dr q,  dn = -dr q

Forward schedule: several triples a program, as embeddings are short rows. The margin is one dot with a
difference: of two dots, each near the other when it gets hard, the difference would keep only the last
digits.
Backward schedule: r is saved, one number a triple, and with it nothing along the row depends on anything: a
grid of (rows, columns) reads three tiles and stores three. The scale 2 dl r is a vector of the rows. An input
without a gradient, a frozen query tower say, has its store compiled out, and a passage that then nobody
multiplies with is not loaded.

op: margin_mse
schedule: recompute_from_stats, same_tile_pointwise
difficulty: 1
dtypes: fp32, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


TILE = {"BLOCK_M": 16, "BLOCK_D": 128}


@triton.jit
def load_tile(ptr, rows, d, M, D):
    mask = (rows[:, None] < M) & (d[None, :] < D)
    return tl.load(ptr + rows[:, None] * D + d[None, :], mask=mask, other=0.0).to(tl.float32)


@triton.jit
def store_tile(ptr, value, rows, d, M, D):
    mask = (rows[:, None] < M) & (d[None, :] < D)
    tl.store(ptr + rows[:, None] * D + d[None, :], value.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def margin_kernel(
    q_ptr, p_ptr, n_ptr, t_ptr, loss_ptr, r_ptr, M, D, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    margin = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    for start in range(0, D, BLOCK_D):
        d = start + tl.arange(0, BLOCK_D)
        apart = load_tile(p_ptr, rows, d, M, D) - load_tile(n_ptr, rows, d, M, D)
        margin += load_tile(q_ptr, rows, d, M, D) * apart
    r = tl.sum(margin, axis=1) - tl.load(t_ptr + rows, mask=rows < M, other=0.0).to(tl.float32)
    tl.store(r_ptr + rows, r, mask=rows < M)
    tl.store(loss_ptr + rows, r * r, mask=rows < M)


def margin_forward(q, p, n, margins):
    if not q.shape == p.shape == n.shape:
        raise ValueError("queries and passages must have one shape")
    M, D = q.shape
    loss, r = (torch.empty(M, device=q.device, dtype=torch.float32) for _ in range(2))
    margin_kernel[(triton.cdiv(M, TILE["BLOCK_M"]),)](q, p, n, margins, loss, r, M, D, **TILE)
    return loss, r


@autodiff(inputs_require_grad=(0, 1, 2))
def margin_mse(q, p, n, margins):
    """q, p, n: (M, D), queries, right and wrong passages; margins: (M), the teacher's; gives (M), float32."""
    return margin_forward(q.contiguous(), p.contiguous(), n.contiguous(), margins.contiguous())[0]


def reference(q, p, n, margins):
    return ((q * (p - n)).sum(-1) - margins).pow(2)


SWEEP = [{"M": 65536, "D": 768}, {"M": 100003, "D": 130}]
SWEEP_CPU = [{"M": 29, "D": 37}, {"M": 18, "D": 140}]


def make_args(dims, device="cuda", dtype=torch.float32):
    M, D = dims["M"], dims["D"]
    q, p, n = (torch.randn(M, D, device=device, dtype=dtype) / D**0.25 for _ in range(3))
    return q, p, n, torch.randn(M, device=device, dtype=dtype)


# ---- backward ----


@triton.jit
def margin_backward_kernel(
    q_ptr, p_ptr, n_ptr, r_ptr, dloss_ptr, dq_ptr, dp_ptr, dn_ptr, M, D,
    NEEDS_DQ: tl.constexpr, NEEDS_DP: tl.constexpr, NEEDS_DN: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    dloss = tl.load(dloss_ptr + rows, mask=rows < M, other=0.0)
    dr = (2 * dloss * tl.load(r_ptr + rows, mask=rows < M, other=0.0))[:, None]
    if NEEDS_DQ:
        apart = load_tile(p_ptr, rows, d, M, D) - load_tile(n_ptr, rows, d, M, D)
        store_tile(dq_ptr, dr * apart, rows, d, M, D)
    if NEEDS_DP or NEEDS_DN:
        scaled = dr * load_tile(q_ptr, rows, d, M, D)
        if NEEDS_DP:
            store_tile(dp_ptr, scaled, rows, d, M, D)
        if NEEDS_DN:
            store_tile(dn_ptr, -scaled, rows, d, M, D)


class MarginMSE(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, p, n, margins):
        q, p, n = q.contiguous(), p.contiguous(), n.contiguous()
        loss, r = margin_forward(q, p, n, margins.contiguous())
        ctx.save_for_backward(q, p, n, r)
        return loss

    @staticmethod
    def backward(ctx, dloss):
        q, p, n, r = ctx.saved_tensors
        M, D = q.shape
        needs = ctx.needs_input_grad[:3]
        grads = tuple(torch.empty_like(q) if needed else None for needed in needs)
        margin_backward_kernel[(triton.cdiv(M, TILE["BLOCK_M"]), triton.cdiv(D, TILE["BLOCK_D"]))](
            q, p, n, r, dloss.contiguous(), *grads, M, D,
            NEEDS_DQ=needs[0], NEEDS_DP=needs[1], NEEDS_DN=needs[2], **TILE,
        )  # fmt: skip
        return *grads, None


def margin_mse_autograd(q, p, n, margins):
    return MarginMSE.apply(q, p, n, margins)
