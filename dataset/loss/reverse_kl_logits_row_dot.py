"""Reverse KL divergence of a student from a teacher, both by their logits and both with gradients.

Forward    p = softmax(s),  r = softmax(t),  l = sum_j p_j (log p_j - log r_j), one loss a row
Backward   d_j = log p_j - log r_j.  dl/dp_j = d_j + 1, and through the softmax only what differs from the
           mean counts: ds_j = dl p_j (d_j - sum_k p_k d_k).  The mean of d under p is l itself:
           ds_j = dl p_j (d_j - l),  dt_j = dl (r_j - p_j)

Forward schedule: a row's owner walks both rows once with a maximum and a sum for each and
u = sum e^{s - m_s} (s - t), rescaled with the student's maximum; l = u / c_s - lse_s + lse_t.
Backward schedule: here the student's probabilities weigh the sum, so its gradient has a row correction that
the other direction of KL lacks, and a backward from scratch would walk each row twice, once for the mean and
once to use it. But the mean is the loss, which the forward has made: with l and both lse saved, three
numbers a row, a grid of (row, column tile) reads each logit once and needs no reduction at all.

op: reverse_kl_logits
schedule: recompute_from_stats, same_tile_pointwise
difficulty: 3
dtypes: fp32, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


@triton.jit
def reverse_kl_kernel(s_ptr, t_ptr, loss_ptr, s_lse_ptr, t_lse_ptr, V, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    s_max = -float("inf")
    t_max = -float("inf")
    s_sum = 0.0
    t_sum = 0.0
    u = 0.0
    for start in range(0, V, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        mask = cols < V
        s = tl.load(s_ptr + row * V + cols, mask=mask, other=-float("inf")).to(tl.float32)
        t = tl.load(t_ptr + row * V + cols, mask=mask, other=-float("inf")).to(tl.float32)
        s_new = tl.maximum(s_max, tl.max(s, axis=0))
        t_new = tl.maximum(t_max, tl.max(t, axis=0))
        e = tl.exp(s - s_new)
        rescale = tl.exp(s_max - s_new)
        s_sum = s_sum * rescale + tl.sum(e, axis=0)
        t_sum = t_sum * tl.exp(t_max - t_new) + tl.sum(tl.exp(t - t_new), axis=0)
        u = u * rescale + tl.sum(e * tl.where(mask, s - t, 0.0), axis=0)
        s_max = s_new
        t_max = t_new
    s_lse = s_max + tl.log(s_sum)
    t_lse = t_max + tl.log(t_sum)
    tl.store(s_lse_ptr + row, s_lse)
    tl.store(t_lse_ptr + row, t_lse)
    tl.store(loss_ptr + row, u / s_sum - s_lse + t_lse)


def reverse_kl_forward(student, teacher):
    if student.shape != teacher.shape:
        raise ValueError("student and teacher must have one shape")
    M, V = student.shape
    loss, s_lse, t_lse = (torch.empty(M, device=student.device, dtype=torch.float32) for _ in range(3))
    BLOCK = min(2048, triton.next_power_of_2(V))
    reverse_kl_kernel[(M,)](student, teacher, loss, s_lse, t_lse, V, BLOCK=BLOCK)
    return loss, s_lse, t_lse


@autodiff(inputs_require_grad=(0, 1))
def reverse_kl_logits(student, teacher):
    """student, teacher: (M, V); gives (M) in float32."""
    return reverse_kl_forward(student.contiguous(), teacher.contiguous())[0]


def reference(student, teacher):
    log_p, log_r = torch.log_softmax(student, dim=-1), torch.log_softmax(teacher, dim=-1)
    return (log_p.exp() * (log_p - log_r)).sum(-1)


SWEEP = [{"M": 2048, "V": 32000}, {"M": 251, "V": 128256}]
SWEEP_CPU = [{"M": 15, "V": 140}, {"M": 3, "V": 2100}]


def make_args(dims, device="cuda", dtype=torch.float32):
    return tuple(2 * torch.randn(dims["M"], dims["V"], device=device, dtype=dtype) for _ in range(2))


# ---- backward ----


@triton.jit
def reverse_kl_backward_kernel(
    s_ptr, t_ptr, loss_ptr, s_lse_ptr, t_lse_ptr, dloss_ptr, ds_ptr, dt_ptr, V,
    NEEDS_DS: tl.constexpr, NEEDS_DT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    offs, mask = row * V + cols, cols < V
    s = tl.load(s_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    t = tl.load(t_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    log_p = s - tl.load(s_lse_ptr + row)
    log_r = t - tl.load(t_lse_ptr + row)
    dloss = tl.load(dloss_ptr + row)
    p = tl.exp(log_p)
    if NEEDS_DS:
        ds = dloss * p * (log_p - log_r - tl.load(loss_ptr + row))
        tl.store(ds_ptr + offs, ds.to(ds_ptr.dtype.element_ty), mask=mask)
    if NEEDS_DT:
        dt = dloss * (tl.exp(log_r) - p)
        tl.store(dt_ptr + offs, dt.to(dt_ptr.dtype.element_ty), mask=mask)


class ReverseKLLogits(torch.autograd.Function):
    @staticmethod
    def forward(ctx, student, teacher):
        student, teacher = student.contiguous(), teacher.contiguous()
        loss, s_lse, t_lse = reverse_kl_forward(student, teacher)
        ctx.save_for_backward(student, teacher, loss, s_lse, t_lse)
        return loss

    @staticmethod
    def backward(ctx, dloss):
        student, teacher, loss, s_lse, t_lse = ctx.saved_tensors
        M, V = student.shape
        needs_ds, needs_dt = ctx.needs_input_grad
        ds = torch.empty_like(student) if needs_ds else None
        dt = torch.empty_like(teacher) if needs_dt else None
        BLOCK = min(2048, triton.next_power_of_2(V))
        reverse_kl_backward_kernel[(M, triton.cdiv(V, BLOCK))](
            student, teacher, loss, s_lse, t_lse, dloss.contiguous(), ds, dt, V,
            NEEDS_DS=needs_ds, NEEDS_DT=needs_dt, BLOCK=BLOCK,
        )  # fmt: skip
        return ds, dt


def reverse_kl_logits_autograd(student, teacher):
    return ReverseKLLogits.apply(student, teacher)
