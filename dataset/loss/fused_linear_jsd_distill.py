"""Jensen-Shannon distillation of a linear layer whose logits exist for a chunk of rows at a time.

Forward    z = x W^T,  p = softmax(z / T),  q = softmax(t / T),  m = (p + q) / 2,
           l_i = k_i + sum_v q log(q / m) / 2,  k_i = sum_v p log(p / m) / 2
Backward   a_v = dl/dp_v = log(p_v / m_v) / 2 but for a constant, which the softmax takes away, so
           dz_v = (dl_i / T) p_v (a_v - sum_u p_u a_u) = (dl_i / T) p_v (a_v - k_i),
           dX = dz W,  dW = dz^T X.  With d = log q - log p:  log(p / m) = log 2 - softplus(d) and
           log(q / m) = log 2 - softplus(d) + d, so no logarithm of a sum of tiny numbers is taken

Forward schedule: the loss compares normalised rows, so it needs each logit twice, first for the normalisers
and then for the sums. The rows are cut in chunks whose logits are about as large as x; one product fills the
buffer, and a program a row walks it twice. Both normalisers and k are saved.
Backward schedule: chunk by chunk the product is made again into the same buffer. The softmax's row correction
is the forward's own sum k_i, so the gradient knows no rows: a grid of tiles replaces logits by dz in place.
Then dX of the chunk is a product with W, complete, and dW gets its part from the owners of its tiles, who add
to what the chunk before left there, in order. One kernel with strides is all three products.

op: fused_linear_jsd
schedule: recompute_from_stats, row_reduce_correct, swap_owner
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
    return {"PRECISION": PRECISION, "BLOCK": 32 if x.dtype == torch.float32 else 64}


@triton.jit
def product_kernel(
    left_ptr, right_ptr, out_ptr, R, S, T, stride_lr, stride_lt, stride_rt, stride_rs,
    ADD: tl.constexpr, PRECISION: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out_rs = sum_t left_rt right_ts, or that added to out; left is rounded to right's dtype."""
    r = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    s = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    out_offs, mask = r[:, None] * S + s[None, :], (r[:, None] < R) & (s[None, :] < S)
    out = tl.zeros([BLOCK, BLOCK], dtype=tl.float32)
    if ADD:
        out += tl.load(out_ptr + out_offs, mask=mask, other=0.0)
    for start in range(0, T, BLOCK):
        t = (start + tl.arange(0, BLOCK)).to(tl.int64)
        left_offs = r[:, None] * stride_lr + t[None, :] * stride_lt
        right_offs = t[:, None] * stride_rt + s[None, :] * stride_rs
        left = tl.load(left_ptr + left_offs, mask=(r[:, None] < R) & (t[None, :] < T), other=0.0)
        right = tl.load(right_ptr + right_offs, mask=(t[:, None] < T) & (s[None, :] < S), other=0.0)
        out = tl.dot(left.to(right.dtype), right, out, input_precision=PRECISION)
    tl.store(out_ptr + out_offs, out.to(out_ptr.dtype.element_ty), mask=mask)


def product(left, right, out, ADD=False):
    (R, T), S, tiles = left.shape, right.shape[1], tiling(right)
    grid = (triton.cdiv(R, tiles["BLOCK"]), triton.cdiv(S, tiles["BLOCK"]))
    product_kernel[grid](left, right, out, R, S, T, *left.stride(), *right.stride(), ADD=ADD, **tiles)


@triton.jit
def log_ratios(z, t, lse_z, lse_t):
    """log p, log q, and log(p / m)."""
    log_p, log_q = z - lse_z, t - lse_t
    d = log_q - log_p
    softplus = tl.where(d > 0, d, 0.0) + tl.log(1 + tl.exp(tl.where(d > 0, -d, d)))
    return log_p, log_q, 0.6931471805599453 - softplus


@triton.jit
def loss_kernel(z_ptr, t_ptr, loss_ptr, stats_ptr, M, V, temperature, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    z_max, t_max, z_sum, t_sum = -float("inf"), -float("inf"), 0.0, 0.0
    for start in range(0, V, BLOCK):
        v = start + tl.arange(0, BLOCK)
        z = tl.load(z_ptr + row * V + v, mask=v < V, other=-float("inf")) / temperature
        t = tl.load(t_ptr + row * V + v, mask=v < V, other=-float("inf")).to(tl.float32) / temperature
        z_new, t_new = tl.maximum(z_max, tl.max(z, axis=0)), tl.maximum(t_max, tl.max(t, axis=0))
        z_sum = z_sum * tl.exp(z_max - z_new) + tl.sum(tl.exp(z - z_new), axis=0)
        t_sum = t_sum * tl.exp(t_max - t_new) + tl.sum(tl.exp(t - t_new), axis=0)
        z_max, t_max = z_new, t_new
    lse_z, lse_t = z_max + tl.log(z_sum), t_max + tl.log(t_sum)
    k = tl.zeros([BLOCK], dtype=tl.float32)
    other = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, V, BLOCK):
        v = start + tl.arange(0, BLOCK)
        z = tl.load(z_ptr + row * V + v, mask=v < V, other=0.0) / temperature
        t = tl.load(t_ptr + row * V + v, mask=v < V, other=0.0).to(tl.float32) / temperature
        log_p, log_q, log_pm = log_ratios(z, t, lse_z, lse_t)
        k += tl.where(v < V, 0.5 * tl.exp(log_p) * log_pm, 0.0)
        other += tl.where(v < V, 0.5 * tl.exp(log_q) * (log_pm + log_q - log_p), 0.0)
    k_row = tl.sum(k, axis=0)
    tl.store(loss_ptr + row, k_row + tl.sum(other, axis=0))
    tl.store(stats_ptr + row, lse_z)
    tl.store(stats_ptr + M + row, lse_t)
    tl.store(stats_ptr + 2 * M + row, k_row)


def row_chunks(x, V):
    """Slices of rows whose logits are together about as many numbers as x."""
    (M, D), BLOCK = x.shape, tiling(x)["BLOCK"]
    chunk = max(1, triton.cdiv(M * D, max(1, V) * BLOCK)) * BLOCK
    return [slice(first, min(first + chunk, M)) for first in range(0, M, chunk)]


def linear_jsd_forward(x, W, t, temperature):
    (M, D), V = x.shape, W.shape[0]
    if W.shape[1] != D or t.shape != (M, V):
        raise ValueError(f"x {tuple(x.shape)}, W {tuple(W.shape)} and logits {tuple(t.shape)} do not fit")
    loss = torch.empty(M, device=x.device, dtype=torch.float32)
    stats = torch.empty((3, M), device=x.device, dtype=torch.float32)
    for rows in row_chunks(x, V):
        z = torch.empty((rows.stop - rows.start, V), device=x.device, dtype=torch.float32)
        product(x[rows], W.t(), z)
        grid = (rows.stop - rows.start,)
        loss_kernel[grid](z, t[rows], loss[rows], stats[0, rows], M, V, temperature, BLOCK=1024)
    return loss, stats


@autodiff(inputs_require_grad=(0, 1))
def linear_jsd(x, W, t, temperature=1.0):
    """x: (M, D); W: (V, D); t: (M, V), the teacher's logits, a constant. Returns a loss a row in float32."""
    return linear_jsd_forward(x.contiguous(), W.contiguous(), t.contiguous(), temperature)[0]


def reference(x, W, t, temperature=1.0):
    log_p = torch.log_softmax(x @ W.t() / temperature, -1)
    log_q = torch.log_softmax(t / temperature, -1)
    log_m = torch.logaddexp(log_p, log_q) - torch.log(torch.full_like(log_p[..., :1], 2.0))
    return (log_p.exp() * (log_p - log_m) + log_q.exp() * (log_q - log_m)).sum(-1) / 2


SWEEP = [
    {"M": 4096, "D": 2048, "V": 32000, "temperature": 1.0},
    {"M": 1021, "D": 768, "V": 50257, "temperature": 2.0},
]
SWEEP_CPU = [
    {"M": 70, "D": 24, "V": 150, "temperature": 1.0},
    {"M": 9, "D": 40, "V": 1100, "temperature": 2.0},
]


def make_args(dims, device="cuda", dtype=torch.float32):
    M, D, V = dims["M"], dims["D"], dims["V"]
    x = torch.randn(M, D, device=device, dtype=dtype)
    W = torch.randn(V, D, device=device, dtype=dtype) / max(1, D) ** 0.5
    return x, W, 2 * torch.randn(M, V, device=device, dtype=dtype), dims["temperature"]


# ---- backward ----


@triton.jit
def logit_gradient_kernel(z_ptr, t_ptr, dloss_ptr, stats_ptr, M, V, temperature, BLOCK: tl.constexpr):
    """Logits become their gradients, in place."""
    row = tl.program_id(0).to(tl.int64)
    v = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    z = tl.load(z_ptr + row * V + v, mask=v < V, other=0.0) / temperature
    t = tl.load(t_ptr + row * V + v, mask=v < V, other=0.0).to(tl.float32) / temperature
    lse_z, lse_t = tl.load(stats_ptr + row), tl.load(stats_ptr + M + row)
    log_p, _, log_pm = log_ratios(z, t, lse_z, lse_t)
    scale = tl.load(dloss_ptr + row) / temperature
    dz = scale * tl.exp(log_p) * (0.5 * log_pm - tl.load(stats_ptr + 2 * M + row))
    tl.store(z_ptr + row * V + v, dz, mask=v < V)


class LinearJSD(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, W, t, temperature):
        x, W, t = x.contiguous(), W.contiguous(), t.contiguous()
        loss, stats = linear_jsd_forward(x, W, t, temperature)
        ctx.save_for_backward(x, W, t, stats)
        ctx.temperature = temperature
        return loss

    @staticmethod
    def backward(ctx, dloss):
        x, W, t, stats = ctx.saved_tensors
        dloss = dloss.contiguous()
        M, V = t.shape
        needs = ctx.needs_input_grad
        dx = torch.empty_like(x) if needs[0] else None
        dW = torch.zeros(W.shape, device=x.device, dtype=torch.float32) if needs[1] else None
        for rows in row_chunks(x, V):
            count = rows.stop - rows.start
            z = torch.empty((count, V), device=x.device, dtype=torch.float32)
            product(x[rows], W.t(), z)
            logit_gradient_kernel[(count, triton.cdiv(V, 1024))](
                z, t[rows], dloss[rows], stats[0, rows], M, V, ctx.temperature, BLOCK=1024
            )
            if needs[0]:
                product(z, W, dx[rows])
            if needs[1]:
                product(z.t(), x[rows], dW, ADD=True)
        return dx, dW.to(W.dtype) if needs[1] else None, None, None


def linear_jsd_autograd(x, W, t, temperature=1.0):
    return LinearJSD.apply(x, W, t, temperature)
