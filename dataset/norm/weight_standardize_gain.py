"""Weight standardisation of a convolution: every filter to mean 0 and variance 1, times a learned gain.

Forward    over the N numbers of filter o:  mu = mean v,  rstd = (mean (v - mu)^2 + eps)^(-1/2),
           vhat = (v - mu) rstd,   W = g_o vhat
Backward   dg_o = <dW, vhat>,   dv = g_o rstd (dW - mean dW - vhat dg_o / N)
           (the same sum is the gain's gradient and the size of what is projected out along vhat)

Forward schedule: a program owns a filter. A filter of a deep layer has some thousand numbers, more than one
would keep in registers, so it is walked: a tile's mean and sum of squares are merged into the running ones
(Chan's rule), one walk for both; a second one writes W.
Backward schedule: the same owner, two walks. The first sums dW and dW vhat, and the second of these is dg
already, complete, as a filter has one owner. The second walk writes dv from v, dW and three constants.
Filters are hundreds, so owners fill a GPU, and a filter that was just read is in cache when it is read again.

op: weight_standardization
schedule: row_reduce_correct, recompute_from_stats
difficulty: 2
dtypes: fp32, fp16, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


def tile_of(N):
    return min(1024, max(16, triton.next_power_of_2(N)))


@triton.jit
def standardize_kernel(v_ptr, g_ptr, w_ptr, mu_ptr, rstd_ptr, N, eps, BLOCK: tl.constexpr):
    o = tl.program_id(0).to(tl.int64)
    mu = 0.0
    squares = 0.0
    for start in range(0, N, BLOCK):
        i = start + tl.arange(0, BLOCK)
        v = tl.load(v_ptr + o * N + i, mask=i < N, other=0.0).to(tl.float32)
        count = tl.minimum(BLOCK, N - start).to(tl.float32)
        tile_mu = tl.sum(v, axis=0) / count
        centred = tl.where(i < N, v - tile_mu, 0.0)
        step, share = tile_mu - mu, count / (start + count)
        squares += tl.sum(centred * centred, axis=0) + step * step * (start * share)
        mu += step * share
    rstd = tl.rsqrt(squares / N + eps)
    tl.store(mu_ptr + o, mu)
    tl.store(rstd_ptr + o, rstd)
    scale = tl.load(g_ptr + o).to(tl.float32) * rstd
    for start in range(0, N, BLOCK):
        i = start + tl.arange(0, BLOCK)
        v = tl.load(v_ptr + o * N + i, mask=i < N, other=0.0).to(tl.float32)
        tl.store(w_ptr + o * N + i, ((v - mu) * scale).to(w_ptr.dtype.element_ty), mask=i < N)


def standardize_forward(v, g, eps):
    O, N = v.shape[0], v.numel() // max(1, v.shape[0])
    if g.shape != (O,):
        raise ValueError(f"{g.shape[0]} gains for {O} filters")
    w = torch.empty_like(v)
    mu, rstd = (torch.empty(O, device=v.device, dtype=torch.float32) for _ in range(2))
    standardize_kernel[(O,)](v, g, w, mu, rstd, N, eps, BLOCK=tile_of(N))
    return w, mu, rstd


@autodiff(inputs_require_grad=(0, 1))
def weight_standardize(v, g, eps=1e-5):
    """v: (O, ...), the filters; g: (O)."""
    return standardize_forward(v.contiguous(), g.contiguous(), eps)[0]


def reference(v, g, eps=1e-5):
    flat = v.flatten(1)
    centred = flat - flat.mean(1, keepdim=True)
    vhat = centred * torch.rsqrt(centred.pow(2).mean(1, keepdim=True) + eps)
    return (g[:, None] * vhat).view(v.shape)


SWEEP = [{"O": 2048, "I": 1024, "S": 3}, {"O": 1000, "I": 500, "S": 3}]
SWEEP_CPU = [{"O": 14, "I": 10, "S": 3}, {"O": 3, "I": 150, "S": 3}]


def make_args(dims, device="cuda", dtype=torch.float32):
    O, I, S = dims["O"], dims["I"], dims["S"]
    v = 0.1 + 0.5 * torch.randn(O, I, S, S, device=device, dtype=dtype)
    return v, 1 + 0.2 * torch.randn(O, device=device, dtype=dtype)


# ---- backward ----


@triton.jit
def standardize_backward_kernel(
    v_ptr, g_ptr, mu_ptr, rstd_ptr, dw_ptr, dv_ptr, dg_ptr, N, BLOCK: tl.constexpr
):
    o = tl.program_id(0).to(tl.int64)
    mu, rstd = tl.load(mu_ptr + o), tl.load(rstd_ptr + o)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    along = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, N, BLOCK):
        i = start + tl.arange(0, BLOCK)
        v = tl.load(v_ptr + o * N + i, mask=i < N, other=0.0).to(tl.float32)
        dw = tl.load(dw_ptr + o * N + i, mask=i < N, other=0.0).to(tl.float32)
        total += dw
        along += dw * (v - mu)
    dg = tl.sum(along, axis=0) * rstd
    tl.store(dg_ptr + o, dg.to(dg_ptr.dtype.element_ty))
    scale = tl.load(g_ptr + o).to(tl.float32) * rstd
    mean = tl.sum(total, axis=0) / N
    slope = dg * rstd / N
    for start in range(0, N, BLOCK):
        i = start + tl.arange(0, BLOCK)
        v = tl.load(v_ptr + o * N + i, mask=i < N, other=0.0).to(tl.float32)
        dw = tl.load(dw_ptr + o * N + i, mask=i < N, other=0.0).to(tl.float32)
        dv = scale * (dw - mean - (v - mu) * slope)
        tl.store(dv_ptr + o * N + i, dv.to(dv_ptr.dtype.element_ty), mask=i < N)


class WeightStandardize(torch.autograd.Function):
    @staticmethod
    def forward(ctx, v, g, eps):
        v, g = v.contiguous(), g.contiguous()
        w, mu, rstd = standardize_forward(v, g, eps)
        ctx.save_for_backward(v, g, mu, rstd)
        return w

    @staticmethod
    def backward(ctx, dw):
        v, g, mu, rstd = ctx.saved_tensors
        O, needs = v.shape[0], ctx.needs_input_grad
        N = v.numel() // max(1, O)
        dv, dg = torch.empty_like(v), torch.empty_like(g)
        standardize_backward_kernel[(O,)](v, g, mu, rstd, dw.contiguous(), dv, dg, N, BLOCK=tile_of(N))
        return dv if needs[0] else None, dg if needs[1] else None, None


def weight_standardize_autograd(v, g, eps=1e-5):
    return WeightStandardize.apply(v, g, eps)
