"""Feature interaction of a recommender: products of all pairs of a sample's vectors, beside the dense one.

Forward    Z (F, D) the vectors of a sample, the first of them from the dense features;  S = Z Z^T;
           y = [Z_0, S_10, S_20, S_21, S_30, ...], D numbers and the F (F - 1) / 2 below the diagonal
Backward   G_ij = dS_ij for i > j, from place i (i - 1) / 2 + j of dy's triangle, and 0 elsewhere. As
           S_ij = <Z_i, Z_j> gives Z_i and Z_j a share each:   dZ = (G + G^T) Z,   and dZ_0 gets the first D
           numbers of dy besides

Forward schedule: a program owns a sample; F and D fit one tile, S is one dot, and the compact triangle is
made by the store: lane (i, j) has an address of its own and a mask i > j.
Backward schedule: the same owner. The triangle is loaded back into a square twice, as (i, j) and as (j, i),
by addresses again; the two never overlap, so their sum G + G^T is the symmetric operand, with zeros on the
diagonal, without a transposition. One dot, and dZ is stored once, with dy's first numbers added to its row 0:
the concatenation has no backward of its own. Samples share nothing, so nothing is reduced across programs.

op: dot_interaction
schedule: row_reduce_correct, gather_transpose
difficulty: 3
dtypes: fp32, fp16, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


def tiling(z):
    F, D = z.shape[1:]
    BLOCK_F, BLOCK_D = (max(16, triton.next_power_of_2(size)) for size in (F, D))
    PRECISION = "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee"
    return {"PRECISION": PRECISION, "BLOCK_F": BLOCK_F, "BLOCK_D": BLOCK_D}


@triton.jit
def triangle_place(i, j):
    """Where S_ij stands for i > j, counted from the first of them."""
    return i[:, None] * (i[:, None] - 1) // 2 + j[None, :]


@triton.jit
def interaction_kernel(
    z_ptr, y_ptr, F, D, PRECISION: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_D: tl.constexpr
):
    sample = tl.program_id(0).to(tl.int64)
    i, j, d = tl.arange(0, BLOCK_F), tl.arange(0, BLOCK_F), tl.arange(0, BLOCK_D)
    inside = (i[:, None] < F) & (d[None, :] < D)
    z = tl.load(z_ptr + sample * F * D + i[:, None] * D + d[None, :], mask=inside, other=0.0)
    s = tl.dot(z, tl.trans(z), input_precision=PRECISION)
    out = y_ptr + sample * (D + F * (F - 1) // 2)
    tl.store(out + d, tl.load(z_ptr + sample * F * D + d, mask=d < D, other=0.0), mask=d < D)
    lower = (i[:, None] > j[None, :]) & (i[:, None] < F)
    tl.store(out + D + triangle_place(i, j), s.to(y_ptr.dtype.element_ty), mask=lower)


@autodiff(inputs_require_grad=(0,))
def dot_interaction(z):
    """z: (B, F, D), at most 64 vectors of at most 256 numbers; gives (B, D + F (F - 1) / 2)."""
    z, (B, F, D) = z.contiguous(), z.shape
    if not 1 <= F <= 64 or D > 256:
        raise ValueError(f"{F} vectors of {D} numbers do not fit one tile")
    y = torch.empty((B, D + F * (F - 1) // 2), device=z.device, dtype=z.dtype)
    interaction_kernel[(B,)](z, y, F, D, **tiling(z))
    return y


def reference(z):
    i, j = torch.tril_indices(z.shape[1], z.shape[1], offset=-1, device=z.device)
    return torch.cat([z[:, 0], (z @ z.transpose(1, 2))[:, i, j]], dim=1)


SWEEP = [{"B": 16384, "F": 27, "D": 128}, {"B": 8191, "F": 40, "D": 50}]
SWEEP_CPU = [{"B": 11, "F": 9, "D": 16}, {"B": 4, "F": 17, "D": 33}]


def make_args(dims, device="cuda", dtype=torch.float32):
    return (torch.randn(dims["B"], dims["F"], dims["D"], device=device, dtype=dtype),)


# ---- backward ----


@triton.jit
def interaction_backward_kernel(
    z_ptr, dy_ptr, dz_ptr, F, D, PRECISION: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_D: tl.constexpr
):
    sample = tl.program_id(0).to(tl.int64)
    i, j, d = tl.arange(0, BLOCK_F), tl.arange(0, BLOCK_F), tl.arange(0, BLOCK_D)
    inside = (i[:, None] < F) & (d[None, :] < D)
    offs = sample * F * D + i[:, None] * D + d[None, :]
    z = tl.load(z_ptr + offs, mask=inside, other=0.0)
    dy = dy_ptr + sample * (D + F * (F - 1) // 2)
    lower = (i[:, None] > j[None, :]) & (i[:, None] < F)
    upper = (i[:, None] < j[None, :]) & (j[None, :] < F)
    mirrored = j[None, :] * (j[None, :] - 1) // 2 + i[:, None]
    both = tl.load(dy + D + triangle_place(i, j), mask=lower, other=0.0)
    both += tl.load(dy + D + mirrored, mask=upper, other=0.0)
    dz = tl.dot(both, z, input_precision=PRECISION)
    dense = tl.load(dy + d, mask=d < D, other=0.0).to(tl.float32)
    dz += tl.where(i[:, None] == 0, dense[None, :], 0.0)
    tl.store(dz_ptr + offs, dz.to(dz_ptr.dtype.element_ty), mask=inside)


class DotInteraction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, z):
        z = z.contiguous()
        ctx.save_for_backward(z)
        return dot_interaction(z)

    @staticmethod
    def backward(ctx, dy):
        (z,) = ctx.saved_tensors
        (B, F, D), dz = z.shape, torch.empty_like(z)
        interaction_backward_kernel[(B,)](z, dy.contiguous(), dz, F, D, **tiling(z))
        return dz


def dot_interaction_autograd(z):
    return DotInteraction.apply(z)
