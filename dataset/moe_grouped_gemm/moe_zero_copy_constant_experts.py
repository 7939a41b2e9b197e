"""Experts that cost nothing beside those that do: zero, copy and constant ones, combined in one pass.

Forward    choice k of token t has a weight w and names e < E, a feed-forward expert, whose output is r_tk;
           e = E, the zero expert;  e = E + 1, the copy;  e = E + 2 + c, constant c of C:
           y_t = sum_k w_tk b_tk,   b_tk = r_tk, 0, x_t or q_c   (r_tk is only read where e < E)
Backward   dw_tk = <dy_t, b_tk>,   dr_tk = w_tk dy_t where e < E, 0 elsewhere,
           dx_t = (sum of w_tk over the copies) dy_t,   dq_c = sum of w_tk dy_t over all that chose c

Forward schedule: a program owns a token and adds its K branches; each is one row, from one of three tensors.
Backward schedule: the token's owner has dy in registers, and all but dq is its own: K dots for dw, K rows dr,
and one row dx, scaled once. The constants are a few rows that many tokens share: a program takes a group of
GROUP tokens and a tile of columns, and walks the group once for each constant, with its sum in registers: a
part for each group, and another kernel adds the parts. That walk reads dy from cache and skips, by a weight
of 0, who did not choose it; sorting tokens by constant would cost more than these few rows.

op: moe_zero_cost_experts
schedule: row_reduce_correct, partials_then_reduce, index_or_seed_replay
difficulty: 3
dtypes: fp32, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


GROUP = 64  # tokens of one part


@triton.jit
def load_branch(r_ptr, x_ptr, q_ptr, choice, t, e, E, cols, D):
    """b of one choice: the row of one tensor, or zeros."""
    inside = cols < D
    b = tl.load(r_ptr + choice * D + cols, mask=inside & (e < E), other=0.0).to(tl.float32)
    b += tl.load(x_ptr + t * D + cols, mask=inside & (e == E + 1), other=0.0).to(tl.float32)
    constant = tl.maximum(e - E - 2, 0)
    return b + tl.load(q_ptr + constant * D + cols, mask=inside & (e >= E + 2), other=0.0).to(tl.float32)


@triton.jit
def combine_kernel(x_ptr, r_ptr, q_ptr, w_ptr, idx_ptr, y_ptr, K, D, E, BLOCK: tl.constexpr):
    t = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    y = tl.zeros([BLOCK], dtype=tl.float32)
    for k in range(K):
        e = tl.load(idx_ptr + t * K + k).to(tl.int64)
        w = tl.load(w_ptr + t * K + k).to(tl.float32)
        y += w * load_branch(r_ptr, x_ptr, q_ptr, t * K + k, t, e, E, cols, D)
    tl.store(y_ptr + t * D + cols, y.to(y_ptr.dtype.element_ty), mask=cols < D)


@autodiff(inputs_require_grad=(0, 1, 2, 3))
def combine_experts(x, r, q, w, idx, E):
    """x: (T, D); r: (T, K, D), of real experts; q: (C, D); w: (T, K); idx: int64 (T, K) below E + 2 + C."""
    x, r, q, w, idx = (tensor.contiguous() for tensor in (x, r, q, w, idx))
    T, K, D = r.shape
    if x.shape != (T, D) or q.shape[1] != D or not w.shape == idx.shape == (T, K):
        raise ValueError("x, r and q must have rows of one length, and w and idx a number for each row of r")
    if D > 16384:
        raise ValueError(f"a row of {D} does not fit one tile")
    y = torch.empty_like(x)
    combine_kernel[(T,)](x, r, q, w, idx, y, K, D, E, BLOCK=triton.next_power_of_2(D))
    return y


def reference(x, r, q, w, idx, E):
    constants = q[(idx - E - 2).clamp(min=0)]
    b = torch.where((idx == E + 1)[..., None], x[:, None], torch.zeros_like(r))
    b = torch.where((idx >= E + 2)[..., None], constants, b)
    b = torch.where((idx < E)[..., None], r, b)
    return (w[..., None] * b).sum(1)


SWEEP = [
    {"T": 8192, "D": 4096, "K": 8, "E": 64, "C": 4},
    {"T": 4099, "D": 1536, "K": 6, "E": 16, "C": 2},
]
SWEEP_CPU = [
    {"T": 21, "D": 20, "K": 3, "E": 4, "C": 2},
    {"T": 70, "D": 9, "K": 2, "E": 3, "C": 3},
]


def make_args(dims, device="cuda", dtype=torch.float32):
    T, D, K, E, C = (dims[name] for name in ("T", "D", "K", "E", "C"))
    x = torch.randn(T, D, device=device, dtype=dtype)
    r = torch.randn(T, K, D, device=device, dtype=dtype)
    q = torch.randn(C, D, device=device, dtype=dtype)
    idx = torch.randint(0, E + 2 + C, (T, K), device=device)
    return x, r, q, torch.rand(T, K, device=device, dtype=dtype), idx, E


# ---- backward ----


@triton.jit
def token_backward_kernel(
    x_ptr, r_ptr, q_ptr, w_ptr, idx_ptr, dy_ptr, dx_ptr, dr_ptr, dw_ptr, K, D, E, BLOCK: tl.constexpr
):
    t = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    inside = cols < D
    dy = tl.load(dy_ptr + t * D + cols, mask=inside, other=0.0).to(tl.float32)
    copies = 0.0
    for k in range(K):
        e = tl.load(idx_ptr + t * K + k).to(tl.int64)
        w = tl.load(w_ptr + t * K + k).to(tl.float32)
        dw = tl.sum(dy * load_branch(r_ptr, x_ptr, q_ptr, t * K + k, t, e, E, cols, D), axis=0)
        tl.store(dw_ptr + t * K + k, dw.to(dw_ptr.dtype.element_ty))
        dr = tl.where(e < E, w, 0.0) * dy
        tl.store(dr_ptr + (t * K + k) * D + cols, dr.to(dr_ptr.dtype.element_ty), mask=inside)
        copies += tl.where(e == E + 1, w, 0.0)
    tl.store(dx_ptr + t * D + cols, (copies * dy).to(dx_ptr.dtype.element_ty), mask=inside)


@triton.jit
def constant_part_kernel(
    w_ptr, idx_ptr, dy_ptr, part_ptr, T, K, D, E, C, GROUP: tl.constexpr, BLOCK: tl.constexpr
):
    group = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    rows = group * GROUP + tl.arange(0, GROUP)
    mask = (rows < T)[:, None] & (cols < D)[None, :]
    dy = tl.load(dy_ptr + rows[:, None] * D + cols[None, :], mask=mask, other=0.0).to(tl.float32)
    for c in range(C):
        weight = tl.zeros([GROUP], dtype=tl.float32)
        for k in range(K):
            e = tl.load(idx_ptr + rows * K + k, mask=rows < T, other=0)
            w = tl.load(w_ptr + rows * K + k, mask=rows < T, other=0.0).to(tl.float32)
            weight += tl.where(e == E + 2 + c, w, 0.0)
        part = tl.sum(weight[:, None] * dy, axis=0)
        tl.store(part_ptr + (group * C + c) * D + cols, part, mask=cols < D)


@triton.jit
def sum_parts_kernel(part_ptr, out_ptr, parts, size, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    acc = tl.zeros([BLOCK], dtype=tl.float32)
    for p in range(parts):
        acc += tl.load(part_ptr + p * size + i, mask=i < size, other=0.0)
    tl.store(out_ptr + i, acc.to(out_ptr.dtype.element_ty), mask=i < size)


class CombineExperts(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, r, q, w, idx, E):
        x, r, q, w, idx = (tensor.contiguous() for tensor in (x, r, q, w, idx))
        ctx.save_for_backward(x, r, q, w, idx)
        ctx.E = E
        return combine_experts(x, r, q, w, idx, E)

    @staticmethod
    def backward(ctx, dy):
        x, r, q, w, idx = ctx.saved_tensors
        (T, K, D), C, E = r.shape, q.shape[0], ctx.E
        dy, needs = dy.contiguous(), ctx.needs_input_grad
        dx, dr, dq, dw = (torch.empty_like(tensor) for tensor in (x, r, q, w))
        if needs[0] or needs[1] or needs[3]:
            token_backward_kernel[(T,)](
                x, r, q, w, idx, dy, dx, dr, dw, K, D, E, BLOCK=triton.next_power_of_2(D)
            )
        if needs[2]:
            groups = triton.cdiv(T, GROUP)
            part = torch.empty((groups, C, D), device=x.device, dtype=torch.float32)
            constant_part_kernel[(groups, triton.cdiv(D, 64))](
                w, idx, dy, part, T, K, D, E, C, GROUP=GROUP, BLOCK=64
            )
            sum_parts_kernel[(triton.cdiv(C * D, 128),)](part, dq, groups, C * D, BLOCK=128)
        grads = zip((dx, dr, dq, dw), needs[:4], strict=True)
        return *(grad if needed else None for grad, needed in grads), None, None


def combine_experts_autograd(x, r, q, w, idx, E):
    return CombineExperts.apply(x, r, q, w, idx, E)
