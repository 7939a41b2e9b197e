"""Linear layer with 2 of each 4 weights, stored packed: the two values and where they stand.

Forward    of the weights n, 4 g .. 4 g + 3 two are not zero: V_n,2g and V_n,2g+1, at the places p_n,2g and
           p_n,2g+1;   W_nk = V_nq where k = 4 (q / 2) + p_nq, and 0 where no q says so;   y = x W^T
Backward   dx = dy W;   dV_nq = sum_m dy_mn x_m,k(q) = (dy^T x)_n,k(q),  k(q) the place of q

Forward schedule: a program owns a tile of y. It unpacks a tile of W on load: each lane looks at the two
values of its group and takes the one that stands at it, so W is never stored whole.
Backward schedule: dx is owned by its tiles, with W unpacked in the same way. For dV each number could gather
its column of x, at another place in each row n: nothing a dot can use. So the owner of a tile makes the
tile of dy^T x whole, by dots, and then keeps the half of it that has weights: a selection in registers,
a sum over the four places of a group with a one-hot of p. Twice the products that are needed, all of them
on tensor cores, and a dense dW, which would be twice the packed one, is never written.

op: sparse24_linear
schedule: swap_owner, index_or_seed_replay
difficulty: 4
dtypes: fp32, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


def tiling(x):
    """Tiles and the precision of dots: products of whole float32 numbers want small tiles."""
    PRECISION = "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee"
    return {"PRECISION": PRECISION, "BLOCK": 32 if x.dtype == torch.float32 else 64}


@triton.jit
def load_tile(ptr, rows, cols, R, C):
    mask = (rows[:, None] < R) & (cols[None, :] < C)
    return tl.load(ptr + rows[:, None].to(tl.int64) * C + cols[None, :], mask=mask, other=0.0)


@triton.jit
def store_tile(ptr, value, rows, cols, R, C):
    mask = (rows[:, None] < R) & (cols[None, :] < C)
    offs = rows[:, None].to(tl.int64) * C + cols[None, :]
    tl.store(ptr + offs, value.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def unpack(v_ptr, place_ptr, n, k, N, K):
    """A tile of W, (n, k)."""
    mask = (n[:, None] < N) & (k[None, :] < K)
    q = n[:, None].to(tl.int64) * (K // 2) + k[None, :] // 4 * 2
    here = k[None, :] % 4
    first = tl.load(place_ptr + q, mask=mask, other=-1) == here
    second = tl.load(place_ptr + q + 1, mask=mask, other=-1) == here
    w = tl.where(first, tl.load(v_ptr + q, mask=mask, other=0.0), 0.0)
    return tl.where(second, tl.load(v_ptr + q + 1, mask=mask, other=0.0), w)


@triton.jit
def linear_kernel(x_ptr, v_ptr, place_ptr, y_ptr, M, N, K, PRECISION: tl.constexpr, BLOCK: tl.constexpr):
    m = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    y = tl.zeros([BLOCK, BLOCK], dtype=tl.float32)
    for start in range(0, K, BLOCK):
        k = start + tl.arange(0, BLOCK)
        w = unpack(v_ptr, place_ptr, n, k, N, K).to(x_ptr.dtype.element_ty)
        y = tl.dot(load_tile(x_ptr, m, k, M, K), tl.trans(w), y, input_precision=PRECISION)
    store_tile(y_ptr, y, m, n, M, N)


@autodiff(inputs_require_grad=(0, 1))
def packed_linear(x, v, place):
    """x: (M, K); v: (N, K / 2); place: int8 (N, K / 2), two different ones of 0 to 3 for each group of 4."""
    M, K = x.shape
    if K % 4 or v.shape[1] * 2 != K or place.shape != v.shape:
        raise ValueError(
            f"{K} inputs with packed weights {tuple(v.shape)} are not groups of 4 with 2 of each"
        )
    x, v, place, tiles, N = x.contiguous(), v.contiguous(), place.contiguous(), tiling(x), v.shape[0]
    y = torch.empty((M, N), device=x.device, dtype=x.dtype)
    grid = (triton.cdiv(M, tiles["BLOCK"]), triton.cdiv(N, tiles["BLOCK"]))
    linear_kernel[grid](x, v, place, y, M, N, K, **tiles)
    return y


def reference(x, v, place):
    (N, half), group = v.shape, torch.arange(v.shape[1], device=v.device) // 2
    w = v.new_zeros(N, 2 * half).scatter(1, 4 * group + place.long(), v)
    return x @ w.t()


SWEEP = [{"M": 8192, "K": 4096, "N": 2048}, {"M": 2003, "K": 1020, "N": 1501}]
SWEEP_CPU = [{"M": 27, "K": 40, "N": 36}, {"M": 50, "K": 76, "N": 9}]


def make_args(dims, device="cuda", dtype=torch.float32):
    M, N, groups = dims["M"], dims["N"], triton.cdiv(dims["K"], 4)
    x = torch.randn(M, 4 * groups, device=device, dtype=dtype)
    v = torch.randn(N, 2 * groups, device=device, dtype=dtype) / max(1, 2 * groups) ** 0.5
    place = torch.rand(N, groups, 4, device=device).argsort(-1)[..., :2]  # two of four, in any order
    return x, v, place.reshape(N, 2 * groups).to(torch.int8)


# ---- backward ----


@triton.jit
def dx_kernel(dy_ptr, v_ptr, place_ptr, dx_ptr, M, N, K, PRECISION: tl.constexpr, BLOCK: tl.constexpr):
    m = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    dx = tl.zeros([BLOCK, BLOCK], dtype=tl.float32)
    for start in range(0, N, BLOCK):
        n = start + tl.arange(0, BLOCK)
        w = unpack(v_ptr, place_ptr, n, k, N, K).to(dy_ptr.dtype.element_ty)
        dx = tl.dot(load_tile(dy_ptr, m, n, M, N), w, dx, input_precision=PRECISION)
    store_tile(dx_ptr, dx, m, k, M, K)


@triton.jit
def dv_kernel(x_ptr, dy_ptr, place_ptr, dv_ptr, M, N, K, PRECISION: tl.constexpr, BLOCK: tl.constexpr):
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    dw = tl.zeros([BLOCK, BLOCK], dtype=tl.float32)
    for start in range(0, M, BLOCK):
        m = start + tl.arange(0, BLOCK)
        dy = tl.trans(load_tile(dy_ptr, m, n, M, N))
        dw = tl.dot(dy, load_tile(x_ptr, m, k, M, K), dw, input_precision=PRECISION)
    groups = tl.reshape(dw, [BLOCK, BLOCK // 4, 4])
    here = tl.arange(0, 4)
    q = tl.program_id(1) * (BLOCK // 2) + 2 * tl.arange(0, BLOCK // 4)  # the first of each group
    for which in tl.static_range(2):
        mask = (n[:, None] < N) & (q[None, :] < K // 2)
        at = n[:, None].to(tl.int64) * (K // 2) + q[None, :] + which
        place = tl.load(place_ptr + at, mask=mask, other=-1)
        dv = tl.sum(tl.where(place[:, :, None] == here[None, None, :], groups, 0.0), axis=2)
        tl.store(dv_ptr + at, dv.to(dv_ptr.dtype.element_ty), mask=mask)


class PackedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, v, place):
        x, v, place = x.contiguous(), v.contiguous(), place.contiguous()
        ctx.save_for_backward(x, v, place)
        return packed_linear(x, v, place)

    @staticmethod
    def backward(ctx, dy):
        x, v, place = ctx.saved_tensors
        (M, K), N, tiles, dy = x.shape, v.shape[0], tiling(x), dy.contiguous()
        count_m, count_n, count_k = (triton.cdiv(size, tiles["BLOCK"]) for size in (M, N, K))
        dx = dv = None
        if ctx.needs_input_grad[0]:
            dx = torch.empty_like(x)
            dx_kernel[(count_m, count_k)](dy, v, place, dx, M, N, K, **tiles)
        if ctx.needs_input_grad[1]:
            dv = torch.empty_like(v)
            dv_kernel[(count_n, count_k)](x, dy, place, dv, M, N, K, **tiles)
        return dx, dv, None


def packed_linear_autograd(x, v, place):
    return PackedLinear.apply(x, v, place)
