"""Triplet loss with the hardest positive and the hardest negative of each anchor in the batch.

Forward    d_ij = (|x_i - x_j|^2 + e)^(1/2);  f(i) = the farthest j != i with i's label, c(i) = the closest
           with another one;  l_i = max(0, d_{i f(i)} - d_{i c(i)} + a), and 0 where one of both is missing
Backward   the choice is constant where it is unique.  With g_i = dl_i where l_i > 0,
           u = (x_i - x_f) / d_if,  v = (x_i - x_c) / d_ic:
           x_i gets g_i (u - v),  x_f gets -g_i u,  x_c gets g_i v

Forward schedule: mining and measuring are two kernels. The owner of a tile of anchors walks all samples,
makes squared distances by a product, |x_i|^2 + |x_j|^2 - 2 <x_i, x_j>, and keeps the index of each extreme:
enough to choose by, but the difference of large numbers is no distance to train on. So a second kernel makes
the two distances of an anchor from x_i - x_j itself, and saves them beside the indices.
Backward schedule: the M x M distances need no thought: the saved indices say which 3 M rows get anything. An
anchor's owner makes u and v from the saved distances and adds to three rows by atomics in fp32. A sample may
be the hardest of many anchors, but 3 M rows of additions are little; to turn the indices round (a sort,
lists) would cost more than it saves. Anchors with l_i = 0 add nothing and load nothing.

op: batch_hard_triplet
schedule: index_or_seed_replay, atomic_accumulate
difficulty: 4
dtypes: fp32, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


EPS = 1e-6


def tiles_of(x):
    """Tiles and the precision of dots: products of whole float32 numbers want small tiles."""
    PRECISION = "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee"
    return {"PRECISION": PRECISION, "BLOCK": 32 if x.dtype == torch.float32 else 64}


@triton.jit
def load_tile(ptr, rows, d, M, D):
    mask = (rows[:, None] < M) & (d[None, :] < D)
    return tl.load(ptr + rows[:, None].to(tl.int64) * D + d[None, :], mask=mask, other=0.0)


@triton.jit
def mining_kernel(
    x_ptr, label_ptr, far_ptr, close_ptr, M, D, PRECISION: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    label = tl.load(label_ptr + rows, mask=rows < M, other=0)
    far = tl.full([BLOCK], -1, dtype=tl.int32)
    close = tl.full([BLOCK], -1, dtype=tl.int32)
    largest = tl.full([BLOCK], -float("inf"), dtype=tl.float32)
    smallest = tl.full([BLOCK], float("inf"), dtype=tl.float32)
    for start in range(0, M, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        square = tl.zeros([BLOCK, BLOCK], dtype=tl.float32)
        norms = tl.zeros([BLOCK], dtype=tl.float32)
        for d_start in range(0, D, BLOCK):
            d = d_start + tl.arange(0, BLOCK)
            x = load_tile(x_ptr, cols, d, M, D)
            square = tl.dot(load_tile(x_ptr, rows, d, M, D), tl.trans(x), square, input_precision=PRECISION)
            norms += tl.sum(x.to(tl.float32) * x.to(tl.float32), axis=1)
        away = norms[None, :] - 2 * square  # |x_i|^2 is one for all j
        other = tl.load(label_ptr + cols, mask=cols < M, other=0)
        same = label[:, None] == other[None, :]
        positive = same & (rows[:, None] != cols[None, :]) & (cols[None, :] < M)
        negative = (label[:, None] != other[None, :]) & (cols[None, :] < M)
        value, index = tl.max(tl.where(positive, away, -float("inf")), axis=1, return_indices=True)
        far = tl.where(value > largest, start + index, far)
        largest = tl.maximum(largest, value)
        value, index = tl.min(tl.where(negative, away, float("inf")), axis=1, return_indices=True)
        close = tl.where(value < smallest, start + index, close)
        smallest = tl.minimum(smallest, value)
    tl.store(far_ptr + rows, far, mask=rows < M)
    tl.store(close_ptr + rows, close, mask=rows < M)


@triton.jit
def distance_kernel(
    x_ptr, far_ptr, close_ptr, loss_ptr, to_far_ptr, to_close_ptr, M, D, margin, eps, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    far = tl.load(far_ptr + row).to(tl.int64)
    close = tl.load(close_ptr + row).to(tl.int64)
    exists = (far >= 0) & (close >= 0)
    far_square = tl.zeros([BLOCK], dtype=tl.float32)
    close_square = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, D, BLOCK):
        d = start + tl.arange(0, BLOCK)
        mask = (d < D) & exists
        x = tl.load(x_ptr + row * D + d, mask=mask, other=0.0).to(tl.float32)
        u = x - tl.load(x_ptr + far * D + d, mask=mask, other=0.0).to(tl.float32)
        v = x - tl.load(x_ptr + close * D + d, mask=mask, other=0.0).to(tl.float32)
        far_square += u * u
        close_square += v * v
    to_far = tl.sqrt(tl.sum(far_square, axis=0) + eps)
    to_close = tl.sqrt(tl.sum(close_square, axis=0) + eps)
    loss = to_far - to_close + margin
    tl.store(to_far_ptr + row, to_far)
    tl.store(to_close_ptr + row, to_close)
    tl.store(loss_ptr + row, tl.where((loss > 0) & exists, loss, 0.0))


def triplet_forward(x, labels, margin):
    (M, D), tiles = x.shape, tiles_of(x)
    far, close = (torch.empty(M, device=x.device, dtype=torch.int32) for _ in range(2))
    loss, to_far, to_close = (torch.empty(M, device=x.device, dtype=torch.float32) for _ in range(3))
    mining_kernel[(triton.cdiv(M, tiles["BLOCK"]),)](x, labels, far, close, M, D, **tiles)
    BLOCK = min(1024, triton.next_power_of_2(D))
    distance_kernel[(M,)](x, far, close, loss, to_far, to_close, M, D, margin, EPS, BLOCK=BLOCK)
    return loss, far, close, to_far, to_close


@autodiff(inputs_require_grad=(0,))
def batch_hard_triplet(x, labels, margin=0.3):
    """x: (M, D); labels: int64 (M); gives (M) in float32."""
    return triplet_forward(x.contiguous(), labels.contiguous(), margin)[0]


def reference(x, labels, margin=0.3):
    square = (x[:, None] - x[None]).pow(2).sum(-1)
    same = labels[:, None] == labels
    positive = same & ~torch.eye(x.shape[0], device=x.device, dtype=torch.bool)
    d = torch.sqrt(square + EPS)
    loss = d.masked_fill(~positive, -1e30).amax(1) - d.masked_fill(same, 1e30).amin(1) + margin
    exists = positive.any(1) & (~same).any(1)
    return torch.where(exists & (loss > 0), loss, 0.0)


SWEEP = [{"M": 128, "D": 512}, {"M": 72, "D": 500}]
SWEEP_CPU = [{"M": 26, "D": 24}, {"M": 70, "D": 35}]


def make_args(dims, device="cuda", dtype=torch.float32):
    """About four samples a label, as batches for this loss are drawn."""
    M, D = dims["M"], dims["D"]
    return torch.randn(M, D, device=device, dtype=dtype), torch.arange(M, device=device) * 7 // 4 % (
        M // 4 + 1
    )


# ---- backward ----


@triton.jit
def triplet_backward_kernel(
    x_ptr, far_ptr, close_ptr, loss_ptr, to_far_ptr, to_close_ptr, dloss_ptr, dx_ptr, D, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    if tl.load(loss_ptr + row) > 0:
        d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        far = tl.load(far_ptr + row).to(tl.int64)
        close = tl.load(close_ptr + row).to(tl.int64)
        g = tl.load(dloss_ptr + row)
        x = tl.load(x_ptr + row * D + d, mask=d < D, other=0.0).to(tl.float32)
        u = x - tl.load(x_ptr + far * D + d, mask=d < D, other=0.0).to(tl.float32)
        v = x - tl.load(x_ptr + close * D + d, mask=d < D, other=0.0).to(tl.float32)
        u *= g / tl.load(to_far_ptr + row)
        v *= g / tl.load(to_close_ptr + row)
        tl.atomic_add(dx_ptr + row * D + d, u - v, mask=d < D, sem="relaxed")
        tl.atomic_add(dx_ptr + far * D + d, -u, mask=d < D, sem="relaxed")
        tl.atomic_add(dx_ptr + close * D + d, v, mask=d < D, sem="relaxed")


class BatchHardTriplet(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, labels, margin):
        x, labels = x.contiguous(), labels.contiguous()
        loss, far, close, to_far, to_close = triplet_forward(x, labels, margin)
        ctx.save_for_backward(x, far, close, loss, to_far, to_close)
        return loss

    @staticmethod
    def backward(ctx, dloss):
        x, *saved = ctx.saved_tensors
        M, D = x.shape
        dx = torch.zeros((M, D), device=x.device, dtype=torch.float32)
        BLOCK = min(512, triton.next_power_of_2(D))
        triplet_backward_kernel[(M, triton.cdiv(D, BLOCK))](x, *saved, dloss.contiguous(), dx, D, BLOCK=BLOCK)
        return dx.to(x.dtype), None, None


def batch_hard_triplet_autograd(x, labels, margin=0.3):
    return BatchHardTriplet.apply(x, labels, margin)
