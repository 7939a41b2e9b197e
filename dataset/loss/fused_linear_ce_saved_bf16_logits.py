"""Cross-entropy of a linear layer with bias; logits are stored once and become gradients as they are read.

Forward    z_iv = x_i . W_v + b_v,  l_i = lse_v(z_iv) - z_{i, t_i}
Backward   G_iv = (exp(z_iv - lse_i) - [v = t_i]) dl_i,   dX = G W,   dW = G^T X,   db_v = sum_i G_iv

Forward schedule: a matrix product whose epilogue, while a tile of logits is in registers, rounds it to x's
dtype and stores it, makes the tile's maximum and sum for each row, and stores the target's logit if the tile
holds it. A second kernel merges the small numbers into lse; the loss reads no logit back. Maxima and sums are
of the rounded logits: were they of the accumulators, the backward's probabilities would not add up to 1.
Backward schedule: two ordinary products, one an owner of tiles of dX and one of dW, whose left operand is
made from the stored logits on its way from memory: a load, an exp, a subtraction. G is never written, where a
kernel of its own would read the logits, write G and have it read twice; and as the logits stay as they were
saved, the backward can run again. db rides along: the first column of dW's programs has every G of its
classes pass by. Against the pairs that rebuild the logits this takes M V numbers of memory and saves M V D
multiplications; in bf16 the logits cost half, and the loss is that of an unfused bf16 layer.

op: fused_linear_cross_entropy
schedule: partials_then_reduce, recompute_from_stats, swap_owner
difficulty: 4
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
    BLOCK = 64 if x.dtype == torch.float32 else 128
    return {"PRECISION": PRECISION, "BLOCK": BLOCK, "BLOCK_K": 32}


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
def logits_kernel(
    x_ptr, w_ptr, b_ptr, target_ptr, z_ptr, max_ptr, sum_ptr, zt_ptr, M, V, D,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    v = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    z = tl.zeros([BLOCK, BLOCK], dtype=tl.float32)
    for start in range(0, D, BLOCK_K):
        d = start + tl.arange(0, BLOCK_K)
        w = tl.trans(load_tile(w_ptr, v, d, V, D))
        z = tl.dot(load_tile(x_ptr, rows, d, M, D), w, z, input_precision=PRECISION)
    z += tl.load(b_ptr + v, mask=v < V, other=0.0).to(tl.float32)[None, :]
    z = z.to(z_ptr.dtype.element_ty).to(tl.float32)  # all that follows is of what is stored
    store_tile(z_ptr, z, rows, v, M, V)
    target = tl.load(target_ptr + rows, mask=rows < M, other=0)
    z_target = tl.sum(tl.where(v[None, :] == target[:, None], z, 0.0), axis=1)
    here = (target >= tl.program_id(1) * BLOCK) & (target < (tl.program_id(1) + 1) * BLOCK)
    tl.store(zt_ptr + rows, z_target, mask=here & (rows < M))
    z = tl.where(v[None, :] < V, z, -float("inf"))
    m = tl.max(z, axis=1)
    slot = tl.program_id(1).to(tl.int64) * M + rows
    tl.store(max_ptr + slot, m, mask=rows < M)
    tl.store(sum_ptr + slot, tl.sum(tl.exp(z - m[:, None]), axis=1), mask=rows < M)


@triton.jit
def merge_kernel(max_ptr, sum_ptr, zt_ptr, loss_ptr, lse_ptr, M, tiles, BLOCK: tl.constexpr):
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m = tl.full([BLOCK], -float("inf"), dtype=tl.float32)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    slot = rows.to(tl.int64)
    for _ in range(tiles):
        tile_max = tl.load(max_ptr + slot, mask=rows < M, other=0.0)
        m_new = tl.maximum(m, tile_max)
        tile_sum = tl.load(sum_ptr + slot, mask=rows < M, other=1.0) * tl.exp(tile_max - m_new)
        total = total * tl.exp(m - m_new) + tile_sum
        m = m_new
        slot += M
    lse = m + tl.log(total)
    tl.store(lse_ptr + rows, lse, mask=rows < M)
    tl.store(loss_ptr + rows, lse - tl.load(zt_ptr + rows, mask=rows < M, other=0.0), mask=rows < M)


def linear_ce_forward(x, w, b, target):
    (M, D), V, tiles = x.shape, w.shape[0], tiles_of(x)
    count = triton.cdiv(V, tiles["BLOCK"])
    z = torch.empty((M, V), device=x.device, dtype=x.dtype)
    maxima, sums = (torch.empty((count, M), device=x.device, dtype=torch.float32) for _ in range(2))
    z_target, loss, lse = (torch.empty(M, device=x.device, dtype=torch.float32) for _ in range(3))
    logits_kernel[(triton.cdiv(M, tiles["BLOCK"]), count)](
        x, w, b, target, z, maxima, sums, z_target, M, V, D, **tiles
    )
    merge_kernel[(triton.cdiv(M, 64),)](maxima, sums, z_target, loss, lse, M, count, BLOCK=64)
    return loss, z, lse


@autodiff(inputs_require_grad=(0, 1, 2))
def linear_cross_entropy(x, w, b, target):
    """x: (M, D); w: (V, D); b: (V); target: int64 (M); gives (M) in float32."""
    return linear_ce_forward(x.contiguous(), w.contiguous(), b.contiguous(), target.contiguous())[0]


def reference(x, w, b, target):
    return torch.nn.functional.cross_entropy(x @ w.t() + b, target, reduction="none")


SWEEP = [{"M": 2048, "D": 1024, "V": 32000}, {"M": 1021, "D": 768, "V": 50257}]
SWEEP_CPU = [{"M": 37, "D": 48, "V": 100}, {"M": 70, "D": 20, "V": 65}]


def make_args(dims, device="cuda", dtype=torch.float32):
    M, D, V = dims["M"], dims["D"], dims["V"]
    x = torch.randn(M, D, device=device, dtype=dtype)
    w = torch.randn(V, D, device=device, dtype=dtype) / D**0.5
    return x, w, torch.randn(V, device=device, dtype=dtype), torch.randint(0, V, (M,), device=device)


# ---- backward ----


@triton.jit
def logit_gradient(z_ptr, target_ptr, lse_ptr, dloss_ptr, rows, v, M, V):
    """The tile (rows, v) of G, in fp32; zero outside M and V."""
    z = load_tile(z_ptr, rows, v, M, V).to(tl.float32)
    lse = tl.load(lse_ptr + rows, mask=rows < M, other=0.0)
    dloss = tl.load(dloss_ptr + rows, mask=rows < M, other=0.0)
    target = tl.load(target_ptr + rows, mask=rows < M, other=0)
    inside = (rows[:, None] < M) & (v[None, :] < V)
    p = tl.exp(tl.where(inside, z - lse[:, None], 0.0))
    g = (p - tl.where(v[None, :] == target[:, None], 1.0, 0.0)) * dloss[:, None]
    return tl.where(inside, g, 0.0)


@triton.jit
def dx_kernel(
    z_ptr, w_ptr, target_ptr, lse_ptr, dloss_ptr, dx_ptr, M, V, D,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    dx = tl.zeros([BLOCK, BLOCK], dtype=tl.float32)
    for start in range(0, V, BLOCK_K):
        v = start + tl.arange(0, BLOCK_K)
        w = load_tile(w_ptr, v, d, V, D)
        g = logit_gradient(z_ptr, target_ptr, lse_ptr, dloss_ptr, rows, v, M, V)
        dx = tl.dot(g.to(w.dtype), w, dx, input_precision=PRECISION)
    store_tile(dx_ptr, dx, rows, d, M, D)


@triton.jit
def dw_db_kernel(
    z_ptr, x_ptr, target_ptr, lse_ptr, dloss_ptr, dw_ptr, db_ptr, M, V, D,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    v = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    dw = tl.zeros([BLOCK, BLOCK], dtype=tl.float32)
    db = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, M, BLOCK_K):
        rows = start + tl.arange(0, BLOCK_K)
        x = load_tile(x_ptr, rows, d, M, D)
        g = logit_gradient(z_ptr, target_ptr, lse_ptr, dloss_ptr, rows, v, M, V)
        dw = tl.dot(tl.trans(g.to(x.dtype)), x, dw, input_precision=PRECISION)
        db += tl.sum(g, axis=0)
    store_tile(dw_ptr, dw, v, d, V, D)
    if tl.program_id(1) == 0:
        tl.store(db_ptr + v, db.to(db_ptr.dtype.element_ty), mask=v < V)


class LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, b, target):
        x, w, b, target = x.contiguous(), w.contiguous(), b.contiguous(), target.contiguous()
        loss, z, lse = linear_ce_forward(x, w, b, target)
        ctx.save_for_backward(x, w, b, target, z, lse)
        return loss

    @staticmethod
    def backward(ctx, dloss):
        x, w, b, target, z, lse = ctx.saved_tensors
        (M, D), V, tiles = x.shape, w.shape[0], tiles_of(x)
        dloss, columns = dloss.contiguous(), triton.cdiv(D, tiles["BLOCK"])
        needs = ctx.needs_input_grad
        dx = dw = db = None
        if needs[0]:
            dx = torch.empty_like(x)
            grid = (triton.cdiv(M, tiles["BLOCK"]), columns)
            dx_kernel[grid](z, w, target, lse, dloss, dx, M, V, D, **tiles)
        if needs[1] or needs[2]:
            dw, db = torch.empty_like(w), torch.empty_like(b)
            grid = (triton.cdiv(V, tiles["BLOCK"]), columns)
            dw_db_kernel[grid](z, x, target, lse, dloss, dw, db, M, V, D, **tiles)
        return dx, dw if needs[1] else None, db if needs[2] else None, None


def linear_cross_entropy_autograd(x, w, b, target):
    return LinearCrossEntropy.apply(x, w, b, target)
