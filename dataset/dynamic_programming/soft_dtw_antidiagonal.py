"""Soft dynamic time warping of two sequences of vectors.

Forward    D_ij = |x_i - y_j|^2,  R_ij = D_ij + m_ij,
           m_ij = -g log(e^{-R_i-1,j-1 / g} + e^{-R_i-1,j / g} + e^{-R_i,j-1 / g}),  m_00 = 0;
           l = R_M-1,N-1
Backward   E_ij = dl/dD_ij = dl/dR_ij (D enters R with weight one). R_ij gives its E to the three cells
           before it, in the shares of the softmin, e^{-R_c / g} over the sum of the three; E_ij is the sum
           of the shares that it receives:   dx_i = 2 sum_j E_ij (x_i - y_j),  dy_j = 2 sum_i E_ij (y_j - x_i)

Forward schedule: D is made by owners of its tiles. Then a program owns a pair of sequences; a lane owns a row
i and walks the antidiagonals i + j. Of its three neighbours one is its own last cell, in a register.
Backward schedule: the same lanes walk the antidiagonals back and need R alone, not D. A cell makes its three
shares from the R before it, so that they add up to one; with e^{(m - R) / g} of a saved m they would not, and
a long path would multiply the error. The share to the left stays in the lane, the others pass to the lane
above through scratch, one diagonal and two later. dl enters at the last cell, so that E is the whole gradient
of D; E is stored, because rows and columns both sum over it: two more launches, each owner walking the other
sequence. x - y is formed before the sum: along the path, where E is large, x and y are close.

op: soft_dtw
schedule: reverse_scan, swap_owner
difficulty: 5
dtypes: fp32
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


@triton.jit
def load_tile(ptr, rows, cols, R, C):
    mask = (rows[:, None] < R) & (cols[None, :] < C)
    return tl.load(ptr + rows[:, None] * C + cols[None, :], mask=mask, other=0.0)


@triton.jit
def cost_kernel(x_ptr, y_ptr, d_ptr, M, N, F, BLOCK: tl.constexpr, BLOCK_F: tl.constexpr):
    pair = tl.program_id(2).to(tl.int64)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    j = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    d = tl.zeros([BLOCK, BLOCK], dtype=tl.float32)
    for start in range(0, F, BLOCK_F):
        f = start + tl.arange(0, BLOCK_F)
        x, y = load_tile(x_ptr + pair * M * F, i, f, M, F), load_tile(y_ptr + pair * N * F, j, f, N, F)
        u = x[:, None, :] - y[None, :, :]
        d += tl.sum(u * u, axis=2)
    mask = (i[:, None] < M) & (j[None, :] < N)
    tl.store(d_ptr + (pair * M + i[:, None]) * N + j[None, :], d, mask=mask)


@triton.jit
def walk_kernel(d_ptr, r_ptr, l_ptr, M, N, g, BLOCK: tl.constexpr):
    pair = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    r = tl.full([BLOCK], 1e30, dtype=tl.float32)
    for diagonal in range(M + N - 1):
        tl.debug_barrier()  # lanes read what their neighbours stored
        j = diagonal - i
        there = (i < M) & (j >= 0) & (j < N)
        cell = pair * M * N + i * N + j
        d = tl.load(d_ptr + cell, mask=there, other=0.0)
        corner = tl.load(r_ptr + cell - N - 1, mask=there & (i >= 1) & (j >= 1), other=1e30)
        above = tl.load(r_ptr + cell - N, mask=there & (i >= 1), other=1e30)
        left = tl.where(j >= 1, r, 1e30)
        least = tl.minimum(tl.minimum(corner, above), left)
        total = tl.exp((least - corner) / g) + tl.exp((least - above) / g) + tl.exp((least - left) / g)
        m = tl.where(diagonal == 0, 0.0, least - g * tl.log(total))
        r = tl.where(there, d + m, r)
        tl.store(r_ptr + cell, r, mask=there)
    tl.store(l_ptr + pair, tl.sum(tl.where(i == M - 1, r, 0.0), axis=0))


def soft_dtw_forward(x, y, g):
    (B, M, F), N = x.shape, y.shape[1]
    if y.shape != (B, N, F) or g <= 0 or N < 1 or not 1 <= M <= 1024:
        raise ValueError("need x (B, M, F) and y (B, N, F), M at most 1024, and a positive temperature")
    d, r = (torch.empty((B, M, N), device=x.device, dtype=torch.float32) for _ in range(2))
    l = torch.empty(B, device=x.device, dtype=torch.float32)
    grid = (triton.cdiv(M, 32), triton.cdiv(N, 32), B)
    cost_kernel[grid](x, y, d, M, N, F, BLOCK=32, BLOCK_F=8)
    walk_kernel[(B,)](d, r, l, M, N, g, BLOCK=triton.next_power_of_2(M))
    return l, r


@autodiff(inputs_require_grad=(0, 1))
def soft_dtw(x, y, g=1.0):
    """x: (B, M, F), y: (B, N, F), float32; g: the temperature; gives (B)."""
    return soft_dtw_forward(x.contiguous(), y.contiguous(), g)[0]


def reference(x, y, g=1.0):
    d = (x[:, :, None, :] - y[:, None, :, :]).pow(2).sum(-1)
    r = {}
    for i in range(d.shape[1]):
        for j in range(d.shape[2]):
            before = [r[c] for c in ((i - 1, j - 1), (i - 1, j), (i, j - 1)) if c in r]
            m = -g * torch.logsumexp(torch.stack(before) / -g, 0) if before else 0
            r[i, j] = d[:, i, j] + m
    return r[d.shape[1] - 1, d.shape[2] - 1]


SWEEP = [{"B": 256, "M": 200, "N": 256, "F": 16}, {"B": 67, "M": 501, "N": 333, "F": 9}]
SWEEP_CPU = [{"B": 2, "M": 7, "N": 9, "F": 4}, {"B": 3, "M": 12, "N": 5, "F": 9}]


def make_args(dims, device="cuda", dtype=torch.float32):
    B, M, N, F = (dims[name] for name in ("B", "M", "N", "F"))
    x = torch.randn(B, M, F, device=device, dtype=dtype)
    return x, torch.randn(B, N, F, device=device, dtype=dtype), 0.5 * F


# ---- backward ----


@triton.jit
def walk_back_kernel(r_ptr, dl_ptr, scratch_ptr, e_ptr, M, N, g, BLOCK: tl.constexpr):
    pair = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    dl = tl.load(dl_ptr + pair)
    scratch = scratch_ptr + pair * 6 * BLOCK + i  # shares to above and to the corner, of three diagonals
    to_left = tl.zeros([BLOCK], dtype=tl.float32)
    for step in range(M + N - 1):
        j = M + N - 2 - step - i
        there = (i < M) & (j >= 0) & (j < N)
        cell = pair * M * N + i * N + j
        below = there & (i < M - 1)
        e = to_left + tl.load(scratch + (step + 2) % 3 * 2 * BLOCK + 1, mask=below, other=0.0)
        e += tl.load(scratch + ((step + 1) % 3 * 2 + 1) * BLOCK + 1, mask=below, other=0.0)
        e = tl.where(step == 0, tl.where(there, dl, 0.0), e)
        tl.store(e_ptr + cell, e, mask=there)
        corner = tl.load(r_ptr + cell - N - 1, mask=there & (i >= 1) & (j >= 1), other=1e30)
        above = tl.load(r_ptr + cell - N, mask=there & (i >= 1), other=1e30)
        left = tl.load(r_ptr + cell - 1, mask=there & (j >= 1), other=1e30)
        least = tl.minimum(tl.minimum(corner, above), left)
        corner, above = tl.exp((least - corner) / g), tl.exp((least - above) / g)
        left = tl.exp((least - left) / g)
        share = tl.where(there, e / (corner + above + left), 0.0)
        to_left = share * left
        tl.store(scratch + step % 3 * 2 * BLOCK, share * above)
        tl.store(scratch + (step % 3 * 2 + 1) * BLOCK, share * corner)
        tl.debug_barrier()  # one is enough: no row is written in the step after it was read


@triton.jit
def own_gradient_kernel(
    own_ptr, other_ptr, e_ptr, grad_ptr, M, N, F, own_stride, other_stride,
    BLOCK: tl.constexpr, BLOCK_F: tl.constexpr,
):  # fmt: skip
    """The gradient of sequences of M vectors against N others; E[own, other] has the two strides."""
    pair = tl.program_id(2).to(tl.int64)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    f = tl.program_id(1) * BLOCK_F + tl.arange(0, BLOCK_F)
    own = load_tile(own_ptr + pair * M * F, i, f, M, F)
    grad = tl.zeros([BLOCK, BLOCK_F], dtype=tl.float32)
    for start in range(0, N, BLOCK):
        j = start + tl.arange(0, BLOCK)
        u = own[:, None, :] - load_tile(other_ptr + pair * N * F, j, f, N, F)[None, :, :]
        offs = pair * M * N + i[:, None] * own_stride + j[None, :] * other_stride
        e = tl.load(e_ptr + offs, mask=(i[:, None] < M) & (j[None, :] < N), other=0.0)
        grad += tl.sum(e[:, :, None] * u, axis=1)
    mask = (i[:, None] < M) & (f[None, :] < F)
    tl.store(grad_ptr + pair * M * F + i[:, None] * F + f[None, :], 2 * grad, mask=mask)


class SoftDTW(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y, g):
        x, y = x.contiguous(), y.contiguous()
        l, r = soft_dtw_forward(x, y, g)
        ctx.save_for_backward(x, y, r)
        ctx.g = g
        return l

    @staticmethod
    def backward(ctx, dl):
        x, y, r = ctx.saved_tensors
        (B, M, F), N, e = x.shape, y.shape[1], torch.empty_like(r)
        BLOCK = triton.next_power_of_2(M)
        scratch = torch.zeros((B, 3, 2, BLOCK), device=x.device, dtype=torch.float32)
        walk_back_kernel[(B,)](r, dl.contiguous(), scratch, e, M, N, ctx.g, BLOCK=BLOCK)
        dx = dy = None
        blocks = {"BLOCK": 16, "BLOCK_F": 16}
        if ctx.needs_input_grad[0]:
            dx = torch.empty_like(x)
            grid = (triton.cdiv(M, 16), triton.cdiv(F, 16), B)
            own_gradient_kernel[grid](x, y, e, dx, M, N, F, N, 1, **blocks)
        if ctx.needs_input_grad[1]:
            dy = torch.empty_like(y)
            grid = (triton.cdiv(N, 16), triton.cdiv(F, 16), B)
            own_gradient_kernel[grid](y, x, e, dy, N, M, F, 1, N, **blocks)
        return dx, dy, None


def soft_dtw_autograd(x, y, g=1.0):
    return SoftDTW.apply(x, y, g)
