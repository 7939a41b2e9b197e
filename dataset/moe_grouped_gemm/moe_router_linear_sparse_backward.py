"""A router from its linear layer to its weights: the backward touches the K chosen experts alone.

Forward    l_te = <x_t, r_e> for E experts,   idx_t the K largest of a row (the first one at a tie),
           w_tk = e^{l_t,idx_k} / sum_n e^{l_t,idx_n}: a softmax of all logits, cut to K and made to sum to 1
Backward   what the softmax has below its cut cancels, so only the chosen logits have a gradient:
           c_tk = w_tk (dw_tk - sum_n w_tn dw_tn),
           dx_t = sum_k c_tk r_{idx_tk},   dr_e = sum of c_tk x_t over all pairs (t, k) that chose e

Forward schedule: a program owns a tile of tokens with the logits of all experts in registers, fed by dots
over D; they are never stored. K rounds of maximum, first index and removal make the choice.
Backward schedule: dL would be a matrix T x E with K numbers a row, and two dense products with it E / K times
the work there is. A token's owner makes c and gathers K rows of r for dx. For dr, the choices are sorted once
by expert; the owner of (expert, columns) walks its own, several rows of x at a time, and stores its row of
dr, zeros where nobody came: one writer each, no atomics, no product with zeros. Only w and idx are saved.

op: moe_router_linear
schedule: row_reduce_correct, segment_gather, index_or_seed_replay
difficulty: 4
dtypes: fp32, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


@triton.jit
def router_kernel(
    x_ptr, r_ptr, w_ptr, idx_ptr, T, D, E, K, PRECISION: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    e, n = tl.arange(0, BLOCK_E), tl.arange(0, BLOCK_K)
    logits = tl.zeros([BLOCK_T, BLOCK_E], dtype=tl.float32)
    for start in range(0, D, BLOCK_D):
        d = start + tl.arange(0, BLOCK_D)
        mask = (rows < T)[:, None] & (d < D)[None, :]
        x = tl.load(x_ptr + rows[:, None] * D + d[None, :], mask=mask, other=0.0)
        mask = (d < D)[:, None] & (e < E)[None, :]
        r = tl.load(r_ptr + e[None, :] * D + d[:, None], mask=mask, other=0.0)
        logits = tl.dot(x, r, logits, input_precision=PRECISION)
    logits = tl.where((e < E)[None, :], logits, -float("inf"))
    chosen = tl.full([BLOCK_T, BLOCK_K], -float("inf"), dtype=tl.float32)
    idx = tl.zeros([BLOCK_T, BLOCK_K], dtype=tl.int32)
    for k in range(K):
        top = tl.max(logits, axis=1)
        first = tl.min(tl.where(logits == top[:, None], e[None, :], BLOCK_E - 1), axis=1)
        is_first = e[None, :] == first[:, None]
        value = tl.sum(tl.where(is_first, logits, 0.0), axis=1)
        chosen = tl.where((n == k)[None, :], value[:, None], chosen)
        idx = tl.where((n == k)[None, :], first[:, None], idx)
        logits = tl.where(is_first, -float("inf"), logits)
    w = tl.exp(chosen - tl.max(chosen, axis=1)[:, None])
    w = w / tl.sum(w, axis=1)[:, None]
    mask = (rows < T)[:, None] & (n < K)[None, :]
    tl.store(w_ptr + rows[:, None] * K + n[None, :], w, mask=mask)
    tl.store(idx_ptr + rows[:, None] * K + n[None, :], idx.to(tl.int64), mask=mask)


@autodiff(inputs_require_grad=(0, 1))
def router_linear(x, r, K):
    """x: (T, D); r: (E, D). Gives w, float32 (T, K), and idx, int64 (T, K)."""
    x, r = x.contiguous(), r.contiguous()
    (T, D), E = x.shape, r.shape[0]
    if not 1 <= K <= min(E, 64) or r.shape[1] != D:
        raise ValueError(f"cannot choose {K} of {E} experts, or x and r have rows of two lengths")
    if E > 512:
        raise ValueError(f"logits of {E} experts do not fit one tile")
    w = torch.empty((T, K), device=x.device, dtype=torch.float32)
    idx = torch.empty((T, K), device=x.device, dtype=torch.int64)
    router_kernel[(triton.cdiv(T, 16),)](
        x, r, w, idx, T, D, E, K,
        PRECISION="tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee",
        BLOCK_T=16, BLOCK_D=32, BLOCK_E=max(16, triton.next_power_of_2(E)),
        BLOCK_K=triton.next_power_of_2(K),
    )  # fmt: skip
    return w, idx


def reference(x, r, K):
    dtype = torch.promote_types(x.dtype, torch.float32)
    logits = x.to(dtype) @ r.to(dtype).t()
    idx = logits.sort(dim=1, descending=True, stable=True).indices[:, :K]
    return torch.softmax(logits.gather(1, idx), dim=1), idx


SWEEP = [{"T": 16384, "D": 2048, "E": 128, "K": 8}, {"T": 4099, "D": 1000, "E": 60, "K": 4}]
SWEEP_CPU = [{"T": 37, "D": 40, "E": 11, "K": 3}, {"T": 16, "D": 70, "E": 20, "K": 2}]


def make_args(dims, device="cuda", dtype=torch.float32):
    """Of twice as many tokens those whose K + 1 largest logits lie farthest apart: no choice among thousands
    hangs on how a sum is rounded."""
    T, D, E, K = (dims[name] for name in ("T", "D", "E", "K"))
    x = torch.randn(2 * T, D, device=device, dtype=dtype)
    r = torch.randn(E, D, device=device, dtype=dtype) / max(1, D) ** 0.5
    top = (x.float() @ r.float().t()).topk(min(K + 1, E), dim=1).values
    apart = -top.diff(dim=1, prepend=torch.full_like(top[:, :1], float("inf"))).amax(1)
    return x[apart.topk(T).indices], r, K


# ---- backward ----


@triton.jit
def token_backward_kernel(
    r_ptr, w_ptr, idx_ptr, dw_ptr, c_ptr, dx_ptr, D, K, BLOCK_K: tl.constexpr, BLOCK: tl.constexpr
):
    t = tl.program_id(0).to(tl.int64)
    n, d = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK)
    w = tl.load(w_ptr + t * K + n, mask=n < K, other=0.0)
    dw = tl.load(dw_ptr + t * K + n, mask=n < K, other=0.0)
    c = w * (dw - tl.sum(w * dw, axis=0))
    tl.store(c_ptr + t * K + n, c, mask=n < K)
    dx = tl.zeros([BLOCK], dtype=tl.float32)
    for k in range(K):
        e = tl.load(idx_ptr + t * K + k)
        r = tl.load(r_ptr + e * D + d, mask=d < D, other=0.0).to(tl.float32)
        dx += tl.sum(tl.where(n == k, c, 0.0), axis=0) * r
    tl.store(dx_ptr + t * D + d, dx.to(dx_ptr.dtype.element_ty), mask=d < D)


@triton.jit
def expert_backward_kernel(
    order_ptr, begin_ptr, x_ptr, c_ptr, dr_ptr, D, K, BLOCK_I: tl.constexpr, BLOCK: tl.constexpr
):
    e = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    end = tl.load(begin_ptr + e + 1)
    acc = tl.zeros([BLOCK_I, BLOCK], dtype=tl.float32)
    for start in range(tl.load(begin_ptr + e), end, BLOCK_I):
        i = start + tl.arange(0, BLOCK_I)
        choice = tl.load(order_ptr + i, mask=i < end, other=0)
        c = tl.load(c_ptr + choice, mask=i < end, other=0.0)
        mask = (i < end)[:, None] & (d < D)[None, :]
        x = tl.load(x_ptr + (choice // K)[:, None] * D + d[None, :], mask=mask, other=0.0)
        acc += c[:, None] * x.to(tl.float32)
    tl.store(dr_ptr + e * D + d, tl.sum(acc, axis=0).to(dr_ptr.dtype.element_ty), mask=d < D)


class RouterLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, r, K):
        x, r = x.contiguous(), r.contiguous()
        w, idx = router_linear(x, r, K)
        ctx.save_for_backward(x, r, w, idx)
        ctx.mark_non_differentiable(idx)
        return w, idx

    @staticmethod
    def backward(ctx, dw, _):
        x, r, w, idx = ctx.saved_tensors
        (T, D), E, K, needs = x.shape, r.shape[0], w.shape[1], ctx.needs_input_grad
        dx, dr, c = torch.empty_like(x), torch.empty_like(r), torch.empty_like(w)
        token_backward_kernel[(T,)](
            r, w, idx, dw.contiguous(), c, dx, D, K,
            BLOCK_K=triton.next_power_of_2(K), BLOCK=triton.next_power_of_2(D),
        )  # fmt: skip
        if needs[1]:
            order = torch.argsort(idx.view(-1), stable=True)
            begin = torch.searchsorted(idx.view(-1)[order], torch.arange(E + 1, device=idx.device))
            expert_backward_kernel[(E, triton.cdiv(D, 64))](
                order, begin, x, c, dr, D, K, BLOCK_I=32, BLOCK=64
            )
        return dx if needs[0] else None, dr if needs[1] else None, None


def router_linear_autograd(x, r, K):
    return RouterLinear.apply(x, r, K)
