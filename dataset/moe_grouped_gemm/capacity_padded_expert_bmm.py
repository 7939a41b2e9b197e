"""Expert product on padded buffers: each expert has room for C rows and uses the first of them.

Forward    Y_ei = X_ei W_e for i < n_e, and 0 for the padding n_e <= i < C;   X (E, C, K), W (E, K, N)
Backward   dX_ei = dY_ei W_e^T for i < n_e, and 0 for the padding;   dW_e = sum over i < n_e of X_ei^T dY_ei

Forward schedule: a program owns (expert, tile of C x N). A tile of padding alone skips its walk of K and
stores zeros; a tile at the border masks rows on load, so the padding may hold anything, NaN included.
Backward schedule: dX is the same kernel on W read transposed: the padding of dY is masked on load, and that
of dX is stored as the zeros that its gradient is. dW needs another owner: (expert, tile of K x N) walks the
rows. The length of its walk is n_e, read from the counts, not C: at a capacity factor of 2 half of all row
tiles are padding, and nobody reads them. An expert without rows walks none and stores zeros. No atomics, no
table of tiles; the price of that simplicity is the memory of the padding.

op: capacity_bmm
schedule: swap_owner
difficulty: 3
dtypes: fp32, fp16, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


def tiling(x):
    """Tiles and the precision of dots: products of whole float32 numbers want small tiles."""
    PRECISION = "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee"
    return {"PRECISION": PRECISION, "BLOCK": 32 if x.dtype == torch.float32 else 64}


@triton.jit
def load_tile(ptr, rows, cols, R, C, stride_r, stride_c):
    mask = (rows[:, None] < R) & (cols[None, :] < C)
    offs = rows[:, None].to(tl.int64) * stride_r + cols[None, :].to(tl.int64) * stride_c
    return tl.load(ptr + offs, mask=mask, other=0.0)


@triton.jit
def padded_kernel(
    x_ptr, w_ptr, counts_ptr, y_ptr, C, N, K, stride_we, stride_wk, stride_wn,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    expert = tl.program_id(2).to(tl.int64)
    rows = tl.minimum(tl.load(counts_ptr + expert), C)
    first = tl.program_id(0) * BLOCK
    i = first + tl.arange(0, BLOCK)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    y = tl.zeros([BLOCK, BLOCK], dtype=tl.float32)
    for start in range(0, tl.where(first < rows, K, 0), BLOCK):
        k = start + tl.arange(0, BLOCK)
        x = load_tile(x_ptr + expert * C * K, i, k, rows, K, K, 1)
        w = load_tile(w_ptr + expert * stride_we, k, n, K, N, stride_wk, stride_wn)
        y = tl.dot(x, w, y, input_precision=PRECISION)
    offs = (expert * C + i[:, None]) * N + n[None, :]
    tl.store(y_ptr + offs, y.to(y_ptr.dtype.element_ty), mask=(i[:, None] < C) & (n[None, :] < N))


def padded_product(x, w, counts):
    """Rows of every expert by its weight; w may be a transposed view."""
    (E, C, K), N, tiles = x.shape, w.shape[2], tiling(x)
    y = torch.empty((E, C, N), device=x.device, dtype=x.dtype)
    grid = (triton.cdiv(C, tiles["BLOCK"]), triton.cdiv(N, tiles["BLOCK"]), E)
    padded_kernel[grid](x, w, counts, y, C, N, K, *w.stride(), **tiles)
    return y


@autodiff(inputs_require_grad=(0, 1))
def capacity_bmm(x, w, counts):
    """x: (E, C, K); w: (E, K, N); counts: int64 (E), rows in use of each expert."""
    if w.shape[:2] != (x.shape[0], x.shape[2]) or counts.shape[0] != x.shape[0]:
        raise ValueError(f"x {tuple(x.shape)}, w {tuple(w.shape)} and {counts.shape[0]} counts do not fit")
    return padded_product(x.contiguous(), w, counts.contiguous())


def reference(x, w, counts):
    used = torch.arange(x.shape[1], device=x.device) < counts[:, None]
    return torch.bmm(torch.where(used[:, :, None], x, 0.0), w)


SWEEP = [{"E": 8, "C": 2048, "K": 1024, "N": 2048}, {"E": 32, "C": 500, "K": 768, "N": 1000}]
SWEEP_CPU = [{"E": 4, "C": 20, "K": 24, "N": 32}, {"E": 3, "C": 70, "K": 17, "N": 40}]


def make_args(dims, device="cuda", dtype=torch.float32):
    E, C, K, N = (dims[name] for name in ("E", "C", "K", "N"))
    x = torch.randn(E, C, K, device=device, dtype=dtype)
    w = torch.randn(E, K, N, device=device, dtype=dtype) / max(1, K) ** 0.5
    return x, w, torch.randint(0, C + 1, (E,), device=device)


# ---- backward ----


@triton.jit
def dw_kernel(x_ptr, dy_ptr, counts_ptr, dw_ptr, C, N, K, PRECISION: tl.constexpr, BLOCK: tl.constexpr):
    expert = tl.program_id(2).to(tl.int64)
    rows = tl.minimum(tl.load(counts_ptr + expert), C)
    k = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    dw = tl.zeros([BLOCK, BLOCK], dtype=tl.float32)
    for start in range(0, rows, BLOCK):
        i = start + tl.arange(0, BLOCK)
        x = load_tile(x_ptr + expert * C * K, i, k, rows, K, K, 1)
        dy = load_tile(dy_ptr + expert * C * N, i, n, rows, N, N, 1)
        dw = tl.dot(tl.trans(x), dy, dw, input_precision=PRECISION)
    offs = (expert * K + k[:, None]) * N + n[None, :]
    tl.store(dw_ptr + offs, dw.to(dw_ptr.dtype.element_ty), mask=(k[:, None] < K) & (n[None, :] < N))


class CapacityBMM(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, counts):
        x, counts = x.contiguous(), counts.contiguous()
        ctx.save_for_backward(x, w, counts)
        return capacity_bmm(x, w, counts)

    @staticmethod
    def backward(ctx, dy):
        x, w, counts = ctx.saved_tensors
        dy = dy.contiguous()
        (E, C, K), N, tiles = x.shape, w.shape[2], tiling(x)
        dx = dw = None
        if ctx.needs_input_grad[0]:
            dx = padded_product(dy, w.transpose(1, 2), counts)
        if ctx.needs_input_grad[1]:
            dw = torch.empty((E, K, N), device=w.device, dtype=w.dtype)
            grid = (triton.cdiv(K, tiles["BLOCK"]), triton.cdiv(N, tiles["BLOCK"]), E)
            dw_kernel[grid](x, dy, counts, dw, C, N, K, **tiles)
        return dx, dw, None


def capacity_bmm_autograd(x, w, counts):
    return CapacityBMM.apply(x, w, counts)
