"""Generalised intersection over union of predicted and true boxes (detectors, DETR).

Forward    boxes (x0, y0, x1, y1), predicted b, true t, A and A' their areas; along x, i = min(x1, x1') -
           max(x0, x0'), floored at 0, and h = max(x1, x1') - min(x0, x0'), and along y the same:
           I = i_x i_y,  H = h_x h_y,  U = A + A' - I,  l = 2 - I / U - U / H, as GIoU is I / U - (H - U) / H
Backward   with U = A + A' - I:  l_I = -1 / U and l_H = U / H^2 for I and H alone,  l_U = I / U^2 - 1 / H:
           dI = l_I - l_U,  dA = l_U,  dH = l_H;  each area is a product of sides, a side a maximum less a
           minimum, so an edge gets its share from A always, from I where it is the inner edge and the boxes
           meet, from H where it is the outer one

Forward schedule: a program owns a tile of boxes, as four vectors, one for each coordinate: four lanes of one
box would have to talk to each other, four vectors of a tile never do.
Backward schedule: the same. A box is eight numbers, so nothing is worth saving: the geometry is made again,
and dA, dI, dH are three numbers from which the four edges take theirs by the comparisons of the forward. The
neighbouring coordinates of a box are four strided loads of one cache line, which the first one fetches.

op: giou_loss
schedule: same_tile_pointwise
difficulty: 3
dtypes: fp32
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


@triton.jit
def load_box(ptr, i, M):
    box = ptr + 4 * i
    x0 = tl.load(box, mask=i < M, other=0.0).to(tl.float32)
    y0 = tl.load(box + 1, mask=i < M, other=0.0).to(tl.float32)
    x1 = tl.load(box + 2, mask=i < M, other=1.0).to(tl.float32)
    y1 = tl.load(box + 3, mask=i < M, other=1.0).to(tl.float32)
    return x0, y0, x1, y1


@triton.jit
def sides(low, high, t_low, t_high):
    """Along one axis: what two intervals share, before its floor, and what covers both."""
    inner = tl.where(high < t_high, high, t_high) - tl.where(low > t_low, low, t_low)
    outer = tl.where(high < t_high, t_high, high) - tl.where(low > t_low, t_low, low)
    return inner, outer


@triton.jit
def giou_kernel(b_ptr, t_ptr, loss_ptr, M, eps, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x0, y0, x1, y1 = load_box(b_ptr, i, M)
    u0, v0, u1, v1 = load_box(t_ptr, i, M)
    inner_x, outer_x = sides(x0, x1, u0, u1)
    inner_y, outer_y = sides(y0, y1, v0, v1)
    meet = (inner_x > 0) & (inner_y > 0)
    shared = tl.where(meet, inner_x * inner_y, 0.0)
    union = (x1 - x0) * (y1 - y0) + (u1 - u0) * (v1 - v0) - shared + eps
    hull = outer_x * outer_y + eps
    tl.store(loss_ptr + i, 2 - shared / union - union / hull, mask=i < M)


@autodiff(inputs_require_grad=(0,))
def giou_loss(boxes, target, eps=1e-7):
    """boxes, target: (M, 4), corners x0 <= x1, y0 <= y1; target is a constant; gives (M)."""
    if boxes.shape != target.shape or boxes.shape[1] != 4:
        raise ValueError("boxes and target are (M, 4)")
    M = boxes.shape[0]
    loss = torch.empty(M, device=boxes.device, dtype=boxes.dtype)
    giou_kernel[(triton.cdiv(M, 256),)](boxes.contiguous(), target.contiguous(), loss, M, eps, BLOCK=256)
    return loss


def reference(boxes, target, eps=1e-7):
    low, high = boxes[:, :2], boxes[:, 2:]
    inner = torch.where(high < target[:, 2:], high, target[:, 2:]) - torch.where(
        low > target[:, :2], low, target[:, :2]
    )
    outer = torch.where(high < target[:, 2:], target[:, 2:], high) - torch.where(
        low > target[:, :2], target[:, :2], low
    )
    shared = torch.where((inner > 0).all(1), inner.prod(1), 0.0)
    union = (high - low).prod(1) + (target[:, 2:] - target[:, :2]).prod(1) - shared + eps
    return 2 - shared / union - union / (outer.prod(1) + eps)


SWEEP = [{"M": 4000000}, {"M": 300007}]
SWEEP_CPU = [{"M": 300}, {"M": 37}]


def make_args(dims, device="cuda", dtype=torch.float32):
    """Boxes of sides 0.2 to 1.2; the predicted are moved by about half a side: most meet, some do not."""
    M = dims["M"]
    sides_of = [0.2 + torch.rand(M, 2, device=device) for _ in range(2)]
    corner = torch.rand(M, 2, device=device)
    moved = corner + 0.5 * torch.randn(M, 2, device=device)
    return tuple(
        torch.cat([low, low + side], dim=1).to(dtype)
        for low, side in zip((moved, corner), sides_of, strict=True)
    )


# ---- backward ----


@triton.jit
def edge_gradients(low, high, t_low, t_high, of_area, of_shared, of_hull):
    """Of both edges along one axis, by what a unit of each side counts."""
    d_high = of_area + tl.where(high < t_high, of_shared, of_hull)
    d_low = -of_area - tl.where(low > t_low, of_shared, of_hull)
    return d_low, d_high


@triton.jit
def giou_backward_kernel(b_ptr, t_ptr, dloss_ptr, db_ptr, M, eps, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x0, y0, x1, y1 = load_box(b_ptr, i, M)
    u0, v0, u1, v1 = load_box(t_ptr, i, M)
    dloss = tl.load(dloss_ptr + i, mask=i < M, other=0.0).to(tl.float32)
    inner_x, outer_x = sides(x0, x1, u0, u1)
    inner_y, outer_y = sides(y0, y1, v0, v1)
    meet = (inner_x > 0) & (inner_y > 0)
    shared = tl.where(meet, inner_x * inner_y, 0.0)
    union = (x1 - x0) * (y1 - y0) + (u1 - u0) * (v1 - v0) - shared + eps
    hull = outer_x * outer_y + eps
    d_area = dloss * (shared / (union * union) - 1 / hull)
    d_shared = tl.where(meet, -dloss / union - d_area, 0.0)
    d_hull = dloss * union / (hull * hull)
    dx0, dx1 = edge_gradients(x0, x1, u0, u1, d_area * (y1 - y0), d_shared * inner_y, d_hull * outer_y)
    dy0, dy1 = edge_gradients(y0, y1, v0, v1, d_area * (x1 - x0), d_shared * inner_x, d_hull * outer_x)
    box = db_ptr + 4 * i
    tl.store(box, dx0.to(db_ptr.dtype.element_ty), mask=i < M)
    tl.store(box + 1, dy0.to(db_ptr.dtype.element_ty), mask=i < M)
    tl.store(box + 2, dx1.to(db_ptr.dtype.element_ty), mask=i < M)
    tl.store(box + 3, dy1.to(db_ptr.dtype.element_ty), mask=i < M)


class GIoULoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, boxes, target, eps):
        boxes, target = boxes.contiguous(), target.contiguous()
        ctx.save_for_backward(boxes, target)
        ctx.eps = eps
        return giou_loss(boxes, target, eps)

    @staticmethod
    def backward(ctx, dloss):
        boxes, target = ctx.saved_tensors
        M, db = boxes.shape[0], torch.empty_like(boxes)
        giou_backward_kernel[(triton.cdiv(M, 256),)](
            boxes, target, dloss.contiguous(), db, M, ctx.eps, BLOCK=256
        )
        return db, None, None


def giou_loss_autograd(boxes, target, eps=1e-7):
    return GIoULoss.apply(boxes, target, eps)
