"""Orthogonal layer as a butterfly: log2 N stages of plane rotations with learned angles.

Forward    stage s takes the halves a = x[: N/2], b = x[N/2 :] and, with c = cos t_s, n = sin t_s, interleaves
           p = c a - n b,   q = n a + c b   into  x' = (p_0, q_0, p_1, q_1, ...)
Backward   a = c p + n q,   b = -n p + c q;    da = c dp + n dq,  db = -n dp + c dq;
           dp/dt = -n a - c b = -q,  dq/dt = c a - n b = p:   dt_s = sum over rows of (p dq - q dp)

Forward schedule: a program owns a few rows in registers. Interleaving rotates the bits of the place by one,
so every stage pairs another bit, all stages are one piece of code, and after log2 N the order is natural.
Backward schedule: a rotation is undone exactly by the one of the other sign, so the stages are walked in
reverse from the output, un-rotating x and its gradient together. The states between the stages, log2 N times
the input, are never stored, and dt needs only what comes after its stage. An angle is shared by all rows: a
program walks tiles of rows with the dt of all stages in registers, half a row each, and stores them in a slot
at the end; a second kernel adds the slots.

op: butterfly_rotation
schedule: reverse_scan, recompute_from_stats, partials_then_reduce
difficulty: 4
dtypes: fp32
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


@triton.jit
def load_rotation(t_ptr, stage, N: tl.constexpr):
    t = tl.load(t_ptr + stage * (N // 2) + tl.arange(0, N // 2))[None, :]
    return tl.cos(t), tl.sin(t)


@triton.jit
def interleaved(p, q, BLOCK: tl.constexpr, N: tl.constexpr):
    return tl.reshape(tl.join(p, q), [BLOCK, N])


@triton.jit
def halves(x, BLOCK: tl.constexpr, N: tl.constexpr):
    return tl.split(tl.permute(tl.reshape(x, [BLOCK, 2, N // 2]), [0, 2, 1]))


@triton.jit
def join_halves(a, b, BLOCK: tl.constexpr, N: tl.constexpr):
    return tl.reshape(tl.permute(tl.join(a, b), [0, 2, 1]), [BLOCK, N])


@triton.jit
def butterfly_kernel(x_ptr, t_ptr, y_ptr, M, N: tl.constexpr, STAGES: tl.constexpr, BLOCK: tl.constexpr):
    rows = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    offs = rows[:, None] * N + tl.arange(0, N)[None, :]
    x = tl.load(x_ptr + offs, mask=rows[:, None] < M, other=0.0)
    for stage in range(STAGES):
        c, n = load_rotation(t_ptr, stage, N)
        a, b = halves(x, BLOCK, N)
        x = interleaved(c * a - n * b, n * a + c * b, BLOCK, N)
    tl.store(y_ptr + offs, x, mask=rows[:, None] < M)


def tiling(x, t):
    N = x.shape[1]
    if N < 2 or N & (N - 1) or N > 2048:
        raise ValueError(f"rows of {N}: the length must be a power of two from 2 to 2048")
    stages = N.bit_length() - 1
    if t.shape != (stages, N // 2):
        raise ValueError(f"need angles ({stages}, {N // 2})")
    return {"N": N, "STAGES": stages, "BLOCK": 4096 // N, "num_warps": 8}


@autodiff(inputs_require_grad=(0, 1))
def butterfly_rotation(x, t):
    """x: (M, N), N a power of two; t: (log2 N, N / 2), angles; both float32."""
    x, t, tiles = x.contiguous(), t.contiguous(), tiling(x, t)
    y = torch.empty_like(x)
    butterfly_kernel[(triton.cdiv(x.shape[0], tiles["BLOCK"]),)](x, t, y, x.shape[0], **tiles)
    return y


def reference(x, t):
    for angles in t:
        a, b = x.chunk(2, dim=1)
        c, n = angles.cos(), angles.sin()
        x = torch.stack([c * a - n * b, n * a + c * b], dim=2).flatten(1)
    return x


SWEEP = [{"M": 65536, "N": 1024}, {"M": 32749, "N": 64}]
SWEEP_CPU = [{"M": 37, "N": 128}, {"M": 70, "N": 64}]


def make_args(dims, device="cuda", dtype=torch.float32):
    M, N = dims["M"], dims["N"]
    t = torch.randn(N.bit_length() - 1, N // 2, device=device, dtype=dtype)
    return torch.randn(M, N, device=device, dtype=dtype), t


# ---- backward ----


MAX_GROUPS = 256


@triton.jit
def butterfly_backward_kernel(
    y_ptr, t_ptr, dy_ptr, dx_ptr, part_ptr, M, G,
    N: tl.constexpr, STAGES: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    stages, pairs = tl.arange(0, BLOCK_S), tl.arange(0, N // 2)
    dt = tl.zeros([BLOCK_S, N // 2], dtype=tl.float32)  # of every stage
    for tile in range(pid, tl.cdiv(M, BLOCK), G):
        rows = tile * BLOCK + tl.arange(0, BLOCK).to(tl.int64)
        offs = rows[:, None] * N + tl.arange(0, N)[None, :]
        x = tl.load(y_ptr + offs, mask=rows[:, None] < M, other=0.0)
        dx = tl.load(dy_ptr + offs, mask=rows[:, None] < M, other=0.0)
        for step in range(STAGES):
            stage = STAGES - 1 - step
            c, n = load_rotation(t_ptr, stage, N)
            p, q = tl.split(tl.reshape(x, [BLOCK, N // 2, 2]))
            dp, dq = tl.split(tl.reshape(dx, [BLOCK, N // 2, 2]))
            dt += tl.where(stages[:, None] == stage, tl.sum(p * dq - q * dp, axis=0)[None, :], 0.0)
            x = join_halves(c * p + n * q, c * q - n * p, BLOCK, N)
            dx = join_halves(c * dp + n * dq, c * dq - n * dp, BLOCK, N)
        tl.store(dx_ptr + offs, dx, mask=rows[:, None] < M)
    slot = part_ptr + pid * (STAGES * (N // 2))
    tl.store(slot + stages[:, None] * (N // 2) + pairs[None, :], dt, mask=stages[:, None] < STAGES)


@triton.jit
def sum_slots_kernel(part_ptr, dt_ptr, slots, count, BLOCK_S: tl.constexpr, BLOCK: tl.constexpr):
    cols = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK_S, BLOCK], dtype=tl.float32)
    for start in range(0, slots, BLOCK_S):
        slot = start + tl.arange(0, BLOCK_S)
        mask = (slot[:, None] < slots) & (cols[None, :] < count)
        offs = slot[:, None].to(tl.int64) * count + cols[None, :]
        total += tl.load(part_ptr + offs, mask=mask, other=0.0)
    tl.store(dt_ptr + cols, tl.sum(total, axis=0), mask=cols < count)


class ButterflyRotation(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, t):
        t = t.contiguous()
        y = butterfly_rotation(x, t)
        ctx.save_for_backward(y, t)
        return y

    @staticmethod
    def backward(ctx, dy):
        y, t = ctx.saved_tensors
        M, tiles = y.shape[0], tiling(y, t)
        slots = min(MAX_GROUPS, triton.cdiv(M, tiles["BLOCK"]))
        dx, dt = torch.empty_like(y), torch.empty_like(t)
        part = torch.empty((slots, t.numel()), device=y.device, dtype=torch.float32)
        BLOCK_S = triton.next_power_of_2(tiles["STAGES"])
        butterfly_backward_kernel[(slots,)](
            y, t, dy.contiguous(), dx, part, M, slots, BLOCK_S=BLOCK_S, **tiles
        )
        needs = ctx.needs_input_grad
        if needs[1]:
            grid = (triton.cdiv(t.numel(), 64),)
            sum_slots_kernel[grid](part, dt, slots, t.numel(), BLOCK_S=32, BLOCK=64)
        return dx if needs[0] else None, dt if needs[1] else None


def butterfly_rotation_autograd(x, t):
    return ButterflyRotation.apply(x, t)
