"""Negative log-likelihood of a mixture of diagonal Gaussians (mixture density network).

Forward    a_k = log softmax(w)_k - sum_d (r_kd^2 / 2 + s_kd) - (D / 2) log 2 pi,
           r_kd = (x_d - m_kd) e^(-s_kd),  s the log-deviation;  l = -log sum_k exp(a_k), one loss a row
Backward   dl/da_k = -q_k,  q_k = exp(a_k + l), the share of component k in explaining x; so, with g = dl,
           dw_k = g (softmax(w)_k - q_k)  (the shares add up to 1),
           dm_kd = -g q_k r_kd e^(-s_kd),  ds_kd = g q_k (1 - r_kd^2)

Forward schedule: a program owns a tile of rows with all K components, a [rows, K] tile, and walks the
dimensions: what it adds up for each is one number a component, so D may be any. It saves q, which the
log-sum-exp over K has in registers anyway.
Backward schedule: q ties the components of a row together and nothing else does. Saved, it makes dm and ds
pointwise over (row, K D) and dw pointwise over (row, K), while from l alone every program would need the sum
over d of all K components first. q is D times smaller than m, so saving it is nearly free. dw, as small as q,
has a kernel of its own, and a softmax of a few numbers is not worth saving.

op: mdn_loss
schedule: recompute_from_stats, same_tile_pointwise
difficulty: 3
dtypes: fp32
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


@triton.jit
def mdn_kernel(
    w_ptr, m_ptr, s_ptr, x_ptr, loss_ptr, q_ptr, M, K, D, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    k = tl.arange(0, BLOCK_K)
    mask = (rows[:, None] < M) & (k[None, :] < K)
    offs = rows[:, None] * K + k[None, :]
    w = tl.load(w_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    w = tl.where(k[None, :] < K, w, -float("inf"))
    top = tl.max(w, axis=1)
    w_lse = top + tl.log(tl.sum(tl.exp(w - top[:, None]), axis=1))
    a = tl.zeros([BLOCK_M, BLOCK_K], dtype=tl.float32)
    for d in range(D):
        x = tl.load(x_ptr + rows * D + d, mask=rows < M, other=0.0).to(tl.float32)
        m = tl.load(m_ptr + offs * D + d, mask=mask, other=0.0).to(tl.float32)
        s = tl.load(s_ptr + offs * D + d, mask=mask, other=0.0).to(tl.float32)
        r = (x[:, None] - m) * tl.exp(-s)
        a -= 0.5 * r * r + s
    a += w - w_lse[:, None] - 0.9189385332046727 * D
    top = tl.max(a, axis=1)
    log_likelihood = top + tl.log(tl.sum(tl.exp(a - top[:, None]), axis=1))
    tl.store(loss_ptr + rows, -log_likelihood, mask=rows < M)
    tl.store(q_ptr + offs, tl.exp(a - log_likelihood[:, None]), mask=mask)


def mdn_forward(weights, means, log_deviations, x):
    M, K, D = means.shape
    if K > 128:
        raise ValueError(f"{K} components do not fit one tile")
    if weights.shape != (M, K) or log_deviations.shape != means.shape or x.shape != (M, D):
        raise ValueError("weights are (M, K), means and log_deviations (M, K, D), x is (M, D)")
    loss = torch.empty(M, device=x.device, dtype=torch.float32)
    q = torch.empty((M, K), device=x.device, dtype=torch.float32)
    BLOCK_K = triton.next_power_of_2(K)
    BLOCK_M = 512 // BLOCK_K
    mdn_kernel[(triton.cdiv(M, BLOCK_M),)](
        weights, means, log_deviations, x, loss, q, M, K, D, BLOCK_M=BLOCK_M, BLOCK_K=BLOCK_K
    )
    return loss, q


@autodiff(inputs_require_grad=(0, 1, 2))
def mdn_loss(weights, means, log_deviations, x):
    """weights: (M, K), logits; means, log_deviations: (M, K, D); x: (M, D); gives (M) in float32."""
    return mdn_forward(weights.contiguous(), means.contiguous(), log_deviations.contiguous(), x.contiguous())[
        0
    ]


def reference(weights, means, log_deviations, x):
    r = (x[:, None] - means) * torch.exp(-log_deviations)
    density = -(0.5 * r * r + log_deviations + 0.9189385332046727).sum(-1)
    return -(torch.log_softmax(weights, dim=-1) + density).logsumexp(-1)


SWEEP = [{"M": 131072, "K": 5, "D": 64}, {"M": 60013, "K": 20, "D": 7}]
SWEEP_CPU = [{"M": 22, "K": 5, "D": 6}, {"M": 131, "K": 3, "D": 2}]


def make_args(dims, device="cuda", dtype=torch.float32):
    M, K, D = dims["M"], dims["K"], dims["D"]
    weights, means = (torch.randn(s, device=device, dtype=dtype) for s in ((M, K), (M, K, D)))
    return weights, means, 0.3 * torch.randn_like(means), torch.randn(M, D, device=device, dtype=dtype)


# ---- backward ----


@triton.jit
def mdn_backward_kernel(
    m_ptr, s_ptr, x_ptr, q_ptr, dloss_ptr, dm_ptr, ds_ptr, K, D, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)  # (component, dimension)
    mask = i < K * D
    offs = row * K * D + i
    share = tl.load(dloss_ptr + row) * tl.load(q_ptr + row * K + i // D, mask=mask, other=0.0)
    x = tl.load(x_ptr + row * D + i % D, mask=mask, other=0.0).to(tl.float32)
    m = tl.load(m_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    narrow = tl.exp(-tl.load(s_ptr + offs, mask=mask, other=0.0).to(tl.float32))
    r = (x - m) * narrow
    # A component of no share may be so far away that r^2 is infinite.
    dm = tl.where(share != 0, -share * r * narrow, 0.0)
    ds = tl.where(share != 0, share * (1 - r * r), 0.0)
    tl.store(dm_ptr + offs, dm.to(dm_ptr.dtype.element_ty), mask=mask)
    tl.store(ds_ptr + offs, ds.to(ds_ptr.dtype.element_ty), mask=mask)


@triton.jit
def dw_kernel(w_ptr, q_ptr, dloss_ptr, dw_ptr, M, K, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr):
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    k = tl.arange(0, BLOCK_K)
    mask = (rows[:, None] < M) & (k[None, :] < K)
    offs = rows[:, None] * K + k[None, :]
    w = tl.load(w_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    w = tl.where(k[None, :] < K, w, -float("inf"))
    e = tl.exp(w - tl.max(w, axis=1)[:, None])
    p = e / tl.sum(e, axis=1)[:, None]
    dloss = tl.load(dloss_ptr + rows, mask=rows < M, other=0.0)
    dw = dloss[:, None] * (p - tl.load(q_ptr + offs, mask=mask, other=0.0))
    tl.store(dw_ptr + offs, dw.to(dw_ptr.dtype.element_ty), mask=mask)


class MDNLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weights, means, log_deviations, x):
        weights, means = weights.contiguous(), means.contiguous()
        log_deviations, x = log_deviations.contiguous(), x.contiguous()
        loss, q = mdn_forward(weights, means, log_deviations, x)
        ctx.save_for_backward(weights, means, log_deviations, x, q)
        return loss

    @staticmethod
    def backward(ctx, dloss):
        weights, means, log_deviations, x, q = ctx.saved_tensors
        M, K, D = means.shape
        dloss, needs = dloss.contiguous(), ctx.needs_input_grad
        dw = dm = ds = None
        if needs[0]:
            dw = torch.empty_like(weights)
            BLOCK_K = triton.next_power_of_2(K)
            BLOCK_M = 512 // BLOCK_K
            dw_kernel[(triton.cdiv(M, BLOCK_M),)](
                weights, q, dloss, dw, M, K, BLOCK_M=BLOCK_M, BLOCK_K=BLOCK_K
            )
        if needs[1] or needs[2]:
            dm, ds = torch.empty_like(means), torch.empty_like(log_deviations)
            BLOCK = min(512, triton.next_power_of_2(K * D))
            mdn_backward_kernel[(M, triton.cdiv(K * D, BLOCK))](
                means, log_deviations, x, q, dloss, dm, ds, K, D, BLOCK=BLOCK
            )
        return dw, dm if needs[1] else None, ds if needs[2] else None, None


def mdn_loss_autograd(weights, means, log_deviations, x):
    return MDNLoss.apply(weights, means, log_deviations, x)
