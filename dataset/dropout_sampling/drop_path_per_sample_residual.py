"""Stochastic depth: the whole branch of a sample is dropped or kept, and added to its residual.

Forward    y_b = r_b + s_b x_b,   s_b = [u_b >= p] / (1 - p),  u the Philox stream of a seed
Backward   dx_b = s_b dy_b,   dr_b = dy_b

Forward schedule: a program owns a block of one sample and draws the sample's number, a single one for all of
its lanes. Of a dropped sample x is not read at all.
Backward schedule: the same blocks, the same draw; nothing is saved. dx of a dropped sample is zeros, stored
without reading dy. dr is dy: a copy made on the way, as dy is in registers for dx; returning dy itself would
let two gradients share memory. Where nobody wants dr, a dropped sample costs a write and no read.

op: drop_path
schedule: index_or_seed_replay, same_tile_pointwise
difficulty: 1
dtypes: fp32, fp16, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


BLOCK = 1024


@triton.jit
def branch_scale(seed, sample, p):
    return tl.where(tl.rand(seed, sample) >= p, 1 / (1 - p), 0.0)


@triton.jit
def drop_path_kernel(x_ptr, r_ptr, y_ptr, N, p, seed, BLOCK: tl.constexpr):
    sample = tl.program_id(0)
    s = branch_scale(seed, sample, p)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    offs = sample.to(tl.int64) * N + cols
    x = tl.load(x_ptr + offs, mask=cols < tl.where(s > 0, N, 0), other=0.0).to(tl.float32)
    r = tl.load(r_ptr + offs, mask=cols < N, other=0.0).to(tl.float32)
    tl.store(y_ptr + offs, (r + s * x).to(y_ptr.dtype.element_ty), mask=cols < N)


@autodiff(inputs_require_grad=(0, 1))
def drop_path(x, r, p, seed):
    """x, r: (B, ...), the branch and the residual."""
    if x.shape != r.shape or not 0 <= p < 1:
        raise ValueError(f"x {tuple(x.shape)} and r {tuple(r.shape)} need one shape, and p = {p} be below 1")
    x, r = x.contiguous(), r.contiguous()
    y, N = torch.empty_like(x), x[0].numel() if x.shape[0] else 0
    drop_path_kernel[(x.shape[0], triton.cdiv(N, BLOCK))](x, r, y, N, p, seed, BLOCK=BLOCK)
    return y


def reference(x, r, p, seed):
    ones = torch.ones((x.shape[0], 1), device=x.device)
    s = drop_path(ones, torch.zeros_like(ones), p, seed) > 0
    s = s.view(-1, *[1] * (x.dim() - 1))
    return r + torch.where(s, x / (1 - p), 0.0)


SWEEP = [{"B": 256, "T": 197, "C": 768}, {"B": 67, "T": 131, "C": 321}]
SWEEP_CPU = [{"B": 6, "T": 7, "C": 11}, {"B": 9, "T": 3, "C": 500}]


def make_args(dims, device="cuda", dtype=torch.float32):
    x, r = (torch.randn(*(dims[name] for name in "BTC"), device=device, dtype=dtype) for _ in range(2))
    return (x, r), {"p": 0.3, "seed": 20}


# ---- backward ----


@triton.jit
def drop_path_backward_kernel(
    dy_ptr, dx_ptr, dr_ptr, N, p, seed, WANT_X: tl.constexpr, WANT_R: tl.constexpr, BLOCK: tl.constexpr
):
    sample = tl.program_id(0)
    s = branch_scale(seed, sample, p)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    offs = sample.to(tl.int64) * N + cols
    wanted = N if WANT_R else tl.where(s > 0, N, 0)
    dy = tl.load(dy_ptr + offs, mask=cols < wanted, other=0.0)
    if WANT_R:
        tl.store(dr_ptr + offs, dy, mask=cols < N)
    if WANT_X:
        dx = tl.where(s > 0, s * dy.to(tl.float32), 0.0)
        tl.store(dx_ptr + offs, dx.to(dx_ptr.dtype.element_ty), mask=cols < N)


class DropPath(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, r, p, seed):
        ctx.p, ctx.seed = p, seed
        return drop_path(x, r, p, seed)

    @staticmethod
    def backward(ctx, dy):
        dy, (want_x, want_r) = dy.contiguous(), ctx.needs_input_grad[:2]
        B, N = dy.shape[0], dy[0].numel() if dy.shape[0] else 0
        dx = torch.empty_like(dy) if want_x else None
        dr = torch.empty_like(dy) if want_r else None
        drop_path_backward_kernel[(B, triton.cdiv(N, BLOCK))](
            dy, dx, dr, N, ctx.p, ctx.seed, WANT_X=want_x, WANT_R=want_r, BLOCK=BLOCK
        )
        return dx, dr, None, None


def drop_path_autograd(x, r, p, seed):
    return DropPath.apply(x, r, p, seed)
