"""PEER: a token is sent to K of very many experts that are one neuron each, two rows of two tables.

Forward    z_tk = <x_t, u_e>,  e = idx_tk,   y_t = sum_k g_tk f(z_tk) v_e,   f the tanh form of GELU
Backward   p_tk = <dy_t, v_e>,   dg_tk = f(z_tk) p_tk,   c_tk = g_tk f'(z_tk) p_tk is the gradient of z_tk:
           dx_t = sum_k c_tk u_e,   du_e = sum c_tk x_t,   dv_e = sum g_tk f(z_tk) dy_t,
           both over the pairs (t, k) that chose e

Forward schedule: a program owns a token, with x and y in registers, and gathers two rows for each choice:
nothing is grouped, as a pair is two dots long. z is saved, one number a choice.
Backward schedule: the token's owner gathers the same rows, and has p, dg, c and dx; c stays for later. The
tables are the other ownership: an expert is chosen by few tokens, and which is known to the data alone, so
the choices are sorted once, and expert e finds its own between begin_e and begin_{e+1}. Its owner gathers
rows of x and dy, weighs them with c and g f, and stores both rows, zeros where nobody came. Each gradient has
one writer; atomic adds of D numbers for each choice would write K rows a token, twice, in no fixed order.

op: peer_experts
schedule: segment_gather, recompute_from_stats
difficulty: 4
dtypes: fp32, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


@triton.jit
def load_row(ptr, row, cols, D):
    return tl.load(ptr + row * D + cols, mask=cols < D, other=0.0).to(tl.float32)


@triton.jit
def store_row(ptr, value, row, cols, D):
    tl.store(ptr + row * D + cols, value.to(ptr.dtype.element_ty), mask=cols < D)


@triton.jit
def gelu_and_slope(z):
    t = 2 * tl.sigmoid(1.5957691216057308 * (z + 0.044715 * z * z * z)) - 1  # tanh
    slope = 0.7978845608028654 * (1 + 3 * 0.044715 * z * z)
    return 0.5 * z * (1 + t), 0.5 * (1 + t) + 0.5 * z * (1 - t * t) * slope


@triton.jit
def peer_kernel(x_ptr, idx_ptr, g_ptr, u_ptr, v_ptr, y_ptr, z_ptr, K, D, BLOCK: tl.constexpr):
    t = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    x = load_row(x_ptr, t, cols, D)
    y = tl.zeros([BLOCK], dtype=tl.float32)
    for k in range(K):
        e = tl.load(idx_ptr + t * K + k).to(tl.int64)
        z = tl.sum(x * load_row(u_ptr, e, cols, D), axis=0)
        f, _ = gelu_and_slope(z)
        y += tl.load(g_ptr + t * K + k).to(tl.float32) * f * load_row(v_ptr, e, cols, D)
        tl.store(z_ptr + t * K + k, z)
    store_row(y_ptr, y, t, cols, D)


def peer_forward(x, idx, g, u, v):
    (T, D), K = x.shape, idx.shape[1]
    if u.shape != v.shape or u.shape[1] != D or idx.shape != g.shape or idx.shape[0] != T:
        raise ValueError("u and v must be tables of rows as wide as x, and idx and g one row a token")
    if D > 8192:
        raise ValueError(f"a row of {D} does not fit one tile")
    y = torch.empty_like(x)
    z = torch.empty((T, K), device=x.device, dtype=torch.float32)
    peer_kernel[(T,)](x, idx, g, u, v, y, z, K, D, BLOCK=triton.next_power_of_2(D))
    return y, z


@autodiff(inputs_require_grad=(0, 2, 3, 4))
def peer_experts(x, idx, g, u, v):
    """x: (T, D); idx: int64 (T, K), experts below E; g: (T, K); u, v: (E, D)."""
    return peer_forward(*(tensor.contiguous() for tensor in (x, idx, g, u, v)))[0]


def reference(x, idx, g, u, v):
    h = g * torch.nn.functional.gelu((x[:, None] * u[idx]).sum(-1), approximate="tanh")
    return (h[..., None] * v[idx]).sum(1)


SWEEP = [
    {"T": 8192, "D": 1024, "K": 32, "E": 65536},
    {"T": 2039, "D": 768, "K": 16, "E": 10007},
]
SWEEP_CPU = [{"T": 13, "D": 20, "K": 3, "E": 11}, {"T": 9, "D": 33, "K": 2, "E": 16}]


def make_args(dims, device="cuda", dtype=torch.float32):
    T, D, K, E = (dims[name] for name in ("T", "D", "K", "E"))
    x = torch.randn(T, D, device=device, dtype=dtype)
    u, v = (torch.randn(E, D, device=device, dtype=dtype) / max(1, D) ** 0.5 for _ in range(2))
    idx = torch.randint(0, E, (T, K), device=device)
    return x, idx, torch.rand(T, K, device=device, dtype=dtype), u, v


# ---- backward ----


@triton.jit
def token_backward_kernel(
    idx_ptr, g_ptr, u_ptr, v_ptr, z_ptr, dy_ptr, dx_ptr, dg_ptr, c_ptr, K, D, BLOCK: tl.constexpr
):
    t = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    dy = load_row(dy_ptr, t, cols, D)
    dx = tl.zeros([BLOCK], dtype=tl.float32)
    for k in range(K):
        e = tl.load(idx_ptr + t * K + k).to(tl.int64)
        p = tl.sum(dy * load_row(v_ptr, e, cols, D), axis=0)
        f, slope = gelu_and_slope(tl.load(z_ptr + t * K + k))
        c = tl.load(g_ptr + t * K + k).to(tl.float32) * slope * p
        tl.store(dg_ptr + t * K + k, (f * p).to(dg_ptr.dtype.element_ty))
        tl.store(c_ptr + t * K + k, c)
        dx += c * load_row(u_ptr, e, cols, D)
    store_row(dx_ptr, dx, t, cols, D)


@triton.jit
def expert_backward_kernel(
    order_ptr, begin_ptr, x_ptr, dy_ptr, g_ptr, z_ptr, c_ptr, du_ptr, dv_ptr, K, D, BLOCK: tl.constexpr
):
    e = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    du = tl.zeros([BLOCK], dtype=tl.float32)
    dv = tl.zeros([BLOCK], dtype=tl.float32)
    for i in range(tl.load(begin_ptr + e), tl.load(begin_ptr + e + 1)):
        choice = tl.load(order_ptr + i)
        f, _ = gelu_and_slope(tl.load(z_ptr + choice))
        du += tl.load(c_ptr + choice) * load_row(x_ptr, choice // K, cols, D)
        dv += tl.load(g_ptr + choice).to(tl.float32) * f * load_row(dy_ptr, choice // K, cols, D)
    store_row(du_ptr, du, e, cols, D)
    store_row(dv_ptr, dv, e, cols, D)


class PeerExperts(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, idx, g, u, v):
        x, idx, g, u, v = (tensor.contiguous() for tensor in (x, idx, g, u, v))
        y, z = peer_forward(x, idx, g, u, v)
        ctx.save_for_backward(x, idx, g, u, v, z)
        return y

    @staticmethod
    def backward(ctx, dy):
        x, idx, g, u, v, z = ctx.saved_tensors
        dy, needs, (T, D), (E, K) = dy.contiguous(), ctx.needs_input_grad, x.shape, (u.shape[0], g.shape[1])
        dx, dg, du, dv = (torch.empty_like(tensor) for tensor in (x, g, u, v))
        c = torch.empty_like(z)
        token_backward_kernel[(T,)](idx, g, u, v, z, dy, dx, dg, c, K, D, BLOCK=triton.next_power_of_2(D))
        if needs[3] or needs[4]:
            order = torch.argsort(idx.view(-1), stable=True)
            begin = torch.searchsorted(idx.view(-1)[order], torch.arange(E + 1, device=idx.device))
            expert_backward_kernel[(E, triton.cdiv(D, 256))](
                order, begin, x, dy, g, z, c, du, dv, K, D, BLOCK=256
            )
        return (
            dx if needs[0] else None,
            None,
            dg if needs[2] else None,
            du if needs[3] else None,
            dv if needs[4] else None,
        )


def peer_experts_autograd(x, idx, g, u, v):
    return PeerExperts.apply(x, idx, g, u, v)
