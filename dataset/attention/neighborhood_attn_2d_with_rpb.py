"""Attention of each pixel to the K x K window around it, with a learned bias for each offset.

Forward    pixel p, offsets t of the window, p + t inside the image:
           S_t = s <q_p, k_{p+t}> + b_{h,t},  P = softmax over t,  o_p = sum_t P_t v_{p+t}
Backward   dS_t = P_t (<do_p, v_{p+t}> - delta_p),  delta_p = <do_p, o_p>,
           dq_p = s sum_t dS_t k_{p+t},   db_{h,t} = sum over batch and pixels of dS_t;
           pixel r is at offset t of pixel r - t:
           dk_r = s sum_t dS_t(r - t) q_{r-t},   dv_r = sum_t P_t(r - t) do_{r-t}

Forward schedule: windows of neighbours overlap but no two have the same keys, so there is no dot: a program
owns a stretch of an image row and loops over the K^2 offsets. An offset's keys are its own tile, shifted, and
its scores are sums over channels. An online softmax over the offsets reads K and V once each; tiles of
neighbouring rows are in cache. lse is saved.
Backward schedule: dq and db keep the owner and the loop: in a step all of a program's dS belong to one
offset, so its share of db_t is one sum, stored in a slot as it comes; a kernel adds the slots. dk and dv
gather: the same loop with the offset's sign turned, reading q, do, lse and delta of pixel r - t. What falls
out of the image is masked on the side that is walked, so borders need no case of their own.

op: neighborhood_attention
schedule: gather_transpose, partials_then_reduce, recompute_from_stats
difficulty: 4
dtypes: fp32, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


@triton.jit
def load_shifted(ptr, image, y, x, Y, X, d, D):
    """A stretch of an image row, and which of it is inside the image."""
    inside = (x >= 0) & (x < X) & (y >= 0) & (y < Y)
    offs = (image * Y * X + y * X + x)[:, None] * D + d[None, :]
    return tl.load(ptr + offs, mask=inside[:, None] & (d[None, :] < D), other=0.0).to(tl.float32), inside


@triton.jit
def store_row(ptr, value, image, y, x, Y, X, d, D):
    offs = (image * Y * X + y * X + x)[:, None] * D + d[None, :]
    tl.store(ptr + offs, value.to(ptr.dtype.element_ty), mask=(x < X)[:, None] & (d[None, :] < D))


@triton.jit
def neighborhood_kernel(
    q_ptr, k_ptr, v_ptr, b_ptr, o_ptr, lse_ptr, H, Y, X, D, K, scale,
    BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    image, y = tl.program_id(2).to(tl.int64), tl.program_id(1)
    b_ptr += tl.program_id(2) % H * K * K
    x, d = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, BLOCK_D)
    q, _ = load_shifted(q_ptr, image, y, x, Y, X, d, D)
    m = tl.full([BLOCK], -1e30, dtype=tl.float32)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    acc = tl.zeros([BLOCK, BLOCK_D], dtype=tl.float32)
    for t in range(K * K):
        ky, kx = y + t // K - K // 2, x + t % K - K // 2
        k, inside = load_shifted(k_ptr, image, ky, kx, Y, X, d, D)
        v, _ = load_shifted(v_ptr, image, ky, kx, Y, X, d, D)
        s = tl.sum(q * k, axis=1) * scale + tl.load(b_ptr + t).to(tl.float32)
        s = tl.where(inside, s, -float("inf"))
        m_new = tl.maximum(m, s)
        p, rescale = tl.exp(s - m_new), tl.exp(m - m_new)
        total = total * rescale + p
        acc = acc * rescale[:, None] + p[:, None] * v
        m = m_new
    total = tl.where(x < X, total, 1.0)
    store_row(o_ptr, acc / total[:, None], image, y, x, Y, X, d, D)
    tl.store(lse_ptr + image * Y * X + y * X + x, m + tl.log(total), mask=x < X)


def launch(q):
    """The grid and the tiles: a tile of about 2048 numbers."""
    B, H, Y, X, D = q.shape
    BLOCK_D = triton.next_power_of_2(D)
    BLOCK = max(1, min(triton.next_power_of_2(max(1, X)), 2048 // BLOCK_D))
    return (triton.cdiv(X, BLOCK), Y, B * H), {"BLOCK": BLOCK, "BLOCK_D": BLOCK_D}


def neighborhood_forward(q, k, v, b):
    B, H, Y, X, D = q.shape
    K = b.shape[-1]
    if not q.shape == k.shape == v.shape or b.shape != (H, K, K) or K % 2 == 0:
        raise ValueError("q, k and v must have one shape, and b an odd window of their heads")
    if D > 256:
        raise ValueError(f"head dimension {D} does not fit one tile")
    o, (grid, blocks) = torch.empty_like(q), launch(q)
    lse = torch.empty((B, H, Y, X), device=q.device, dtype=torch.float32)
    neighborhood_kernel[grid](q, k, v, b, o, lse, H, Y, X, D, K, D**-0.5, **blocks)
    return o, lse


@autodiff(inputs_require_grad=(0, 1, 2, 3))
def neighborhood_attention(q, k, v, b):
    """q, k, v: (batch, heads, Y, X, dim); b: (heads, K, K), K odd; the window ends at the image's borders."""
    return neighborhood_forward(q.contiguous(), k.contiguous(), v.contiguous(), b.contiguous())[0]


def reference(q, k, v, b):
    Y, X, D = q.shape[2:]
    K = b.shape[-1]
    y, x = torch.arange(Y, device=q.device), torch.arange(X, device=q.device)
    ty = (y - y[:, None] + K // 2)[:, None, :, None].expand(Y, X, Y, X)
    tx = (x - x[:, None] + K // 2)[None, :, None, :].expand(Y, X, Y, X)
    seen = (ty >= 0) & (ty < K) & (tx >= 0) & (tx < K)
    bias = b[:, ty.clamp(0, K - 1), tx.clamp(0, K - 1)].flatten(1, 2).flatten(2)
    s = D**-0.5 * q.flatten(2, 3) @ k.flatten(2, 3).transpose(-1, -2) + bias
    s = s.masked_fill(~seen.reshape(Y * X, Y * X), -float("inf"))
    return (torch.softmax(s, dim=-1) @ v.flatten(2, 3)).view(v.shape)


SWEEP = [
    {"B": 4, "H": 8, "Y": 56, "X": 56, "K": 7, "D": 32},
    {"B": 2, "H": 6, "Y": 61, "X": 83, "K": 5, "D": 48},
]
SWEEP_CPU = [
    {"B": 1, "H": 2, "Y": 3, "X": 5, "K": 3, "D": 8},
    {"B": 2, "H": 1, "Y": 2, "X": 3, "K": 5, "D": 11},
]


def make_args(dims, device="cuda", dtype=torch.float32):
    B, H, Y, X, K, D = (dims[key] for key in ("B", "H", "Y", "X", "K", "D"))
    q, k, v = (torch.randn(B, H, Y, X, D, device=device, dtype=dtype) for _ in range(3))
    return q, k, v, torch.randn(H, K, K, device=device, dtype=dtype)


# ---- backward ----


@triton.jit
def pixel_kernel(
    q_ptr, k_ptr, v_ptr, b_ptr, o_ptr, lse_ptr, do_ptr, delta_ptr, dq_ptr, slots_ptr, H, Y, X, D, K, scale,
    BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    image, y = tl.program_id(2).to(tl.int64), tl.program_id(1)
    b_ptr += tl.program_id(2) % H * K * K
    slots_ptr += ((image * tl.num_programs(1) + y) * tl.num_programs(0) + tl.program_id(0)) * K * K
    x, d = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, BLOCK_D)
    q, _ = load_shifted(q_ptr, image, y, x, Y, X, d, D)
    o, _ = load_shifted(o_ptr, image, y, x, Y, X, d, D)
    do, _ = load_shifted(do_ptr, image, y, x, Y, X, d, D)
    lse = tl.load(lse_ptr + image * Y * X + y * X + x, mask=x < X, other=float("inf"))
    delta = tl.sum(o * do, axis=1)
    tl.store(delta_ptr + image * Y * X + y * X + x, delta, mask=x < X)
    dq = tl.zeros([BLOCK, BLOCK_D], dtype=tl.float32)
    for t in range(K * K):
        ky, kx = y + t // K - K // 2, x + t % K - K // 2
        k, inside = load_shifted(k_ptr, image, ky, kx, Y, X, d, D)
        v, _ = load_shifted(v_ptr, image, ky, kx, Y, X, d, D)
        s = tl.sum(q * k, axis=1) * scale + tl.load(b_ptr + t).to(tl.float32)
        p = tl.exp(tl.where(inside, s - lse, -float("inf")))
        ds = p * (tl.sum(do * v, axis=1) - delta)
        dq += ds[:, None] * k
        tl.store(slots_ptr + t, tl.sum(ds, axis=0))
    store_row(dq_ptr, dq * scale, image, y, x, Y, X, d, D)


@triton.jit
def neighbour_kernel(
    q_ptr, k_ptr, v_ptr, b_ptr, lse_ptr, do_ptr, delta_ptr, dk_ptr, dv_ptr, H, Y, X, D, K, scale,
    BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    image, y = tl.program_id(2).to(tl.int64), tl.program_id(1)
    b_ptr += tl.program_id(2) % H * K * K
    x, d = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, BLOCK_D)
    k, _ = load_shifted(k_ptr, image, y, x, Y, X, d, D)
    v, _ = load_shifted(v_ptr, image, y, x, Y, X, d, D)
    dk = tl.zeros([BLOCK, BLOCK_D], dtype=tl.float32)
    dv = tl.zeros([BLOCK, BLOCK_D], dtype=tl.float32)
    for t in range(K * K):
        qy, qx = y - t // K + K // 2, x - t % K + K // 2  # the pixel that has this one at offset t
        q, inside = load_shifted(q_ptr, image, qy, qx, Y, X, d, D)
        do, _ = load_shifted(do_ptr, image, qy, qx, Y, X, d, D)
        at = image * Y * X + qy * X + qx
        lse = tl.load(lse_ptr + at, mask=inside, other=float("inf"))
        delta = tl.load(delta_ptr + at, mask=inside, other=0.0)
        p = tl.exp(tl.sum(q * k, axis=1) * scale + tl.load(b_ptr + t).to(tl.float32) - lse)
        dv += p[:, None] * do
        dk += (p * (tl.sum(do * v, axis=1) - delta))[:, None] * q
    store_row(dk_ptr, dk * scale, image, y, x, Y, X, d, D)
    store_row(dv_ptr, dv, image, y, x, Y, X, d, D)


@triton.jit
def bias_kernel(slots_ptr, db_ptr, B, H, G, KK, BLOCK: tl.constexpr):
    """Sum of slots (B, H, G, K K) over batch and programs, for one head and offset."""
    h, t = tl.program_id(0), tl.program_id(1)
    acc = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, B * G, BLOCK):
        i = start + tl.arange(0, BLOCK)
        slot = (i // G * H + h).to(tl.int64) * G + i % G
        acc += tl.load(slots_ptr + slot * KK + t, mask=i < B * G, other=0.0)
    tl.store(db_ptr + h * KK + t, tl.sum(acc, axis=0).to(db_ptr.dtype.element_ty))


class NeighborhoodAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, b):
        q, k, v, b = q.contiguous(), k.contiguous(), v.contiguous(), b.contiguous()
        o, lse = neighborhood_forward(q, k, v, b)
        ctx.save_for_backward(q, k, v, b, o, lse)
        return o

    @staticmethod
    def backward(ctx, do):
        q, k, v, b, o, lse = ctx.saved_tensors
        do, needs = do.contiguous(), ctx.needs_input_grad
        (B, H, Y, X, D), K, (grid, blocks) = q.shape, b.shape[-1], launch(q)
        G = grid[0] * grid[1]
        delta, slots = torch.empty_like(lse), lse.new_empty((B, H, G, K * K))
        grads = [torch.empty_like(tensor) for tensor in (q, k, v, b)]
        dq, dk, dv, db = grads
        sizes = (H, Y, X, D, K, D**-0.5)
        pixel_kernel[grid](
            q, k, v, b, o, lse, do, delta, dq, slots, *sizes, **blocks
        )  # delta for the other too
        if needs[1] or needs[2]:
            neighbour_kernel[grid](q, k, v, b, lse, do, delta, dk, dv, *sizes, **blocks)
        if needs[3]:
            bias_kernel[(H, K * K)](slots, db, B, H, G, K * K, BLOCK=128)
        return tuple(grad if needed else None for grad, needed in zip(grads, needs, strict=True))


def neighborhood_attention_autograd(q, k, v, b):
    return NeighborhoodAttention.apply(q, k, v, b)
