"""Log-likelihood of samples under a mixture of Gaussians with diagonal covariances.

Forward    z_nk = (x_n - mu_k) exp(-s_k),
           p_nk = w_k - sum_d (z_nkd^2 / 2 + s_kd + log(2 pi) / 2),
           l_n = log sum_k exp p_nk = m_n + log t_n,  m_n = max_k p_nk,  t_n = sum_k exp(p_nk - m_n);
           s are logarithms of standard deviations, w of weights
Backward   with the responsibilities r_nk = exp(p_nk - m_n) / t_n, g_nk = dl_n r_nk:
           dx_n = -sum_k g_nk z_nk exp(-s_k),   dmu_k = sum_n g_nk z_nk exp(-s_k),
           ds_kd = sum_n g_nk (z_nkd^2 - 1),   dw_k = sum_n g_nk

Forward schedule: a program owns a tile of samples, which stay in registers, and walks the components with an
online logarithm of the sum. It keeps m and t, not l: far from every mean m is in the millions, m + log t
rounds log t away, and exp(p - l) can share out a sample between two equal components as 0.47 and 0.47.
Backward schedule: the matrix of responsibilities is not stored; it is made again from m and t, once for each
side, as in attention. Samples keep their owners, who walk the components for dx. A component is used by
every program of the forward, so it gets an owner of its own that walks the samples, with its three gradients
in registers: sums over samples need neither atomics nor slots.

op: gmm_log_likelihood
schedule: swap_owner, recompute_from_stats
difficulty: 4
dtypes: fp32
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


HALF_LOG_2PI: tl.constexpr = tl.constexpr(0.9189385332046727)


@triton.jit
def load_samples(ptr, n, d, N, D):
    mask = (n[:, None] < N) & (d[None, :] < D)
    return tl.load(ptr + n[:, None].to(tl.int64) * D + d[None, :], mask=mask, other=0.0)


@triton.jit
def component(x, mu_ptr, s_ptr, w_ptr, k, d, D):
    """z, exp(-s) and p of samples x under component k; z is 0 past D."""
    mu = tl.load(mu_ptr + k * D + d, mask=d < D, other=0.0)
    s = tl.load(s_ptr + k * D + d, mask=d < D, other=0.0)
    precision = tl.exp(-s)
    z = (x - mu[None, :]) * precision[None, :]
    constant = tl.sum(tl.where(d < D, s + HALF_LOG_2PI, 0.0), axis=0)
    return z, precision, tl.load(w_ptr + k) - constant - 0.5 * tl.sum(z * z, axis=1)


@triton.jit
def gmm_kernel(
    x_ptr, mu_ptr, s_ptr, w_ptr, l_ptr, m_ptr, t_ptr, N, K, D,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_D)
    x = load_samples(x_ptr, n, d, N, D)
    m = tl.full([BLOCK_N], -1e30, dtype=tl.float32)
    t = tl.zeros([BLOCK_N], dtype=tl.float32)
    for k in range(K):
        _, _, p = component(x, mu_ptr, s_ptr, w_ptr, k, d, D)
        m_new = tl.maximum(m, p)
        t = t * tl.exp(m - m_new) + tl.exp(p - m_new)
        m = m_new
    tl.store(l_ptr + n, m + tl.log(t), mask=n < N)
    tl.store(m_ptr + n, m, mask=n < N)
    tl.store(t_ptr + n, t, mask=n < N)


def gmm_forward(x, mu, s, w):
    (N, D), K = x.shape, mu.shape[0]
    if mu.shape[1] != D or s.shape != mu.shape or w.shape != (K,):
        raise ValueError("need x (N, D), mu and s (K, D), w (K)")
    if K == 0 or D > 128:
        raise ValueError(f"{K} components of {D} numbers: need one or more, of at most 128")
    l, m, t = (torch.empty(N, device=x.device, dtype=x.dtype) for _ in range(3))
    blocks = {"BLOCK_N": 32, "BLOCK_D": triton.next_power_of_2(D)}
    gmm_kernel[(triton.cdiv(N, 32),)](x, mu, s, w, l, m, t, N, K, D, **blocks)
    return l, m, t


@autodiff(inputs_require_grad=(0, 1, 2, 3))
def gmm_log_likelihood(x, mu, s, w):
    """x: (N, D); mu, s: (K, D), means and logarithms of deviations; w: (K), of weights; gives (N)."""
    return gmm_forward(x.contiguous(), mu.contiguous(), s.contiguous(), w.contiguous())[0]


def reference(x, mu, s, w):
    z = (x[:, None, :] - mu) * torch.exp(-s)
    return (w - (z.pow(2) / 2 + s + HALF_LOG_2PI.value).sum(-1)).logsumexp(1)


SWEEP = [{"N": 32768, "K": 256, "D": 64}, {"N": 10007, "K": 512, "D": 39}]
SWEEP_CPU = [{"N": 60, "K": 5, "D": 7}, {"N": 9, "K": 12, "D": 33}]


def make_args(dims, device="cuda", dtype=torch.float32):
    N, K, D = dims["N"], dims["K"], dims["D"]
    x = torch.randn(N, D, device=device, dtype=dtype)
    mu = torch.randn(K, D, device=device, dtype=dtype)
    s = 0.3 * torch.randn(K, D, device=device, dtype=dtype)
    return x, mu, s, torch.log_softmax(torch.randn(K, device=device, dtype=dtype), 0)


# ---- backward ----


@triton.jit
def sample_kernel(
    x_ptr, mu_ptr, s_ptr, w_ptr, m_ptr, t_ptr, dl_ptr, dx_ptr, N, K, D,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_D)
    x = load_samples(x_ptr, n, d, N, D)
    m = tl.load(m_ptr + n, mask=n < N, other=float("inf"))  # and so r = 0 for samples that are none
    dx = tl.zeros([BLOCK_N, BLOCK_D], dtype=tl.float32)
    for k in range(K):
        z, precision, p = component(x, mu_ptr, s_ptr, w_ptr, k, d, D)
        share = tl.exp(p - m)[:, None]  # r t
        dx -= tl.where(share > 0, share * z * precision[None, :], 0.0)
    t = tl.load(t_ptr + n, mask=n < N, other=1.0)
    dl = tl.load(dl_ptr + n, mask=n < N, other=0.0)
    mask = (n[:, None] < N) & (d[None, :] < D)
    tl.store(dx_ptr + n[:, None].to(tl.int64) * D + d[None, :], dx * (dl / t)[:, None], mask=mask)


@triton.jit
def component_kernel(
    x_ptr, mu_ptr, s_ptr, w_ptr, m_ptr, t_ptr, dl_ptr, dmu_ptr, ds_ptr, dw_ptr, N, D,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    k = tl.program_id(0)
    d = tl.arange(0, BLOCK_D)
    dmu = tl.zeros([BLOCK_N, BLOCK_D], dtype=tl.float32)
    ds = tl.zeros([BLOCK_N, BLOCK_D], dtype=tl.float32)
    dw = tl.zeros([BLOCK_N], dtype=tl.float32)
    for start in range(0, N, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        x = load_samples(x_ptr, n, d, N, D)
        z, precision, p = component(x, mu_ptr, s_ptr, w_ptr, k, d, D)
        m = tl.load(m_ptr + n, mask=n < N, other=float("inf"))
        t = tl.load(t_ptr + n, mask=n < N, other=1.0)
        g = tl.load(dl_ptr + n, mask=n < N, other=0.0) * tl.exp(p - m) / t
        z = tl.where(g[:, None] != 0, z, 0.0)
        dmu += g[:, None] * z * precision[None, :]
        ds += g[:, None] * (z * z - 1)
        dw += g
    tl.store(dmu_ptr + k * D + d, tl.sum(dmu, axis=0), mask=d < D)
    tl.store(ds_ptr + k * D + d, tl.sum(ds, axis=0), mask=d < D)
    tl.store(dw_ptr + k, tl.sum(dw, axis=0))


class GMMLogLikelihood(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, mu, s, w):
        x, mu, s, w = (tensor.contiguous() for tensor in (x, mu, s, w))
        l, m, t = gmm_forward(x, mu, s, w)
        ctx.save_for_backward(x, mu, s, w, m, t)
        return l

    @staticmethod
    def backward(ctx, dl):
        saved, dl, needs = ctx.saved_tensors, dl.contiguous(), ctx.needs_input_grad
        dx, dmu, ds, dw = (torch.empty_like(tensor) for tensor in saved[:4])
        (N, D), K = dx.shape, dw.shape[0]
        blocks = {"BLOCK_N": 32, "BLOCK_D": triton.next_power_of_2(D)}
        if needs[0]:
            sample_kernel[(triton.cdiv(N, 32),)](*saved, dl, dx, N, K, D, **blocks)
        if any(needs[1:]):
            component_kernel[(K,)](*saved, dl, dmu, ds, dw, N, D, **blocks)
        return tuple(g if need else None for g, need in zip((dx, dmu, ds, dw), needs, strict=True))


def gmm_log_likelihood_autograd(x, mu, s, w):
    return GMMLogLikelihood.apply(x, mu, s, w)
