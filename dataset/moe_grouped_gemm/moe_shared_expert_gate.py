"""A shared expert joins a mixture: its result, times a gate made from the token, is added to the others'.

Forward    l_t = <x_t, w>,   g_t = sigmoid(l_t),   y_t = r_t + g_t s_t;   r the routed, s the shared result
Backward   dr = dy,   ds_t = g_t dy_t,   dl_t = <dy_t, s_t> g_t (1 - g_t),   dx_t = dl_t w,
           dw = sum_t dl_t x_t

Forward schedule: a program owns a token, whose row of D numbers fits one tile: the dot with w, the gate, and
the sum, in one pass. g is kept, a number a token.
Backward schedule: everything but dw stays with the token: its owner has dy in registers for the copy dr, for
ds and for the row dot with s, and with that dot it has dx, which is w times a number. A layer for the gate,
multiplication and addition apart would read dy three times and store the (T, 1) steps between. G programs
walk the tokens pid, pid + G, ... with w in registers and add dl_t x_t there; G parts of dw are added by a
second kernel.

op: moe_shared_gate
schedule: row_reduce_correct, partials_then_reduce
difficulty: 2
dtypes: fp32, fp16, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


def tile_of(D):
    """A whole row in one tile, and warps enough to hold it in registers."""
    BLOCK = triton.next_power_of_2(D)
    return {"BLOCK": BLOCK, "num_warps": min(16, max(4, BLOCK // 512))}


@triton.jit
def load_row(ptr, t, d, D):
    return tl.load(ptr + t * D + d, mask=d < D, other=0.0).to(tl.float32)


@triton.jit
def store_row(ptr, value, t, d, D):
    tl.store(ptr + t * D + d, value.to(ptr.dtype.element_ty), mask=d < D)


@triton.jit
def shared_gate_kernel(x_ptr, w_ptr, r_ptr, s_ptr, y_ptr, g_ptr, D, BLOCK: tl.constexpr):
    t, d = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    g = tl.sigmoid(tl.sum(load_row(x_ptr, t, d, D) * load_row(w_ptr, 0, d, D), axis=0))
    tl.store(g_ptr + t, g)
    store_row(y_ptr, load_row(r_ptr, t, d, D) + g * load_row(s_ptr, t, d, D), t, d, D)


def shared_gate_forward(x, w, r, s):
    T, D = x.shape
    if w.shape != (D,) or r.shape != (T, D) or s.shape != (T, D) or D > 16384:
        raise ValueError(f"x {tuple(x.shape)}, w {tuple(w.shape)}, r {tuple(r.shape)}; rows of at most 16384")
    y, g = torch.empty_like(r), torch.empty(T, device=x.device, dtype=torch.float32)
    shared_gate_kernel[(T,)](x, w, r, s, y, g, D, **tile_of(D))
    return y, g


@autodiff(inputs_require_grad=(0, 1, 2, 3))
def moe_shared_gate(x, w, r, s):
    """x, r, s: (T, D), tokens, what the routed and what the shared expert made of them; w: (D)."""
    return shared_gate_forward(x.contiguous(), w.contiguous(), r.contiguous(), s.contiguous())[0]


def reference(x, w, r, s):
    return r + torch.sigmoid(x @ w)[:, None] * s


SWEEP = [{"T": 16384, "D": 2048}, {"T": 4099, "D": 3500}]
SWEEP_CPU = [{"T": 29, "D": 40}, {"T": 135, "D": 9}]


def make_args(dims, device="cuda", dtype=torch.float32):
    T, D = dims["T"], dims["D"]
    x, r, s = (torch.randn(T, D, device=device, dtype=dtype) for _ in range(3))
    return x, torch.randn(D, device=device, dtype=dtype) / max(1, D) ** 0.5, r, s


# ---- backward ----

MAX_GROUPS = 256  # about two programs a multiprocessor


@triton.jit
def shared_gate_backward_kernel(
    x_ptr, w_ptr, s_ptr, g_ptr, dy_ptr, dx_ptr, dr_ptr, ds_ptr, parts_ptr, T, D, BLOCK: tl.constexpr
):
    pid, d = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    w = load_row(w_ptr, 0, d, D)
    dw = tl.zeros([BLOCK], dtype=tl.float32)
    for t in range(pid, T, tl.num_programs(0)):
        g = tl.load(g_ptr + t)
        dy = load_row(dy_ptr, t, d, D)
        dl = tl.sum(dy * load_row(s_ptr, t, d, D), axis=0) * g * (1 - g)
        store_row(dr_ptr, dy, t, d, D)
        store_row(ds_ptr, g * dy, t, d, D)
        store_row(dx_ptr, dl * w, t, d, D)
        dw += dl * load_row(x_ptr, t, d, D)
    store_row(parts_ptr, dw, pid, d, D)


@triton.jit
def sum_parts_kernel(parts_ptr, dw_ptr, G, D, BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr):
    d = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)
    dw = tl.zeros([BLOCK_G, BLOCK_D], dtype=tl.float32)
    for start in range(0, G, BLOCK_G):
        part = start + tl.arange(0, BLOCK_G)
        mask = (part[:, None] < G) & (d[None, :] < D)
        dw += tl.load(parts_ptr + part[:, None] * D + d[None, :], mask=mask, other=0.0)
    tl.store(dw_ptr + d, tl.sum(dw, axis=0).to(dw_ptr.dtype.element_ty), mask=d < D)


class MoESharedGate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, r, s):
        x, w, s = x.contiguous(), w.contiguous(), s.contiguous()
        y, g = shared_gate_forward(x, w, r.contiguous(), s)
        ctx.save_for_backward(x, w, s, g)
        return y

    @staticmethod
    def backward(ctx, dy):
        x, w, s, g = ctx.saved_tensors
        (T, D), needs = x.shape, ctx.needs_input_grad
        G = min(T, MAX_GROUPS)
        dx, dw, dr, ds = (torch.empty_like(t) for t in (x, w, s, s))
        parts = torch.empty((G, D), device=x.device, dtype=torch.float32)
        shared_gate_backward_kernel[(G,)](x, w, s, g, dy.contiguous(), dx, dr, ds, parts, T, D, **tile_of(D))
        if needs[1]:
            sum_parts_kernel[(triton.cdiv(D, 64),)](parts, dw, G, D, BLOCK_G=32, BLOCK_D=64)
        grads = (dx, dw, dr, ds)
        return tuple(g if needed else None for g, needed in zip(grads, needs, strict=True))


def moe_shared_gate_autograd(x, w, r, s):
    return MoESharedGate.apply(x, w, r, s)
