"""Attention over depth: a token's input to a layer is a softmax mix of the outputs of all layers before it.

Forward    a token, layers l:  vhat_l = v_l r_l,  r_l = (mean v_l^2 + eps)^(-1/2),  u = wq * wn,
           s_l = <u, vhat_l>,  p = softmax(s),  h = sum_l p_l v_l
Backward   v_l is a value, and through its norm a key:
           ds_l = p_l (<dh, v_l> - <dh, h>),   du = sum over tokens and layers of ds_l vhat_l,
           dv_l = p_l dh + ds_l r_l (u - vhat_l mean(u * vhat_l)) = p_l dh + ds_l r_l (u - vhat_l s_l / D),
           dwq = wn * du,  dwn = wq * du

Forward schedule: a program owns a token and walks its L layers with an online softmax, so a layer's output is
read once, for its norm, its score and its share of h together. s and r are saved, two numbers a layer.
Backward schedule: the same owner. The mean in the norm's backward is s_l / D, which is saved, and the softmax
correction is <dh, h>, one dot before the walk: so nothing has to be known of a layer before its step but what
the step itself loads. One walk reads each v_l and writes each dv_l once, with both routes added in
registers. du is shared by all tokens: G programs take the tokens pid, pid + G, .. and keep a part in
registers; a second kernel adds the parts and splits du between the two weights.

op: depth_attention
schedule: row_reduce_correct, partials_then_reduce, recompute_from_stats
difficulty: 4
dtypes: fp32, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


@triton.jit
def depth_kernel(v_ptr, wq_ptr, wn_ptr, h_ptr, s_ptr, r_ptr, lse_ptr, L, T, D, eps, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK)
    mask = d < D
    u = tl.load(wq_ptr + d, mask=mask, other=0.0).to(tl.float32)
    u *= tl.load(wn_ptr + d, mask=mask, other=0.0).to(tl.float32)
    m = -1e30
    total = 0.0
    acc = tl.zeros([BLOCK], dtype=tl.float32)
    for layer in range(L):
        at = layer * T + token
        v = tl.load(v_ptr + at * D + d, mask=mask, other=0.0).to(tl.float32)
        r = tl.rsqrt(tl.sum(v * v, axis=0) / D + eps)
        s = tl.sum(u * v, axis=0) * r
        tl.store(s_ptr + at, s)
        tl.store(r_ptr + at, r)
        m_new = tl.maximum(m, s)
        p, rescale = tl.exp(s - m_new), tl.exp(m - m_new)
        total = total * rescale + p
        acc = acc * rescale + p * v
        m = m_new
    tl.store(h_ptr + token * D + d, (acc / total).to(h_ptr.dtype.element_ty), mask=mask)
    tl.store(lse_ptr + token, m + tl.log(total))


def depth_forward(v, wq, wn, eps):
    L, T, D = v.shape
    if not wq.shape == wn.shape == (D,) or L == 0:
        raise ValueError("the weights do not fit a row, or there is no layer")
    if D > 16384:
        raise ValueError(f"a row of {D} does not fit one tile")
    h = torch.empty_like(v[0])
    s, r, lse = (torch.empty(shape, device=v.device, dtype=torch.float32) for shape in ((L, T), (L, T), T))
    depth_kernel[(T,)](v, wq, wn, h, s, r, lse, L, T, D, eps, BLOCK=triton.next_power_of_2(D))
    return h, s, r, lse


@autodiff(inputs_require_grad=(0, 1, 2))
def depth_attention(v, wq, wn, eps=1e-6):
    """v: (layers, tokens, D); wq, wn: (D), the query and the norm's weight."""
    return depth_forward(v.contiguous(), wq.contiguous(), wn.contiguous(), eps)[0]


def reference(v, wq, wn, eps=1e-6):
    vhat = v * torch.rsqrt(v.pow(2).mean(-1, keepdim=True) + eps)
    p = torch.softmax((vhat * wn * wq).sum(-1), dim=0)
    return (p[..., None] * v).sum(0)


SWEEP = [{"L": 12, "T": 8192, "D": 1024}, {"L": 7, "T": 3001, "D": 1536}]
SWEEP_CPU = [{"L": 5, "T": 21, "D": 48}, {"L": 2, "T": 130, "D": 9}]


def make_args(dims, device="cuda", dtype=torch.float32):
    L, T, D = (dims[key] for key in ("L", "T", "D"))
    v = torch.randn(L, T, D, device=device, dtype=dtype)
    wq = torch.randn(D, device=device, dtype=dtype) / max(1, D) ** 0.5
    return v, wq, 1 + 0.2 * torch.randn(D, device=device, dtype=dtype)


# ---- backward ----

MAX_GROUPS = 128


@triton.jit
def depth_backward_kernel(
    v_ptr, wq_ptr, wn_ptr, h_ptr, s_ptr, r_ptr, lse_ptr, dh_ptr, dv_ptr, part_ptr, L, T, D, G,
    BLOCK: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK)
    mask = d < D
    u = tl.load(wq_ptr + d, mask=mask, other=0.0).to(tl.float32)
    u *= tl.load(wn_ptr + d, mask=mask, other=0.0).to(tl.float32)
    du = tl.zeros([BLOCK], dtype=tl.float32)
    for token in range(pid, T, G):
        dh = tl.load(dh_ptr + token * D + d, mask=mask, other=0.0).to(tl.float32)
        h = tl.load(h_ptr + token * D + d, mask=mask, other=0.0).to(tl.float32)
        delta = tl.sum(dh * h, axis=0)
        lse = tl.load(lse_ptr + token)
        for layer in range(L):
            at = layer * T + token
            v = tl.load(v_ptr + at * D + d, mask=mask, other=0.0).to(tl.float32)
            s, r = tl.load(s_ptr + at), tl.load(r_ptr + at)
            p = tl.exp(s - lse)
            ds = p * (tl.sum(dh * v, axis=0) - delta)
            vhat = v * r
            dv = p * dh + ds * r * (u - vhat * (s / D))
            tl.store(dv_ptr + at * D + d, dv.to(dv_ptr.dtype.element_ty), mask=mask)
            du += ds * vhat
    tl.store(part_ptr + pid * D + d, du, mask=mask)


@triton.jit
def weights_kernel(
    part_ptr, wq_ptr, wn_ptr, dwq_ptr, dwn_ptr, G, D, BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr
):
    d = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)
    acc = tl.zeros([BLOCK_G, BLOCK_D], dtype=tl.float32)
    for start in range(0, G, BLOCK_G):
        g = start + tl.arange(0, BLOCK_G)
        mask = (g[:, None] < G) & (d[None, :] < D)
        acc += tl.load(part_ptr + g[:, None] * D + d[None, :], mask=mask, other=0.0)
    du = tl.sum(acc, axis=0)
    wq = tl.load(wq_ptr + d, mask=d < D, other=0.0).to(tl.float32)
    wn = tl.load(wn_ptr + d, mask=d < D, other=0.0).to(tl.float32)
    tl.store(dwq_ptr + d, (du * wn).to(dwq_ptr.dtype.element_ty), mask=d < D)
    tl.store(dwn_ptr + d, (du * wq).to(dwn_ptr.dtype.element_ty), mask=d < D)


class DepthAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, v, wq, wn, eps):
        v, wq, wn = v.contiguous(), wq.contiguous(), wn.contiguous()
        h, s, r, lse = depth_forward(v, wq, wn, eps)
        ctx.save_for_backward(v, wq, wn, h, s, r, lse)
        return h

    @staticmethod
    def backward(ctx, dh):
        v, wq, wn, h, s, r, lse = ctx.saved_tensors
        (L, T, D), needs = v.shape, ctx.needs_input_grad
        G = min(T, MAX_GROUPS)
        dv, dwq, dwn = (torch.empty_like(tensor) for tensor in (v, wq, wn))
        part = lse.new_empty((G, D))
        depth_backward_kernel[(G,)](
            v, wq, wn, h, s, r, lse, dh.contiguous(), dv, part, L, T, D, G, BLOCK=triton.next_power_of_2(D)
        )
        if needs[1] or needs[2]:
            grid = (triton.cdiv(D, 32),)
            weights_kernel[grid](part, wq, wn, dwq, dwn, G, D, BLOCK_G=64, BLOCK_D=32)
        return dv if needs[0] else None, dwq if needs[1] else None, dwn if needs[2] else None, None


def depth_attention_autograd(v, wq, wn, eps=1e-6):
    return DepthAttention.apply(v, wq, wn, eps)
