"""Distillation: KL divergence of a student from a teacher at a temperature, from the logits of both.

Forward    p = softmax(t / T),  q = softmax(z / T),  l = T^2 sum_j p_j (log p_j - log q_j), one loss a row
Backward   dl/dz_j = T^2 sum_k p_k (q_j - [j = k]) / T = T (q_j - p_j), so dz_j = dl T (q_j - p_j)

Forward schedule: a row's owner walks both rows once, side by side, with an online maximum and sum for each
and one more sum u = sum e^{t/T - m_t} (t - z) / T, which a new maximum of the teacher rescales. Then
sum p log p - p log q = u / s_t - lse_t + lse_z: no probability is stored and no second walk is made. The two
lse of the row are saved.
Backward schedule: with both lse known every element stands alone: a grid of (row, class tile) reads two
logits, makes p and q by one exp each, and writes dz once. The two softmaxes, each as large as the logits,
never exist in memory. The teacher is a target and gets no gradient.

op: kl_logits
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
def kl_kernel(z_ptr, t_ptr, loss_ptr, z_lse_ptr, t_lse_ptr, V, temperature, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    z_max = -float("inf")
    t_max = -float("inf")
    z_sum = 0.0
    t_sum = 0.0
    u = 0.0
    for start in range(0, V, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        mask = cols < V
        z = tl.load(z_ptr + row * V + cols, mask=mask, other=-float("inf")).to(tl.float32) / temperature
        t = tl.load(t_ptr + row * V + cols, mask=mask, other=-float("inf")).to(tl.float32) / temperature
        z_new = tl.maximum(z_max, tl.max(z, axis=0))
        t_new = tl.maximum(t_max, tl.max(t, axis=0))
        e = tl.exp(t - t_new)
        away = tl.where(mask, t - z, 0.0)
        z_sum = z_sum * tl.exp(z_max - z_new) + tl.sum(tl.exp(z - z_new), axis=0)
        t_sum = t_sum * tl.exp(t_max - t_new) + tl.sum(e, axis=0)
        u = u * tl.exp(t_max - t_new) + tl.sum(e * away, axis=0)
        z_max = z_new
        t_max = t_new
    z_lse = z_max + tl.log(z_sum)
    t_lse = t_max + tl.log(t_sum)
    tl.store(z_lse_ptr + row, z_lse)
    tl.store(t_lse_ptr + row, t_lse)
    tl.store(loss_ptr + row, temperature * temperature * (u / t_sum - t_lse + z_lse))


def kl_forward(student, teacher, temperature):
    if student.shape != teacher.shape:
        raise ValueError("student and teacher must have one shape")
    M, V = student.shape
    loss, z_lse, t_lse = (torch.empty(M, device=student.device, dtype=torch.float32) for _ in range(3))
    BLOCK = min(2048, triton.next_power_of_2(V))
    kl_kernel[(M,)](student, teacher, loss, z_lse, t_lse, V, temperature, BLOCK=BLOCK)
    return loss, z_lse, t_lse


@autodiff(inputs_require_grad=(0,))
def kl_from_logits(student, teacher, temperature):
    """student, teacher: (M, V); gives (M) in float32."""
    return kl_forward(student.contiguous(), teacher.contiguous(), temperature)[0]


def reference(student, teacher, temperature):
    log_p = torch.log_softmax(teacher / temperature, dim=-1)
    log_q = torch.log_softmax(student / temperature, dim=-1)
    return temperature**2 * (log_p.exp() * (log_p - log_q)).sum(-1)


SWEEP = [{"M": 1024, "V": 32000}, {"M": 251, "V": 128256}]
SWEEP_CPU = [{"M": 18, "V": 210}, {"M": 3, "V": 2100}]


def make_args(dims, device="cuda", dtype=torch.float32):
    student, teacher = (2 * torch.randn(dims["M"], dims["V"], device=device, dtype=dtype) for _ in range(2))
    return student, teacher, 2.0


# ---- backward ----


@triton.jit
def kl_backward_kernel(
    z_ptr, t_ptr, z_lse_ptr, t_lse_ptr, dloss_ptr, dz_ptr, V, temperature, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < V
    z = tl.load(z_ptr + row * V + cols, mask=mask, other=0.0).to(tl.float32)
    t = tl.load(t_ptr + row * V + cols, mask=mask, other=0.0).to(tl.float32)
    q = tl.exp(z / temperature - tl.load(z_lse_ptr + row))
    p = tl.exp(t / temperature - tl.load(t_lse_ptr + row))
    dz = tl.load(dloss_ptr + row) * temperature * (q - p)
    tl.store(dz_ptr + row * V + cols, dz.to(dz_ptr.dtype.element_ty), mask=mask)


class KLFromLogits(torch.autograd.Function):
    @staticmethod
    def forward(ctx, student, teacher, temperature):
        student, teacher = student.contiguous(), teacher.contiguous()
        loss, z_lse, t_lse = kl_forward(student, teacher, temperature)
        ctx.save_for_backward(student, teacher, z_lse, t_lse)
        ctx.temperature = temperature
        return loss

    @staticmethod
    def backward(ctx, dloss):
        student, teacher, z_lse, t_lse = ctx.saved_tensors
        M, V = student.shape
        dz = torch.empty_like(student)
        BLOCK = min(2048, triton.next_power_of_2(V))
        kl_backward_kernel[(M, triton.cdiv(V, BLOCK))](
            student, teacher, z_lse, t_lse, dloss.contiguous(), dz, V, ctx.temperature, BLOCK=BLOCK
        )
        return dz, None, None


def kl_from_logits_autograd(student, teacher, temperature):
    return KLFromLogits.apply(student, teacher, temperature)
