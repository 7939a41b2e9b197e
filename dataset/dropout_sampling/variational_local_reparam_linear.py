"""Bayesian linear layer: weights with a mean and a deviation, and the noise drawn where it ends, on outputs.

Forward    m = x M^T,  v = x^2 (S^2)^T, squares by elements: mean and variance of a product with weights
           M_nk + S_nk times a normal number;   y = m + d eps,  d = (v + tiny)^(1/2), eps the noise of a seed
Backward   dm = dy,  and with q = eps / (2 d):  dv = dy q =: h;
           dx = dy M + 2 x (h S^2),   dM = dy^T x,   dS = 2 S (h^T x^2)

Forward schedule: a program owns a tile of y and walks k with two accumulators: x and M, S are loaded once and
squared in registers for the second product. Of the noise and the root q is stored, and neither of them: that
one number is all that the backward asks of both.
Backward schedule: four products, by two kernels. dx's owner walks n and loads dy once, with q beside it, for
the two products that end in dx; its x waits for the epilogue, as the factor 2 x_mk is outside the sum over n.
The owner of a weight tile walks m and makes dM and dS in one go, with S again left for the epilogue. h, x^2
and S^2 are made on load, never stored.

op: bayes_linear
schedule: swap_owner, index_or_seed_replay
difficulty: 4
dtypes: fp32, bf16
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
def load_tile(ptr, rows, cols, R, C):
    mask = (rows[:, None] < R) & (cols[None, :] < C)
    return tl.load(ptr + rows[:, None].to(tl.int64) * C + cols[None, :], mask=mask, other=0.0)


@triton.jit
def store_tile(ptr, value, rows, cols, R, C):
    mask = (rows[:, None] < R) & (cols[None, :] < C)
    offs = rows[:, None].to(tl.int64) * C + cols[None, :]
    tl.store(ptr + offs, value.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def square(value):
    wide = value.to(tl.float32)
    return (wide * wide).to(value.dtype)


@triton.jit
def bayes_kernel(
    x_ptr, mean_ptr, s_ptr, y_ptr, q_ptr, M, N, K, tiny, seed, PRECISION: tl.constexpr, BLOCK: tl.constexpr
):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    m = tl.zeros([BLOCK, BLOCK], dtype=tl.float32)
    v = tl.zeros([BLOCK, BLOCK], dtype=tl.float32)
    for start in range(0, K, BLOCK):
        k = start + tl.arange(0, BLOCK)
        x = load_tile(x_ptr, i, k, M, K)
        m = tl.dot(x, tl.trans(load_tile(mean_ptr, n, k, N, K)), m, input_precision=PRECISION)
        s = tl.trans(load_tile(s_ptr, n, k, N, K))
        v = tl.dot(square(x), square(s), v, input_precision=PRECISION)
    d = tl.sqrt(v + tiny)
    eps = tl.randn(seed, i[:, None].to(tl.int64) * N + n[None, :])
    store_tile(y_ptr, m + d * eps, i, n, M, N)
    store_tile(q_ptr, 0.5 * eps / d, i, n, M, N)


def bayes_forward(x, mean, s, seed, tiny):
    (M, K), N, tiles = x.shape, mean.shape[0], tiling(x)
    if mean.shape != s.shape or mean.shape[1] != K:
        raise ValueError(f"x {tuple(x.shape)}, means {tuple(mean.shape)}, deviations {tuple(s.shape)}")
    y = torch.empty((M, N), device=x.device, dtype=x.dtype)
    q = torch.empty((M, N), device=x.device, dtype=torch.float32)
    grid = (triton.cdiv(M, tiles["BLOCK"]), triton.cdiv(N, tiles["BLOCK"]))
    bayes_kernel[grid](x, mean, s, y, q, M, N, K, tiny, seed, **tiles)
    return y, q


@autodiff(inputs_require_grad=(0, 1, 2))
def bayes_linear(x, mean, s, seed, tiny=1e-6):
    """x: (M, K); mean, s: (N, K)."""
    return bayes_forward(x.contiguous(), mean.contiguous(), s.contiguous(), seed, tiny)[0]


@triton.jit
def noise_kernel(out_ptr, n, seed, BLOCK: tl.constexpr):
    """eps alone, for the reference."""
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + offs, tl.randn(seed, offs), mask=offs < n)


def reference(x, mean, s, seed, tiny=1e-6):
    eps = torch.empty((x.shape[0], mean.shape[0]), device=x.device)
    noise_kernel[(triton.cdiv(eps.numel(), 256),)](eps, eps.numel(), seed, BLOCK=256)
    return x @ mean.t() + (x.square() @ s.square().t() + tiny).sqrt() * eps.to(x.dtype)


SWEEP = [{"M": 8192, "K": 2048, "N": 2048}, {"M": 1501, "K": 700, "N": 1030}]
SWEEP_CPU = [{"M": 22, "K": 40, "N": 28}, {"M": 50, "K": 17, "N": 35}]


def make_args(dims, device="cuda", dtype=torch.float32):
    M, K, N = (dims[name] for name in "MKN")
    x = torch.randn(M, K, device=device, dtype=dtype)
    mean = torch.randn(N, K, device=device, dtype=dtype) / max(1, K) ** 0.5
    s = (0.2 + 0.2 * torch.rand(N, K, device=device, dtype=dtype)) / max(1, K) ** 0.5
    return (x, mean, s), {"seed": 20}


# ---- backward ----


@triton.jit
def load_dm_dv(dy_ptr, q_ptr, i, n, M, N):
    dy = load_tile(dy_ptr, i, n, M, N)
    return dy, (dy.to(tl.float32) * load_tile(q_ptr, i, n, M, N)).to(dy.dtype)


@triton.jit
def dx_kernel(
    x_ptr, mean_ptr, s_ptr, dy_ptr, q_ptr, dx_ptr, M, N, K, PRECISION: tl.constexpr, BLOCK: tl.constexpr
):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    dx = tl.zeros([BLOCK, BLOCK], dtype=tl.float32)
    dx2 = tl.zeros([BLOCK, BLOCK], dtype=tl.float32)
    for start in range(0, N, BLOCK):
        n = start + tl.arange(0, BLOCK)
        dy, h = load_dm_dv(dy_ptr, q_ptr, i, n, M, N)
        dx = tl.dot(dy, load_tile(mean_ptr, n, k, N, K), dx, input_precision=PRECISION)
        dx2 = tl.dot(h, square(load_tile(s_ptr, n, k, N, K)), dx2, input_precision=PRECISION)
    x = load_tile(x_ptr, i, k, M, K).to(tl.float32)
    store_tile(dx_ptr, dx + 2 * x * dx2, i, k, M, K)


@triton.jit
def weights_kernel(
    x_ptr, s_ptr, dy_ptr, q_ptr, dmean_ptr, ds_ptr, M, N, K, PRECISION: tl.constexpr, BLOCK: tl.constexpr
):
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    dmean = tl.zeros([BLOCK, BLOCK], dtype=tl.float32)
    ds2 = tl.zeros([BLOCK, BLOCK], dtype=tl.float32)
    for start in range(0, M, BLOCK):
        i = start + tl.arange(0, BLOCK)
        dy, h = load_dm_dv(dy_ptr, q_ptr, i, n, M, N)
        x = load_tile(x_ptr, i, k, M, K)
        dmean = tl.dot(tl.trans(dy), x, dmean, input_precision=PRECISION)
        ds2 = tl.dot(tl.trans(h), square(x), ds2, input_precision=PRECISION)
    s = load_tile(s_ptr, n, k, N, K).to(tl.float32)
    store_tile(dmean_ptr, dmean, n, k, N, K)
    store_tile(ds_ptr, 2 * s * ds2, n, k, N, K)


class BayesLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, mean, s, seed, tiny):
        x, mean, s = x.contiguous(), mean.contiguous(), s.contiguous()
        y, q = bayes_forward(x, mean, s, seed, tiny)
        ctx.save_for_backward(x, mean, s, q)
        return y

    @staticmethod
    def backward(ctx, dy):
        x, mean, s, q = ctx.saved_tensors
        (M, K), N, tiles, needs = x.shape, mean.shape[0], tiling(x), ctx.needs_input_grad
        dy, dx, dmean, ds = dy.contiguous(), None, None, None
        count_m, count_n, count_k = (triton.cdiv(size, tiles["BLOCK"]) for size in (M, N, K))
        if needs[0]:
            dx = torch.empty_like(x)
            dx_kernel[(count_m, count_k)](x, mean, s, dy, q, dx, M, N, K, **tiles)
        if needs[1] or needs[2]:
            dmean, ds = torch.empty_like(mean), torch.empty_like(s)
            weights_kernel[(count_n, count_k)](x, s, dy, q, dmean, ds, M, N, K, **tiles)
        return dx, dmean if needs[1] else None, ds if needs[2] else None, None, None


def bayes_linear_autograd(x, mean, s, seed, tiny=1e-6):
    return BayesLinear.apply(x, mean, s, seed, tiny)
