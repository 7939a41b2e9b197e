"""Running products of 2 x 2 matrices: transfer matrices, chains of rotations, lenses one behind another.

Forward    P_t = M_t P_{t-1},  P_{-1} = I
Backward   with G_t the gradient of P_t along all paths:  G_t = dP_t + M_{t+1}^T G_{t+1},
           dM_t = G_t P_{t-1}^T

Forward schedule: a lane owns a sequence with the four numbers of P in registers and walks time. Matrices do
not commute, and there is no inverse to lean on: P_t is stored as it comes, being the output.
Backward schedule: the same lanes walk back with the four numbers of G. P_{t-1} is read from the output, so
that nothing is recomputed, and M_t^T is applied on the way to the next step, so that a singular M does no
harm (dM_t = M_t^{-T} (..) would divide by its determinant). Time is the outer axis in memory: neighbouring
lanes read neighbouring matrices.

op: matrix_prefix_scan
schedule: reverse_scan
difficulty: 3
dtypes: fp32
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


@triton.jit
def load_matrix(ptr, i, mask):
    a, b = tl.load(ptr + 4 * i, mask=mask, other=0.0), tl.load(ptr + 4 * i + 1, mask=mask, other=0.0)
    c, d = tl.load(ptr + 4 * i + 2, mask=mask, other=0.0), tl.load(ptr + 4 * i + 3, mask=mask, other=0.0)
    return a, b, c, d


@triton.jit
def store_matrix(ptr, i, a, b, c, d, mask):
    tl.store(ptr + 4 * i, a, mask=mask)
    tl.store(ptr + 4 * i + 1, b, mask=mask)
    tl.store(ptr + 4 * i + 2, c, mask=mask)
    tl.store(ptr + 4 * i + 3, d, mask=mask)


@triton.jit
def product(a, b, c, d, e, f, g, h):
    """(a b; c d) (e f; g h)"""
    return a * e + b * g, a * f + b * h, c * e + d * g, c * f + d * h


@triton.jit
def prefix_kernel(m_ptr, p_ptr, T, B, BLOCK: tl.constexpr):
    lane = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = lane < B
    pa = tl.full([BLOCK], 1.0, dtype=tl.float32)
    pb = tl.zeros([BLOCK], dtype=tl.float32)
    pc = tl.zeros([BLOCK], dtype=tl.float32)
    pd = tl.full([BLOCK], 1.0, dtype=tl.float32)
    for t in range(T):
        i = tl.cast(t, tl.int64) * B + lane
        a, b, c, d = load_matrix(m_ptr, i, mask)
        pa, pb, pc, pd = product(a, b, c, d, pa, pb, pc, pd)
        store_matrix(p_ptr, i, pa, pb, pc, pd, mask)


@autodiff(inputs_require_grad=(0,))
def matrix_prefix(m):
    """m: (T, B, 2, 2), float32; gives all P, of the same shape."""
    m = m.contiguous()
    T, B = m.shape[:2]
    if m.shape[2:] != (2, 2):
        raise ValueError(f"matrices of {tuple(m.shape[2:])} are not 2 x 2")
    p = torch.empty_like(m)
    prefix_kernel[(triton.cdiv(B, 64),)](m, p, T, B, BLOCK=64)
    return p


def reference(m):
    p, steps = torch.eye(2, device=m.device, dtype=m.dtype).expand(m.shape[1:]), []
    for m_t in m:
        p = m_t @ p
        steps.append(p)
    return torch.stack(steps)


SWEEP = [{"T": 256, "B": 16384}, {"T": 101, "B": 4099}]
SWEEP_CPU = [{"T": 14, "B": 33}, {"T": 5, "B": 70}]


def make_args(dims, device="cuda", dtype=torch.float32):
    angle = torch.randn(dims["T"], dims["B"], device=device, dtype=dtype)
    sin, cos = angle.sin(), angle.cos()
    m = torch.stack([cos, -sin, sin, cos], dim=-1).reshape(*angle.shape, 2, 2)
    return (m + 0.05 * torch.randn_like(m),)


# ---- backward ----


@triton.jit
def prefix_backward_kernel(m_ptr, p_ptr, dp_ptr, dm_ptr, T, B, BLOCK: tl.constexpr):
    lane = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = lane < B
    ga = tl.zeros([BLOCK], dtype=tl.float32)  # M_{t+1}^T G_{t+1}, then G_t
    gb = tl.zeros([BLOCK], dtype=tl.float32)
    gc = tl.zeros([BLOCK], dtype=tl.float32)
    gd = tl.zeros([BLOCK], dtype=tl.float32)
    for back in range(T):
        t = T - 1 - back
        i = tl.cast(t, tl.int64) * B + lane
        a, b, c, d = load_matrix(dp_ptr, i, mask)
        ga, gb, gc, gd = ga + a, gb + b, gc + c, gd + d
        a, b, c, d = load_matrix(p_ptr, i - B, mask & (t > 0))
        a, d = tl.where(t > 0, a, 1.0), tl.where(t > 0, d, 1.0)
        a, b, c, d = product(ga, gb, gc, gd, a, c, b, d)
        store_matrix(dm_ptr, i, a, b, c, d, mask)
        a, b, c, d = load_matrix(m_ptr, i, mask)
        ga, gb, gc, gd = product(a, c, b, d, ga, gb, gc, gd)


class MatrixPrefix(torch.autograd.Function):
    @staticmethod
    def forward(ctx, m):
        m = m.contiguous()
        p = matrix_prefix(m)
        ctx.save_for_backward(m, p)
        return p

    @staticmethod
    def backward(ctx, dp):
        m, p = ctx.saved_tensors
        T, B = m.shape[:2]
        dm = torch.empty_like(m)
        prefix_backward_kernel[(triton.cdiv(B, 64),)](m, p, dp.contiguous(), dm, T, B, BLOCK=64)
        return dm


def matrix_prefix_autograd(m):
    return MatrixPrefix.apply(m)
