"""Frame-aligned point error of protein structures: each residue's frame looks at all atoms.

Forward    for frame i and point j:  d_ij = R_i^T (x_j - t_i) - S_i^T (z_j - s_i), S, s, z the true structure;
           e_ij = (|d_ij|^2 + eps)^(1/2),   l_i = mean over j of min(e_ij, limit)
Backward   with g_ij = dl_i d_ij / (P e_ij) where e_ij < limit, else 0:
           dx_j = sum_i R_i g_ij,   dt_i = -R_i sum_j g_ij,   dR_i = sum_j (x_j - t_i) g_ij^T

Forward schedule: a program owns a frame, twelve numbers and twelve more of the truth, and walks the points
by tiles: all F P errors pass through registers, three coordinates at a time, and none is stored.
Backward schedule: a frame's gradient is a sum over points and a point's a sum over frames, so each gets its
own walk, and both make d anew: nine products for an error, where a stored g would be three numbers written
and read twice. The frame's owner keeps its points as lanes and R_i as scalars; it needs sum_j g_ij and
sum_j x_j g_ij^T alone, twelve sums, since t_i comes out of both at the end. The points' owner keeps a tile of
them as lanes and walks the frames, whose numbers are then the scalars.

op: fape
schedule: swap_owner, recompute_from_stats
difficulty: 4
dtypes: fp32
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


BLOCK = 128


@triton.jit
def load_points(ptr, j, P):
    x = tl.load(ptr + 3 * j, mask=j < P, other=0.0)
    y = tl.load(ptr + 3 * j + 1, mask=j < P, other=0.0)
    return x, y, tl.load(ptr + 3 * j + 2, mask=j < P, other=0.0)


@triton.jit
def into_frame(rot_ptr, shift_ptr, x, y, z):
    """R^T (x - t) for points and the one frame at these pointers."""
    x, y, z = x - tl.load(shift_ptr), y - tl.load(shift_ptr + 1), z - tl.load(shift_ptr + 2)
    a = tl.load(rot_ptr) * x + tl.load(rot_ptr + 3) * y + tl.load(rot_ptr + 6) * z
    b = tl.load(rot_ptr + 1) * x + tl.load(rot_ptr + 4) * y + tl.load(rot_ptr + 7) * z
    c = tl.load(rot_ptr + 2) * x + tl.load(rot_ptr + 5) * y + tl.load(rot_ptr + 8) * z
    return a, b, c


@triton.jit
def errors(R_ptr, t_ptr, S_ptr, s_ptr, i, x, y, z, u, v, w, eps):
    """d and e of the points x and their truth u, v, w in frame i."""
    a, b, c = into_frame(R_ptr + 9 * i, t_ptr + 3 * i, x, y, z)
    p, q, r = into_frame(S_ptr + 9 * i, s_ptr + 3 * i, u, v, w)
    a, b, c = a - p, b - q, c - r
    return a, b, c, tl.sqrt(a * a + b * b + c * c + eps)


@triton.jit
def fape_kernel(R_ptr, t_ptr, x_ptr, S_ptr, s_ptr, z_ptr, l_ptr, F, P, limit, eps, BLOCK: tl.constexpr):
    i, batch = tl.program_id(0), tl.program_id(1).to(tl.int64)
    frame, x_ptr, z_ptr = batch * F + i, x_ptr + batch * P * 3, z_ptr + batch * P * 3
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, P, BLOCK):
        j = start + tl.arange(0, BLOCK)
        x, y, z = load_points(x_ptr, j, P)
        u, v, w = load_points(z_ptr, j, P)
        _, _, _, e = errors(R_ptr, t_ptr, S_ptr, s_ptr, frame, x, y, z, u, v, w, eps)
        total += tl.where(j < P, tl.where(e < limit, e, limit), 0.0)
    tl.store(l_ptr + frame, tl.sum(total, axis=0) / P)


@autodiff(inputs_require_grad=(0, 1, 2))
def fape(R, t, x, S, s, z, limit=10.0, eps=1e-4):
    """R, S: float32 (B, F, 3, 3); t, s: (B, F, 3); x, z: (B, P, 3); S, s, z are constants; gives (B, F)."""
    (B, F), P = R.shape[:2], x.shape[1]
    if S.shape != R.shape or not t.shape == s.shape == (B, F, 3) or not x.shape == z.shape == (B, P, 3):
        raise ValueError(f"frames {tuple(R.shape)}, {tuple(t.shape)} and points {tuple(x.shape)}")
    inputs = [tensor.contiguous() for tensor in (R, t, x, S, s, z)]
    out = torch.empty((B, F), device=R.device, dtype=R.dtype)
    fape_kernel[(F, B)](*inputs, out, F, P, limit, eps, BLOCK=BLOCK)
    return out


def reference(R, t, x, S, s, z, limit=10.0, eps=1e-4):
    local = torch.einsum("bfac,bfpa->bfpc", R, x[:, None] - t[:, :, None])
    true = torch.einsum("bfac,bfpa->bfpc", S, z[:, None] - s[:, :, None])
    e = ((local - true).pow(2).sum(-1) + eps).sqrt()
    return torch.where(e < limit, e, limit).mean(-1)


SWEEP = [{"B": 4, "F": 512, "P": 2560}, {"B": 1, "F": 301, "P": 4099}]
SWEEP_CPU = [{"B": 2, "F": 5, "P": 33}, {"B": 1, "F": 9, "P": 150}]


def make_args(dims, device="cuda", dtype=torch.float32):
    """A structure and the truth beside it, some errors beyond the limit."""
    B, F, P = dims["B"], dims["F"], dims["P"]
    R, S = (torch.linalg.qr(torch.randn(B, F, 3, 3, device=device))[0].to(dtype) for _ in range(2))
    t, s = (3 * torch.randn(B, F, 3, device=device, dtype=dtype) for _ in range(2))
    x, z = (3 * torch.randn(B, P, 3, device=device, dtype=dtype) for _ in range(2))
    return R, t, x, S, s, z, 8.0


# ---- backward ----


@triton.jit
def frames_kernel(
    R_ptr, t_ptr, x_ptr, S_ptr, s_ptr, z_ptr, dl_ptr, dR_ptr, dt_ptr, F, P, limit, eps,
    BLOCK: tl.constexpr,
):  # fmt: skip
    i, batch = tl.program_id(0), tl.program_id(1).to(tl.int64)
    frame, x_ptr, z_ptr = batch * F + i, x_ptr + batch * P * 3, z_ptr + batch * P * 3
    k, axis = tl.arange(0, 4), tl.arange(0, 4)
    dl = tl.load(dl_ptr + frame) / P
    outer = tl.zeros([4, 4], dtype=tl.float32)  # sum of x g^T, and in the fourth row of g
    for start in range(0, P, BLOCK):
        j = start + tl.arange(0, BLOCK)
        x, y, z = load_points(x_ptr, j, P)
        u, v, w = load_points(z_ptr, j, P)
        a, b, c, e = errors(R_ptr, t_ptr, S_ptr, s_ptr, frame, x, y, z, u, v, w, eps)
        pull = tl.where((e < limit) & (j < P), dl / e, 0.0)
        a, b, c = pull * a, pull * b, pull * c
        g = tl.where(axis[None, :] == 0, a[:, None], tl.where(axis[None, :] == 1, b[:, None], c[:, None]))
        p = tl.where(k[None, :] == 0, x[:, None], tl.where(k[None, :] == 1, y[:, None], z[:, None]))
        p = tl.where(k[None, :] == 3, 1.0, p)
        outer += tl.sum(p[:, :, None] * g[:, None, :], axis=0)
    total = tl.sum(tl.where(k[:, None] == 3, outer, 0.0), axis=0)  # sum of g
    entries = (k[:, None] < 3) & (axis[None, :] < 3)
    t = tl.load(t_ptr + 3 * frame + k, mask=k < 3, other=0.0)
    at = 9 * frame + 3 * k[:, None] + axis[None, :]
    tl.store(dR_ptr + at, outer - t[:, None] * total[None, :], mask=entries)
    R = tl.load(R_ptr + at, mask=entries, other=0.0)
    tl.store(dt_ptr + 3 * frame + k, -tl.sum(R * total[None, :], axis=1), mask=k < 3)


@triton.jit
def points_kernel(
    R_ptr, t_ptr, x_ptr, S_ptr, s_ptr, z_ptr, dl_ptr, dx_ptr, F, P, limit, eps, BLOCK: tl.constexpr
):
    batch = tl.program_id(1).to(tl.int64)
    j = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x, y, z = load_points(x_ptr + batch * P * 3, j, P)
    u, v, w = load_points(z_ptr + batch * P * 3, j, P)
    dx = tl.zeros([BLOCK], dtype=tl.float32)
    dy = tl.zeros([BLOCK], dtype=tl.float32)
    dz = tl.zeros([BLOCK], dtype=tl.float32)
    for i in range(F):
        frame = batch * F + i
        a, b, c, e = errors(R_ptr, t_ptr, S_ptr, s_ptr, frame, x, y, z, u, v, w, eps)
        pull = tl.where(e < limit, tl.load(dl_ptr + frame) / P / e, 0.0)
        a, b, c, R = pull * a, pull * b, pull * c, R_ptr + 9 * frame
        dx += tl.load(R) * a + tl.load(R + 1) * b + tl.load(R + 2) * c
        dy += tl.load(R + 3) * a + tl.load(R + 4) * b + tl.load(R + 5) * c
        dz += tl.load(R + 6) * a + tl.load(R + 7) * b + tl.load(R + 8) * c
    at = dx_ptr + (batch * P + j) * 3
    tl.store(at, dx, mask=j < P)
    tl.store(at + 1, dy, mask=j < P)
    tl.store(at + 2, dz, mask=j < P)


class Fape(torch.autograd.Function):
    @staticmethod
    def forward(ctx, R, t, x, S, s, z, limit, eps):
        inputs = [tensor.contiguous() for tensor in (R, t, x, S, s, z)]
        ctx.save_for_backward(*inputs)
        ctx.constants = limit, eps
        return fape(*inputs, limit, eps)

    @staticmethod
    def backward(ctx, dl):
        inputs, needs, dl = ctx.saved_tensors, ctx.needs_input_grad, dl.contiguous()
        R, t, x = inputs[:3]
        (B, F), P = dl.shape, x.shape[1]
        dR = dt = dx = None
        if needs[0] or needs[1]:
            dR, dt = torch.empty_like(R), torch.empty_like(t)
            frames_kernel[(F, B)](*inputs, dl, dR, dt, F, P, *ctx.constants, BLOCK=BLOCK)
        if needs[2]:
            dx = torch.empty_like(x)
            points_kernel[(triton.cdiv(P, BLOCK), B)](*inputs, dl, dx, F, P, *ctx.constants, BLOCK=BLOCK)
        grads = (dR if needs[0] else None, dt if needs[1] else None, dx)
        return *grads, None, None, None, None, None


def fape_autograd(R, t, x, S, s, z, limit=10.0, eps=1e-4):
    return Fape.apply(R, t, x, S, s, z, limit, eps)
