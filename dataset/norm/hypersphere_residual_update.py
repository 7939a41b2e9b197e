"""Residual on the hypersphere: a unit vector moves towards a layer's result, by a learned step a channel.

Forward    fhat = f p,  p = (|f|^2 + eps)^(-1/2);   u = h + a (fhat - h);   y = u r,  r = (|u|^2 + eps)^(-1/2)
           f a layer's result, h the residual, rows of N; a (N) the steps
Backward   du = r (dy - y <dy, y>)   (a unit row lets through what is at right angles to it);
           dh = du (1 - a),   da = sum over rows of du (fhat - h),
           with k = du a:   df = p (k - fhat <k, fhat>)

Forward schedule: a program owns a row through both normalisations. p and r are saved, two numbers a row.
Backward schedule: G programs walk the rows pid, pid + G, ... A row has two projections, one after the other:
the second's result, u's gradient, must be whole before the first's row sum begins. With the row in registers
that is an order of statements, where kernels of single operations would store du, k and fhat between
launches. Only p and r are kept beside the inputs: f and h are read anyway, and fhat and y are made of them
again. The output would save nothing, and it is rounded: <dy, y> and dy nearly cancel in a short row, where
dy - y <dy, y> would be what rounding left. da is carried over a program's rows, and a second kernel adds G
parts.

op: hypersphere_update
schedule: row_reduce_correct, partials_then_reduce, recompute_from_stats
difficulty: 3
dtypes: fp32, fp16, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


def tile_of(N):
    """A whole row in one tile, and warps enough to hold it in registers."""
    BLOCK = triton.next_power_of_2(N)
    return {"BLOCK": BLOCK, "num_warps": min(16, max(4, BLOCK // 512))}


@triton.jit
def load_row(ptr, row, cols, N):
    return tl.load(ptr + row * N + cols, mask=cols < N, other=0.0).to(tl.float32)


@triton.jit
def store_row(ptr, value, row, cols, N):
    tl.store(ptr + row * N + cols, value.to(ptr.dtype.element_ty), mask=cols < N)


@triton.jit
def update_kernel(f_ptr, h_ptr, a_ptr, y_ptr, p_ptr, r_ptr, N, eps, BLOCK: tl.constexpr):
    row, cols = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    f, h = load_row(f_ptr, row, cols, N), load_row(h_ptr, row, cols, N)
    p = tl.rsqrt(tl.sum(f * f, axis=0) + eps)
    u = h + load_row(a_ptr, 0, cols, N) * (f * p - h)
    r = tl.rsqrt(tl.sum(u * u, axis=0) + eps)
    tl.store(p_ptr + row, p)
    tl.store(r_ptr + row, r)
    store_row(y_ptr, u * r, row, cols, N)


def update_forward(f, h, a, eps):
    M, N = f.shape
    if h.shape != f.shape or a.shape != (N,) or N > 16384:
        raise ValueError(f"f {tuple(f.shape)}, h {tuple(h.shape)}, a {tuple(a.shape)}: rows of at most 16384")
    y = torch.empty_like(f)
    p, r = (torch.empty(M, device=f.device, dtype=torch.float32) for _ in range(2))
    update_kernel[(M,)](f, h, a, y, p, r, N, eps, **tile_of(N))
    return y, p, r


@autodiff(inputs_require_grad=(0, 1, 2))
def hypersphere_update(f, h, a, eps=1e-6):
    """f, h: (M, N); a: (N); gives (M, N)."""
    return update_forward(f.contiguous(), h.contiguous(), a.contiguous(), eps)[0]


def reference(f, h, a, eps=1e-6):
    fhat = f * torch.rsqrt(f.pow(2).sum(1, keepdim=True) + eps)
    u = h + a * (fhat - h)
    return u * torch.rsqrt(u.pow(2).sum(1, keepdim=True) + eps)


SWEEP = [{"M": 8192, "N": 4096}, {"M": 4099, "N": 2300}]
SWEEP_CPU = [{"M": 27, "N": 60}, {"M": 135, "N": 9}]


def make_args(dims, device="cuda", dtype=torch.float32):
    M, N = dims["M"], dims["N"]
    f = torch.randn(M, N, device=device, dtype=dtype)
    h = torch.nn.functional.normalize(torch.randn(M, N, device=device), dim=1).to(dtype)
    return f, h, torch.rand(N, device=device, dtype=dtype)


# ---- backward ----

MAX_GROUPS = 128  # about one program a multiprocessor


@triton.jit
def update_backward_kernel(
    f_ptr, h_ptr, a_ptr, p_ptr, r_ptr, dy_ptr, df_ptr, dh_ptr, parts_ptr, M, N, BLOCK: tl.constexpr
):
    pid, cols = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    a = load_row(a_ptr, 0, cols, N)
    da = tl.zeros([BLOCK], dtype=tl.float32)
    for row in range(pid, M, tl.num_programs(0)):
        p, r = tl.load(p_ptr + row), tl.load(r_ptr + row)
        fhat, h = load_row(f_ptr, row, cols, N) * p, load_row(h_ptr, row, cols, N)
        y, dy = (h + a * (fhat - h)) * r, load_row(dy_ptr, row, cols, N)
        du = r * (dy - y * tl.sum(dy * y, axis=0))
        k = du * a
        store_row(dh_ptr, du - k, row, cols, N)
        store_row(df_ptr, p * (k - fhat * tl.sum(k * fhat, axis=0)), row, cols, N)
        da += du * (fhat - h)
    store_row(parts_ptr, da, pid, cols, N)


@triton.jit
def sum_parts_kernel(parts_ptr, da_ptr, G, N, BLOCK_G: tl.constexpr, BLOCK_N: tl.constexpr):
    cols = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    da = tl.zeros([BLOCK_G, BLOCK_N], dtype=tl.float32)
    for start in range(0, G, BLOCK_G):
        part = start + tl.arange(0, BLOCK_G)
        mask = (part[:, None] < G) & (cols[None, :] < N)
        da += tl.load(parts_ptr + part[:, None] * N + cols[None, :], mask=mask, other=0.0)
    tl.store(da_ptr + cols, tl.sum(da, axis=0).to(da_ptr.dtype.element_ty), mask=cols < N)


class HypersphereUpdate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, f, h, a, eps):
        f, h, a = f.contiguous(), h.contiguous(), a.contiguous()
        y, p, r = update_forward(f, h, a, eps)
        ctx.save_for_backward(f, h, a, p, r)
        return y

    @staticmethod
    def backward(ctx, dy):
        f, h, a, p, r = ctx.saved_tensors
        (M, N), needs = f.shape, ctx.needs_input_grad
        G = min(M, MAX_GROUPS)
        df, dh, da = (torch.empty_like(t) for t in (f, h, a))
        parts = torch.empty((G, N), device=f.device, dtype=torch.float32)
        update_backward_kernel[(G,)](f, h, a, p, r, dy.contiguous(), df, dh, parts, M, N, **tile_of(N))
        if needs[2]:
            sum_parts_kernel[(triton.cdiv(N, 64),)](parts, da, G, N, BLOCK_G=32, BLOCK_N=64)
        return df if needs[0] else None, dh if needs[1] else None, da if needs[2] else None, None


def hypersphere_update_autograd(f, h, a, eps=1e-6):
    return HypersphereUpdate.apply(f, h, a, eps)
