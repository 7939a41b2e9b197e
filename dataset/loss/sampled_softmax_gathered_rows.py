"""Sampled softmax: each row's target class against S classes drawn for the whole batch.

Forward    scores of row i:  u_i = x_i . W_t + b_t - c_t,  t = t_i its target, and
           v_is = x_i . W_k + b_k - c_k,  k = k_s a sampled class; c = log of a class's expected count.
           Samples that hit the target (k_s = t_i) do not count.  l_i = log(e^{u_i} + sum_s e^{v_is}) - u_i
Backward   g_is = dl_i exp(v_is - lse_i),  h_i = -sum_s g_is, which is dl_i (exp(u_i - lse_i) - 1):
           dx_i = h_i W_t + sum_s g_is W_k;   row k_s of dW gets sum_i g_is x_i, row t_i gets h_i x_i,
           and db the same without x

Forward schedule: a program owns a tile of rows and walks the samples; their rows of W are gathered as the
tiles of an ordinary product, with the width in steps. u is a row-wise dot with gathered rows, made first,
and starts the online log-sum-exp, which is saved.
Backward schedule: dx keeps that ownership: a program has (row tile, column chunk) and rebuilds g; its rows
sum up to h, which keeps all its digits where the target is all but certain: 1 - exp would have none left.
For dW the samples are owners: one has (sample tile, column chunk), walks all rows with its sum in
registers, and adds it to row k_s once. A batch shares its samples, so this is where all rows meet, and the
loop has settled it without an atomic for each. What is left meets seldom, a sample drawn twice or targets
that agree, and is added by atomics into zeroed fp32. Rows of W that nobody drew are never touched.

op: sampled_softmax
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
    return {"PRECISION": PRECISION, "BLOCK": 32 if x.dtype == torch.float32 else 64, "BLOCK_D": 64}


@triton.jit
def gather_tile(ptr, rows, inside, d, D):
    """Rows of a matrix by their numbers, which are int64."""
    mask = inside[:, None] & (d[None, :] < D)
    return tl.load(ptr + rows[:, None] * D + d[None, :], mask=mask, other=0.0)


@triton.jit
def target_scores(
    x_ptr, w_ptr, b_ptr, c_ptr, target, rows, M, D, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr
):  # fmt: skip
    """u of a tile of rows."""
    u = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, D, BLOCK_D):
        d = start + tl.arange(0, BLOCK_D)
        x = gather_tile(x_ptr, rows, rows < M, d, D).to(tl.float32)
        u += tl.sum(x * gather_tile(w_ptr, target, rows < M, d, D).to(tl.float32), axis=1)
    b = tl.load(b_ptr + target, mask=rows < M, other=0.0).to(tl.float32)
    return u + b - tl.load(c_ptr + target, mask=rows < M, other=0.0)


@triton.jit
def sample_scores(
    x_ptr, w_ptr, b_ptr, c_ptr, target, k, rows, s, M, S, D,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """v of a tile of rows by samples, and which of them count."""
    v = tl.zeros([BLOCK, BLOCK], dtype=tl.float32)
    for start in range(0, D, BLOCK_D):
        d = start + tl.arange(0, BLOCK_D)
        w = tl.trans(gather_tile(w_ptr, k, s < S, d, D))
        v = tl.dot(gather_tile(x_ptr, rows, rows < M, d, D), w, v, input_precision=PRECISION)
    b = tl.load(b_ptr + k, mask=s < S, other=0.0).to(tl.float32)
    v += (b - tl.load(c_ptr + k, mask=s < S, other=0.0))[None, :]
    return v, (k[None, :] != target[:, None]) & (rows[:, None] < M) & (s[None, :] < S)


@triton.jit
def sampled_softmax_kernel(
    x_ptr, w_ptr, b_ptr, c_ptr, target_ptr, sample_ptr, loss_ptr, lse_ptr, M, S, D,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    target = tl.load(target_ptr + rows, mask=rows < M, other=0)
    u = target_scores(x_ptr, w_ptr, b_ptr, c_ptr, target, rows, M, D, BLOCK, BLOCK_D)
    m = u
    total = tl.full([BLOCK], 1.0, dtype=tl.float32)
    for start in range(0, S, BLOCK):
        s = start + tl.arange(0, BLOCK)
        k = tl.load(sample_ptr + s, mask=s < S, other=0)
        v, counts = sample_scores(
            x_ptr, w_ptr, b_ptr, c_ptr, target, k, rows, s, M, S, D, PRECISION, BLOCK, BLOCK_D
        )
        v = tl.where(counts, v, -float("inf"))
        m_new = tl.maximum(m, tl.max(v, axis=1))
        total = total * tl.exp(m - m_new) + tl.sum(tl.exp(v - m_new[:, None]), axis=1)
        m = m_new
    lse = m + tl.log(total)
    tl.store(lse_ptr + rows, lse, mask=rows < M)
    tl.store(loss_ptr + rows, lse - u, mask=rows < M)


def sampled_softmax_forward(x, w, b, c, target, samples):
    (M, D), S, tiles = x.shape, samples.numel(), tiles_of(x)
    loss, lse = (torch.empty(M, device=x.device, dtype=torch.float32) for _ in range(2))
    sampled_softmax_kernel[(triton.cdiv(M, tiles["BLOCK"]),)](
        x, w, b, c, target, samples, loss, lse, M, S, D, **tiles
    )
    return loss, lse


@autodiff(inputs_require_grad=(0, 1, 2))
def sampled_softmax(x, w, b, log_counts, target, samples):
    """x: (M, D); w: (V, D); b: (V); log_counts: (V) in float32, a constant; target: int64 (M); samples:
    int64 (S); gives (M) in float32."""
    x, w, b, c = x.contiguous(), w.contiguous(), b.contiguous(), log_counts.contiguous()
    return sampled_softmax_forward(x, w, b, c, target.contiguous(), samples.contiguous())[0]


def reference(x, w, b, log_counts, target, samples):
    shift = b - log_counts
    u = (x * w[target]).sum(1) + shift[target]
    v = x @ w[samples].t() + shift[samples]
    v = v.masked_fill(samples == target[:, None], -torch.inf)
    return torch.cat([u[:, None], v], dim=1).logsumexp(1) - u


SWEEP = [{"M": 8192, "D": 256, "V": 500000, "S": 8192}, {"M": 4095, "D": 100, "V": 100003, "S": 1021}]
SWEEP_CPU = [{"M": 30, "D": 20, "V": 90, "S": 16}, {"M": 35, "D": 70, "V": 20, "S": 37}]


def make_args(dims, device="cuda", dtype=torch.float32):
    M, D, V, S = dims["M"], dims["D"], dims["V"], dims["S"]
    x = torch.randn(M, D, device=device, dtype=dtype)
    w = torch.randn(V, D, device=device, dtype=dtype) / D**0.5
    b = torch.randn(V, device=device, dtype=dtype)
    log_counts = torch.log(S / V * (0.5 + torch.rand(V, device=device)))
    return x, w, b, log_counts, *(torch.randint(0, V, (n,), device=device) for n in (M, S))


# ---- backward ----


@triton.jit
def row_kernel(
    x_ptr, w_ptr, b_ptr, c_ptr, target_ptr, sample_ptr, lse_ptr, dloss_ptr, dx_ptr, dw_ptr, db_ptr,
    M, S, D, NEEDS_W: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """A chunk of dx of a tile of rows, and what their targets get."""
    rows = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    chunk = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    target = tl.load(target_ptr + rows, mask=rows < M, other=0)
    lse = tl.load(lse_ptr + rows, mask=rows < M, other=0.0)
    dloss = tl.load(dloss_ptr + rows, mask=rows < M, other=0.0)
    h = tl.zeros([BLOCK], dtype=tl.float32)
    dx = tl.zeros([BLOCK, BLOCK_D], dtype=tl.float32)
    for start in range(0, S, BLOCK):
        s = start + tl.arange(0, BLOCK)
        k = tl.load(sample_ptr + s, mask=s < S, other=0)
        v, counts = sample_scores(
            x_ptr, w_ptr, b_ptr, c_ptr, target, k, rows, s, M, S, D, PRECISION, BLOCK, BLOCK_D
        )
        g = dloss[:, None] * tl.exp(tl.where(counts, v - lse[:, None], -float("inf")))
        w = gather_tile(w_ptr, k, s < S, chunk, D)
        h -= tl.sum(g, axis=1)
        dx = tl.dot(g.to(w.dtype), w, dx, input_precision=PRECISION)
    dx += h[:, None] * gather_tile(w_ptr, target, rows < M, chunk, D).to(tl.float32)
    mask = (rows[:, None] < M) & (chunk[None, :] < D)
    offs = rows[:, None] * D + chunk[None, :]
    tl.store(dx_ptr + offs, dx.to(dx_ptr.dtype.element_ty), mask=mask)
    if NEEDS_W:
        dw = h[:, None] * gather_tile(x_ptr, rows, rows < M, chunk, D).to(tl.float32)
        tl.atomic_add(dw_ptr + target[:, None] * D + chunk[None, :], dw, mask=mask, sem="relaxed")
        if tl.program_id(1) == 0:
            tl.atomic_add(db_ptr + target, h, mask=rows < M, sem="relaxed")


@triton.jit
def sample_kernel(
    x_ptr, w_ptr, b_ptr, c_ptr, target_ptr, sample_ptr, lse_ptr, dloss_ptr, dw_ptr, db_ptr, M, S, D,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """A chunk of what a tile of samples gets from all rows."""
    s = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    chunk = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    k = tl.load(sample_ptr + s, mask=s < S, other=0)
    dw = tl.zeros([BLOCK, BLOCK_D], dtype=tl.float32)
    db = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, M, BLOCK):
        rows = (start + tl.arange(0, BLOCK)).to(tl.int64)
        target = tl.load(target_ptr + rows, mask=rows < M, other=0)
        lse = tl.load(lse_ptr + rows, mask=rows < M, other=0.0)
        dloss = tl.load(dloss_ptr + rows, mask=rows < M, other=0.0)
        v, counts = sample_scores(
            x_ptr, w_ptr, b_ptr, c_ptr, target, k, rows, s, M, S, D, PRECISION, BLOCK, BLOCK_D
        )
        g = dloss[:, None] * tl.exp(tl.where(counts, v - lse[:, None], -float("inf")))
        x = gather_tile(x_ptr, rows, rows < M, chunk, D)
        dw = tl.dot(tl.trans(g.to(x.dtype)), x, dw, input_precision=PRECISION)
        db += tl.sum(g, axis=0)
    mask = (s[:, None] < S) & (chunk[None, :] < D)
    tl.atomic_add(dw_ptr + k[:, None] * D + chunk[None, :], dw, mask=mask, sem="relaxed")
    if tl.program_id(1) == 0:
        tl.atomic_add(db_ptr + k, db, mask=s < S, sem="relaxed")


class SampledSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, b, log_counts, target, samples):
        saved = tuple(tensor.contiguous() for tensor in (x, w, b, log_counts, target, samples))
        loss, lse = sampled_softmax_forward(*saved)
        ctx.save_for_backward(*saved, lse)
        return loss

    @staticmethod
    def backward(ctx, dloss):
        x, w, b, c, target, samples, lse = ctx.saved_tensors
        (M, D), S, tiles = x.shape, samples.numel(), tiles_of(x)
        needs = ctx.needs_input_grad
        needs_w, dloss, chunks = needs[1] or needs[2], dloss.contiguous(), triton.cdiv(D, tiles["BLOCK_D"])
        dx, dw, db = torch.empty_like(x), None, None
        if needs_w:
            dw, db = (torch.zeros_like(tensor, dtype=torch.float32) for tensor in (w, b))
            sample_kernel[(triton.cdiv(S, tiles["BLOCK"]), chunks)](
                x, w, b, c, target, samples, lse, dloss, dw, db, M, S, D, **tiles
            )
        row_kernel[(triton.cdiv(M, tiles["BLOCK"]), chunks)](
            x, w, b, c, target, samples, lse, dloss, dx, dw, db, M, S, D, NEEDS_W=needs_w, **tiles
        )
        dx = dx if needs[0] else None
        dw = dw.to(w.dtype) if needs[1] else None
        return dx, dw, db.to(b.dtype) if needs[2] else None, None, None, None


def sampled_softmax_autograd(x, w, b, log_counts, target, samples):
    return SampledSoftmax.apply(x, w, b, log_counts, target, samples)
