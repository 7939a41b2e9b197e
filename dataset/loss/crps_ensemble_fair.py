"""Fair continuous ranked probability score of an ensemble forecast, at each point.

Forward    n members x_i and the truth y of a point:
           l = (1 / n) sum_i |x_i - y| - (1 / (2 n (n - 1))) sum_ij |x_i - x_j|
Backward   a member is on both sides of the double sum, so that its factor of 1 / 2 goes:
           dx_i = dl ((1 / n) sgn(x_i - y) - (1 / (n (n - 1))) sum_j sgn(x_i - x_j))

Forward schedule: members are few and points millions, so memory is laid out by members, and a program owns a
tile of points with all of their members, as one [members, points] tile. The other side of the pairs is
walked: member j is a row of the tile's points, in cache from a moment ago, so n^2 pairs cost n loads of a
row.
Backward schedule: the same tile. The sum of signs is a member's rank, which sorting a point's members would
give too, but lanes that hold members of a point would have to exchange them; comparing with each in turn is n
additions without an exchange, and stays pointwise in points. All is compared again and nothing is saved: a
sign of each pair would be larger than the ensemble. A member beside itself, or an equal one, counts 0.

op: crps
schedule: same_tile_pointwise
difficulty: 2
dtypes: fp32, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


def tiling(n, P):
    """The grid and the tile of all members by points."""
    BLOCK_N = triton.next_power_of_2(n)
    BLOCK_P = max(32, 2048 // BLOCK_N)
    return (triton.cdiv(P, BLOCK_P),), {"BLOCK_N": BLOCK_N, "BLOCK_P": BLOCK_P}


@triton.jit
def load_members(x_ptr, i, p, n, P):
    mask = (i[:, None] < n) & (p[None, :] < P)
    return tl.load(x_ptr + i[:, None].to(tl.int64) * P + p[None, :], mask=mask, other=0.0).to(tl.float32)


@triton.jit
def crps_kernel(x_ptr, y_ptr, loss_ptr, n, P, BLOCK_N: tl.constexpr, BLOCK_P: tl.constexpr):
    i = tl.arange(0, BLOCK_N)
    p = tl.program_id(0) * BLOCK_P + tl.arange(0, BLOCK_P)
    x = load_members(x_ptr, i, p, n, P)
    error = x - tl.load(y_ptr + p, mask=p < P, other=0.0).to(tl.float32)[None, :]
    error = tl.where(error > 0, error, -error)
    spread = tl.zeros([BLOCK_N, BLOCK_P], dtype=tl.float32)
    member = x_ptr + p
    for _ in range(n):
        apart = x - tl.load(member, mask=p < P, other=0.0).to(tl.float32)[None, :]
        spread += tl.where(apart > 0, apart, -apart)
        member += P
    terms = tl.where(i[:, None] < n, error / n - spread / (2.0 * n * (n - 1)), 0.0)
    tl.store(loss_ptr + p, tl.sum(terms, axis=0), mask=p < P)


@autodiff(inputs_require_grad=(0,))
def crps(x, y):
    """x: (n, P), n members at P points; y: (P), a constant; gives (P) in float32."""
    n, P = x.shape
    if y.shape != (P,) or not 2 <= n <= 128:
        raise ValueError("an ensemble has 2 to 128 members, and the truth a number for each point")
    loss = torch.empty(P, device=x.device, dtype=torch.float32)
    grid, blocks = tiling(n, P)
    crps_kernel[grid](x.contiguous(), y.contiguous(), loss, n, P, **blocks)
    return loss


def reference(x, y):
    n = x.shape[0]
    error, apart = x - y, x[:, None] - x
    error = torch.where(error > 0, error, -error)
    spread = torch.where(apart > 0, apart, -apart).sum((0, 1))
    return error.mean(0) - spread / (2 * n * (n - 1))


SWEEP = [{"n": 8, "P": 1038243}, {"n": 50, "P": 64800}]
SWEEP_CPU = [{"n": 5, "P": 130}, {"n": 11, "P": 290}]


def make_args(dims, device="cuda", dtype=torch.float32):
    n, P = dims["n"], dims["P"]
    return torch.randn(n, P, device=device, dtype=dtype), torch.randn(P, device=device, dtype=dtype)


# ---- backward ----


@triton.jit
def crps_backward_kernel(
    x_ptr, y_ptr, dloss_ptr, dx_ptr, n, P, BLOCK_N: tl.constexpr, BLOCK_P: tl.constexpr
):  # fmt: skip
    i = tl.arange(0, BLOCK_N)
    p = tl.program_id(0) * BLOCK_P + tl.arange(0, BLOCK_P)
    x = load_members(x_ptr, i, p, n, P)
    error = x - tl.load(y_ptr + p, mask=p < P, other=0.0).to(tl.float32)[None, :]
    rank = tl.zeros([BLOCK_N, BLOCK_P], dtype=tl.float32)
    member = x_ptr + p
    for _ in range(n):
        apart = x - tl.load(member, mask=p < P, other=0.0).to(tl.float32)[None, :]
        rank += tl.where(apart > 0, 1.0, tl.where(apart < 0, -1.0, 0.0))
        member += P
    dloss = tl.load(dloss_ptr + p, mask=p < P, other=0.0)
    dx = dloss[None, :] * (tl.where(error > 0, 1.0, -1.0) / n - rank / (n * (n - 1.0)))
    mask = (i[:, None] < n) & (p[None, :] < P)
    offs = i[:, None].to(tl.int64) * P + p[None, :]
    tl.store(dx_ptr + offs, dx.to(dx_ptr.dtype.element_ty), mask=mask)


class CRPS(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y):
        x, y = x.contiguous(), y.contiguous()
        ctx.save_for_backward(x, y)
        return crps(x, y)

    @staticmethod
    def backward(ctx, dloss):
        x, y = ctx.saved_tensors
        (n, P), dx = x.shape, torch.empty_like(x)
        grid, blocks = tiling(n, P)
        crps_backward_kernel[grid](x, y, dloss.contiguous(), dx, n, P, **blocks)
        return dx, None


def crps_autograd(x, y):
    return CRPS.apply(x, y)
