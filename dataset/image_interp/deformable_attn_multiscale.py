"""Deformable attention over several scales: each query samples a few learned places of each feature map.

Forward    O_qh = sum_{l, p} a_qhlp S(V_lh, loc_qhlp);  S is bilinear in map l of head h at
           u = x W_l - 1/2, v = y H_l - 1/2 for loc = (x, y), and zero outside;
           with j = floor u, i = floor v, f = u - j, e = v - i:
           S = (1 - e) ((1 - f) V_ij + f V_i,j+1) + e ((1 - f) V_i+1,j + f V_i+1,j+1)
Backward   da = <dO, S>,  dx = a W_l <dO, (1 - e) (V_i,j+1 - V_ij) + e (V_i+1,j+1 - V_i+1,j)>,
           dy = a H_l <dO, (1 - f) (V_i+1,j - V_ij) + f (V_i+1,j+1 - V_i,j+1)>,
           dV at the four corners += a dO times their weights

Forward schedule: a program owns a tile of queries of one head, with all channels of the head, and walks
levels and points; the four corners are rows of channels, so loads are contiguous along them.
Backward schedule: the same owner and walk. What is private to a query (da, dx, dy) is a dot of dO, which
stays in registers for all points, with the corners that the walk reads in any case, and is stored once. What
is shared, dV, goes by atomic adds of whole channel rows into a zeroed fp32 buffer: the places are data, they
move with every step, and a position gets few of them, so inverting the map would cost a sort of all
samples for sums of a few terms.

op: deformable_attention
schedule: atomic_accumulate, row_reduce_correct
difficulty: 5
dtypes: fp32
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


BLOCK_Q = 16


@triton.jit
def place(ptr, offs, mask, size):
    """First corner and weight of the second along an axis; far outside all corners are, so it may be cut."""
    g = tl.load(ptr + offs, mask=mask, other=0.0).to(tl.float32)
    u = tl.minimum(tl.maximum(g * size - 0.5, -2.0), size + 1.0)
    first = tl.floor(u)
    return first.to(tl.int32), u - first


@triton.jit
def corner(first, stride, i, j, H, W, mask, d, D):
    """Where the channels of (i, j) are, one row a query, and which of them are there."""
    inside = mask & (i >= 0) & (i < H) & (j >= 0) & (j < W)
    offs = first + (i * W + j)[:, None] * stride + d[None, :]
    return offs, inside[:, None] & (d[None, :] < D)


@triton.jit
def deformable_kernel(
    v_ptr, shapes_ptr, loc_ptr, a_ptr, o_ptr, S, Q, heads, D, L, points,
    BLOCK_Q: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(1).to(tl.int64) // heads
    head = tl.program_id(1) % heads
    q = tl.program_id(0) * BLOCK_Q + tl.arange(0, BLOCK_Q)
    d = tl.arange(0, BLOCK_D)
    own = (n * Q + q) * heads + head
    o = tl.zeros([BLOCK_Q, BLOCK_D], dtype=tl.float32)
    start = 0
    for level in range(L):
        H = tl.load(shapes_ptr + 2 * level).to(tl.int32)
        W = tl.load(shapes_ptr + 2 * level + 1).to(tl.int32)
        first = (n * S + start) * heads * D + head * D
        for point in range(points):
            sample = (own * L + level) * points + point
            j, f = place(loc_ptr, 2 * sample, q < Q, W)
            i, e = place(loc_ptr, 2 * sample + 1, q < Q, H)
            a = tl.load(a_ptr + sample, mask=q < Q, other=0.0).to(tl.float32)
            for k in tl.static_range(4):
                at, there = corner(first, heads * D, i + k // 2, j + k % 2, H, W, q < Q, d, D)
                w = (e if k // 2 else 1 - e) * (f if k % 2 else 1 - f)
                o += (a * w)[:, None] * tl.load(v_ptr + at, mask=there, other=0.0).to(tl.float32)
        start += H * W
    mask = (q[:, None] < Q) & (d[None, :] < D)
    tl.store(o_ptr + own[:, None] * D + d[None, :], o.to(o_ptr.dtype.element_ty), mask=mask)


@autodiff(inputs_require_grad=(0, 2, 3))
def deformable_attention(v, shapes, loc, a):
    """v: (N, S, heads, D), the maps of all levels one after another; shapes: int64 (L, 2), their heights and
    widths; loc: (N, Q, heads, L, points, 2), x before y, 0 to 1; a: (N, Q, heads, L, points)."""
    v, shapes, loc, a = v.contiguous(), shapes.contiguous(), loc.contiguous(), a.contiguous()
    N, S, heads, D = v.shape
    _, Q, _, L, points = a.shape
    o = torch.empty((N, Q, heads, D), device=v.device, dtype=v.dtype)
    BLOCK_D = max(16, triton.next_power_of_2(D))
    deformable_kernel[(triton.cdiv(Q, BLOCK_Q), N * heads)](
        v, shapes, loc, a, o, S, Q, heads, D, L, points, BLOCK_Q=BLOCK_Q, BLOCK_D=BLOCK_D
    )
    return o


def reference(v, shapes, loc, a):
    N, _, heads, D = v.shape
    Q, sizes = a.shape[1], [(int(H), int(W)) for H, W in shapes]
    o = 0
    for level, part in enumerate(v.split([H * W for H, W in sizes], dim=1)):
        maps = part.permute(0, 2, 3, 1).reshape(N * heads, D, *sizes[level])
        grid = (2 * loc[:, :, :, level] - 1).transpose(1, 2).flatten(0, 1)
        samples = torch.nn.functional.grid_sample(maps, grid, align_corners=False)  # (N heads, D, Q, points)
        weights = a[:, :, :, level].transpose(1, 2).flatten(0, 1)
        o = o + (samples * weights[:, None]).sum(-1)
    return o.view(N, heads, D, Q).permute(0, 3, 1, 2)


SWEEP = [
    {"N": 2, "heads": 8, "D": 32, "Q": 5440, "H": 64, "W": 64, "P": 4},
    {"N": 1, "heads": 8, "D": 32, "Q": 900, "H": 101, "W": 133, "P": 4},
]
SWEEP_CPU = [
    {"N": 1, "heads": 2, "D": 8, "Q": 5, "H": 6, "W": 7, "P": 2},
    {"N": 2, "heads": 1, "D": 20, "Q": 18, "H": 4, "W": 3, "P": 3},
]


def make_args(dims, device="cuda", dtype=torch.float32):
    """Two levels, the second half as large. No place is close to a pixel's centre, where dx and dy jump."""
    N, heads, D, Q, points = (dims[name] for name in ("N", "heads", "D", "Q", "P"))
    sizes = [(dims["H"], dims["W"]), ((dims["H"] + 1) // 2, (dims["W"] + 1) // 2)]
    levels = []
    for H, W in sizes:
        axes = []
        for size in (W, H):
            pixel = torch.randint(-1, size, (N, Q, heads, points), device=device)
            axes.append((pixel + 0.6 + 0.8 * torch.rand(N, Q, heads, points, device=device)) / size)
        levels.append(torch.stack(axes, dim=-1))
    v = torch.randn(N, sum(H * W for H, W in sizes), heads, D, device=device, dtype=dtype)
    a = torch.rand(N, Q, heads, len(sizes), points, device=device, dtype=dtype)
    return v, torch.tensor(sizes, device=device), torch.stack(levels, dim=3).to(dtype), a


# ---- backward ----


@triton.jit
def deformable_backward_kernel(
    v_ptr, shapes_ptr, loc_ptr, a_ptr, do_ptr, dv_ptr, dloc_ptr, da_ptr, S, Q, heads, D, L, points,
    BLOCK_Q: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(1).to(tl.int64) // heads
    head = tl.program_id(1) % heads
    q = tl.program_id(0) * BLOCK_Q + tl.arange(0, BLOCK_Q)
    d = tl.arange(0, BLOCK_D)
    own = (n * Q + q) * heads + head
    mask = (q[:, None] < Q) & (d[None, :] < D)
    do = tl.load(do_ptr + own[:, None] * D + d[None, :], mask=mask, other=0.0).to(tl.float32)
    start = 0
    for level in range(L):
        H = tl.load(shapes_ptr + 2 * level).to(tl.int32)
        W = tl.load(shapes_ptr + 2 * level + 1).to(tl.int32)
        first = (n * S + start) * heads * D + head * D
        for point in range(points):
            sample = (own * L + level) * points + point
            j, f = place(loc_ptr, 2 * sample, q < Q, W)
            i, e = place(loc_ptr, 2 * sample + 1, q < Q, H)
            a = tl.load(a_ptr + sample, mask=q < Q, other=0.0).to(tl.float32)
            da = tl.zeros([BLOCK_Q], dtype=tl.float32)
            du = tl.zeros([BLOCK_Q], dtype=tl.float32)
            dv = tl.zeros([BLOCK_Q], dtype=tl.float32)
            for k in tl.static_range(4):
                at, there = corner(first, heads * D, i + k // 2, j + k % 2, H, W, q < Q, d, D)
                along_y = e if k // 2 else 1 - e
                along_x = f if k % 2 else 1 - f
                dot = tl.sum(do * tl.load(v_ptr + at, mask=there, other=0.0).to(tl.float32), axis=1)
                da += along_y * along_x * dot
                du += along_y * (dot if k % 2 else -dot)
                dv += along_x * (dot if k // 2 else -dot)
                share = (a * along_y * along_x)[:, None] * do
                tl.atomic_add(dv_ptr + at, share, mask=there, sem="relaxed")
            tl.store(da_ptr + sample, da.to(da_ptr.dtype.element_ty), mask=q < Q)
            tl.store(dloc_ptr + 2 * sample, (a * W * du).to(dloc_ptr.dtype.element_ty), mask=q < Q)
            tl.store(dloc_ptr + 2 * sample + 1, (a * H * dv).to(dloc_ptr.dtype.element_ty), mask=q < Q)
        start += H * W


class DeformableAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, v, shapes, loc, a):
        v, shapes, loc, a = v.contiguous(), shapes.contiguous(), loc.contiguous(), a.contiguous()
        ctx.save_for_backward(v, shapes, loc, a)
        return deformable_attention(v, shapes, loc, a)

    @staticmethod
    def backward(ctx, do):
        v, shapes, loc, a = ctx.saved_tensors
        N, S, heads, D = v.shape
        _, Q, _, L, points = a.shape
        dv = torch.zeros(v.shape, device=v.device, dtype=torch.float32)
        dloc, da = torch.empty_like(loc), torch.empty_like(a)
        BLOCK_D = max(16, triton.next_power_of_2(D))
        deformable_backward_kernel[(triton.cdiv(Q, BLOCK_Q), N * heads)](
            v, shapes, loc, a, do.contiguous(), dv, dloc, da, S, Q, heads, D, L, points,
            BLOCK_Q=BLOCK_Q, BLOCK_D=BLOCK_D,
        )  # fmt: skip
        needs = ctx.needs_input_grad
        dv = dv.to(v.dtype) if needs[0] else None
        return dv, None, dloc if needs[2] else None, da if needs[3] else None


def deformable_attention_autograd(v, shapes, loc, a):
    return DeformableAttention.apply(v, shapes, loc, a)
