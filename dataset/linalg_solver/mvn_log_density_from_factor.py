"""Log-density of vectors under Gaussians that are given by the Cholesky factors of their covariances.

Forward    z = L^{-1} r,   l = -z^T z / 2 - sum_i log L_ii - n log(2 pi) / 2;   r: vector less mean
Backward   dz = L^{-1} (dr - dL z) as differentials. With w = L^{-T} z:
           dl = -z^T L^{-1} (dr - dL z) - sum_i dL_ii / L_ii, so
           the gradient of r is  -w,   that of L  tril(w z^T) - diag(1 / L_ii),  each times the upstream

Forward schedule: a program owns a Gaussian and a lane a row; substitution goes down the columns: when z_i is
known, its column times z_i leaves what remains. z is stored.
Backward schedule: the same owner solves the transposed system for w, up the columns of L^T, the rows of L,
with one sum a step. The matrix gradient is an outer product of two vectors in registers, of rank one, so it
costs its own store and nothing else; no inverse, no second solve, and L is read once more, a row a step.

op: mvn_log_density
schedule: adjoint_solve
difficulty: 3
dtypes: fp32
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


@triton.jit
def density_kernel(r_ptr, l_ptr, z_ptr, density_ptr, n, BLOCK: tl.constexpr):
    one = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    z = tl.load(r_ptr + one * n + i, mask=i < n, other=0.0)  # from k on: what remains
    logs = tl.zeros([BLOCK], dtype=tl.float32)
    for k in range(n):
        column = tl.load(l_ptr + (one * n + i) * n + k, mask=(i >= k) & (i < n), other=0.0)
        pivot = tl.sum(tl.where(i == k, column, 0.0), axis=0)
        z_k = tl.sum(tl.where(i == k, z, 0.0), axis=0) / pivot
        z = tl.where(i == k, z_k, z - tl.where(i > k, column, 0.0) * z_k)
        logs = tl.where(i == k, tl.log(pivot), logs)
    tl.store(z_ptr + one * n + i, z, mask=i < n)
    each = tl.where(i < n, 0.5 * z * z + logs + 0.9189385332046727, 0.0)
    tl.store(density_ptr + one, -tl.sum(each, axis=0))


def density_forward(r, l):
    B, n = r.shape
    if l.shape != (B, n, n) or not 1 <= n <= 128:
        raise ValueError("need r (B, n) and l (B, n, n), n from 1 to 128")
    z, density = torch.empty_like(r), torch.empty(B, device=r.device, dtype=r.dtype)
    density_kernel[(B,)](r, l, z, density, n, BLOCK=triton.next_power_of_2(n), num_warps=1)
    return density, z


@autodiff(inputs_require_grad=(0, 1))
def mvn_log_density(r, l):
    """r: (B, n); l: (B, n, n), the lower triangle is read, with a positive diagonal; float32; gives (B)."""
    return density_forward(r.contiguous(), l.contiguous())[0]


def reference(r, l):
    z = torch.linalg.solve_triangular(l.tril(), r[:, :, None], upper=False)[:, :, 0]
    logs = l.diagonal(dim1=1, dim2=2).log()
    return -(0.5 * z.pow(2) + logs + 0.9189385332046727).sum(1)


SWEEP = [{"B": 65536, "n": 32}, {"B": 10007, "n": 75}]
SWEEP_CPU = [{"B": 7, "n": 12}, {"B": 3, "n": 33}]


def make_args(dims, device="cuda", dtype=torch.float32):
    B, n = dims["B"], dims["n"]
    l = torch.randn(B, n, n, device=device, dtype=dtype) / max(1, 2 * n)
    return torch.randn(B, n, device=device, dtype=dtype), l + torch.eye(n, device=device, dtype=dtype)


# ---- backward ----


@triton.jit
def density_backward_kernel(l_ptr, z_ptr, up_ptr, dr_ptr, dl_ptr, n, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    one = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    up = tl.load(up_ptr + one)
    z = tl.load(z_ptr + one * n + i, mask=i < n, other=0.0)
    w = z  # up to k: what remains
    inverse = tl.zeros([BLOCK], dtype=tl.float32)
    for step in range(n):
        k = n - 1 - step
        row = tl.load(l_ptr + (one * n + k) * n + i, mask=i <= k, other=0.0)
        pivot = tl.sum(tl.where(i == k, row, 0.0), axis=0)
        w_k = tl.sum(tl.where(i == k, w, 0.0), axis=0) / pivot
        w = tl.where(i == k, w_k, w - tl.where(i < k, row, 0.0) * w_k)
        inverse = tl.where(i == k, 1 / pivot, inverse)
    tl.store(dr_ptr + one * n + i, -up * w, mask=i < n)
    for start in range(0, n, ROWS):  # a few rows at a time: the outer product needs not fit in registers
        k = start + tl.arange(0, ROWS)
        own = k[:, None] == i[None, :]
        w_rows = tl.sum(tl.where(own, w[None, :], 0.0), axis=1)
        dl = tl.where(i[None, :] <= k[:, None], w_rows[:, None] * z[None, :], 0.0)
        dl -= tl.where(own, inverse[None, :], 0.0)
        mask = (k[:, None] < n) & (i[None, :] < n)
        tl.store(dl_ptr + (one * n + k[:, None]) * n + i[None, :], up * dl, mask=mask)


class MVNLogDensity(torch.autograd.Function):
    @staticmethod
    def forward(ctx, r, l):
        l = l.contiguous()
        density, z = density_forward(r.contiguous(), l)
        ctx.save_for_backward(l, z)
        return density

    @staticmethod
    def backward(ctx, up):
        l, z = ctx.saved_tensors
        (B, n), dr, dl = z.shape, torch.empty_like(z), torch.empty_like(l)
        BLOCK = triton.next_power_of_2(n)
        density_backward_kernel[(B,)](l, z, up.contiguous(), dr, dl, n, BLOCK=BLOCK, ROWS=8, num_warps=1)
        return dr if ctx.needs_input_grad[0] else None, dl if ctx.needs_input_grad[1] else None


def mvn_log_density_autograd(r, l):
    return MVNLogDensity.apply(r, l)
