"""Group norm over channels first.

Forward    xhat = (x - mu) rstd over the K = (C / g) P values of a (sample, group);  y = xhat w_c + b_c
Backward   with e_c = sum_p dy, f_c = sum_p dy xhat per (sample, channel):
           db_c = sum_n e_c,  dw_c = sum_n f_c,
           dx = rstd (w_c dy - (sum_c w_c e_c + xhat sum_c w_c f_c) / K),  c over the group

Forward schedule: a program owns (sample, group) and walks its span, which is contiguous, three times: mean,
variance, output.
Backward schedule: the same owner. Its first walk makes e and f channel by channel; these are the partials
of db and dw for its sample, and weighted by w they are also the two projections that dx needs, so one walk
serves all three gradients. The second walk writes dx; a small kernel adds the partials over the samples.

op: group_norm
schedule: row_reduce_correct, partials_then_reduce, recompute_from_stats
difficulty: 3
dtypes: fp32, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


@triton.jit
def group_norm_kernel(x_ptr, w_ptr, b_ptr, y_ptr, mu_ptr, rstd_ptr, C, P, groups, eps, BLOCK: tl.constexpr):
    n = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    per_group = C // groups
    span = per_group * P
    base = (n * C + group * per_group) * P
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, span, BLOCK):
        i = start + tl.arange(0, BLOCK)
        total += tl.load(x_ptr + base + i, mask=i < span, other=0.0).to(tl.float32)
    mu = tl.sum(total, axis=0) / span
    squares = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, span, BLOCK):
        i = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + base + i, mask=i < span, other=0.0).to(tl.float32)
        squares += tl.where(i < span, (x - mu) * (x - mu), 0.0)
    rstd = tl.rsqrt(tl.sum(squares, axis=0) / span + eps)
    tl.store(mu_ptr + n * groups + group, mu)
    tl.store(rstd_ptr + n * groups + group, rstd)
    for start in range(0, span, BLOCK):
        i = start + tl.arange(0, BLOCK)
        c = group * per_group + i // P
        x = tl.load(x_ptr + base + i, mask=i < span, other=0.0).to(tl.float32)
        w = tl.load(w_ptr + c, mask=i < span, other=0.0).to(tl.float32)
        b = tl.load(b_ptr + c, mask=i < span, other=0.0).to(tl.float32)
        tl.store(y_ptr + base + i, (x - mu) * rstd * w + b, mask=i < span)


def group_norm_forward(x, w, b, groups, eps):
    N, C, P = x.shape
    if C % groups != 0:
        raise ValueError(f"{C} channels cannot be split in {groups} groups")
    y = torch.empty_like(x)
    mu, rstd = (torch.empty((N, groups), device=x.device, dtype=torch.float32) for _ in range(2))
    BLOCK = min(1024, triton.next_power_of_2(P))
    group_norm_kernel[(N, groups)](x, w, b, y, mu, rstd, C, P, groups, eps, BLOCK=BLOCK)
    return y, mu, rstd


@autodiff(inputs_require_grad=(0, 1, 2))
def group_norm(x, w, b, groups, eps=1e-5):
    """x: (N, C, pixels); w, b: (C)."""
    return group_norm_forward(x.contiguous(), w.contiguous(), b.contiguous(), groups, eps)[0]


def reference(x, w, b, groups, eps=1e-5):
    spans = x.view(x.shape[0], groups, -1)
    centred = spans - spans.mean(-1, keepdim=True)
    xhat = centred * torch.rsqrt(centred.pow(2).mean(-1, keepdim=True) + eps)
    return xhat.view(x.shape) * w[:, None] + b[:, None]


SWEEP = [
    {"N": 16, "C": 256, "g": 32, "HW": 4096},
    {"N": 8, "C": 640, "g": 32, "HW": 4096},
    {"N": 17, "C": 96, "g": 8, "HW": 5917},
]
SWEEP_CPU = [{"N": 3, "C": 12, "g": 4, "HW": 35}, {"N": 1, "C": 4, "g": 2, "HW": 1050}]


def make_args(dims, device="cuda", dtype=torch.float32):
    C = dims["C"]
    x = 0.5 + 2 * torch.randn(dims["N"], C, dims["HW"], device=device, dtype=dtype)
    w = 1 + 0.2 * torch.randn(C, device=device, dtype=dtype)
    return x, w, torch.randn(C, device=device, dtype=dtype), dims["g"]


# ---- backward ----


@triton.jit
def group_norm_backward_kernel(
    x_ptr, w_ptr, mu_ptr, rstd_ptr, dy_ptr, dx_ptr, e_ptr, f_ptr, C, P, groups, BLOCK: tl.constexpr
):
    n = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    per_group = C // groups
    mu = tl.load(mu_ptr + n * groups + group)
    rstd = tl.load(rstd_ptr + n * groups + group)
    c0 = 0.0
    c1 = 0.0
    for c in range(group * per_group, (group + 1) * per_group):
        e = tl.zeros([BLOCK], dtype=tl.float32)
        f = tl.zeros([BLOCK], dtype=tl.float32)
        for start in range(0, P, BLOCK):
            p = start + tl.arange(0, BLOCK)
            x = tl.load(x_ptr + (n * C + c) * P + p, mask=p < P, other=0.0).to(tl.float32)
            dy = tl.load(dy_ptr + (n * C + c) * P + p, mask=p < P, other=0.0).to(tl.float32)
            e += dy
            f += dy * (x - mu) * rstd
        e_sum = tl.sum(e, axis=0)
        f_sum = tl.sum(f, axis=0)
        tl.store(e_ptr + n * C + c, e_sum)
        tl.store(f_ptr + n * C + c, f_sum)
        w = tl.load(w_ptr + c).to(tl.float32)
        c0 += w * e_sum
        c1 += w * f_sum
    c0 /= per_group * P
    c1 /= per_group * P
    for c in range(group * per_group, (group + 1) * per_group):
        w = tl.load(w_ptr + c).to(tl.float32)
        for start in range(0, P, BLOCK):
            p = start + tl.arange(0, BLOCK)
            x = tl.load(x_ptr + (n * C + c) * P + p, mask=p < P, other=0.0).to(tl.float32)
            dy = tl.load(dy_ptr + (n * C + c) * P + p, mask=p < P, other=0.0).to(tl.float32)
            dx = rstd * (w * dy - c0 - (x - mu) * rstd * c1)
            tl.store(dx_ptr + (n * C + c) * P + p, dx, mask=p < P)


@triton.jit
def batch_sum_kernel(e_ptr, f_ptr, dw_ptr, db_ptr, N, C, BLOCK: tl.constexpr):
    c = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    dw = tl.zeros([BLOCK], dtype=tl.float32)
    db = tl.zeros([BLOCK], dtype=tl.float32)
    for n in range(N):
        db += tl.load(e_ptr + n * C + c, mask=c < C, other=0.0)
        dw += tl.load(f_ptr + n * C + c, mask=c < C, other=0.0)
    tl.store(dw_ptr + c, dw, mask=c < C)
    tl.store(db_ptr + c, db, mask=c < C)


class GroupNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, b, groups, eps):
        x, w, b = x.contiguous(), w.contiguous(), b.contiguous()
        y, mu, rstd = group_norm_forward(x, w, b, groups, eps)
        ctx.save_for_backward(x, w, mu, rstd)
        return y

    @staticmethod
    def backward(ctx, dy):
        x, w, mu, rstd = ctx.saved_tensors
        dy = dy.contiguous()
        N, C, P = x.shape
        groups = mu.shape[1]
        dx, dw, db = torch.empty_like(x), torch.empty_like(w), torch.empty_like(w)
        e, f = (torch.empty((N, C), device=x.device, dtype=torch.float32) for _ in range(2))
        BLOCK = min(1024, triton.next_power_of_2(P))
        group_norm_backward_kernel[(N, groups)](x, w, mu, rstd, dy, dx, e, f, C, P, groups, BLOCK=BLOCK)
        batch_sum_kernel[(triton.cdiv(C, 64),)](e, f, dw, db, N, C, BLOCK=64)
        needs = ctx.needs_input_grad
        return dx if needs[0] else None, dw if needs[1] else None, db if needs[2] else None, None, None


def group_norm_autograd(x, w, b, groups, eps=1e-5):
    return GroupNorm.apply(x, w, b, groups, eps)
