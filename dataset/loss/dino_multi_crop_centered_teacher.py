"""Self-distillation between crops (DINO): each student crop predicts what the teacher sees in other views.

Forward    student z (S, B, K), teacher t (T, B, K), T <= S; both see crops 0..T-1; center c (K):
           p_s = softmax(z_s / a),  q_v = softmax((t_v - c) / b);
           L = (1 / n) sum over samples, teacher views v and crops s != v of -sum_j q_vj log p_sj,
           n = B (T S - T) the number of terms
Backward   -sum_j q_j log p_j = lse(z / a) - <q, z> / a has the gradient (p - q) / a; crop s is in N_s terms,
           T of them, or T - 1 if the teacher saw it:
           dz_sj = (dL / (a n)) (N_s p_sj - sum_{v != s} q_vj)

Forward schedule: first the owner of each row of z and of t makes its lse. Then the owner of a row of z walks
it once more beside all views of its sample: <Q, z> is linear in Q = sum of the q_v, so the T losses of a crop
are one product, and a view's probabilities are made as they are needed. Parts are added by one program.
Backward schedule: the sum of losses lets gradients be added before they are made: (row of z, column tile)
programs read z once and the T views, and store dz once, where a loss for each pair would write T gradients
and add them. Teacher rows are read by S crops each, and stay in cache: the crops of a sample are neighbours
in the grid. The softmaxes, S + T tensors of 65,536 prototypes a sample, never exist.

op: dino_loss
schedule: recompute_from_stats, same_tile_pointwise, partials_then_reduce
difficulty: 4
dtypes: fp32, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


@triton.jit
def lse_kernel(x_ptr, center_ptr, lse_ptr, K, temperature, CENTERED: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    m = -float("inf")
    total = 0.0
    for start in range(0, K, BLOCK):
        k = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * K + k, mask=k < K, other=-float("inf")).to(tl.float32)
        if CENTERED:
            x -= tl.load(center_ptr + k, mask=k < K, other=0.0).to(tl.float32)
        x /= temperature
        m_new = tl.maximum(m, tl.max(x, axis=0))
        total = total * tl.exp(m - m_new) + tl.sum(tl.exp(x - m_new), axis=0)
        m = m_new
    tl.store(lse_ptr + row, m + tl.log(total))


@triton.jit
def teacher_sum(
    t_ptr, center_ptr, t_lse_ptr, crop, b, k, T, B, K, temperature, BLOCK: tl.constexpr
):  # fmt: skip
    """The tile k of Q for a crop: the sum of q_v over the views that are not the crop itself."""
    center = tl.load(center_ptr + k, mask=k < K, other=0.0).to(tl.float32)
    Q = tl.zeros([BLOCK], dtype=tl.float32)
    for v in range(T):
        row = b + v * B  # int64, as b is
        t = tl.load(t_ptr + row * K + k, mask=k < K, other=0.0).to(tl.float32)
        q = tl.exp((t - center) / temperature - tl.load(t_lse_ptr + row))
        Q += tl.where((v != crop) & (k < K), q, 0.0)
    return Q


@triton.jit
def crop_loss_kernel(
    z_ptr, t_ptr, center_ptr, z_lse_ptr, t_lse_ptr, part_ptr, T, B, K, a, b_temperature, BLOCK: tl.constexpr
):  # fmt: skip
    b = tl.program_id(1).to(tl.int64)
    crop = tl.program_id(0)
    row = crop.to(tl.int64) * B + b
    lse = tl.load(z_lse_ptr + row)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, K, BLOCK):
        k = start + tl.arange(0, BLOCK)
        z = tl.load(z_ptr + row * K + k, mask=k < K, other=0.0).to(tl.float32)
        Q = teacher_sum(t_ptr, center_ptr, t_lse_ptr, crop, b, k, T, B, K, b_temperature, BLOCK)
        total += Q * (lse - z / a)
    tl.store(part_ptr + row, tl.sum(total, axis=0))


@triton.jit
def mean_kernel(part_ptr, loss_ptr, parts, terms, BLOCK: tl.constexpr):
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, parts, BLOCK):
        i = start + tl.arange(0, BLOCK)
        total += tl.load(part_ptr + i, mask=i < parts, other=0.0)
    tl.store(loss_ptr, tl.sum(total, axis=0) / terms)


def dino_forward(student, teacher, center, student_temperature, teacher_temperature):
    (S, B, K), T = student.shape, teacher.shape[0]
    if teacher.shape[1:] != (B, K) or center.shape != (K,) or T > S or T * S == T:
        raise ValueError(
            "the teacher's views are some of the student's crops, and there are two crops or more"
        )
    z_lse, part = (torch.empty(S * B, device=student.device, dtype=torch.float32) for _ in range(2))
    t_lse = torch.empty(T * B, device=student.device, dtype=torch.float32)
    loss = torch.empty((), device=student.device, dtype=torch.float32)
    BLOCK = min(2048, triton.next_power_of_2(K))
    lse_kernel[(S * B,)](student, center, z_lse, K, student_temperature, CENTERED=False, BLOCK=BLOCK)
    lse_kernel[(T * B,)](teacher, center, t_lse, K, teacher_temperature, CENTERED=True, BLOCK=BLOCK)
    crop_loss_kernel[(S, B)](
        student, teacher, center, z_lse, t_lse, part, T, B, K, student_temperature, teacher_temperature,
        BLOCK=BLOCK,
    )  # fmt: skip
    mean_kernel[(1,)](part, loss, S * B, B * (T * S - T), BLOCK=1024)
    return loss, z_lse, t_lse


@autodiff(inputs_require_grad=(0,))
def dino_loss(student, teacher, center, student_temperature=0.1, teacher_temperature=0.04):
    """student: (crops, B, K); teacher: (views, B, K), of the first crops, and center: (K), constants; gives
    one number in float32."""
    student, teacher, center = student.contiguous(), teacher.contiguous(), center.contiguous()
    return dino_forward(student, teacher, center, student_temperature, teacher_temperature)[0]


def reference(student, teacher, center, student_temperature=0.1, teacher_temperature=0.04):
    log_p = torch.log_softmax(student / student_temperature, dim=-1)
    q = torch.softmax((teacher - center) / teacher_temperature, dim=-1)
    S, T = student.shape[0], teacher.shape[0]
    losses = [-(q[v] * log_p[s]).sum(-1).mean() for v in range(T) for s in range(S) if s != v]
    return sum(losses) / len(losses)


SWEEP = [{"S": 10, "T": 2, "B": 64, "K": 65536}, {"S": 8, "T": 2, "B": 33, "K": 8191}]
SWEEP_CPU = [{"S": 4, "T": 2, "B": 3, "K": 70}, {"S": 3, "T": 3, "B": 2, "K": 300}]


def make_args(dims, device="cuda", dtype=torch.float32):
    S, T, B, K = (dims[name] for name in "STBK")
    student = 0.3 * torch.randn(S, B, K, device=device, dtype=dtype)
    teacher = 0.1 * torch.randn(min(S, T), B, K, device=device, dtype=dtype)
    return student, teacher, 0.05 * torch.randn(K, device=device, dtype=dtype)


# ---- backward ----


@triton.jit
def crop_gradient_kernel(
    z_ptr, t_ptr, center_ptr, z_lse_ptr, t_lse_ptr, dloss_ptr, dz_ptr, T, B, K, a, b_temperature, terms,
    BLOCK: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(1).to(tl.int64)
    crop = tl.program_id(0)
    row = crop.to(tl.int64) * B + b
    k = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    z = tl.load(z_ptr + row * K + k, mask=k < K, other=0.0).to(tl.float32)
    p = tl.exp(z / a - tl.load(z_lse_ptr + row))
    Q = teacher_sum(t_ptr, center_ptr, t_lse_ptr, crop, b, k, T, B, K, b_temperature, BLOCK)
    N = tl.where(crop < T, T - 1, T)
    dz = tl.load(dloss_ptr).to(tl.float32) / (a * terms) * (N * p - Q)
    tl.store(dz_ptr + row * K + k, dz.to(dz_ptr.dtype.element_ty), mask=k < K)


class DINOLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, student, teacher, center, student_temperature, teacher_temperature):
        student, teacher, center = student.contiguous(), teacher.contiguous(), center.contiguous()
        ctx.temperatures = student_temperature, teacher_temperature
        loss, z_lse, t_lse = dino_forward(student, teacher, center, *ctx.temperatures)
        ctx.save_for_backward(student, teacher, center, z_lse, t_lse)
        return loss

    @staticmethod
    def backward(ctx, dloss):
        student, teacher, center, z_lse, t_lse = ctx.saved_tensors
        (S, B, K), T = student.shape, teacher.shape[0]
        dz = torch.empty_like(student)
        BLOCK = min(1024, triton.next_power_of_2(K))
        crop_gradient_kernel[(S, B, triton.cdiv(K, BLOCK))](
            student, teacher, center, z_lse, t_lse, dloss, dz, T, B, K, *ctx.temperatures,
            B * (T * S - T), BLOCK=BLOCK,
        )  # fmt: skip
        return dz, None, None, None, None


def dino_loss_autograd(student, teacher, center, student_temperature=0.1, teacher_temperature=0.04):
    return DINOLoss.apply(student, teacher, center, student_temperature, teacher_temperature)
