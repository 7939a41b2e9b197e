"""Group norm over channels last, with the pixels of a sample split over many programs.

Forward    xhat = (x - mu) rstd over the K = P (C / g) values of a (sample, group);  y = xhat w_c + b_c
Backward   with e_nc = sum_p dy, f_nc = sum_p dy xhat:  db_c = sum_n e_nc,  dw_c = sum_n f_nc,
           dx = rstd (w_c dy - (c0 + xhat c1) / K),  c0 = sum_c w_c e_nc,  c1 = sum_c w_c f_nc over the group

Forward schedule: with channels last a group is a narrow stripe of every pixel, a few bytes in each row: its
owner could not read whole cache lines. So a program owns (sample, split of pixels, channel tile), reads
contiguous rows of channels, and stores for each channel its mean and sum of squares. The owner of (sample,
group) merges them: over channels and splits M = sum of n_i m_i / K, and squares add as those of the parts
plus n_i (m_i - M)^2 (Chan's rule). A third, pointwise launch writes y.
Backward schedule: the same three stages. The splits leave partials of e and f for each channel, and these
serve both sums: the owner of (sample, group) adds them over splits and, weighted by w, over channels (c0,
c1); the owner of a channel tile adds them over samples and splits (dw, db). dx is pointwise then. A sample
of few groups and many pixels still fills the device, and nothing is added twice or by atomics.

op: group_norm
schedule: partials_then_reduce, row_reduce_correct, recompute_from_stats
difficulty: 4
dtypes: fp32, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


ROWS = 256  # pixels of a split
TILE = {"BLOCK_P": 16, "BLOCK_C": 128}


@triton.jit
def split_moments_kernel(
    x_ptr, mean_ptr, square_ptr, P, C, ROWS: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr
):
    n, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    c = tl.program_id(2) * BLOCK_C + tl.arange(0, BLOCK_C)
    first, last = split * ROWS, tl.minimum(split * ROWS + ROWS, P)
    total = tl.zeros([BLOCK_P, BLOCK_C], dtype=tl.float32)
    for start in range(first, last, BLOCK_P):
        p = start + tl.arange(0, BLOCK_P)
        mask = (p[:, None] < last) & (c[None, :] < C)
        total += tl.load(x_ptr + (n * P + p[:, None]) * C + c[None, :], mask=mask, other=0.0).to(tl.float32)
    mean = tl.sum(total, axis=0) / (last - first)
    squares = tl.zeros([BLOCK_P, BLOCK_C], dtype=tl.float32)
    for start in range(first, last, BLOCK_P):
        p = start + tl.arange(0, BLOCK_P)
        mask = (p[:, None] < last) & (c[None, :] < C)
        x = tl.load(x_ptr + (n * P + p[:, None]) * C + c[None, :], mask=mask, other=0.0).to(tl.float32)
        centred = tl.where(mask, x - mean[None, :], 0.0)
        squares += centred * centred
    own = (n * tl.num_programs(1) + split) * C + c
    tl.store(mean_ptr + own, mean, mask=c < C)
    tl.store(square_ptr + own, tl.sum(squares, axis=0), mask=c < C)


@triton.jit
def merge_moments_kernel(
    mean_ptr, square_ptr, mu_ptr, rstd_ptr, P, C, S, eps,
    ROWS: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_G: tl.constexpr,
):  # fmt: skip
    n, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    per_group = C // tl.num_programs(1)
    j = tl.arange(0, BLOCK_G)
    total = tl.zeros([BLOCK_S, BLOCK_G], dtype=tl.float32)
    for start in range(0, S, BLOCK_S):
        s = start + tl.arange(0, BLOCK_S)
        count = tl.minimum(ROWS, P - s * ROWS).to(tl.float32)
        offs = (n * S + s[:, None]) * C + group * per_group + j[None, :]
        mask = (s[:, None] < S) & (j[None, :] < per_group)
        total += tl.load(mean_ptr + offs, mask=mask, other=0.0) * count[:, None]
    mu = tl.sum(tl.sum(total, axis=1), axis=0) / (per_group * P)
    squares = tl.zeros([BLOCK_S, BLOCK_G], dtype=tl.float32)
    for start in range(0, S, BLOCK_S):
        s = start + tl.arange(0, BLOCK_S)
        count = tl.minimum(ROWS, P - s * ROWS).to(tl.float32)
        offs = (n * S + s[:, None]) * C + group * per_group + j[None, :]
        mask = (s[:, None] < S) & (j[None, :] < per_group)
        away = tl.load(mean_ptr + offs, mask=mask, other=0.0) - mu
        squares += tl.load(square_ptr + offs, mask=mask, other=0.0)
        squares += tl.where(mask, away * away * count[:, None], 0.0)
    var = tl.sum(tl.sum(squares, axis=1), axis=0) / (per_group * P)
    tl.store(mu_ptr + n * tl.num_programs(1) + group, mu)
    tl.store(rstd_ptr + n * tl.num_programs(1) + group, tl.rsqrt(var + eps))


@triton.jit
def normalise_kernel(
    x_ptr, w_ptr, b_ptr, mu_ptr, rstd_ptr, y_ptr, P, C, groups,
    BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(1).to(tl.int64)
    p = tl.program_id(0) * BLOCK_P + tl.arange(0, BLOCK_P)
    c = tl.program_id(2) * BLOCK_C + tl.arange(0, BLOCK_C)
    own = n * groups + c // (C // groups)
    scale = tl.load(rstd_ptr + own, mask=c < C, other=0.0)
    scale *= tl.load(w_ptr + c, mask=c < C, other=0.0).to(tl.float32)
    mu = tl.load(mu_ptr + own, mask=c < C, other=0.0)
    b = tl.load(b_ptr + c, mask=c < C, other=0.0).to(tl.float32)
    mask = (p[:, None] < P) & (c[None, :] < C)
    offs = (n * P + p[:, None]) * C + c[None, :]
    x = tl.load(x_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    y = (x - mu[None, :]) * scale[None, :] + b[None, :]
    tl.store(y_ptr + offs, y.to(y_ptr.dtype.element_ty), mask=mask)


def group_norm_forward(x, w, b, groups, eps):
    N, P, C = x.shape
    if C % groups != 0:
        raise ValueError(f"{C} channels cannot be split in {groups} groups")
    S, columns = triton.cdiv(P, ROWS), triton.cdiv(C, TILE["BLOCK_C"])
    y = torch.empty_like(x)
    mean, square = torch.empty((2, N, S, C), device=x.device, dtype=torch.float32)
    mu, rstd = (torch.empty((N, groups), device=x.device, dtype=torch.float32) for _ in range(2))
    split_moments_kernel[(N, S, columns)](x, mean, square, P, C, ROWS=ROWS, **TILE)
    merge_moments_kernel[(N, groups)](
        mean, square, mu, rstd, P, C, S, eps,
        ROWS=ROWS, BLOCK_S=16, BLOCK_G=triton.next_power_of_2(C // groups),
    )  # fmt: skip
    grid = (triton.cdiv(P, TILE["BLOCK_P"]), N, columns)
    normalise_kernel[grid](x, w, b, mu, rstd, y, P, C, groups, **TILE)
    return y, mu, rstd


@autodiff(inputs_require_grad=(0, 1, 2))
def group_norm_channels_last(x, w, b, groups, eps=1e-5):
    """x: (N, pixels, C); w, b: (C)."""
    return group_norm_forward(x.contiguous(), w.contiguous(), b.contiguous(), groups, eps)[0]


def reference(x, w, b, groups, eps=1e-5):
    N, P, C = x.shape
    spans = x.view(N, P, groups, C // groups)
    centred = spans - spans.mean((1, 3), keepdim=True)
    xhat = centred * torch.rsqrt(centred.pow(2).mean((1, 3), keepdim=True) + eps)
    return xhat.view(x.shape) * w + b


SWEEP = [{"N": 4, "g": 32, "D": 20, "P": 4096}, {"N": 2, "g": 32, "D": 10, "P": 16383}]
SWEEP_CPU = [{"N": 2, "g": 4, "D": 4, "P": 77}, {"N": 1, "g": 3, "D": 50, "P": 300}]


def make_args(dims, device="cuda", dtype=torch.float32):
    C = dims["g"] * dims["D"]
    x = 0.5 + 2 * torch.randn(dims["N"], dims["P"], C, device=device, dtype=dtype)
    w = 1 + 0.2 * torch.randn(C, device=device, dtype=dtype)
    return x, w, torch.randn(C, device=device, dtype=dtype), dims["g"]


# ---- backward ----


@triton.jit
def split_sums_kernel(
    x_ptr, mu_ptr, rstd_ptr, dy_ptr, e_ptr, f_ptr, P, C, groups,
    ROWS: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    n, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    c = tl.program_id(2) * BLOCK_C + tl.arange(0, BLOCK_C)
    last = tl.minimum(split * ROWS + ROWS, P)
    group = n * groups + c // (C // groups)
    mu = tl.load(mu_ptr + group, mask=c < C, other=0.0)
    rstd = tl.load(rstd_ptr + group, mask=c < C, other=0.0)
    e = tl.zeros([BLOCK_P, BLOCK_C], dtype=tl.float32)
    f = tl.zeros([BLOCK_P, BLOCK_C], dtype=tl.float32)
    for start in range(split * ROWS, last, BLOCK_P):
        p = start + tl.arange(0, BLOCK_P)
        mask = (p[:, None] < last) & (c[None, :] < C)
        offs = (n * P + p[:, None]) * C + c[None, :]
        x = tl.load(x_ptr + offs, mask=mask, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + offs, mask=mask, other=0.0).to(tl.float32)
        e += dy
        f += dy * (x - mu[None, :])
    own = (n * tl.num_programs(1) + split) * C + c
    tl.store(e_ptr + own, tl.sum(e, axis=0), mask=c < C)
    tl.store(f_ptr + own, tl.sum(f, axis=0) * rstd, mask=c < C)


@triton.jit
def group_sums_kernel(
    e_ptr, f_ptr, w_ptr, c0_ptr, c1_ptr, P, C, S, BLOCK_S: tl.constexpr, BLOCK_G: tl.constexpr
):
    n, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    per_group = C // tl.num_programs(1)
    j = tl.arange(0, BLOCK_G)
    w = tl.load(w_ptr + group * per_group + j, mask=j < per_group, other=0.0).to(tl.float32)
    e = tl.zeros([BLOCK_S, BLOCK_G], dtype=tl.float32)
    f = tl.zeros([BLOCK_S, BLOCK_G], dtype=tl.float32)
    for start in range(0, S, BLOCK_S):
        s = start + tl.arange(0, BLOCK_S)
        offs = (n * S + s[:, None]) * C + group * per_group + j[None, :]
        mask = (s[:, None] < S) & (j[None, :] < per_group)
        e += tl.load(e_ptr + offs, mask=mask, other=0.0)
        f += tl.load(f_ptr + offs, mask=mask, other=0.0)
    own = n * tl.num_programs(1) + group
    tl.store(c0_ptr + own, tl.sum(tl.sum(e, axis=0) * w, axis=0) / (per_group * P))
    tl.store(c1_ptr + own, tl.sum(tl.sum(f, axis=0) * w, axis=0) / (per_group * P))


@triton.jit
def channel_sums_kernel(e_ptr, f_ptr, dw_ptr, db_ptr, parts, C, BLOCK_S: tl.constexpr, BLOCK_C: tl.constexpr):
    c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    db = tl.zeros([BLOCK_S, BLOCK_C], dtype=tl.float32)
    dw = tl.zeros([BLOCK_S, BLOCK_C], dtype=tl.float32)
    for start in range(0, parts, BLOCK_S):
        s = start + tl.arange(0, BLOCK_S)
        mask = (s[:, None] < parts) & (c[None, :] < C)
        db += tl.load(e_ptr + s[:, None] * C + c[None, :], mask=mask, other=0.0)
        dw += tl.load(f_ptr + s[:, None] * C + c[None, :], mask=mask, other=0.0)
    tl.store(dw_ptr + c, tl.sum(dw, axis=0).to(dw_ptr.dtype.element_ty), mask=c < C)
    tl.store(db_ptr + c, tl.sum(db, axis=0).to(db_ptr.dtype.element_ty), mask=c < C)


@triton.jit
def dx_kernel(
    x_ptr, w_ptr, mu_ptr, rstd_ptr, c0_ptr, c1_ptr, dy_ptr, dx_ptr, P, C, groups,
    BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(1).to(tl.int64)
    p = tl.program_id(0) * BLOCK_P + tl.arange(0, BLOCK_P)
    c = tl.program_id(2) * BLOCK_C + tl.arange(0, BLOCK_C)
    own = n * groups + c // (C // groups)
    mu = tl.load(mu_ptr + own, mask=c < C, other=0.0)
    rstd = tl.load(rstd_ptr + own, mask=c < C, other=0.0)
    c0 = tl.load(c0_ptr + own, mask=c < C, other=0.0)
    c1 = tl.load(c1_ptr + own, mask=c < C, other=0.0)
    w = tl.load(w_ptr + c, mask=c < C, other=0.0).to(tl.float32)
    mask = (p[:, None] < P) & (c[None, :] < C)
    offs = (n * P + p[:, None]) * C + c[None, :]
    xhat = (tl.load(x_ptr + offs, mask=mask, other=0.0).to(tl.float32) - mu[None, :]) * rstd[None, :]
    dy = tl.load(dy_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    dx = rstd[None, :] * (w[None, :] * dy - c0[None, :] - xhat * c1[None, :])
    tl.store(dx_ptr + offs, dx.to(dx_ptr.dtype.element_ty), mask=mask)


class GroupNormChannelsLast(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, b, groups, eps):
        x, w, b = x.contiguous(), w.contiguous(), b.contiguous()
        y, mu, rstd = group_norm_forward(x, w, b, groups, eps)
        ctx.save_for_backward(x, w, mu, rstd)
        ctx.b_dtype = b.dtype
        return y

    @staticmethod
    def backward(ctx, dy):
        x, w, mu, rstd = ctx.saved_tensors
        dy = dy.contiguous()
        (N, P, C), groups = x.shape, mu.shape[1]
        S, columns = triton.cdiv(P, ROWS), triton.cdiv(C, TILE["BLOCK_C"])
        needs = ctx.needs_input_grad
        dx = dw = db = None
        e, f = torch.empty((2, N, S, C), device=x.device, dtype=torch.float32)
        split_sums_kernel[(N, S, columns)](x, mu, rstd, dy, e, f, P, C, groups, ROWS=ROWS, **TILE)
        if needs[1] or needs[2]:
            dw, db = torch.empty_like(w), torch.empty_like(w, dtype=ctx.b_dtype)
            channel_sums_kernel[(triton.cdiv(C, 64),)](e, f, dw, db, N * S, C, BLOCK_S=16, BLOCK_C=64)
        if needs[0]:
            dx = torch.empty_like(x)
            c0, c1 = torch.empty((2, N, groups), device=x.device, dtype=torch.float32)
            BLOCK_G = triton.next_power_of_2(C // groups)
            group_sums_kernel[(N, groups)](e, f, w, c0, c1, P, C, S, BLOCK_S=16, BLOCK_G=BLOCK_G)
            grid = (triton.cdiv(P, TILE["BLOCK_P"]), N, columns)
            dx_kernel[grid](x, w, mu, rstd, c0, c1, dy, dx, P, C, groups, **TILE)
        return dx, dw if needs[1] else None, db if needs[2] else None, None, None


def group_norm_channels_last_autograd(x, w, b, groups, eps=1e-5):
    return GroupNormChannelsLast.apply(x, w, b, groups, eps)
