"""Hidden layer of which each token computes a few chosen neurons alone: contextual sparsity, tiny experts.

Forward    h_tk = relu(<x_t, u_n>),  n = S_tk the k-th neuron that token t chose;   y_t = sum_k h_tk v_n
Backward   dh_tk = [h_tk > 0] <dy_t, v_n>;   dx_t = sum_k dh_tk u_n;
           du_n = sum of dh_tk x_t,  dv_n = sum of h_tk dy_t  over the (t, k) with S_tk = n

Forward schedule: a program owns a token and gathers its K rows of u, then of v, as tiles of columns. h is
saved: K numbers a token.
Backward schedule: the same token's program gathers the same rows again for dh, which it stores, and dx. A
neuron's rows are read by whoever chose it, so du and dv change owners: one sort of S gives each neuron the
list of its (t, k), and the neuron's program walks it, gathering x_t and dy_t weighted by h and dh. Popular
neurons have long lists, but each row is stored once, and a neuron that nobody chose stores zeros. With
atomics K rows of u and of v a token would be added to, 2 D K times what a token's y is.

op: sparse_mlp
schedule: segment_gather, swap_owner
difficulty: 4
dtypes: fp32, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


@triton.jit
def load_rows(ptr, rows, there, d, D):
    mask = there[:, None] & (d[None, :] < D)
    return tl.load(ptr + rows[:, None] * D + d[None, :], mask=mask, other=0.0).to(tl.float32)


@triton.jit
def row_dots(ptr, rows, there, x_ptr, D, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr):
    """Of some rows of a matrix with one vector."""
    total = tl.zeros([BLOCK_K], dtype=tl.float32)
    for start in range(0, D, BLOCK_D):
        d = start + tl.arange(0, BLOCK_D)
        x = tl.load(x_ptr + d, mask=d < D, other=0.0).to(tl.float32)
        total += tl.sum(load_rows(ptr, rows, there, d, D) * x[None, :], axis=1)
    return total


@triton.jit
def mix_rows(ptr, rows, there, weights, out_ptr, D, BLOCK_D: tl.constexpr):
    """The weighted sum of some rows of a matrix."""
    for start in range(0, D, BLOCK_D):
        d = start + tl.arange(0, BLOCK_D)
        y = tl.sum(load_rows(ptr, rows, there, d, D) * weights[:, None], axis=0)
        tl.store(out_ptr + d, y.to(out_ptr.dtype.element_ty), mask=d < D)


@triton.jit
def sparse_mlp_kernel(
    x_ptr, u_ptr, v_ptr, s_ptr, y_ptr, h_ptr, D, K, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr
):
    t, k = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK_K)
    rows = tl.load(s_ptr + t * K + k, mask=k < K, other=0)
    score = row_dots(u_ptr, rows, k < K, x_ptr + t * D, D, BLOCK_K, BLOCK_D)
    h = tl.where(score > 0, score, 0.0)
    tl.store(h_ptr + t * K + k, h, mask=k < K)
    mix_rows(v_ptr, rows, k < K, h, y_ptr + t * D, D, BLOCK_D)


def sparse_mlp_forward(x, u, v, s):
    (T, D), K = x.shape, s.shape[1]
    if u.shape != v.shape or u.shape[1] != D or s.shape[0] != T or K > 128:
        raise ValueError(f"x {tuple(x.shape)}, u {tuple(u.shape)}, v {tuple(v.shape)}, s {tuple(s.shape)}")
    y, h = torch.empty_like(x), torch.empty((T, K), device=x.device, dtype=torch.float32)
    blocks = {"BLOCK_K": triton.next_power_of_2(K), "BLOCK_D": 64}
    sparse_mlp_kernel[(T,)](x, u, v, s, y, h, D, K, **blocks)
    return y, h


@autodiff(inputs_require_grad=(0, 1, 2))
def sparse_mlp(x, u, v, s):
    """x: (T, D); u, v: (F, D); s: int64 (T, K), neurons from 0 to F - 1, at most 128 a token."""
    return sparse_mlp_forward(x.contiguous(), u.contiguous(), v.contiguous(), s.contiguous())[0]


def reference(x, u, v, s):
    h = torch.relu(torch.einsum("td,tkd->tk", x, u[s]))
    return torch.einsum("tk,tkd->td", h, v[s])


SWEEP = [{"T": 4096, "D": 1024, "F": 16384, "K": 32}, {"T": 2003, "D": 500, "F": 3001, "K": 11}]
SWEEP_CPU = [{"T": 15, "D": 20, "F": 9, "K": 6}, {"T": 6, "D": 100, "F": 40, "K": 4}]


def make_args(dims, device="cuda", dtype=torch.float32):
    T, D, F, K = (dims[name] for name in "TDFK")
    x = torch.randn(T, D, device=device, dtype=dtype)
    u = torch.randn(F, D, device=device, dtype=dtype) / max(1, D) ** 0.5
    v = torch.randn(F, D, device=device, dtype=dtype) / max(1, K) ** 0.5
    return x, u, v, torch.randint(0, F, (T, K), device=device)


# ---- backward ----


@triton.jit
def token_kernel(
    dy_ptr, u_ptr, v_ptr, s_ptr, h_ptr, dx_ptr, dh_ptr, D, K,
    WANT_X: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    t, k = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK_K)
    rows = tl.load(s_ptr + t * K + k, mask=k < K, other=0)
    h = tl.load(h_ptr + t * K + k, mask=k < K, other=0.0)
    dh = row_dots(v_ptr, rows, k < K, dy_ptr + t * D, D, BLOCK_K, BLOCK_D)
    dh = tl.where(h > 0, dh, 0.0)
    tl.store(dh_ptr + t * K + k, dh, mask=k < K)
    if WANT_X:
        mix_rows(u_ptr, rows, k < K, dh, dx_ptr + t * D, D, BLOCK_D)


@triton.jit
def neuron_kernel(
    x_ptr, dy_ptr, h_ptr, dh_ptr, place_ptr, first_ptr, du_ptr, dv_ptr, D, K,
    BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """place: the (t, k), as t K + k, by neuron; first: where each neuron's begin."""
    n = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    end = tl.load(first_ptr + n + 1)
    du = tl.zeros([BLOCK_D], dtype=tl.float32)
    dv = tl.zeros([BLOCK_D], dtype=tl.float32)
    for start in range(tl.load(first_ptr + n), end, BLOCK_T):
        i = start + tl.arange(0, BLOCK_T)
        place = tl.load(place_ptr + i, mask=i < end, other=0)
        h = tl.load(h_ptr + place, mask=i < end, other=0.0)
        dh = tl.load(dh_ptr + place, mask=i < end, other=0.0)
        du += tl.sum(dh[:, None] * load_rows(x_ptr, place // K, i < end, d, D), axis=0)
        dv += tl.sum(h[:, None] * load_rows(dy_ptr, place // K, i < end, d, D), axis=0)
    tl.store(du_ptr + n * D + d, du.to(du_ptr.dtype.element_ty), mask=d < D)
    tl.store(dv_ptr + n * D + d, dv.to(dv_ptr.dtype.element_ty), mask=d < D)


class SparseMLP(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, u, v, s):
        x, u, v, s = x.contiguous(), u.contiguous(), v.contiguous(), s.contiguous()
        y, h = sparse_mlp_forward(x, u, v, s)
        ctx.save_for_backward(x, u, v, s, h)
        return y

    @staticmethod
    def backward(ctx, dy):
        x, u, v, s, h = ctx.saved_tensors
        (T, D), (F, K), needs, dy = x.shape, (u.shape[0], s.shape[1]), ctx.needs_input_grad, dy.contiguous()
        dx, dh = torch.empty_like(x), torch.empty_like(h)
        du, dv = torch.empty_like(u), torch.empty_like(v)
        blocks = {"BLOCK_K": triton.next_power_of_2(K), "BLOCK_D": 64}
        token_kernel[(T,)](dy, u, v, s, h, dx, dh, D, K, WANT_X=needs[0], **blocks)
        if needs[1] or needs[2]:
            neuron, place = s.flatten().sort(stable=True)
            first = torch.searchsorted(neuron, torch.arange(F + 1, device=s.device))
            neuron_kernel[(F, triton.cdiv(D, 128))](
                x, dy, h, dh, place, first, du, dv, D, K, BLOCK_T=16, BLOCK_D=128
            )
        return dx if needs[0] else None, du if needs[1] else None, dv if needs[2] else None, None


def sparse_mlp_autograd(x, u, v, s):
    return SparseMLP.apply(x, u, v, s)
