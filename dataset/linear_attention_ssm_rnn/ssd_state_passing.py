"""State passing of a chunked state-space layer: what each chunk adds becomes what each chunk begins with.

Forward    per (batch, head):  S_0 = s0,   S_{c+1} = e^{a_c} S_c + X_c   for the chunks c,
           X_c what chunk c adds, M numbers, and a_c the sum of its log decays; out: all S_c and the last
Backward   with R_{c+1} the gradient of S_{c+1} along all paths:   dX_c = R_{c+1},
           da_c = e^{a_c} <R_{c+1}, S_c>,   R_c = dS_c + e^{a_c} R_{c+1},   ds0 = R_0;
           it begins with the gradient of the last state

Forward schedule: the M numbers of a state share one decay but do not mix, so a program owns (batch, head,
tile of the state) and walks the chunks, few in number.
Backward schedule: the same owner walks the chunks from right to left with R in registers, reads S_c from the
output and stores dX_c, which is R itself. The decay is one number for the whole state, whose tiles belong to
different programs: each stores its part of <R, S> in a slot of its own, and a second kernel adds the slots of
a chunk and multiplies by e^{a}, once. Adding by atomics would put all tiles of a head on one address at about
the same time.

op: ssd_state_passing
schedule: reverse_scan, partials_then_reduce
difficulty: 3
dtypes: fp32, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


BLOCK = 256


@triton.jit
def load_part(ptr, i, M):
    return tl.load(ptr + i, mask=i < M, other=0.0).to(tl.float32)


@triton.jit
def store_part(ptr, value, i, M):
    tl.store(ptr + i, value.to(ptr.dtype.element_ty), mask=i < M)


@triton.jit
def passing_kernel(x_ptr, a_ptr, s0_ptr, before_ptr, last_ptr, chunks, H, M, BLOCK: tl.constexpr):
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    pair = tl.program_id(0).to(tl.int64)  # (batch, head)
    first = pair // H * chunks * H + pair % H
    s = load_part(s0_ptr + pair * M, i, M)
    for c in range(chunks):
        row = first + c * H
        store_part(before_ptr + row * M, s, i, M)
        s = tl.exp(tl.load(a_ptr + row).to(tl.float32)) * s + load_part(x_ptr + row * M, i, M)
    store_part(last_ptr + pair * M, s, i, M)


@autodiff(inputs_require_grad=(0, 1, 2))
def state_passing(x, a, s0):
    """x: (B, chunks, H, M); a: (B, chunks, H); s0: (B, H, M). Gives each chunk's first state, and the end."""
    x, a, s0 = x.contiguous(), a.contiguous(), s0.contiguous()
    B, chunks, H, M = x.shape
    if a.shape != x.shape[:3] or s0.shape != (B, H, M):
        raise ValueError(f"x {tuple(x.shape)}, a {tuple(a.shape)} and s0 {tuple(s0.shape)} do not fit")
    before, last = torch.empty_like(x), torch.empty_like(s0)
    passing_kernel[(B * H, triton.cdiv(M, BLOCK))](x, a, s0, before, last, chunks, H, M, BLOCK=BLOCK)
    return before, last


def reference(x, a, s0):
    s, before = s0, []
    for c in range(x.shape[1]):
        before.append(s)
        s = a[:, c, :, None].exp() * s + x[:, c]
    return torch.stack(before, dim=1), s


SWEEP = [
    {"B": 4, "chunks": 16, "H": 32, "M": 8192},
    {"B": 1, "chunks": 33, "H": 24, "M": 5000},
]
SWEEP_CPU = [{"B": 2, "chunks": 5, "H": 3, "M": 300}, {"B": 1, "chunks": 2, "H": 1, "M": 256}]


def make_args(dims, device="cuda", dtype=torch.float32):
    B, chunks, H, M = (dims[name] for name in ("B", "chunks", "H", "M"))
    x = torch.randn(B, chunks, H, M, device=device, dtype=dtype)
    a = -2 * torch.rand(B, chunks, H, device=device, dtype=dtype)
    return x, a, torch.randn(B, H, M, device=device, dtype=dtype)


# ---- backward ----


@triton.jit
def passing_backward_kernel(
    a_ptr, before_ptr, dbefore_ptr, dlast_ptr, dx_ptr, slots_ptr, ds0_ptr, chunks, H, M, BLOCK: tl.constexpr
):
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    pair = tl.program_id(0).to(tl.int64)
    first = pair // H * chunks * H + pair % H
    r = load_part(dlast_ptr + pair * M, i, M)
    for back in range(chunks):
        row = first + (chunks - 1 - back) * H
        store_part(dx_ptr + row * M, r, i, M)
        share = tl.sum(r * load_part(before_ptr + row * M, i, M), axis=0)
        tl.store(slots_ptr + row * tl.num_programs(1) + tl.program_id(1), share)
        decay = tl.exp(tl.load(a_ptr + row).to(tl.float32))
        r = load_part(dbefore_ptr + row * M, i, M) + decay * r
    store_part(ds0_ptr + pair * M, r, i, M)


@triton.jit
def da_kernel(slots_ptr, a_ptr, da_ptr, tiles, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, tiles, BLOCK):
        i = start + tl.arange(0, BLOCK)
        total += tl.load(slots_ptr + row * tiles + i, mask=i < tiles, other=0.0)
    da = tl.sum(total, axis=0) * tl.exp(tl.load(a_ptr + row).to(tl.float32))
    tl.store(da_ptr + row, da.to(da_ptr.dtype.element_ty))


class StatePassing(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, a, s0):
        a = a.contiguous()
        before, last = state_passing(x, a, s0)
        ctx.save_for_backward(a, before)
        return before, last

    @staticmethod
    def backward(ctx, dbefore, dlast):
        a, before = ctx.saved_tensors
        B, chunks, H, M = before.shape
        tiles, needs = triton.cdiv(M, BLOCK), ctx.needs_input_grad
        dx, ds0, da = torch.empty_like(before), before.new_empty((B, H, M)), torch.empty_like(a)
        slots = torch.empty((B * chunks * H, tiles), device=a.device, dtype=torch.float32)
        passing_backward_kernel[(B * H, tiles)](
            a, before, dbefore.contiguous(), dlast.contiguous(), dx, slots, ds0, chunks, H, M, BLOCK=BLOCK
        )
        if needs[1]:
            da_kernel[(a.numel(),)](slots, a, da, tiles, BLOCK=32)
        grads = zip((dx, da, ds0), needs, strict=True)
        return tuple(grad if needed else None for grad, needed in grads)


def state_passing_autograd(x, a, s0):
    return StatePassing.apply(x, a, s0)
