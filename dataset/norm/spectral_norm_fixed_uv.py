"""Spectral norm with given singular vectors: a weight divided by its estimated largest singular value.

Forward    sigma = u^T W v = sum_oi u_o W_oi v_i,   Y = W / sigma;   u, v, of power iteration, are constants
Backward   dsigma = -(1 / sigma^2) <dY, W>, and dsigma/dW = u v^T:
           dW = (1 / sigma) (dY - (<dY, W> / sigma) u v^T)

Forward schedule: sigma needs all of W, and every number of Y needs sigma. Programs own rows: each stores its
rows' share u_o <W_o, v>. In the second kernel a program owns rows again, adds all shares on its own, some
hundred numbers out of cache, and divides its rows.
Backward schedule: the same two steps with <dY_o, W_o> for the share. The rank-one matrix u v^T is an outer
product of a row's number with a vector that every program holds, so it is made where it is subtracted and is
never stored. sigma is kept, a single number; W and dY are read twice, and nothing but the shares is between.

op: spectral_norm
schedule: partials_then_reduce, row_reduce_correct
difficulty: 2
dtypes: fp32, fp16, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


PARTS = tl.constexpr(256)  # programs of a pass over W, at most
BLOCK = 512


@triton.jit
def share_kernel(w_ptr, u_ptr, v_ptr, shares_ptr, O, I, BLOCK: tl.constexpr):
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for o in range(tl.program_id(0), O, tl.num_programs(0)):
        u = tl.load(u_ptr + o).to(tl.float32)
        for start in range(0, I, BLOCK):
            i = start + tl.arange(0, BLOCK)
            w = tl.load(w_ptr + o * I + i, mask=i < I, other=0.0).to(tl.float32)
            total += u * w * tl.load(v_ptr + i, mask=i < I, other=0.0).to(tl.float32)
    tl.store(shares_ptr + tl.program_id(0), tl.sum(total, axis=0))


@triton.jit
def sum_shares(shares_ptr, count):
    part = tl.arange(0, PARTS)
    return tl.sum(tl.load(shares_ptr + part, mask=part < count, other=0.0), axis=0)


@triton.jit
def divide_kernel(w_ptr, shares_ptr, y_ptr, sigma_ptr, O, I, BLOCK: tl.constexpr):
    sigma = sum_shares(shares_ptr, tl.num_programs(0))
    if tl.program_id(0) == 0:
        tl.store(sigma_ptr, sigma)
    for o in range(tl.program_id(0), O, tl.num_programs(0)):
        for start in range(0, I, BLOCK):
            i = start + tl.arange(0, BLOCK)
            w = tl.load(w_ptr + o * I + i, mask=i < I, other=0.0).to(tl.float32)
            tl.store(y_ptr + o * I + i, (w / sigma).to(y_ptr.dtype.element_ty), mask=i < I)


def spectral_norm_forward(w, u, v):
    O, I = w.shape
    if u.shape != (O,) or v.shape != (I,) or O * I >= 2**31:
        raise ValueError(f"w {tuple(w.shape)}, u {tuple(u.shape)} and v {tuple(v.shape)} do not fit")
    parts = min(O, PARTS.value)
    y, sigma = torch.empty_like(w), torch.empty((), device=w.device, dtype=torch.float32)
    shares = torch.empty(parts, device=w.device, dtype=torch.float32)
    share_kernel[(parts,)](w, u, v, shares, O, I, BLOCK=BLOCK)
    divide_kernel[(parts,)](w, shares, y, sigma, O, I, BLOCK=BLOCK)
    return y, sigma


@autodiff(inputs_require_grad=(0,))
def spectral_norm(w, u, v):
    """w: (O, I); u: (O) and v: (I), unit vectors, no gradient; u^T w v is not 0."""
    return spectral_norm_forward(w.contiguous(), u.contiguous(), v.contiguous())[0]


def reference(w, u, v):
    return w / (u @ w @ v)


SWEEP = [{"O": 4096, "I": 4096}, {"O": 1000, "I": 4608}]
SWEEP_CPU = [{"O": 33, "I": 45}, {"O": 7, "I": 600}]


def make_args(dims, device="cuda", dtype=torch.float32):
    O, I = dims["O"], dims["I"]
    u = torch.nn.functional.normalize(torch.randn(O, device=device), dim=0)
    v = torch.nn.functional.normalize(torch.randn(I, device=device), dim=0)
    w = torch.randn(O, I, device=device) / max(1, I) ** 0.5 + 3 * u[:, None] * v
    return w.to(dtype), u.to(dtype), v.to(dtype)


# ---- backward ----


@triton.jit
def product_share_kernel(w_ptr, dy_ptr, shares_ptr, O, I, BLOCK: tl.constexpr):
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for o in range(tl.program_id(0), O, tl.num_programs(0)):
        for start in range(0, I, BLOCK):
            i = start + tl.arange(0, BLOCK)
            w = tl.load(w_ptr + o * I + i, mask=i < I, other=0.0).to(tl.float32)
            total += w * tl.load(dy_ptr + o * I + i, mask=i < I, other=0.0).to(tl.float32)
    tl.store(shares_ptr + tl.program_id(0), tl.sum(total, axis=0))


@triton.jit
def dw_kernel(u_ptr, v_ptr, sigma_ptr, shares_ptr, dy_ptr, dw_ptr, O, I, BLOCK: tl.constexpr):
    sigma = tl.load(sigma_ptr)
    slope = sum_shares(shares_ptr, tl.num_programs(0)) / sigma
    for o in range(tl.program_id(0), O, tl.num_programs(0)):
        u = tl.load(u_ptr + o).to(tl.float32)
        for start in range(0, I, BLOCK):
            i = start + tl.arange(0, BLOCK)
            v = tl.load(v_ptr + i, mask=i < I, other=0.0).to(tl.float32)
            dy = tl.load(dy_ptr + o * I + i, mask=i < I, other=0.0).to(tl.float32)
            dw = (dy - slope * u * v) / sigma
            tl.store(dw_ptr + o * I + i, dw.to(dw_ptr.dtype.element_ty), mask=i < I)


class SpectralNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, w, u, v):
        w, u, v = w.contiguous(), u.contiguous(), v.contiguous()
        y, sigma = spectral_norm_forward(w, u, v)
        ctx.save_for_backward(w, u, v, sigma)
        return y

    @staticmethod
    def backward(ctx, dy):
        w, u, v, sigma = ctx.saved_tensors
        dy, (O, I), dw = dy.contiguous(), w.shape, torch.empty_like(w)
        parts = min(O, PARTS.value)
        shares = torch.empty(parts, device=w.device, dtype=torch.float32)
        product_share_kernel[(parts,)](w, dy, shares, O, I, BLOCK=BLOCK)
        dw_kernel[(parts,)](u, v, sigma, shares, dy, dw, O, I, BLOCK=BLOCK)
        return dw, None, None


def spectral_norm_autograd(w, u, v):
    return SpectralNorm.apply(w, u, v)
