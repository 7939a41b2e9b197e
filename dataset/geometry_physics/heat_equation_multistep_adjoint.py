"""Explicit steps of the heat equation with a conductivity field, differentiated through all of them.

Forward    u_{t+1} = u_t + k L u_t,  L the sum of the four neighbours less four times the point, 0 outside;
           T steps from u_0 to the result u_T, on a batch of fields that share k
Backward   with g_T = du_T:  g_t = g_{t+1} + L (k g_{t+1}), as L is symmetric; du_0 = g_0 and
           dk = sum over t and batch of g_{t+1} L u_t

Forward schedule: a launch a step, since a point needs neighbours of other programs; u_0 to u_T are stored one
after another. A program owns a tile of points of one field and finds neighbours in the cache.
Backward schedule: the launches in reversed order. The adjoint of a stencil is a stencil: the owner of a point
gathers k g of its neighbours, nothing is scattered. g needs two buffers in turn. k is shared by the batch,
so a tile's owner loops over the fields with its sum for dk in registers and adds it to dk once a step: no
other program has this tile, and steps are launches, so that a plain read and write will do.

op: stencil_pde
schedule: reverse_scan, gather_transpose, swap_owner
difficulty: 3
dtypes: fp32
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


BLOCK = 256


@triton.jit
def at(ptr, y, x, p, Y, X):
    inside = (p < Y * X) & (y >= 0) & (y < Y) & (x >= 0) & (x < X)
    return tl.load(ptr + y * X + x, mask=inside, other=0.0)


@triton.jit
def step_kernel(u_ptr, k_ptr, out_ptr, Y, X, BLOCK: tl.constexpr):
    field = tl.program_id(1).to(tl.int64) * Y * X
    p = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    y, x = p // X, p % X
    u_ptr += field
    u, k = at(u_ptr, y, x, p, Y, X), at(k_ptr, y, x, p, Y, X)
    around = at(u_ptr, y - 1, x, p, Y, X) + at(u_ptr, y + 1, x, p, Y, X)
    around += at(u_ptr, y, x - 1, p, Y, X) + at(u_ptr, y, x + 1, p, Y, X)
    tl.store(out_ptr + field + p, u + k * (around - 4 * u), mask=p < Y * X)


def heat_forward(u0, k, T):
    B, Y, X = u0.shape
    if k.shape != (Y, X) or T < 1:
        raise ValueError(f"a field {tuple(k.shape)} and {T} steps are not for {tuple(u0.shape)}")
    states = torch.empty((T, B, Y, X), device=u0.device, dtype=u0.dtype)
    for t in range(T):
        source = states[t - 1] if t else u0
        step_kernel[(triton.cdiv(Y * X, BLOCK), B)](source, k, states[t], Y, X, BLOCK=BLOCK)
    return states


@autodiff(inputs_require_grad=(0, 1))
def heat_steps(u0, k, T):
    """u0: float32 (B, Y, X); k: float32 (Y, X), of up to a quarter where steps should be stable."""
    return heat_forward(u0.contiguous(), k.contiguous(), T)[-1].clone()


def reference(u0, k, T):
    u = u0
    for _ in range(T):
        p = torch.nn.functional.pad(u, (1, 1, 1, 1))
        u = u + k * (p[:, :-2, 1:-1] + p[:, 2:, 1:-1] + p[:, 1:-1, :-2] + p[:, 1:-1, 2:] - 4 * u)
    return u


SWEEP = [{"B": 8, "Y": 512, "X": 512, "T": 32}, {"B": 3, "Y": 401, "X": 733, "T": 9}]
SWEEP_CPU = [{"B": 2, "Y": 13, "X": 19, "T": 5}, {"B": 1, "Y": 20, "X": 30, "T": 2}]


def make_args(dims, device="cuda", dtype=torch.float32):
    B, Y, X, T = (dims[name] for name in "BYXT")
    u0 = torch.randn(B, Y, X, device=device, dtype=dtype)
    return (u0, 0.05 + 0.15 * torch.rand(Y, X, device=device, dtype=dtype)), {"T": max(1, T)}


# ---- backward ----


@triton.jit
def flow(g_ptr, k_ptr, y, x, p, Y, X):
    return at(g_ptr, y, x, p, Y, X) * at(k_ptr, y, x, p, Y, X)


@triton.jit
def step_backward_kernel(
    u_ptr, k_ptr, g_ptr, out_ptr, dk_ptr, B, Y, X, FIRST: tl.constexpr, BLOCK: tl.constexpr
):
    """g_t of all fields from g_{t+1}, and what this step adds to dk."""
    p = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    y, x = p // X, p % X
    k = at(k_ptr, y, x, p, Y, X)
    dk = tl.zeros([BLOCK], dtype=tl.float32)
    for _ in range(B):
        u, g = at(u_ptr, y, x, p, Y, X), at(g_ptr, y, x, p, Y, X)
        around = at(u_ptr, y - 1, x, p, Y, X) + at(u_ptr, y + 1, x, p, Y, X)
        around += at(u_ptr, y, x - 1, p, Y, X) + at(u_ptr, y, x + 1, p, Y, X)
        dk += g * (around - 4 * u)
        inflow = flow(g_ptr, k_ptr, y - 1, x, p, Y, X) + flow(g_ptr, k_ptr, y + 1, x, p, Y, X)
        inflow += flow(g_ptr, k_ptr, y, x - 1, p, Y, X) + flow(g_ptr, k_ptr, y, x + 1, p, Y, X)
        tl.store(out_ptr + p, g + inflow - 4 * k * g, mask=p < Y * X)
        u_ptr += Y * X
        g_ptr += Y * X
        out_ptr += Y * X
    if not FIRST:
        dk += tl.load(dk_ptr + p, mask=p < Y * X, other=0.0)
    tl.store(dk_ptr + p, dk, mask=p < Y * X)


class HeatSteps(torch.autograd.Function):
    @staticmethod
    def forward(ctx, u0, k, T):
        u0, k = u0.contiguous(), k.contiguous()
        states = heat_forward(u0, k, T)
        ctx.save_for_backward(u0, k, states)
        return states[-1].clone()

    @staticmethod
    def backward(ctx, g):
        u0, k, states = ctx.saved_tensors
        T, B, Y, X = states.shape
        g, dk, buffers = g.contiguous(), torch.empty_like(k), [torch.empty_like(u0) for _ in range(2)]
        for t in reversed(range(T)):
            source = states[t - 1] if t else u0
            step_backward_kernel[(triton.cdiv(Y * X, BLOCK),)](
                source, k, g, buffers[t % 2], dk, B, Y, X, FIRST=t == T - 1, BLOCK=BLOCK
            )
            g = buffers[t % 2]
        return g if ctx.needs_input_grad[0] else None, dk if ctx.needs_input_grad[1] else None, None


def heat_steps_autograd(u0, k, T):
    return HeatSteps.apply(u0, k, T)
