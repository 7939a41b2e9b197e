"""Cross-entropy of a narrow linear layer over many classes; the backward rebuilds the logits once.

Forward    z_iv = x_i . W_v,  l_i = lse_v(z_iv) - z_{i, t_i}
Backward   G_iv = (exp(z_iv - lse_i) - [v = t_i]) dl_i,   dX = G W,   dW = G^T X

Forward schedule: a program owns a tile of rows and walks the classes with an online log-sum-exp; logits are
never stored. Widths of up to 128 fit one tile: item embeddings of a recommender, factorised vocabularies.
Backward schedule: G serves two products, and whoever rebuilds a tile of it may as well use it for both. The
owner of a class tile walks the rows: dW stays in its registers, complete at the end, and G W of each row
tile is added to dX by atomics in an fp32 buffer, cast at the end. That is three products in place of the
four of two owners. A tile of V adds M D numbers, so the price is M D V / BLOCK_V atomic adds, against M D V
multiplications saved: it pays where rows are narrow, and where no order of dX's sum has to be kept. To
spread the meetings, a program starts its walk at a place of its own: neighbours that run at once, all from
row 0, would add to the same lines all the way.

op: fused_linear_cross_entropy
schedule: swap_owner, atomic_accumulate, recompute_from_stats
difficulty: 5
dtypes: fp32, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


def tiles_of(x):
    """Tiles and the precision of dots: products of whole float32 numbers want small tiles."""
    PRECISION = "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee"
    BLOCK_D = max(16, triton.next_power_of_2(x.shape[1]))
    BLOCK_V = 32 if x.dtype == torch.float32 else 128
    return {"PRECISION": PRECISION, "BLOCK_M": 32, "BLOCK_V": BLOCK_V, "BLOCK_D": BLOCK_D, "num_warps": 8}


@triton.jit
def load_tile(ptr, rows, cols, R, C):
    mask = (rows[:, None] < R) & (cols[None, :] < C)
    return tl.load(ptr + rows[:, None].to(tl.int64) * C + cols[None, :], mask=mask, other=0.0)


@triton.jit
def linear_ce_kernel(
    x_ptr, w_ptr, target_ptr, loss_ptr, lse_ptr, M, V, D,
    PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    x = load_tile(x_ptr, rows, d, M, D)
    target = tl.load(target_ptr + rows, mask=rows < M, other=0)
    m = tl.full([BLOCK_M], -float("inf"), dtype=tl.float32)
    total = tl.zeros([BLOCK_M], dtype=tl.float32)
    z_target = tl.zeros([BLOCK_M], dtype=tl.float32)
    for start in range(0, V, BLOCK_V):
        v = start + tl.arange(0, BLOCK_V)
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
    (M, D), V = x.shape, w.shape[0]
    if D > 128:
        raise ValueError(f"a width of {D} does not fit one tile")
    loss, lse = (torch.empty(M, device=x.device, dtype=torch.float32) for _ in range(2))
    tiles = tiles_of(x)
    linear_ce_kernel[(triton.cdiv(M, tiles["BLOCK_M"]),)](x, w, target, loss, lse, M, V, D, **tiles)
    return loss, lse


@autodiff(inputs_require_grad=(0, 1))
def linear_cross_entropy(x, w, target):
    """x: (M, D); w: (V, D); target: int64 (M); gives (M) in float32."""
    return linear_ce_forward(x.contiguous(), w.contiguous(), target.contiguous())[0]


def reference(x, w, target):
    return torch.nn.functional.cross_entropy(x @ w.t(), target, reduction="none")


SWEEP = [{"M": 8192, "D": 64, "V": 100000}, {"M": 4095, "D": 128, "V": 30522}]
SWEEP_CPU = [{"M": 37, "D": 24, "V": 150}, {"M": 35, "D": 32, "V": 65}]


def make_args(dims, device="cuda", dtype=torch.float32):
    M, D, V = dims["M"], dims["D"], dims["V"]
    x = torch.randn(M, D, device=device, dtype=dtype)
    w = torch.randn(V, D, device=device, dtype=dtype) / D**0.5
    return x, w, torch.randint(0, V, (M,), device=device)


# ---- backward ----


@triton.jit
def both_kernel(
    x_ptr, w_ptr, target_ptr, lse_ptr, dloss_ptr, dx_ptr, dw_ptr, M, V, D,
    NEEDS_DX: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    v = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    d = tl.arange(0, BLOCK_D)
    w = load_tile(w_ptr, v, d, V, D)
    dw = tl.zeros([BLOCK_V, BLOCK_D], dtype=tl.float32)
    steps = tl.cdiv(M, BLOCK_M)
    for step in range(steps):
        rows = (step + tl.program_id(0)) % steps * BLOCK_M + tl.arange(0, BLOCK_M)
        x = load_tile(x_ptr, rows, d, M, D)
        target = tl.load(target_ptr + rows, mask=rows < M, other=0)
        lse = tl.load(lse_ptr + rows, mask=rows < M, other=0.0)
        dloss = tl.load(dloss_ptr + rows, mask=rows < M, other=0.0)
        z = tl.dot(x, tl.trans(w), input_precision=PRECISION)
        inside = (rows[:, None] < M) & (v[None, :] < V)
        p = tl.exp(tl.where(inside, z - lse[:, None], 0.0))
        g = (p - tl.where(v[None, :] == target[:, None], 1.0, 0.0)) * dloss[:, None]
        g = tl.where(inside, g, 0.0).to(x.dtype)
        dw = tl.dot(tl.trans(g), x, dw, input_precision=PRECISION)
        if NEEDS_DX:
            dx = tl.dot(g, w, input_precision=PRECISION)
            mask = (rows[:, None] < M) & (d[None, :] < D)
            tl.atomic_add(dx_ptr + rows[:, None].to(tl.int64) * D + d[None, :], dx, mask=mask, sem="relaxed")
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
        (M, D), V = x.shape, w.shape[0]
        needs_dx, needs_dw, _ = ctx.needs_input_grad
        dx = torch.zeros((M, D), device=x.device, dtype=torch.float32) if needs_dx else None
        dw = torch.empty_like(w)
        tiles = tiles_of(x)
        both_kernel[(triton.cdiv(V, tiles["BLOCK_V"]),)](
            x, w, target, lse, dloss.contiguous(), dx, dw, M, V, D, NEEDS_DX=needs_dx, **tiles
        )
        return dx.to(x.dtype) if needs_dx else None, dw if needs_dw else None, None


def linear_cross_entropy_autograd(x, w, target):
    return LinearCrossEntropy.apply(x, w, target)
