"""The state that each chunk of a Mamba-2 layer adds, B shared by the heads of a group.

Forward    in a chunk whose decays sum to s_t up to step t, and to s_e at its last:
           w_t = e^{s_e - s_t} dt_t,   S = sum over the chunk of w_t x_t B_t^T   (P x N, for each head)
Backward   with Q = dS:   dx_t = w_t Q B_t,   dB_t = sum over the group's heads of w_t Q^T x_t,
           y_t = <x_t, Q B_t> is the gradient of w_t:   ddt_t = e^{s_e - s_t} y_t,   ds_t = -w_t y_t,
           and ds_e has the sum over the chunk of w_t y_t beside its own

Forward schedule: a program owns (batch, chunk, head, tile of N) and walks the chunk by time tiles, one dot
each, with its part of S in registers.
Backward schedule: dS arrives whole, and every gradient belongs to a step, so there is no state to pass. The
owner of (chunk, head) walks the time tiles again: one product Q B gives dx, and its dot with x gives y, hence
ddt and ds; nothing but the row sum leaves the tile. The last step's ds needs the whole chunk, and comes last
in the walk, so the sum is complete when its tile is stored. B is read by all heads of its group: its owner,
a (time tile, group), loops over them, where a slot a head would be H / G times as large as dB.

op: ssd_chunk_state
schedule: swap_owner, row_reduce_correct
difficulty: 4
dtypes: fp32, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


def tiling(x, b):
    single = x.dtype == torch.float32
    return {
        "PRECISION": "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee",
        "BLOCK_T": 32 if single else 64,
        "BLOCK_P": max(16, triton.next_power_of_2(x.shape[3])),
        "BLOCK_N": max(16, triton.next_power_of_2(b.shape[3])),
        "num_warps": 8 if single else 4,
    }


@triton.jit
def load_steps(ptr, rows, end, cols, stride, C):
    mask = (rows < end)[:, None] & (cols < C)[None, :]
    return tl.load(ptr + rows[:, None].to(tl.int64) * stride + cols[None, :], mask=mask, other=0.0)


@triton.jit
def load_weights(dt_ptr, s_ptr, rows, end, H):
    """e^{s_e - s_t} and w_t; both 0 past the chunk."""
    last = tl.load(s_ptr + (end - 1).to(tl.int64) * H)
    s = tl.load(s_ptr + rows.to(tl.int64) * H, mask=rows < end, other=0.0)
    decay = tl.where(rows < end, tl.exp(last - s), 0.0)
    return decay, decay * tl.load(dt_ptr + rows.to(tl.int64) * H, mask=rows < end, other=0.0)


@triton.jit
def chunk_state_kernel(
    x_ptr, b_ptr, dt_ptr, s_ptr, state_ptr, T, H, G, P, N, chunk, PRECISION: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    head, c = tl.program_id(0), tl.program_id(1)
    batch = tl.program_id(2).to(tl.int64)
    p, n = tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_N)
    x_ptr += batch * T * H * P + head * P
    b_ptr += (batch * T * G + head // (H // G)) * N
    end = tl.minimum((c + 1) * chunk, T)
    state = tl.zeros([BLOCK_P, BLOCK_N], dtype=tl.float32)
    for start in range(c * chunk, end, BLOCK_T):
        rows = start + tl.arange(0, BLOCK_T)
        x = load_steps(x_ptr, rows, end, p, H * P, P)
        b = load_steps(b_ptr, rows, end, n, G * N, N)
        _, w = load_weights(dt_ptr + batch * T * H + head, s_ptr + batch * T * H + head, rows, end, H)
        scaled = (x.to(tl.float32) * w[:, None]).to(x.dtype)
        state = tl.dot(tl.trans(scaled), b, state, input_precision=PRECISION)
    place = ((batch * tl.num_programs(1) + c) * H + head) * P * N
    mask = (p < P)[:, None] & (n < N)[None, :]
    tl.store(state_ptr + place + p[:, None] * N + n[None, :], state, mask=mask)


@autodiff(inputs_require_grad=(0, 1, 2, 3))
def ssd_chunk_state(x, b, dt, s, chunk=256):
    """x: (B, T, H, P); b: (B, T, G, N); dt, s: (B, T, H), float32. Gives (B, chunks, H, P, N), float32."""
    x, b, dt, s = x.contiguous(), b.contiguous(), dt.contiguous(), s.contiguous()
    (B, T, H, P), (G, N) = x.shape, b.shape[2:]
    if b.shape[:2] != x.shape[:2] or not dt.shape == s.shape == x.shape[:3]:
        raise ValueError("x, b, dt and s must agree in batch and time, and x, dt and s in heads")
    if H % G != 0:
        raise ValueError(f"{H} heads cannot share {G} groups")
    if P > 128 or N > 128:
        raise ValueError(f"a state of {P} x {N} does not fit one tile")
    chunks = triton.cdiv(T, chunk)
    state = torch.empty((B, chunks, H, P, N), device=x.device, dtype=torch.float32)
    chunk_state_kernel[(H, chunks, B)](x, b, dt, s, state, T, H, G, P, N, chunk, **tiling(x, b))
    return state


def reference(x, b, dt, s, chunk=256):
    dtype = torch.promote_types(x.dtype, torch.float32)
    x, b, states = x.to(dtype), b.to(dtype).repeat_interleave(x.shape[2] // b.shape[2], dim=2), []
    for t in range(0, x.shape[1], chunk):
        part = slice(t, t + chunk)
        w = torch.exp(s[:, part][:, -1:] - s[:, part]) * dt[:, part]
        states.append(torch.einsum("bth,bthp,bthn->bhpn", w.to(dtype), x[:, part], b[:, part]))
    return torch.stack(states, dim=1)


SWEEP = [
    {"B": 2, "T": 4096, "H": 64, "G": 1, "P": 64, "N": 128, "Q": 256},
    {"B": 1, "T": 2039, "H": 24, "G": 8, "P": 64, "N": 100, "Q": 128},
]
SWEEP_CPU = [
    {"B": 1, "T": 70, "H": 4, "G": 2, "P": 16, "N": 20, "Q": 40},
    {"B": 2, "T": 40, "H": 1, "G": 1, "P": 9, "N": 16, "Q": 16},
]


def make_args(dims, device="cuda", dtype=torch.float32):
    B, T, H, G, P, N = (dims[name] for name in ("B", "T", "H", "G", "P", "N"))
    x = torch.randn(B, T, H, P, device=device, dtype=dtype)
    b = torch.randn(B, T, G, N, device=device, dtype=dtype)
    dt = 0.2 * torch.rand(B, T, H, device=device)
    s = torch.cat([-part.cumsum(1) for part in dt.split(dims["Q"], dim=1)], dim=1)
    return x, b, dt, s, dims["Q"]


# ---- backward ----


@triton.jit
def load_dstate(dstate_ptr, place, p, n, P, N):
    mask = (p < P)[:, None] & (n < N)[None, :]
    return tl.load(dstate_ptr + place * P * N + p[:, None] * N + n[None, :], mask=mask, other=0.0)


@triton.jit
def head_backward_kernel(
    x_ptr, b_ptr, dt_ptr, s_ptr, dstate_ptr, dx_ptr, ddt_ptr, ds_ptr, T, H, G, P, N, chunk,
    PRECISION: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    head, c = tl.program_id(0), tl.program_id(1)
    batch = tl.program_id(2).to(tl.int64)
    p, n = tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_N)
    x_ptr += batch * T * H * P + head * P
    b_ptr += (batch * T * G + head // (H // G)) * N
    steps = batch * T * H + head
    end = tl.minimum((c + 1) * chunk, T)
    Q = load_dstate(dstate_ptr, (batch * tl.num_programs(1) + c) * H + head, p, n, P, N)
    Q = tl.trans(Q.to(x_ptr.dtype.element_ty))
    total = tl.zeros([1], dtype=tl.float32)
    for start in range(c * chunk, end, BLOCK_T):
        rows = start + tl.arange(0, BLOCK_T)
        x = load_steps(x_ptr, rows, end, p, H * P, P).to(tl.float32)
        b = load_steps(b_ptr, rows, end, n, G * N, N)
        decay, w = load_weights(dt_ptr + steps, s_ptr + steps, rows, end, H)
        u = tl.dot(b, Q, input_precision=PRECISION)
        y = tl.sum(u * x, axis=1)
        total += tl.sum(w * y, axis=0)
        ds = tl.where(rows == end - 1, total, 0.0) - w * y
        offs = steps + rows.to(tl.int64) * H
        tl.store(ddt_ptr + offs, decay * y, mask=rows < end)
        tl.store(ds_ptr + offs, ds, mask=rows < end)
        offs = batch * T * H * P + head * P + rows[:, None].to(tl.int64) * H * P + p[None, :]
        mask = (rows < end)[:, None] & (p < P)[None, :]
        tl.store(dx_ptr + offs, (w[:, None] * u).to(dx_ptr.dtype.element_ty), mask=mask)


@triton.jit
def db_kernel(
    x_ptr, dt_ptr, s_ptr, dstate_ptr, db_ptr, T, H, G, P, N, chunk, PRECISION: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(chunk, BLOCK_T)
    c = tl.program_id(0) // tiles
    group = tl.program_id(1)
    batch = tl.program_id(2).to(tl.int64)
    p, n = tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_N)
    rows = c * chunk + tl.program_id(0) % tiles * BLOCK_T + tl.arange(0, BLOCK_T)
    end = tl.minimum((c + 1) * chunk, T)
    db = tl.zeros([BLOCK_T, BLOCK_N], dtype=tl.float32)
    for i in range(H // G):
        head = group * (H // G) + i
        x = load_steps(x_ptr + batch * T * H * P + head * P, rows, end, p, H * P, P)
        _, w = load_weights(dt_ptr + batch * T * H + head, s_ptr + batch * T * H + head, rows, end, H)
        Q = load_dstate(dstate_ptr, (batch * tl.cdiv(T, chunk) + c) * H + head, p, n, P, N)
        scaled = (x.to(tl.float32) * w[:, None]).to(x.dtype)
        db = tl.dot(scaled, Q.to(x.dtype), db, input_precision=PRECISION)
    offs = (batch * T * G + group) * N + rows[:, None].to(tl.int64) * G * N + n[None, :]
    mask = (rows < end)[:, None] & (n < N)[None, :]
    tl.store(db_ptr + offs, db.to(db_ptr.dtype.element_ty), mask=mask)


class SsdChunkState(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, b, dt, s, chunk):
        x, b, dt, s = x.contiguous(), b.contiguous(), dt.contiguous(), s.contiguous()
        ctx.save_for_backward(x, b, dt, s)
        ctx.chunk = chunk
        return ssd_chunk_state(x, b, dt, s, chunk)

    @staticmethod
    def backward(ctx, dstate):
        x, b, dt, s = ctx.saved_tensors
        (B, T, H, P), (G, N) = x.shape, b.shape[2:]
        dstate, chunk, tiles = dstate.contiguous(), ctx.chunk, tiling(x, b)
        needs, chunks = ctx.needs_input_grad, triton.cdiv(T, ctx.chunk)
        dx, db, ddt, ds = (torch.empty_like(tensor) for tensor in (x, b, dt, s))
        if needs[0] or needs[2] or needs[3]:
            head_backward_kernel[(H, chunks, B)](
                x, b, dt, s, dstate, dx, ddt, ds, T, H, G, P, N, chunk, **tiles
            )
        if needs[1]:
            grid = (chunks * triton.cdiv(chunk, tiles["BLOCK_T"]), G, B)
            db_kernel[grid](x, dt, s, dstate, db, T, H, G, P, N, chunk, **tiles)
        grads = zip((dx, db, ddt, ds), needs[:4], strict=True)
        return *(grad if needed else None for grad, needed in grads), None


def ssd_chunk_state_autograd(x, b, dt, s, chunk=256):
    return SsdChunkState.apply(x, b, dt, s, chunk)
