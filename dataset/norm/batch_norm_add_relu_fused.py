"""The end of a residual block, channels last: batch norm in training, residual, ReLU.

Forward    over the M pixels of channel c:  mu = mean x,  var = mean (x - mu)^2,  rstd = (var + eps)^(-1/2),
           xhat = (x - mu) rstd,   y = max(xhat w_c + b_c + res, 0)
Backward   g = [y > 0] * dy:   dres = g,   db_c = sum g,   dw_c = sum g xhat,
           dx = w_c rstd (g - (db_c + xhat dw_c) / M)

Forward schedule: channels lie side by side, so a program reads rows of a tile of channels. The pixels are
many and the channels few: they are split among parts, each stores its mean and squared deviations, a small
kernel merges the parts (Chan's rule), and a pointwise kernel writes y.
Backward schedule: the same three steps. The first has dy and y in registers, and stores g = dres on the way
to its parts of the two sums: what the residual needs anyway is the masked gradient that the last step reads,
so that step reads g and x, not dy, y and x. The middle one adds the parts, and they are db and dw. The sign
of y is all that ReLU leaves to know, and y is kept by the layer that follows.

op: batch_norm_relu
schedule: partials_then_reduce, row_reduce_correct, recompute_from_stats
difficulty: 3
dtypes: fp32, fp16, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


BLOCKS = {"BLOCK_M": 32, "BLOCK_C": 64}
MAX_PARTS = 64


def split(M):
    """Rows of a part, and the number of parts."""
    part = max(1, triton.cdiv(M, 32 * MAX_PARTS)) * 32
    return part, triton.cdiv(M, part)


@triton.jit
def load_tile(ptr, m, c, end, C):
    mask = (m[:, None] < end) & (c[None, :] < C)
    offs = m[:, None].to(tl.int64) * C + c[None, :]
    return tl.load(ptr + offs, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def store_tile(ptr, value, m, c, end, C):
    mask = (m[:, None] < end) & (c[None, :] < C)
    offs = m[:, None].to(tl.int64) * C + c[None, :]
    tl.store(ptr + offs, value.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def moments_kernel(
    x_ptr, mean_slots_ptr, dev_slots_ptr, M, C, part, BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr
):
    c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    first = tl.program_id(1) * part
    end = tl.minimum(first + part, M)
    mean = tl.zeros([BLOCK_C], dtype=tl.float32)
    dev = tl.zeros([BLOCK_C], dtype=tl.float32)
    for start in range(first, end, BLOCK_M):
        m = start + tl.arange(0, BLOCK_M)
        x = load_tile(x_ptr, m, c, end, C)
        seen = (start - first).to(tl.float32)
        count = tl.minimum(BLOCK_M, end - start).to(tl.float32)
        tile_mean = tl.sum(x, axis=0) / count
        centred = tl.where(m[:, None] < end, x - tile_mean[None, :], 0.0)
        step = tile_mean - mean
        dev += tl.sum(centred * centred, axis=0) + step * step * (seen * (count / (seen + count)))
        mean += step * (count / (seen + count))
    tl.store(mean_slots_ptr + tl.program_id(1) * C + c, mean, mask=c < C)
    tl.store(dev_slots_ptr + tl.program_id(1) * C + c, dev, mask=c < C)


@triton.jit
def merge_kernel(
    mean_slots_ptr, dev_slots_ptr, mu_ptr, rstd_ptr, M, C, part, parts, eps, BLOCK: tl.constexpr
):
    c = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mu = tl.zeros([BLOCK], dtype=tl.float32)
    dev = tl.zeros([BLOCK], dtype=tl.float32)
    seen = 0.0
    for i in range(parts):
        step = tl.load(mean_slots_ptr + i * C + c, mask=c < C, other=0.0) - mu
        count = tl.minimum(part, M - i * part).to(tl.float32)
        dev += tl.load(dev_slots_ptr + i * C + c, mask=c < C, other=0.0)
        dev += step * step * (seen * (count / (seen + count)))
        mu += step * (count / (seen + count))
        seen += count
    tl.store(mu_ptr + c, mu, mask=c < C)
    tl.store(rstd_ptr + c, tl.rsqrt(dev / M + eps), mask=c < C)


@triton.jit
def add_relu_kernel(
    x_ptr, res_ptr, w_ptr, b_ptr, mu_ptr, rstd_ptr, y_ptr, M, C,
    BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    w = tl.load(w_ptr + c, mask=c < C, other=0.0).to(tl.float32)
    b = tl.load(b_ptr + c, mask=c < C, other=0.0).to(tl.float32)
    mu = tl.load(mu_ptr + c, mask=c < C, other=0.0)
    scale = tl.load(rstd_ptr + c, mask=c < C, other=0.0) * w
    y = (load_tile(x_ptr, m, c, M, C) - mu[None, :]) * scale[None, :] + b[None, :]
    y += load_tile(res_ptr, m, c, M, C)
    store_tile(y_ptr, tl.where(y > 0, y, 0.0), m, c, M, C)


def batch_norm_add_relu_forward(x, res, w, b, eps):
    M, C = x.shape
    if res.shape != x.shape or w.shape != (C,) or b.shape != (C,):
        raise ValueError(f"x {tuple(x.shape)}, res {tuple(res.shape)} and w {tuple(w.shape)} do not fit")
    if M == 0:
        raise ValueError("there is no mean without pixels")
    part, parts = split(M)
    y = torch.empty_like(x)
    mu, rstd = (torch.empty(C, device=x.device, dtype=torch.float32) for _ in range(2))
    means, devs = (torch.empty((parts, C), device=x.device, dtype=torch.float32) for _ in range(2))
    across = triton.cdiv(C, 64)
    moments_kernel[(across, parts)](x, means, devs, M, C, part, **BLOCKS)
    merge_kernel[(across,)](means, devs, mu, rstd, M, C, part, parts, eps, BLOCK=64)
    add_relu_kernel[(across, triton.cdiv(M, 32))](x, res, w, b, mu, rstd, y, M, C, **BLOCKS)
    return y, mu, rstd


@autodiff(inputs_require_grad=(0, 1, 2, 3))
def batch_norm_add_relu(x, res, w, b, eps=1e-5):
    """x, res: (M, C), M the pixels of all images, channels last; w, b: (C)."""
    x, res, w, b = x.contiguous(), res.contiguous(), w.contiguous(), b.contiguous()
    return batch_norm_add_relu_forward(x, res, w, b, eps)[0]


def reference(x, res, w, b, eps=1e-5):
    centred = x - x.mean(0)
    return torch.relu(centred * torch.rsqrt(centred.pow(2).mean(0) + eps) * w + b + res)


SWEEP = [{"M": 100352, "C": 256}, {"M": 3137, "C": 2000}]
SWEEP_CPU = [{"M": 135, "C": 8}, {"M": 40, "C": 70}]


def make_args(dims, device="cuda", dtype=torch.float32):
    M, C = dims["M"], dims["C"]
    x = 0.5 + 2 * torch.randn(M, C, device=device, dtype=dtype)
    res, w = torch.randn(M, C, device=device, dtype=dtype), torch.randn(C, device=device, dtype=dtype)
    return x, res, 1 + 0.2 * w, torch.randn(C, device=device, dtype=dtype)


# ---- backward ----


@triton.jit
def mask_sums_kernel(
    x_ptr, y_ptr, mu_ptr, rstd_ptr, dy_ptr, dres_ptr, db_slots_ptr, dw_slots_ptr, M, C, part,
    BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    mu = tl.load(mu_ptr + c, mask=c < C, other=0.0)[None, :]
    first = tl.program_id(1) * part
    end = tl.minimum(first + part, M)
    db = tl.zeros([BLOCK_M, BLOCK_C], dtype=tl.float32)
    dw = tl.zeros([BLOCK_M, BLOCK_C], dtype=tl.float32)
    for start in range(first, end, BLOCK_M):
        m = start + tl.arange(0, BLOCK_M)
        g = tl.where(load_tile(y_ptr, m, c, end, C) > 0, load_tile(dy_ptr, m, c, end, C), 0.0)
        store_tile(dres_ptr, g, m, c, end, C)
        db += g
        dw += g * (load_tile(x_ptr, m, c, end, C) - mu)
    rstd = tl.load(rstd_ptr + c, mask=c < C, other=0.0)
    slot = tl.program_id(1) * C + c
    tl.store(db_slots_ptr + slot, tl.sum(db, axis=0), mask=c < C)
    tl.store(dw_slots_ptr + slot, tl.sum(dw, axis=0) * rstd, mask=c < C)


@triton.jit
def sum_slots_kernel(db_slots_ptr, dw_slots_ptr, sums_ptr, db_ptr, dw_ptr, C, parts, BLOCK: tl.constexpr):
    """The sums in float32 for the last step, and in their own dtypes as gradients."""
    c = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    db = tl.zeros([BLOCK], dtype=tl.float32)
    dw = tl.zeros([BLOCK], dtype=tl.float32)
    for i in range(parts):
        db += tl.load(db_slots_ptr + i * C + c, mask=c < C, other=0.0)
        dw += tl.load(dw_slots_ptr + i * C + c, mask=c < C, other=0.0)
    tl.store(sums_ptr + c, db, mask=c < C)
    tl.store(sums_ptr + C + c, dw, mask=c < C)
    tl.store(db_ptr + c, db.to(db_ptr.dtype.element_ty), mask=c < C)
    tl.store(dw_ptr + c, dw.to(dw_ptr.dtype.element_ty), mask=c < C)


@triton.jit
def dx_kernel(
    x_ptr, w_ptr, mu_ptr, rstd_ptr, g_ptr, sums_ptr, dx_ptr, M, C,
    BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    mu = tl.load(mu_ptr + c, mask=c < C, other=0.0)
    rstd = tl.load(rstd_ptr + c, mask=c < C, other=0.0)
    scale = tl.load(w_ptr + c, mask=c < C, other=0.0).to(tl.float32) * rstd
    constant = tl.load(sums_ptr + c, mask=c < C, other=0.0) / M
    slope = tl.load(sums_ptr + C + c, mask=c < C, other=0.0) * rstd / M
    centred = load_tile(x_ptr, m, c, M, C) - mu[None, :]
    dx = load_tile(g_ptr, m, c, M, C) - constant[None, :] - centred * slope[None, :]
    store_tile(dx_ptr, dx * scale[None, :], m, c, M, C)


class BatchNormAddReLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, res, w, b, eps):
        x, res, w, b = x.contiguous(), res.contiguous(), w.contiguous(), b.contiguous()
        y, mu, rstd = batch_norm_add_relu_forward(x, res, w, b, eps)
        ctx.save_for_backward(x, y, w, mu, rstd)
        ctx.b_dtype = b.dtype
        return y

    @staticmethod
    def backward(ctx, dy):
        x, y, w, mu, rstd = ctx.saved_tensors
        (M, C), needs = x.shape, ctx.needs_input_grad
        (part, parts), across = split(M), triton.cdiv(C, 64)
        dres, dw, db = torch.empty_like(x), torch.empty_like(w), torch.empty_like(w, dtype=ctx.b_dtype)
        slots = torch.empty((2, parts, C), device=x.device, dtype=torch.float32)
        sums = torch.empty((2, C), device=x.device, dtype=torch.float32)
        mask_sums_kernel[(across, parts)](
            x, y, mu, rstd, dy.contiguous(), dres, slots[0], slots[1], M, C, part, **BLOCKS
        )
        dx = None
        if needs[0] or needs[2] or needs[3]:
            sum_slots_kernel[(across,)](slots[0], slots[1], sums, db, dw, C, parts, BLOCK=64)
        if needs[0]:
            dx = torch.empty_like(x)
            dx_kernel[(across, triton.cdiv(M, 32))](x, w, mu, rstd, dres, sums, dx, M, C, **BLOCKS)
        return dx, dres if needs[1] else None, dw if needs[2] else None, db if needs[3] else None, None


def batch_norm_add_relu_autograd(x, res, w, b, eps=1e-5):
    return BatchNormAddReLU.apply(x, res, w, b, eps)
