"""Weight normalisation: each output's filter is a direction times a length of its own.

Forward    W_o = g_o vhat_o,  vhat_o = v_o / |v_o|,  |v_o| over all of filter o
Backward   dg_o = <dW_o, vhat_o>,  dv_o = (g_o / |v_o|) (dW_o - dg_o vhat_o)

Forward schedule: a program owns a filter, sums its squares, and scales it in a second walk; 1 / |v| is saved.
Backward schedule: the same owner. The projection that dv must lose is dg itself, so the one sum along the
row is both a gradient and the correction: the first walk makes it, the second writes dv. The length was
saved, so v is not summed again, and W, which a layer throws away after use, is not kept: vhat is v times one
number. Rows are independent; filters of a convolution may have any shape, flattened by a view.

op: weight_norm
schedule: row_reduce_correct, recompute_from_stats
difficulty: 2
dtypes: fp32, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


@triton.jit
def weight_norm_kernel(v_ptr, g_ptr, w_ptr, r_ptr, N, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    squares = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, N, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        v = tl.load(v_ptr + row * N + cols, mask=cols < N, other=0.0).to(tl.float32)
        squares += v * v
    r = tl.rsqrt(tl.sum(squares, axis=0))
    tl.store(r_ptr + row, r)
    scale = tl.load(g_ptr + row).to(tl.float32) * r
    for start in range(0, N, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        v = tl.load(v_ptr + row * N + cols, mask=cols < N, other=0.0).to(tl.float32)
        tl.store(w_ptr + row * N + cols, (v * scale).to(w_ptr.dtype.element_ty), mask=cols < N)


def weight_norm_forward(v, g):
    if g.numel() != v.shape[0]:
        raise ValueError(f"{v.shape[0]} filters need as many lengths, not {g.numel()}")
    M, N = v.shape[0], v[0].numel()
    w = torch.empty_like(v)
    r = torch.empty(M, device=v.device, dtype=torch.float32)
    weight_norm_kernel[(M,)](v, g, w, r, N, BLOCK=min(1024, triton.next_power_of_2(N)))
    return w, r


@autodiff(inputs_require_grad=(0, 1))
def weight_norm(v, g):
    """v: (outputs, ...), no filter all zeros; g: (outputs); gives the weight, of v's shape."""
    return weight_norm_forward(v.contiguous(), g.contiguous())[0]


def reference(v, g):
    flat = v.flatten(1)
    return (g[:, None] * flat / torch.linalg.vector_norm(flat, dim=1, keepdim=True)).view(v.shape)


SWEEP = [{"O": 4096, "I": 1024, "taps": 7}, {"O": 511, "I": 1025, "taps": 3}]
SWEEP_CPU = [{"O": 24, "I": 12, "taps": 3}, {"O": 5, "I": 230, "taps": 5}]


def make_args(dims, device="cuda", dtype=torch.float32):
    v = torch.randn(dims["O"], dims["I"], dims["taps"], device=device, dtype=dtype)
    return v, 1 + torch.rand(dims["O"], device=device, dtype=dtype)


# ---- backward ----


@triton.jit
def weight_norm_backward_kernel(v_ptr, g_ptr, r_ptr, dw_ptr, dv_ptr, dg_ptr, N, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    r = tl.load(r_ptr + row)
    products = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, N, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        v = tl.load(v_ptr + row * N + cols, mask=cols < N, other=0.0).to(tl.float32)
        products += v * tl.load(dw_ptr + row * N + cols, mask=cols < N, other=0.0).to(tl.float32)
    dg = tl.sum(products, axis=0) * r
    tl.store(dg_ptr + row, dg.to(dg_ptr.dtype.element_ty))
    scale = tl.load(g_ptr + row).to(tl.float32) * r
    for start in range(0, N, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        vhat = tl.load(v_ptr + row * N + cols, mask=cols < N, other=0.0).to(tl.float32) * r
        dw = tl.load(dw_ptr + row * N + cols, mask=cols < N, other=0.0).to(tl.float32)
        dv = scale * (dw - dg * vhat)
        tl.store(dv_ptr + row * N + cols, dv.to(dv_ptr.dtype.element_ty), mask=cols < N)


class WeightNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, v, g):
        v, g = v.contiguous(), g.contiguous()
        w, r = weight_norm_forward(v, g)
        ctx.save_for_backward(v, g, r)
        return w

    @staticmethod
    def backward(ctx, dw):
        v, g, r = ctx.saved_tensors
        M, N = v.shape[0], v[0].numel()
        dv, dg = torch.empty_like(v), torch.empty_like(g)
        BLOCK = min(1024, triton.next_power_of_2(N))
        weight_norm_backward_kernel[(M,)](v, g, r, dw.contiguous(), dv, dg, N, BLOCK=BLOCK)
        return dv if ctx.needs_input_grad[0] else None, dg if ctx.needs_input_grad[1] else None


def weight_norm_autograd(v, g):
    return WeightNorm.apply(v, g)
