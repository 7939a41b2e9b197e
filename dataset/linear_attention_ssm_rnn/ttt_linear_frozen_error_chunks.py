"""A linear memory trained while it reads: one gradient step a chunk, its errors taken before the chunk.

Forward    the memory S (D x D) is to map keys to values; with S fixed during a chunk,
           E = V - K S,  N = diag(b) E  (b a learning rate a token);  token i reads with the steps up to i:
           O = Q S + M N,  M_ij = <q_i, k_j> for j <= i,   S' = S + K^T N
Backward   with R the gradient of S':   dN = M^T dO + K R,   dE = diag(b) dN = dV,   db_j = <dN_j, E_j>,
           dM = dO N^T for j <= i,   dQ = dO S^T + dM K,   dK = N R^T + dM^T Q - dE S^T,
           and for the chunk before   R <- R + Q^T dO - K^T dE

Forward schedule: the delta rule would solve a triangular system in each chunk; with frozen errors a chunk is
five dots. Heads are narrow (64) and many, so a program owns a head, with the whole S in registers, and walks
the chunks. It stores S before each chunk, D x D numbers for 32 D of each input.
Backward schedule: the same program walks back with R in registers. S is whole too, so no gradient is a sum
over programs: dQ, dK, dV and db of a chunk are finished when the walk passes it, with no second kernel, no
slots and no second read of the inputs. E and M come again from S, two dots; saving E would save one of them.

op: ttt_linear
schedule: chunk_state_pass, reverse_scan, recompute_from_stats
difficulty: 4
dtypes: fp32, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


CHUNK = 32


def tiling(q):
    return {
        "PRECISION": "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee",
        "CHUNK": CHUNK,
        "BLOCK_D": max(16, triton.next_power_of_2(q.shape[3])),
        "num_warps": 8,
        "num_stages": 1,
    }


@triton.jit
def load_tile(ptr, rows, cols, R, C):
    mask = (rows[:, None] < R) & (cols[None, :] < C)
    return tl.load(ptr + rows[:, None] * C + cols[None, :], mask=mask, other=0.0)


@triton.jit
def store_tile(ptr, value, rows, cols, R, C):
    mask = (rows[:, None] < R) & (cols[None, :] < C)
    tl.store(ptr + rows[:, None] * C + cols[None, :], value.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def causal_product(a, b, PRECISION: tl.constexpr, CHUNK: tl.constexpr):
    i = tl.arange(0, CHUNK)
    product = tl.dot(a, tl.trans(b), input_precision=PRECISION)
    return tl.where(i[None, :] <= i[:, None], product, 0.0).to(a.dtype)


@triton.jit
def load_chunk(q_ptr, k_ptr, v_ptr, b_ptr, head, rows, d, T, D):
    q = load_tile(q_ptr + head * D, rows, d, T, D)
    k = load_tile(k_ptr + head * D, rows, d, T, D)
    v = load_tile(v_ptr + head * D, rows, d, T, D)
    return q, k, v, tl.load(b_ptr + head + rows, mask=rows < T, other=0.0).to(tl.float32)


@triton.jit
def ttt_kernel(
    q_ptr, k_ptr, v_ptr, b_ptr, o_ptr, saved_ptr, T, D,
    PRECISION: tl.constexpr, CHUNK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0).to(tl.int64) * T
    saved_ptr += tl.program_id(0).to(tl.int64) * tl.cdiv(T, CHUNK) * D * D
    d = tl.arange(0, BLOCK_D)
    state = tl.zeros([BLOCK_D, BLOCK_D], dtype=tl.float32)
    for chunk in range(tl.cdiv(T, CHUNK)):
        store_tile(saved_ptr + chunk * D * D, state, d, d, D, D)
        rows = chunk * CHUNK + tl.arange(0, CHUNK)
        q, k, v, b = load_chunk(q_ptr, k_ptr, v_ptr, b_ptr, head, rows, d, T, D)
        S = state.to(q.dtype)
        E = v.to(tl.float32) - tl.dot(k, S, input_precision=PRECISION)
        N = (b[:, None] * E).to(q.dtype)
        o = tl.dot(q, S, input_precision=PRECISION)
        o = tl.dot(causal_product(q, k, PRECISION, CHUNK), N, o, input_precision=PRECISION)
        store_tile(o_ptr + head * D, o, rows, d, T, D)
        state = tl.dot(tl.trans(k), N, state, input_precision=PRECISION)


def ttt_forward(q, k, v, b):
    B, H, T, D = q.shape
    if not q.shape == k.shape == v.shape or b.shape != q.shape[:3]:
        raise ValueError("q, k and v must have one shape, and b its first three sizes")
    if D > 128:
        raise ValueError(f"a memory of {D} x {D} does not fit one program")
    o = torch.empty_like(v)
    saved = torch.empty((B, H, triton.cdiv(T, CHUNK), D, D), device=q.device, dtype=torch.float32)
    ttt_kernel[(B * H,)](q, k, v, b, o, saved, T, D, **tiling(q))
    return o, saved


@autodiff(inputs_require_grad=(0, 1, 2, 3))
def ttt_linear(q, k, v, b):
    """q, k, v: (B, H, T, D), k of about unit length; b: (B, H, T)."""
    return ttt_forward(q.contiguous(), k.contiguous(), v.contiguous(), b.contiguous())[0]


def reference(q, k, v, b):
    S, outputs = q.new_zeros(*q.shape[:2], q.shape[3], q.shape[3]), []
    for start in range(0, q.shape[2], CHUNK):
        part = slice(start, start + CHUNK)
        Q, K = q[:, :, part], k[:, :, part]
        N = b[:, :, part, None] * (v[:, :, part] - K @ S)
        outputs.append(Q @ S + (Q @ K.transpose(-1, -2)).tril() @ N)
        S = S + K.transpose(-1, -2) @ N
    return torch.cat(outputs, dim=2)


SWEEP = [{"B": 8, "H": 32, "T": 2048, "D": 64}, {"B": 4, "H": 12, "T": 1021, "D": 80}]
SWEEP_CPU = [{"B": 1, "H": 2, "T": 70, "D": 16}, {"B": 2, "H": 1, "T": 33, "D": 20}]


def make_args(dims, device="cuda", dtype=torch.float32):
    B, H, T, D = (dims[name] for name in ("B", "H", "T", "D"))
    q, k = (torch.randn(B, H, T, D, device=device, dtype=dtype) / max(1, D) ** 0.5 for _ in range(2))
    v = torch.randn(B, H, T, D, device=device, dtype=dtype)
    return q, k, v, torch.rand(B, H, T, device=device, dtype=dtype) * min(1.0, D / CHUNK)


# ---- backward ----


@triton.jit
def ttt_backward_kernel(
    q_ptr, k_ptr, v_ptr, b_ptr, saved_ptr, do_ptr, dq_ptr, dk_ptr, dv_ptr, db_ptr, T, D,
    PRECISION: tl.constexpr, CHUNK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0).to(tl.int64) * T
    chunks = tl.cdiv(T, CHUNK)
    saved_ptr += tl.program_id(0).to(tl.int64) * chunks * D * D
    d = tl.arange(0, BLOCK_D)
    grad = tl.zeros([BLOCK_D, BLOCK_D], dtype=tl.float32)  # R
    for back in range(chunks):
        chunk = chunks - 1 - back
        rows = chunk * CHUNK + tl.arange(0, CHUNK)
        q, k, v, b = load_chunk(q_ptr, k_ptr, v_ptr, b_ptr, head, rows, d, T, D)
        do = load_tile(do_ptr + head * D, rows, d, T, D)
        S = load_tile(saved_ptr + chunk * D * D, d, d, D, D).to(q.dtype)
        R = grad.to(q.dtype)
        E = v.to(tl.float32) - tl.dot(k, S, input_precision=PRECISION)
        N = (b[:, None] * E).to(q.dtype)
        M = causal_product(q, k, PRECISION, CHUNK)
        dN = tl.dot(k, R, input_precision=PRECISION)
        dN = tl.dot(tl.trans(M), do, dN, input_precision=PRECISION)
        tl.store(db_ptr + head + rows, tl.sum(dN * E, axis=1).to(db_ptr.dtype.element_ty), mask=rows < T)
        store_tile(dv_ptr + head * D, b[:, None] * dN, rows, d, T, D)
        dE = (-b[:, None] * dN).to(q.dtype)  # its negative, in all that follows
        dM = causal_product(do, N, PRECISION, CHUNK)
        S = tl.trans(S)
        dq = tl.dot(do, S, input_precision=PRECISION)
        store_tile(dq_ptr + head * D, tl.dot(dM, k, dq, input_precision=PRECISION), rows, d, T, D)
        dk = tl.dot(N, tl.trans(R), input_precision=PRECISION)
        dk = tl.dot(dE, S, dk, input_precision=PRECISION)
        dk = tl.dot(tl.trans(dM), q, dk, input_precision=PRECISION)
        store_tile(dk_ptr + head * D, dk, rows, d, T, D)
        grad = tl.dot(tl.trans(q), do, grad, input_precision=PRECISION)
        grad = tl.dot(tl.trans(k), dE, grad, input_precision=PRECISION)


class TttLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, b):
        q, k, v, b = q.contiguous(), k.contiguous(), v.contiguous(), b.contiguous()
        o, saved = ttt_forward(q, k, v, b)
        ctx.save_for_backward(q, k, v, b, saved)
        return o

    @staticmethod
    def backward(ctx, do):
        q, k, v, b, saved = ctx.saved_tensors
        B, H, T, D = q.shape
        grads = tuple(torch.empty_like(tensor) for tensor in (q, k, v, b))
        ttt_backward_kernel[(B * H,)](q, k, v, b, saved, do.contiguous(), *grads, T, D, **tiling(q))
        return tuple(g if needed else None for g, needed in zip(grads, ctx.needs_input_grad, strict=True))


def ttt_linear_autograd(q, k, v, b):
    return TttLinear.apply(q, k, v, b)
