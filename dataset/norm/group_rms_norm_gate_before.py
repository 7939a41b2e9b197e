"""Gate, then an RMS norm over groups of channels: before the output projection of a state-space layer.

Forward    u = x q,  q = silu(z) = z s,  s = sigmoid(z);   a group is C neighbouring channels:
           r = (mean over the group of u^2 + eps)^(-1/2),   y = u r w
Backward   with uhat = u r, h = dy w:   du = r (h - uhat mean(h uhat)),
           dx = du q,   dz = du x s (1 + z (1 - s)),   dw = sum over rows of dy uhat

Forward schedule: a program owns (row, group); groups may live on different devices, so a program never looks
beyond its own. r is saved, a number a group.
Backward schedule: as the gate comes first, the norm's gradient is an intermediate, du, that two gradients
need; it never leaves the registers of the one who makes it. A program owns a group of channels for a strided
set of rows: its part of dw stays in registers meanwhile, and G parts a group are stored and added by a second
kernel. The rows are divided among G programs a group such that groups times G fill the GPU.

op: gated_rms_norm
schedule: row_reduce_correct, partials_then_reduce, recompute_from_stats
difficulty: 3
dtypes: fp32, fp16, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


def tile_of(C):
    """A whole group in one tile, and warps enough to hold it in registers."""
    BLOCK = triton.next_power_of_2(C)
    return {"BLOCK": BLOCK, "num_warps": min(16, max(1, BLOCK // 256))}


@triton.jit
def gated_group_norm_kernel(x_ptr, z_ptr, w_ptr, y_ptr, r_ptr, C, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    group, groups = tl.program_id(1), tl.num_programs(1)
    cols = tl.arange(0, BLOCK)
    mask = cols < C
    offs = (row * groups + group) * C + cols
    x = tl.load(x_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    z = tl.load(z_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    w = tl.load(w_ptr + group * C + cols, mask=mask, other=0.0).to(tl.float32)
    u = x * z * tl.sigmoid(z)
    r = tl.rsqrt(tl.sum(u * u, axis=0) / C + eps)
    tl.store(r_ptr + row * groups + group, r)
    tl.store(y_ptr + offs, (u * r * w).to(y_ptr.dtype.element_ty), mask=mask)


def gated_group_norm_forward(x, z, w, groups, eps):
    M, N = x.shape
    if z.shape != x.shape or w.shape != (N,):
        raise ValueError(f"x {tuple(x.shape)}, z {tuple(z.shape)} and w {tuple(w.shape)} do not fit")
    if N == 0 or groups < 1 or N % groups != 0:
        raise ValueError(f"{N} channels do not make {groups} groups")
    C = N // groups
    if C > 16384:
        raise ValueError(f"a group of {C} does not fit one tile")
    y, r = torch.empty_like(x), torch.empty((M, groups), device=x.device, dtype=torch.float32)
    gated_group_norm_kernel[(M, groups)](x, z, w, y, r, C, eps, **tile_of(C))
    return y, r


@autodiff(inputs_require_grad=(0, 1, 2))
def gated_group_rms_norm(x, z, w, groups, eps=1e-5):
    """x, z: (M, N); w: (N); groups divides N."""
    return gated_group_norm_forward(x.contiguous(), z.contiguous(), w.contiguous(), groups, eps)[0]


def reference(x, z, w, groups, eps=1e-5):
    u = (x * torch.nn.functional.silu(z)).unflatten(1, (groups, -1))
    return (u * torch.rsqrt(u.pow(2).mean(-1, keepdim=True) + eps)).flatten(1) * w


SWEEP = [{"M": 8192, "G": 8, "C": 512}, {"M": 4099, "G": 2, "C": 1500}]
SWEEP_CPU = [{"M": 22, "G": 4, "C": 17}, {"M": 70, "G": 2, "C": 40}]


def make_args(dims, device="cuda", dtype=torch.float32):
    N = dims["G"] * dims["C"]
    x, z = (torch.randn(dims["M"], N, device=device, dtype=dtype) for _ in range(2))
    return x, z, 1 + 0.2 * torch.randn(N, device=device, dtype=dtype), dims["G"]


# ---- backward ----

PROGRAMS = 1024  # some eight a multiprocessor


@triton.jit
def gated_group_norm_backward_kernel(
    x_ptr, z_ptr, w_ptr, r_ptr, dy_ptr, dx_ptr, dz_ptr, part_ptr, M, C, BLOCK: tl.constexpr
):
    pid, G = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    group, groups = tl.program_id(1), tl.num_programs(1)
    cols = tl.arange(0, BLOCK)
    mask = cols < C
    w = tl.load(w_ptr + group * C + cols, mask=mask, other=0.0).to(tl.float32)
    dw = tl.zeros([BLOCK], dtype=tl.float32)
    for row in range(pid, M, G):
        offs = (row * groups + group) * C + cols
        x = tl.load(x_ptr + offs, mask=mask, other=0.0).to(tl.float32)
        z = tl.load(z_ptr + offs, mask=mask, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + offs, mask=mask, other=0.0).to(tl.float32)
        r = tl.load(r_ptr + row * groups + group)
        s = tl.sigmoid(z)
        uhat = x * z * s * r
        h = dy * w
        du = r * (h - uhat * (tl.sum(h * uhat, axis=0) / C))
        tl.store(dx_ptr + offs, (du * z * s).to(dx_ptr.dtype.element_ty), mask=mask)
        tl.store(dz_ptr + offs, (du * x * s * (1 + z * (1 - s))).to(dz_ptr.dtype.element_ty), mask=mask)
        dw += dy * uhat
    tl.store(part_ptr + (pid * groups + group) * C + cols, dw, mask=mask)


@triton.jit
def weight_sum_kernel(part_ptr, dw_ptr, G, N, BLOCK_G: tl.constexpr, BLOCK_N: tl.constexpr):
    cols = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    dw = tl.zeros([BLOCK_G, BLOCK_N], dtype=tl.float32)
    for start in range(0, G, BLOCK_G):
        part = start + tl.arange(0, BLOCK_G)
        mask = (part[:, None] < G) & (cols[None, :] < N)
        dw += tl.load(part_ptr + part[:, None] * N + cols[None, :], mask=mask, other=0.0)
    tl.store(dw_ptr + cols, tl.sum(dw, axis=0).to(dw_ptr.dtype.element_ty), mask=cols < N)


class GatedGroupRMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, z, w, groups, eps):
        x, z, w = x.contiguous(), z.contiguous(), w.contiguous()
        y, r = gated_group_norm_forward(x, z, w, groups, eps)
        ctx.save_for_backward(x, z, w, r)
        return y

    @staticmethod
    def backward(ctx, dy):
        x, z, w, r = ctx.saved_tensors
        (M, N), groups, needs = x.shape, r.shape[1], ctx.needs_input_grad
        G = min(M, triton.cdiv(PROGRAMS, groups))
        dx, dz, dw = (torch.empty_like(t) for t in (x, z, w))
        part = torch.empty((G, N), device=x.device, dtype=torch.float32)
        gated_group_norm_backward_kernel[(G, groups)](
            x, z, w, r, dy.contiguous(), dx, dz, part, M, N // groups, **tile_of(N // groups)
        )
        if needs[2]:
            weight_sum_kernel[(triton.cdiv(N, 64),)](part, dw, G, N, BLOCK_G=32, BLOCK_N=64)
        grads = (dx, dz, dw)
        return *(g if needed else None for g, needed in zip(grads, needs, strict=False)), None, None


def gated_group_rms_norm_autograd(x, z, w, groups, eps=1e-5):
    return GatedGroupRMSNorm.apply(x, z, w, groups, eps)
