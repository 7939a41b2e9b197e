"""Safe rational activation with learned coefficients for each group of channels.

Forward    P = sum_{k=0..5} p_k x^k,  A = sum_{k=1..4} q_k x^k,  R = 1 + |A|,  y = P / R
Backward   dx = dy (P' - y sgn(A) A') / R;  for the coefficients of a group, over all that uses them,
           dp_k = sum dy x^k / R,  dq_k = -sum dy y sgn(A) x^k / R

Forward schedule: a program owns (row block, group) and has its group's ten coefficients as scalars; Horner's
rule, no powers.
Backward schedule: dx is pointwise. Each coefficient is read by every element of its group, and ten sums over
millions of numbers are what makes this layer slow: with an atomic for each tile they all meet in the same
few addresses. Here a program walks the tiles of its row block with ten vectors in registers, reduces them
once at the end, and stores ten numbers in a slot of its own; a second kernel adds the slots. All of an
element's terms start from dy / R and -dy y sgn(A) / R, so it costs one division and some products.

op: rational_activation
schedule: same_tile_pointwise, partials_then_reduce
difficulty: 4
dtypes: fp32, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


@triton.jit
def rational(x, p_ptr, q_ptr):
    """P, P', A and A' of x, by the coefficients of one group."""
    p5 = tl.load(p_ptr + 5).to(tl.float32)
    P = p5 * x + tl.load(p_ptr + 4).to(tl.float32)
    slope_P = p5 + tl.zeros_like(x)
    for k in tl.static_range(4):
        slope_P = slope_P * x + P
        P = P * x + tl.load(p_ptr + (3 - k)).to(tl.float32)
    inner = tl.load(q_ptr + 3).to(tl.float32) + tl.zeros_like(x)  # A / x
    slope_inner = tl.zeros_like(x)
    for k in tl.static_range(3):
        slope_inner = slope_inner * x + inner
        inner = inner * x + tl.load(q_ptr + (2 - k)).to(tl.float32)
    return P, slope_P, inner * x, inner + slope_inner * x


@triton.jit
def rational_kernel(
    x_ptr, p_ptr, q_ptr, y_ptr, M, C, per_group, BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    group = tl.program_id(1)
    for start in range(0, per_group, BLOCK_C):
        c = start + tl.arange(0, BLOCK_C)
        mask = (rows[:, None] < M) & (c[None, :] < per_group)
        offs = rows[:, None] * C + group * per_group + c[None, :]
        x = tl.load(x_ptr + offs, mask=mask, other=0.0).to(tl.float32)
        P, _, A, _ = rational(x, p_ptr + group * 6, q_ptr + group * 4)
        tl.store(y_ptr + offs, (P / (1 + tl.abs(A))).to(y_ptr.dtype.element_ty), mask=mask)


@autodiff(inputs_require_grad=(0, 1, 2))
def rational_activation(x, p, q):
    """x: (M, C); p: (groups, 6), from the constant up; q: (groups, 4), from the linear one up."""
    groups = p.shape[0]
    if x.shape[1] % groups or p.shape != (groups, 6) or q.shape != (groups, 4):
        raise ValueError("p is (groups, 6) and q (groups, 4), and groups divide the channels of x")
    x, p, q = x.contiguous(), p.contiguous(), q.contiguous()
    M, C = x.shape
    y = torch.empty_like(x)
    rational_kernel[(triton.cdiv(M, 16), groups)](x, p, q, y, M, C, C // groups, BLOCK_M=16, BLOCK_C=64)
    return y


def reference(x, p, q):
    groups = p.shape[0]
    grouped = x.view(x.shape[0], groups, -1)
    P = sum(p[:, k, None] * grouped**k for k in range(6))
    A = sum(q[:, k, None] * grouped ** (k + 1) for k in range(4))
    return (P / (1 + A.abs())).view_as(x)


SWEEP = [{"M": 25216, "per_group": 96, "groups": 8}, {"M": 8191, "per_group": 130, "groups": 3}]
SWEEP_CPU = [{"M": 50, "per_group": 4, "groups": 3}, {"M": 70, "per_group": 70, "groups": 1}]


def make_args(dims, device="cuda", dtype=torch.float32):
    """Coefficients near those of a smooth gate."""
    groups = dims["groups"]
    x = torch.randn(dims["M"], groups * dims["per_group"], device=device, dtype=dtype)
    p = torch.tensor([0.02, 0.5, 0.6, 0.3, 0.06, 0.01], device=device) + 0.02 * torch.randn(
        groups, 6, device=device
    )
    q = torch.tensor([0.1, 0.4, 0.1, 0.03], device=device) + 0.02 * torch.randn(groups, 4, device=device)
    return x, p.to(dtype), q.to(dtype)


# ---- backward ----

ROWS = 256  # of a program


@triton.jit
def rational_backward_kernel(
    x_ptr, p_ptr, q_ptr, dy_ptr, dx_ptr, part_ptr, M, C, per_group, ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    group = tl.program_id(1)
    zeros = tl.zeros([BLOCK_M, BLOCK_C], dtype=tl.float32)
    p0, p1, p2, p3, p4, p5 = zeros, zeros, zeros, zeros, zeros, zeros
    q1, q2, q3, q4 = zeros, zeros, zeros, zeros
    for step in range(0, ROWS, BLOCK_M):
        rows = tl.program_id(0).to(tl.int64) * ROWS + step + tl.arange(0, BLOCK_M)
        for start in range(0, per_group, BLOCK_C):
            c = start + tl.arange(0, BLOCK_C)
            mask = (rows[:, None] < M) & (c[None, :] < per_group)
            offs = rows[:, None] * C + group * per_group + c[None, :]
            x = tl.load(x_ptr + offs, mask=mask, other=0.0).to(tl.float32)
            dy = tl.load(dy_ptr + offs, mask=mask, other=0.0).to(tl.float32)
            P, slope_P, A, slope_A = rational(x, p_ptr + group * 6, q_ptr + group * 4)
            inverse = 1 / (1 + tl.abs(A))
            sign = tl.where(A > 0, 1.0, tl.where(A < 0, -1.0, 0.0))
            g = dy * inverse
            h = -g * P * inverse * sign
            dx = g * slope_P + h * slope_A
            tl.store(dx_ptr + offs, dx.to(dx_ptr.dtype.element_ty), mask=mask)
            p0 += g
            p1 += g * x
            p2 += g * x * x
            p3 += g * x * x * x
            p4 += g * x * x * x * x
            p5 += g * x * x * x * x * x
            q1 += h * x
            q2 += h * x * x
            q3 += h * x * x * x
            q4 += h * x * x * x * x
    slot = part_ptr + (tl.program_id(0) * tl.num_programs(1) + group) * 10
    tl.store(slot, tl.sum(p0))
    tl.store(slot + 1, tl.sum(p1))
    tl.store(slot + 2, tl.sum(p2))
    tl.store(slot + 3, tl.sum(p3))
    tl.store(slot + 4, tl.sum(p4))
    tl.store(slot + 5, tl.sum(p5))
    tl.store(slot + 6, tl.sum(q1))
    tl.store(slot + 7, tl.sum(q2))
    tl.store(slot + 8, tl.sum(q3))
    tl.store(slot + 9, tl.sum(q4))


@triton.jit
def coefficient_kernel(part_ptr, dp_ptr, dq_ptr, slots, BLOCK: tl.constexpr):
    group, k = tl.program_id(0), tl.program_id(1)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, slots, BLOCK):
        i = start + tl.arange(0, BLOCK)
        own = part_ptr + (i * tl.num_programs(0) + group) * 10 + k
        total += tl.load(own, mask=i < slots, other=0.0)
    grad = tl.sum(total, axis=0)
    if k < 6:
        tl.store(dp_ptr + group * 6 + k, grad.to(dp_ptr.dtype.element_ty))
    else:
        tl.store(dq_ptr + group * 4 + k - 6, grad.to(dq_ptr.dtype.element_ty))


class RationalActivation(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, p, q):
        x, p, q = x.contiguous(), p.contiguous(), q.contiguous()
        ctx.save_for_backward(x, p, q)
        return rational_activation(x, p, q)

    @staticmethod
    def backward(ctx, dy):
        x, p, q = ctx.saved_tensors
        (M, C), groups, needs = x.shape, p.shape[0], ctx.needs_input_grad
        dx, dp, dq = torch.empty_like(x), torch.empty_like(p), torch.empty_like(q)
        slots = triton.cdiv(M, ROWS)
        part = torch.empty((slots, groups, 10), device=x.device, dtype=torch.float32)
        BLOCK_C = min(128, triton.next_power_of_2(C // groups))
        rational_backward_kernel[(slots, groups)](
            x, p, q, dy.contiguous(), dx, part, M, C, C // groups,
            ROWS=ROWS, BLOCK_M=max(1, 512 // BLOCK_C), BLOCK_C=BLOCK_C,
        )  # fmt: skip
        if needs[1] or needs[2]:
            coefficient_kernel[(groups, 10)](part, dp, dq, slots, BLOCK=128)
        grads = zip((dx, dp, dq), needs, strict=True)
        return tuple(grad if needed else None for grad, needed in grads)


def rational_activation_autograd(x, p, q):
    return RationalActivation.apply(x, p, q)
