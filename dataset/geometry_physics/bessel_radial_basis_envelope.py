"""Radial basis of edges: Bessel functions with learned frequencies, under an envelope that ends smoothly.

Forward    r = (|x|^2 + eps)^(1/2),  u = r / cutoff;   h(u) = 1 - 28 u^6 + 48 u^7 - 21 u^8 for u < 1, else 0;
           y_k = A sin(f_k u),   A = (2 / cutoff)^(1/2) h(u) / r
Backward   dA/dr = (2 / cutoff)^(1/2) (h'(u) / cutoff - h(u) / r) / r,   h'(u) = -168 u^5 (1 - u)^2;
           dr = sum_k dy_k (dA/dr sin(f_k u) + A f_k cos(f_k u) / cutoff),   dx = dr x / r;
           df_k = sum over edges of dy_k A u cos(f_k u)

Forward schedule: a program owns a tile of edges and all K functions; h and A are made once for an edge.
Backward schedule: an edge's K gradients end in one number dr and then in three, so dx has the forward's
owner, who reduces over k in registers. f is read by all edges: a program walks a part of them, keeps K sums
in registers from the cosines that dr needs in any case, and stores them in a slot; one more kernel adds the
slots. Sines and cosines are made anew; K numbers an edge would be more to load than they are to compute.

op: radial_basis
schedule: row_reduce_correct, partials_then_reduce, recompute_from_stats
difficulty: 3
dtypes: fp32
"""

import math

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


EDGES = 32


@triton.jit
def load_edges(x_ptr, e, E, cutoff, eps):
    """The vectors, their lengths, u, h(u) and h'(u)."""
    x = tl.load(x_ptr + 3 * e, mask=e < E, other=0.0)
    y = tl.load(x_ptr + 3 * e + 1, mask=e < E, other=0.0)
    z = tl.load(x_ptr + 3 * e + 2, mask=e < E, other=0.0)
    r = tl.sqrt(x * x + y * y + z * z + eps)
    u = r / cutoff
    u5 = u * u * u * u * u
    h = tl.where(u < 1, 1 - u5 * u * (28 - 48 * u + 21 * u * u), 0.0)
    return x, y, z, r, u, h, tl.where(u < 1, -168 * u5 * (1 - u) * (1 - u), 0.0)


@triton.jit
def basis_kernel(x_ptr, f_ptr, y_ptr, E, K, cutoff, root, eps, EDGES: tl.constexpr, BLOCK_K: tl.constexpr):
    e, k = tl.program_id(0).to(tl.int64) * EDGES + tl.arange(0, EDGES), tl.arange(0, BLOCK_K)
    _, _, _, r, u, h, _ = load_edges(x_ptr, e, E, cutoff, eps)
    f = tl.load(f_ptr + k, mask=k < K, other=0.0)
    y = (root * h / r)[:, None] * tl.sin(f[None, :] * u[:, None])
    tl.store(y_ptr + e[:, None] * K + k[None, :], y, mask=(e[:, None] < E) & (k[None, :] < K))


@autodiff(inputs_require_grad=(0, 1))
def radial_basis(x, f, cutoff=5.0, eps=1e-6):
    """x: float32 (E, 3), the edges' vectors; f: float32 (K), at first the multiples of pi; gives (E, K)."""
    E, K = x.shape[0], f.numel()
    if K > 256 or cutoff <= 0:
        raise ValueError(f"{K} functions do not fit one tile, or the cutoff {cutoff} is no length")
    y = torch.empty((E, K), device=x.device, dtype=x.dtype)
    basis_kernel[(triton.cdiv(E, EDGES),)](
        x.contiguous(), f.contiguous(), y, E, K, cutoff, math.sqrt(2 / cutoff), eps,
        EDGES=EDGES, BLOCK_K=triton.next_power_of_2(K),
    )  # fmt: skip
    return y


def reference(x, f, cutoff=5.0, eps=1e-6):
    r = (x.pow(2).sum(-1, keepdim=True) + eps).sqrt()
    u = r / cutoff
    h = torch.where(u < 1, 1 - 28 * u**6 + 48 * u**7 - 21 * u**8, 0.0)
    return math.sqrt(2 / cutoff) * h / r * torch.sin(f * u)


SWEEP = [{"E": 2000000, "K": 8}, {"E": 300007, "K": 20}]
SWEEP_CPU = [{"E": 45, "K": 8}, {"E": 100, "K": 5}]


def make_args(dims, device="cuda", dtype=torch.float32):
    """Lengths around half of the cutoff, a few beyond it."""
    x = 1.6 * torch.randn(dims["E"], 3, device=device, dtype=dtype)
    return x, math.pi * torch.arange(1, dims["K"] + 1, device=device, dtype=dtype)


# ---- backward ----


@triton.jit
def basis_backward_kernel(
    x_ptr, f_ptr, dy_ptr, dx_ptr, slots_ptr, E, K, part, cutoff, root, eps,
    EDGES: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    slot, k = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK_K)
    f = tl.load(f_ptr + k, mask=k < K, other=0.0)
    df = tl.zeros([EDGES, BLOCK_K], dtype=tl.float32)
    for start in range(slot * part, tl.minimum((slot + 1) * part, E), EDGES):
        e = start + tl.arange(0, EDGES)
        x, y, z, r, u, h, slope = load_edges(x_ptr, e, E, cutoff, eps)
        mask = (e[:, None] < E) & (k[None, :] < K)
        g = tl.load(dy_ptr + e[:, None] * K + k[None, :], mask=mask, other=0.0)
        A, dA = root * h / r, root * (slope / cutoff - h / r) / r
        angle = f[None, :] * u[:, None]
        bent = g * A[:, None] * tl.cos(angle)
        df += bent * u[:, None]
        dr = tl.sum(g * dA[:, None] * tl.sin(angle) + bent * f[None, :] / cutoff, axis=1) / r
        tl.store(dx_ptr + 3 * e, dr * x, mask=e < E)
        tl.store(dx_ptr + 3 * e + 1, dr * y, mask=e < E)
        tl.store(dx_ptr + 3 * e + 2, dr * z, mask=e < E)
    tl.store(slots_ptr + slot * K + k, tl.sum(df, axis=0), mask=k < K)


@triton.jit
def sum_slots_kernel(slots_ptr, df_ptr, count, K, SLOTS: tl.constexpr):
    k = tl.program_id(0)
    total = tl.zeros([SLOTS], dtype=tl.float32)
    for start in range(0, count, SLOTS):
        slot = start + tl.arange(0, SLOTS)
        total += tl.load(slots_ptr + slot * K + k, mask=slot < count, other=0.0)
    tl.store(df_ptr + k, tl.sum(total, axis=0))


class RadialBasis(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, f, cutoff, eps):
        x, f = x.contiguous(), f.contiguous()
        ctx.save_for_backward(x, f)
        ctx.constants = cutoff, math.sqrt(2 / cutoff), eps
        return radial_basis(x, f, cutoff, eps)

    @staticmethod
    def backward(ctx, dy):
        x, f = ctx.saved_tensors
        E, K, needs = x.shape[0], f.numel(), ctx.needs_input_grad
        part = triton.cdiv(max(1, E), 1024 * EDGES) * EDGES  # 1024 parts at most
        count = triton.cdiv(E, part)
        dx, df = torch.empty_like(x), torch.empty_like(f)
        slots = torch.empty((count, K), device=x.device, dtype=torch.float32)
        basis_backward_kernel[(count,)](
            x, f, dy.contiguous(), dx, slots, E, K, part, *ctx.constants,
            EDGES=EDGES, BLOCK_K=triton.next_power_of_2(K),
        )  # fmt: skip
        if needs[1]:
            sum_slots_kernel[(K,)](slots, df, count, K, SLOTS=128)
        return dx if needs[0] else None, df if needs[1] else None, None, None


def radial_basis_autograd(x, f, cutoff=5.0, eps=1e-6):
    return RadialBasis.apply(x, f, cutoff, eps)
