"""Lovasz hinge: a surrogate of one minus intersection over union that is exact at right and wrong labels.

Forward    pixel i of an image has the label y_i, s_i = 2 y_i - 1, and the error e_i = 1 - s_i z_i; in order
           of falling errors, place k = 1..n, with P the positives of the image and p_k, n_k those and the
           negatives among the first k, J_k = 1 - (P - p_k) / (P + n_k) is the loss of calling these k wrong;
           l = sum_k max(0, e_k) (J_k - J_{k-1})
Backward   the order is constant almost everywhere, so the weights W = J_k - J_{k-1} are:
           dz_i = -dl s_i W_i where e_i > 0, else 0

Forward schedule: the order is by s z, which has no rounding, where 1 - s z would make ties of different
numbers. An image's owner walks its pixels in that order with a count of positives that goes from tile to
tile. The weights need no difference of two J: a positive at place k gives 1 / (P + n_k), a negative (P - p_k)
/ ((P + n_k) (P + n_k - 1)), and the very first negative of an image without positives 1.
Backward schedule: the forward stores each weight at its pixel, so the sort is used once and forgotten: the
backward is pointwise, in the order of memory. Without that it would gather and scatter by the order, and
count again, which one owner an image does slowly.

op: lovasz_hinge
schedule: index_or_seed_replay, same_tile_pointwise
difficulty: 4
dtypes: fp32, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


@triton.jit
def lovasz_kernel(z_ptr, y_ptr, order_ptr, loss_ptr, w_ptr, n, BLOCK: tl.constexpr):
    image = tl.program_id(0).to(tl.int64) * n
    counts = tl.zeros([BLOCK], dtype=tl.int32)
    for start in range(0, n, BLOCK):
        k = start + tl.arange(0, BLOCK)
        counts += tl.load(y_ptr + image + k, mask=k < n, other=0).to(tl.int32)
    P = tl.sum(counts, axis=0)
    seen = P - P  # positives so far
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, n, BLOCK):
        k = start + tl.arange(0, BLOCK)
        i = tl.load(order_ptr + image + k, mask=k < n, other=0)
        y = tl.load(y_ptr + image + i, mask=k < n, other=0).to(tl.int32)
        z = tl.load(z_ptr + image + i, mask=k < n, other=0.0).to(tl.float32)
        p_k = seen + tl.cumsum(y, axis=0)
        union = (P + k + 1 - p_k).to(tl.float32)
        left = (P - p_k).to(tl.float32)
        of_negative = tl.where(union > 1, left / (union * tl.where(union > 1, union - 1, 1.0)), 1.0)
        w = tl.where(y == 1, 1 / union, of_negative)
        e = 1 - tl.where(y == 1, z, -z)
        total += tl.where((k < n) & (e > 0), e * w, 0.0)
        tl.store(w_ptr + image + i, w, mask=k < n)
        seen += tl.sum(y, axis=0)
    tl.store(loss_ptr + tl.program_id(0), tl.sum(total, axis=0))


def order_of(logits, labels):
    """Pixels of each image by falling error; of equal ones, the first first."""
    return torch.where(labels == 1, -logits, logits).argsort(dim=1, descending=True, stable=True)


def lovasz_forward(logits, labels):
    if logits.shape != labels.shape:
        raise ValueError("logits and labels must have one shape")
    images, n = logits.shape
    order = order_of(logits.detach(), labels)
    loss = torch.empty(images, device=logits.device, dtype=torch.float32)
    w = torch.empty((images, n), device=logits.device, dtype=torch.float32)
    BLOCK = min(2048, triton.next_power_of_2(n))
    lovasz_kernel[(images,)](logits, labels, order, loss, w, n, BLOCK=BLOCK)
    return loss, w


@autodiff(inputs_require_grad=(0,))
def lovasz_hinge(logits, labels):
    """logits: (images, pixels); labels: int8 (images, pixels), 0 or 1; gives (images) in float32."""
    return lovasz_forward(logits.contiguous(), labels.contiguous())[0]


def reference(logits, labels):
    order = order_of(logits.detach(), labels)
    z, y = logits.gather(1, order), labels.gather(1, order).to(logits.dtype)
    P, p_k = y.sum(1, keepdim=True), y.cumsum(1)
    J = 1 - (P - p_k) / (P + (1 - y).cumsum(1))
    w = torch.diff(J, dim=1, prepend=torch.zeros_like(P))
    e = 1 - (2 * y - 1) * z
    return (torch.where(e > 0, e, 0.0) * w).sum(1)


SWEEP = [{"images": 16, "n": 512 * 512}, {"images": 33, "n": 101 * 101}]
SWEEP_CPU = [{"images": 3, "n": 90}, {"images": 2, "n": 2100}]


def make_args(dims, device="cuda", dtype=torch.float32):
    shape = (dims["images"], dims["n"])
    labels = (torch.rand(shape, device=device) < 0.3).to(torch.int8)
    return torch.randn(shape, device=device, dtype=dtype) + labels.to(dtype) - 0.5, labels


# ---- backward ----


@triton.jit
def lovasz_backward_kernel(z_ptr, y_ptr, w_ptr, dloss_ptr, dz_ptr, n, BLOCK: tl.constexpr):
    image = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    offs = image * n + i
    positive = tl.load(y_ptr + offs, mask=i < n, other=0) == 1
    z = tl.load(z_ptr + offs, mask=i < n, other=0.0).to(tl.float32)
    g = tl.load(dloss_ptr + image) * tl.load(w_ptr + offs, mask=i < n, other=0.0)
    e = 1 - tl.where(positive, z, -z)
    dz = tl.where(e > 0, tl.where(positive, -g, g), 0.0)
    tl.store(dz_ptr + offs, dz.to(dz_ptr.dtype.element_ty), mask=i < n)


class LovaszHinge(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, labels):
        logits, labels = logits.contiguous(), labels.contiguous()
        loss, w = lovasz_forward(logits, labels)
        ctx.save_for_backward(logits, labels, w)
        return loss

    @staticmethod
    def backward(ctx, dloss):
        logits, labels, w = ctx.saved_tensors
        images, n = logits.shape
        dz = torch.empty_like(logits)
        lovasz_backward_kernel[(images, triton.cdiv(n, 1024))](
            logits, labels, w, dloss.contiguous(), dz, n, BLOCK=1024
        )
        return dz, None


def lovasz_hinge_autograd(logits, labels):
    return LovaszHinge.apply(logits, labels)
