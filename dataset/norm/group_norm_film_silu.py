"""Group norm, scale and shift by a condition, SiLU: the front of a diffusion model's residual block.

Forward    xhat = (x - mu) rstd over the K = (C / g) P values of a (sample n, group);
           u = (xhat w_c + b_c) (1 + s_nc) + h_nc = xhat a_nc + d_nc,   y = silu(u) = u sigmoid(u);
           a = w (1 + s),   d = b (1 + s) + h
Backward   du = dy silu'(u),  silu'(u) = t (1 + u (1 - t)),  t = sigmoid(u).  With e_nc = sum_p du and
           f_nc = sum_p du xhat:   dh = e,   ds = w f + b e,
           db_c = sum_n (1 + s) e,   dw_c = sum_n (1 + s) f,
           dx = rstd (a du - (sum_c a e + xhat sum_c a f) / K),  c over the group

Forward schedule: a program owns (sample, group), whose values are contiguous. It walks them for the mean, for
the variance, and channel by channel for y. Only x, two numbers a group and the small parameters are kept.
Backward schedule: the same owner. u and its slope are made again from x, a and d, so neither u nor the norm's
result is ever stored. Its first walk makes e and f channel by channel: they are dh and ds of its channels
outright, its sample's parts of db and dw, and, weighted by a, the two projections of dx: one walk for five
gradients. The second walk writes dx. Parts of db and dw are added over the samples by a small kernel.

op: group_norm_silu
schedule: row_reduce_correct, partials_then_reduce, recompute_from_stats
difficulty: 4
dtypes: fp32, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


def tile_of(P):
    return min(1024, max(16, triton.next_power_of_2(P)))


@triton.jit
def load_number(ptr, i):
    return tl.load(ptr + i).to(tl.float32)


@triton.jit
def load_pixels(ptr, start, p, P):
    return tl.load(ptr + start + p, mask=p < P, other=0.0).to(tl.float32)


@triton.jit
def store_pixels(ptr, value, start, p, P):
    tl.store(ptr + start + p, value.to(ptr.dtype.element_ty), mask=p < P)


@triton.jit
def film_norm_kernel(
    x_ptr, w_ptr, b_ptr, s_ptr, h_ptr, y_ptr, mu_ptr, rstd_ptr, C, P, channels, eps, BLOCK: tl.constexpr
):
    n, group = tl.program_id(1).to(tl.int64), tl.program_id(0)
    slot = n * tl.num_programs(0) + group
    K = channels * P
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, K, BLOCK):
        total += load_pixels(x_ptr, slot * K, start + tl.arange(0, BLOCK), K)
    mu = tl.sum(total, axis=0) / K
    squares = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, K, BLOCK):
        i = start + tl.arange(0, BLOCK)
        centred = tl.where(i < K, load_pixels(x_ptr, slot * K, i, K) - mu, 0.0)
        squares += centred * centred
    rstd = tl.rsqrt(tl.sum(squares, axis=0) / K + eps)
    tl.store(mu_ptr + slot, mu)
    tl.store(rstd_ptr + slot, rstd)
    for c in range(group * channels, (group + 1) * channels):
        scale = 1 + load_number(s_ptr, n * C + c)
        a = load_number(w_ptr, c) * scale
        d = load_number(b_ptr, c) * scale + load_number(h_ptr, n * C + c)
        for start in range(0, P, BLOCK):
            p = start + tl.arange(0, BLOCK)
            u = (load_pixels(x_ptr, (n * C + c) * P, p, P) - mu) * rstd * a + d
            store_pixels(y_ptr, u * tl.sigmoid(u), (n * C + c) * P, p, P)


def film_norm_forward(x, w, b, s, h, groups, eps):
    N, C, P = x.shape
    if groups < 1 or C % groups != 0:
        raise ValueError(f"{C} channels do not make {groups} groups")
    if w.shape != (C,) or b.shape != (C,) or s.shape != (N, C) or h.shape != (N, C):
        raise ValueError(f"x {tuple(x.shape)}, w {tuple(w.shape)} and s {tuple(s.shape)} do not fit")
    y, mu = torch.empty_like(x), torch.empty((N, groups), device=x.device, dtype=torch.float32)
    rstd = torch.empty_like(mu)
    film_norm_kernel[(groups, N)](x, w, b, s, h, y, mu, rstd, C, P, C // groups, eps, BLOCK=tile_of(P))
    return y, mu, rstd


@autodiff(inputs_require_grad=(0, 1, 2, 3, 4))
def group_norm_film_silu(x, w, b, s, h, groups, eps=1e-5):
    """x: (N, C, P), P pixels; w, b: (C); s, h: (N, C), scale and shift of the condition."""
    tensors = [t.contiguous() for t in (x, w, b, s, h)]
    return film_norm_forward(*tensors, groups, eps)[0]


def reference(x, w, b, s, h, groups, eps=1e-5):
    normed = torch.nn.functional.group_norm(x, groups, w, b, eps)
    return torch.nn.functional.silu(normed * (1 + s[..., None]) + h[..., None])


SWEEP = [{"N": 16, "C": 320, "P": 4096, "G": 32}, {"N": 9, "C": 96, "P": 1225, "G": 8}]
SWEEP_CPU = [{"N": 3, "C": 6, "P": 35, "G": 2}, {"N": 2, "C": 4, "P": 9, "G": 4}]


def make_args(dims, device="cuda", dtype=torch.float32):
    N, C, P = dims["N"], dims["C"], dims["P"]
    x = 0.5 + 2 * torch.randn(N, C, P, device=device, dtype=dtype)
    w, b = (torch.randn(C, device=device, dtype=dtype) for _ in range(2))
    s, h = (0.3 * torch.randn(N, C, device=device, dtype=dtype) for _ in range(2))
    return x, 1 + 0.2 * w, b, s, h, dims["G"]


# ---- backward ----


@triton.jit
def load_du(x_ptr, dy_ptr, start, p, P, mu, rstd, a, d):
    """xhat and du of some pixels of a channel; du is 0 outside, where dy is."""
    xhat = (load_pixels(x_ptr, start, p, P) - mu) * rstd
    u = xhat * a + d
    t = tl.sigmoid(u)
    return xhat, load_pixels(dy_ptr, start, p, P) * t * (1 + u * (1 - t))


@triton.jit
def film_norm_backward_kernel(
    x_ptr, w_ptr, b_ptr, s_ptr, h_ptr, mu_ptr, rstd_ptr, dy_ptr, dx_ptr, ds_ptr, dh_ptr, dw_slots_ptr,
    db_slots_ptr, C, P, channels, BLOCK: tl.constexpr,
):  # fmt: skip
    n, group = tl.program_id(1).to(tl.int64), tl.program_id(0)
    slot = n * tl.num_programs(0) + group
    mu, rstd = tl.load(mu_ptr + slot), tl.load(rstd_ptr + slot)
    c0, c1 = 0.0, 0.0
    for c in range(group * channels, (group + 1) * channels):
        w, b, scale = load_number(w_ptr, c), load_number(b_ptr, c), 1 + load_number(s_ptr, n * C + c)
        d = b * scale + load_number(h_ptr, n * C + c)
        e_lanes = tl.zeros([BLOCK], dtype=tl.float32)
        f_lanes = tl.zeros([BLOCK], dtype=tl.float32)
        for start in range(0, P, BLOCK):
            p = start + tl.arange(0, BLOCK)
            xhat, du = load_du(x_ptr, dy_ptr, (n * C + c) * P, p, P, mu, rstd, w * scale, d)
            e_lanes += du
            f_lanes += du * xhat
        e, f = tl.sum(e_lanes, axis=0), tl.sum(f_lanes, axis=0)
        tl.store(dh_ptr + n * C + c, e.to(dh_ptr.dtype.element_ty))
        tl.store(ds_ptr + n * C + c, (w * f + b * e).to(ds_ptr.dtype.element_ty))
        tl.store(dw_slots_ptr + n * C + c, scale * f)
        tl.store(db_slots_ptr + n * C + c, scale * e)
        c0 += w * scale * e
        c1 += w * scale * f
    c0 = c0 / (channels * P)
    c1 = c1 / (channels * P)
    for c in range(group * channels, (group + 1) * channels):
        scale = 1 + load_number(s_ptr, n * C + c)
        a = load_number(w_ptr, c) * scale
        d = load_number(b_ptr, c) * scale + load_number(h_ptr, n * C + c)
        for start in range(0, P, BLOCK):
            p = start + tl.arange(0, BLOCK)
            xhat, du = load_du(x_ptr, dy_ptr, (n * C + c) * P, p, P, mu, rstd, a, d)
            store_pixels(dx_ptr, rstd * (a * du - c0 - xhat * c1), (n * C + c) * P, p, P)


@triton.jit
def sum_samples_kernel(dw_slots_ptr, db_slots_ptr, dw_ptr, db_ptr, N, C, BLOCK: tl.constexpr):
    c = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    dw = tl.zeros([BLOCK], dtype=tl.float32)
    db = tl.zeros([BLOCK], dtype=tl.float32)
    for n in range(N):
        dw += tl.load(dw_slots_ptr + n * C + c, mask=c < C, other=0.0)
        db += tl.load(db_slots_ptr + n * C + c, mask=c < C, other=0.0)
    tl.store(dw_ptr + c, dw.to(dw_ptr.dtype.element_ty), mask=c < C)
    tl.store(db_ptr + c, db.to(db_ptr.dtype.element_ty), mask=c < C)


class GroupNormFilmSilu(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, b, s, h, groups, eps):
        x, w, b, s, h = (t.contiguous() for t in (x, w, b, s, h))
        y, mu, rstd = film_norm_forward(x, w, b, s, h, groups, eps)
        ctx.save_for_backward(x, w, b, s, h, mu, rstd)
        return y

    @staticmethod
    def backward(ctx, dy):
        x, w, b, s, h, mu, rstd = ctx.saved_tensors
        (N, C, P), groups, needs = x.shape, mu.shape[1], ctx.needs_input_grad
        dx, dw, db, ds, dh = (torch.empty_like(t) for t in (x, w, b, s, h))
        slots = torch.empty((2, N, C), device=x.device, dtype=torch.float32)
        film_norm_backward_kernel[(groups, N)](
            x, w, b, s, h, mu, rstd, dy.contiguous(), dx, ds, dh, slots[0], slots[1], C, P, C // groups,
            BLOCK=tile_of(P),
        )  # fmt: skip
        if needs[1] or needs[2]:
            sum_samples_kernel[(triton.cdiv(C, 64),)](slots[0], slots[1], dw, db, N, C, BLOCK=64)
        grads = (dx, dw, db, ds, dh)
        return *(g if needed else None for g, needed in zip(grads, needs, strict=False)), None, None


def group_norm_film_silu_autograd(x, w, b, s, h, groups, eps=1e-5):
    return GroupNormFilmSilu.apply(x, w, b, s, h, groups, eps)
