"""Mixup: each sample is blended with a partner, its place taken from a permutation.

Forward    y_b = l_b x_b + (1 - l_b) x_p(b),   p a permutation of the batch, l a weight for each sample
Backward   x_b stands in its own row and in the row whose partner it is, q(b) with p(q(b)) = b:
           dx_b = l_b dy_b + (1 - l_q(b)) dy_q(b);   dl_b = <dy_b, x_b - x_p(b)>

Forward schedule: a program owns (sample, tile of its numbers) and reads two samples.
Backward schedule: a permutation has exactly one q, so what looks like a scatter of (1 - l_b) dy_b to x_p(b)
is a gather of two rows of dy, by the inverse permutation, which the sort of p gives. dl needs a sum over a
whole sample, split here over its tiles: the program that makes dx_b's tile has dy_b there already, reads x_b
and x_p(b) beside it, and stores its share in a slot; a second kernel adds them. If nobody wants dl, x is not
read at all.

op: mixup
schedule: segment_gather, row_reduce_correct, partials_then_reduce
difficulty: 2
dtypes: fp32, fp16, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


BLOCK = 1024


@triton.jit
def load_part(ptr, sample, cols, N):
    return tl.load(ptr + sample.to(tl.int64) * N + cols, mask=cols < N, other=0.0).to(tl.float32)


@triton.jit
def mixup_kernel(x_ptr, l_ptr, p_ptr, y_ptr, N, BLOCK: tl.constexpr):
    b = tl.program_id(0)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    own = tl.load(l_ptr + b).to(tl.float32)
    y = own * load_part(x_ptr, b, cols, N) + (1 - own) * load_part(x_ptr, tl.load(p_ptr + b), cols, N)
    tl.store(y_ptr + b.to(tl.int64) * N + cols, y.to(y_ptr.dtype.element_ty), mask=cols < N)


@autodiff(inputs_require_grad=(0, 1))
def mixup(x, weight, partner):
    """x: (B, N); weight: (B); partner: int64 (B), a permutation."""
    B, N = x.shape
    if weight.shape != (B,) or partner.shape != (B,):
        raise ValueError(f"{B} samples with {tuple(weight.shape)} weights, {tuple(partner.shape)} partners")
    x, weight, partner = x.contiguous(), weight.contiguous(), partner.contiguous()
    y = torch.empty_like(x)
    mixup_kernel[(B, triton.cdiv(N, BLOCK))](x, weight, partner, y, N, BLOCK=BLOCK)
    return y


def reference(x, weight, partner):
    return weight[:, None] * x + (1 - weight[:, None]) * x[partner]


SWEEP = [{"B": 256, "C": 3, "S": 224}, {"B": 67, "C": 1, "S": 301}]
SWEEP_CPU = [{"B": 6, "C": 3, "S": 5}, {"B": 5, "C": 1, "S": 40}]


def make_args(dims, device="cuda", dtype=torch.float32):
    """Square pictures as rows."""
    B, N = dims["B"], dims["C"] * dims["S"] ** 2
    x = torch.randn(B, N, device=device, dtype=dtype)
    return x, torch.rand(B, device=device, dtype=dtype), torch.randperm(B, device=device)


# ---- backward ----


@triton.jit
def mixup_backward_kernel(
    x_ptr, l_ptr, p_ptr, q_ptr, dy_ptr, dx_ptr, slots_ptr, N,
    WANT_X: tl.constexpr, WANT_L: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    dy = load_part(dy_ptr, b, cols, N)
    if WANT_X:
        q = tl.load(q_ptr + b)
        own, others = tl.load(l_ptr + b).to(tl.float32), tl.load(l_ptr + q).to(tl.float32)
        dx = own * dy + (1 - others) * load_part(dy_ptr, q, cols, N)
        tl.store(dx_ptr + b.to(tl.int64) * N + cols, dx.to(dx_ptr.dtype.element_ty), mask=cols < N)
    if WANT_L:
        difference = load_part(x_ptr, b, cols, N) - load_part(x_ptr, tl.load(p_ptr + b), cols, N)
        slot = slots_ptr + b * tl.num_programs(1) + tl.program_id(1)
        tl.store(slot, tl.sum(dy * difference, axis=0))


@triton.jit
def sum_slots_kernel(slots_ptr, dl_ptr, count, BLOCK: tl.constexpr):
    b = tl.program_id(0)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, count, BLOCK):
        slot = start + tl.arange(0, BLOCK)
        total += tl.load(slots_ptr + b * count + slot, mask=slot < count, other=0.0)
    tl.store(dl_ptr + b, tl.sum(total, axis=0).to(dl_ptr.dtype.element_ty))


class Mixup(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, partner):
        x, weight, partner = x.contiguous(), weight.contiguous(), partner.contiguous()
        ctx.save_for_backward(x, weight, partner)
        return mixup(x, weight, partner)

    @staticmethod
    def backward(ctx, dy):
        x, weight, partner = ctx.saved_tensors
        (B, N), (want_x, want_l) = x.shape, ctx.needs_input_grad[:2]
        count = triton.cdiv(N, BLOCK)
        dx = torch.empty_like(x) if want_x else None
        dl = torch.empty_like(weight) if want_l else None
        slots = torch.empty((B, count), device=x.device, dtype=torch.float32)
        mixup_backward_kernel[(B, count)](
            x, weight, partner, partner.argsort(), dy.contiguous(), dx, slots, N,
            WANT_X=want_x, WANT_L=want_l, BLOCK=BLOCK,
        )  # fmt: skip
        if want_l:
            sum_slots_kernel[(B,)](slots, dl, count, BLOCK=128)
        return dx, dl, None


def mixup_autograd(x, weight, partner):
    return Mixup.apply(x, weight, partner)
