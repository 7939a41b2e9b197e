"""Cross-entropy of a linear layer whose logits are never stored.

Forward    z_iv = x_i . W_v,  l_i = lse_v(z_iv) - z_{i, t_i}
Backward   G_iv = (exp(z_iv - lse_i) - [v = t_i]) dl_i,   dX = G W,   dW = G^T X

Forward schedule: a program owns a tile of rows, walks the vocabulary, makes each tile of logits by a dot,
folds it in an online log-sum-exp, picks up the target's logit when its tile comes by, and saves lse.
Backward schedule: the M x V matrix G is as large as the logits, so it is rebuilt, not stored: once by the
owner of a row tile, which walks the vocabulary for dX, and once by the owner of a vocabulary tile, which
walks the rows for dW. The second rebuild costs one more product, against M V of memory or atomics on dX;
memory stays O((M + V) D) and every gradient is stored once. Both owners hold whole rows, so this is for the
narrow layers of recommenders, with up to 128 features and very many items.

op: fused_linear_cross_entropy
schedule: swap_owner, recompute_from_stats
difficulty: 5
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
    BLOCK_D = max(16, triton.next_power_of_2(x.shape[1]))
    BLOCK = 64 if x.dtype != torch.float32 else 32 if BLOCK_D <= 64 else 16
    return {"PRECISION": PRECISION, "BLOCK": BLOCK, "BLOCK_D": BLOCK_D, "num_warps": 8}


@triton.jit
def load_tile(ptr, rows, cols, R, C):
    mask = (rows[:, None] < R) & (cols[None, :] < C)
    return tl.load(ptr + rows[:, None].to(tl.int64) * C + cols[None, :], mask=mask, other=0.0)


@triton.jit
def linear_ce_kernel(
    x_ptr, w_ptr, target_ptr, loss_ptr, lse_ptr, M, V, D,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    d = tl.arange(0, BLOCK_D)
    x = load_tile(x_ptr, rows, d, M, D)
    target = tl.load(target_ptr + rows, mask=rows < M, other=0)
    m = tl.full([BLOCK], -float("inf"), dtype=tl.float32)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    z_target = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, V, BLOCK):
        v = start + tl.arange(0, BLOCK)
        z = tl.dot(x, tl.trans(load_tile(w_ptr, v, d, V, D)), input_precision=PRECISION)
        z_target += tl.sum(tl.where(v[None, :] == target[:, None], z, 0.0), axis=1)
        z = tl.where(v[None, :] < V, z, -float("inf"))
        m_new = tl.maximum(m, tl.max(z, axis=1))
        total = total * tl.exp(m - m_new) + tl.sum(tl.exp(z - m_new[:, None]), axis=1)
        m = m_new
    lse = m + tl.log(total)
    tl.store(lse_ptr + rows, lse, mask=rows < M)
    tl.store(loss_ptr + rows, lse - z_target, mask=rows < M)


def linear_ce_forward(x, w, target):
    M, D = x.shape
    V = w.shape[0]
    if D > 128:
        raise ValueError(f"a hidden size of {D} does not fit one tile")
    loss = torch.empty(M, device=x.device, dtype=torch.float32)
    lse = torch.empty_like(loss)
    tiles = tiling(x)
    linear_ce_kernel[(triton.cdiv(M, tiles["BLOCK"]),)](x, w, target, loss, lse, M, V, D, **tiles)
    return loss, lse


@autodiff(inputs_require_grad=(0, 1))
def linear_cross_entropy(x, w, target):
    """x: (M, D); w: (V, D); target: int64 (M). Returns a loss per row."""
    return linear_ce_forward(x.contiguous(), w.contiguous(), target.contiguous())[0]


def reference(x, w, target):
    return torch.nn.functional.cross_entropy(x @ w.t(), target, reduction="none")


SWEEP = [
    {"M": 4096, "D": 128, "V": 65536},
    {"M": 2048, "D": 64, "V": 131072},
    {"M": 1021, "D": 96, "V": 50257},
]
SWEEP_CPU = [{"M": 37, "D": 24, "V": 150}, {"M": 16, "D": 32, "V": 65}]


def make_args(dims, device="cuda", dtype=torch.float32):
    x = torch.randn(dims["M"], dims["D"], device=device, dtype=dtype)
    w = torch.randn(dims["V"], dims["D"], device=device, dtype=dtype) / dims["D"] ** 0.5
    return x, w, torch.randint(0, dims["V"], (dims["M"],), device=device)


# ---- backward ----


@triton.jit
def logit_gradient(x, w, target, lse, dloss, rows, v, M, V, PRECISION: tl.constexpr):
    """The tile (rows, v) of G; zero outside M and V."""
    z = tl.dot(x, tl.trans(w), input_precision=PRECISION)
    p = tl.exp(z - lse[:, None])
    g = (p - tl.where(v[None, :] == target[:, None], 1.0, 0.0)) * dloss[:, None]
    return tl.where((rows[:, None] < M) & (v[None, :] < V), g, 0.0).to(x.dtype)


@triton.jit
def dx_kernel(
    x_ptr, w_ptr, target_ptr, lse_ptr, dloss_ptr, dx_ptr, M, V, D,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    d = tl.arange(0, BLOCK_D)
    x = load_tile(x_ptr, rows, d, M, D)
    target = tl.load(target_ptr + rows, mask=rows < M, other=0)
    lse = tl.load(lse_ptr + rows, mask=rows < M, other=0.0)
    dloss = tl.load(dloss_ptr + rows, mask=rows < M, other=0.0)
    dx = tl.zeros([BLOCK, BLOCK_D], dtype=tl.float32)
    for start in range(0, V, BLOCK):
        v = start + tl.arange(0, BLOCK)
        w = load_tile(w_ptr, v, d, V, D)
        g = logit_gradient(x, w, target, lse, dloss, rows, v, M, V, PRECISION)
        dx = tl.dot(g, w, dx, input_precision=PRECISION)
    mask = (rows[:, None] < M) & (d[None, :] < D)
    tl.store(dx_ptr + rows[:, None].to(tl.int64) * D + d[None, :], dx.to(dx_ptr.dtype.element_ty), mask=mask)


@triton.jit
def dw_kernel(
    x_ptr, w_ptr, target_ptr, lse_ptr, dloss_ptr, dw_ptr, M, V, D,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    v = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    d = tl.arange(0, BLOCK_D)
    w = load_tile(w_ptr, v, d, V, D)
    dw = tl.zeros([BLOCK, BLOCK_D], dtype=tl.float32)
    for start in range(0, M, BLOCK):
        rows = start + tl.arange(0, BLOCK)
        x = load_tile(x_ptr, rows, d, M, D)
        target = tl.load(target_ptr + rows, mask=rows < M, other=0)
        lse = tl.load(lse_ptr + rows, mask=rows < M, other=0.0)
        dloss = tl.load(dloss_ptr + rows, mask=rows < M, other=0.0)
        g = logit_gradient(x, w, target, lse, dloss, rows, v, M, V, PRECISION)
        dw = tl.dot(tl.trans(g), x, dw, input_precision=PRECISION)
    mask = (v[:, None] < V) & (d[None, :] < D)
    tl.store(dw_ptr + v[:, None].to(tl.int64) * D + d[None, :], dw.to(dw_ptr.dtype.element_ty), mask=mask)


class LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, target):
        x, w, target = x.contiguous(), w.contiguous(), target.contiguous()
        loss, lse = linear_ce_forward(x, w, target)
        ctx.save_for_backward(x, w, target, lse)
        return loss

    @staticmethod
    def backward(ctx, dloss):
        x, w, target, lse = ctx.saved_tensors
        dloss = dloss.contiguous()
        M, D = x.shape
        V = w.shape[0]
        tiles = tiling(x)
        BLOCK = tiles["BLOCK"]
        dx = dw = None
        if ctx.needs_input_grad[0]:
            dx = torch.empty_like(x)
            dx_kernel[(triton.cdiv(M, BLOCK),)](x, w, target, lse, dloss, dx, M, V, D, **tiles)
        if ctx.needs_input_grad[1]:
            dw = torch.empty_like(w)
            dw_kernel[(triton.cdiv(V, BLOCK),)](x, w, target, lse, dloss, dw, M, V, D, **tiles)
        return dx, dw, None


def linear_cross_entropy_autograd(x, w, target):
    return LinearCrossEntropy.apply(x, w, target)
