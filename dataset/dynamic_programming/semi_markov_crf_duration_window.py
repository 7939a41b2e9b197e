"""Semi-Markov random field: log-partition over all segmentations, with labels and durations of up to K.

Forward    a segment (p, t] of label l scores C_tl - C_pl + U_kl, k = t - p <= K, C running sums of s; then
           A_tl = C_tl + log sum_k e^{Y_t-k,l + U_kl},   Y_tl = Z_tl - C_tl,   Z_0l = 0,
           Z_tl = log sum_h e^{A_th + W_hl},   z = log sum_l e^{A_nl} over n places
Backward   posteriors instead of a second table. E_tl, that a segment of label l ends at t, is a softmax of
           A_n at the end; it is shared by durations, and what starts at p by the labels before:
           S_tkl = E_tl e^{Y_t-k,l + U_kl} / sum over k,   B_pl = sum_k S_p+k,kl,
           P_phl = B_pl e^{A_ph + W_hl} / sum over h,   E_ph = sum_l P_phl;
           dU = dz sum_t S_t,  dW = dz sum_p P_p;  s_pl counts for the segments over p, those that end
           behind it less those that start behind it, since each one is closed again:
           ds_pl = dz (sum_{t > p} E_tl - sum_{q > p} B_ql)

Forward schedule: a program owns a sequence and walks the places, a lane a label. The window of the last K
rows of Y is a tile read back from memory, so K x L numbers replace the L x K x T of all segments' scores.
Backward schedule: the same walk from the end, over the same windows; both shares are softmaxes of saved
numbers, which add up to one however long the sequence is. The starts of a window collect in memory that only
this program touches, a tile added to and moved by one place a step. The posteriors are made once and serve
everything: added up in registers they are dU and dW, and ds follows from ends and starts as one running sum,
without a walk over the places that a segment covers. dU and dW leave one partial a sequence.

op: semi_crf
schedule: reverse_scan, partials_then_reduce
difficulty: 5
dtypes: fp32
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


@triton.jit
def load_tile(ptr, rows, cols, R, C, other: tl.constexpr):
    mask = (rows[:, None] < R) & (cols[None, :] < C)
    return tl.load(ptr + rows[:, None] * C + cols[None, :], mask=mask, other=other)


@triton.jit
def log_sum(v, axis: tl.constexpr):
    m = tl.max(v, axis=axis)
    return m + tl.log(tl.sum(tl.exp(v - tl.expand_dims(m, axis)), axis=axis))


@triton.jit
def semi_crf_kernel(
    s_ptr, w_ptr, u_ptr, places_ptr, a_ptr, y_ptr, z_ptr, T, K, L,
    BLOCK_K: tl.constexpr, BLOCK_L: tl.constexpr,
):  # fmt: skip
    sequence = tl.program_id(0).to(tl.int64)
    n = tl.load(places_ptr + sequence)
    l, k = tl.arange(0, BLOCK_L), tl.arange(0, BLOCK_K)  # durations are k + 1
    w = load_tile(w_ptr, l, l, L, L, 0.0)
    u = load_tile(u_ptr, k, l, K, L, -1e30)
    first = sequence * (T + 1)
    c = tl.zeros([BLOCK_L], dtype=tl.float32)
    a = tl.full([BLOCK_L], -1e30, dtype=tl.float32)
    tl.store(y_ptr + first * L + l, c, mask=l < L)
    for t in range(1, n + 1):
        tl.debug_barrier()  # the window is read back
        place = (first + t) * L + l
        c += tl.load(s_ptr + (sequence * T + t - 1) * L + l, mask=l < L, other=0.0)
        inside = (k[:, None] < K) & (k[:, None] < t) & (l[None, :] < L)
        window = (first + t - 1 - k[:, None]) * L + l[None, :]
        v = tl.load(y_ptr + window, mask=inside, other=-1e30) + u
        a = tl.where(l < L, c + log_sum(v, 0), -1e30)
        tl.store(a_ptr + place, a, mask=l < L)
        tl.store(y_ptr + place, log_sum(a[:, None] + w, 0) - c, mask=l < L)
    tl.store(z_ptr + sequence, log_sum(a, 0))


def tiling(s, w, u):
    L, K = s.shape[2], u.shape[0]
    if w.shape != (L, L) or u.shape[1] != L or not 1 <= L <= 64 or not 1 <= K <= 64:
        raise ValueError("need s (B, T, L), w (L, L), u (K, L), of at most 64 labels and durations")
    blocks = {"BLOCK_K": triton.next_power_of_2(K), "BLOCK_L": triton.next_power_of_2(L)}
    return {**blocks, "num_warps": 8 if L > 32 else 4}


def semi_crf_forward(s, w, u, places):
    B, T, L = s.shape
    tiles = tiling(s, w, u)
    a, y = (torch.empty((B, T + 1, L), device=s.device, dtype=torch.float32) for _ in range(2))
    z = torch.empty(B, device=s.device, dtype=torch.float32)
    semi_crf_kernel[(B,)](s, w, u, places, a, y, z, T, u.shape[0], L, **tiles)
    return z, a, y


@autodiff(inputs_require_grad=(0, 1, 2))
def semi_crf(s, w, u, places):
    """s: (B, T, L); w: (L, L), from row to column; u: (K, L), durations 1 to K; places: int64 (B), >= 1."""
    return semi_crf_forward(s.contiguous(), w.contiguous(), u.contiguous(), places.contiguous())[0]


def reference(s, w, u, places):
    c = torch.nn.functional.pad(s.cumsum(1), (0, 0, 1, 0))  # c[:, t] sums the scores in front of place t
    z, ends = [torch.zeros_like(s[:, 0])], torch.zeros_like(s[:, 0])
    for t in range(1, s.shape[1] + 1):
        first = max(0, t - u.shape[0])
        begun = torch.stack(z[first:t], dim=1) - c[:, first:t] + u[: t - first].flip(0)
        a = c[:, t] + begun.logsumexp(1)
        ends = torch.where(t == places[:, None], a, ends)
        z.append((a[:, :, None] + w).logsumexp(1))
    return ends.logsumexp(1)


SWEEP = [{"B": 256, "T": 512, "K": 32, "L": 16}, {"B": 99, "T": 301, "K": 19, "L": 33}]
SWEEP_CPU = [{"B": 2, "T": 9, "K": 4, "L": 5}, {"B": 3, "T": 5, "K": 9, "L": 3}]


def make_args(dims, device="cuda", dtype=torch.float32):
    B, T, K, L = (dims[name] for name in ("B", "T", "K", "L"))
    s, w, u = (torch.randn(*shape, device=device, dtype=dtype) for shape in ((B, T, L), (L, L), (K, L)))
    return s, w, u, torch.randint((T + 1) // 2, T + 1, (B,), device=device)


# ---- backward ----


@triton.jit
def shares(v, axis: tl.constexpr):
    e = tl.exp(v - tl.expand_dims(tl.max(v, axis=axis), axis))
    return e / tl.expand_dims(tl.sum(e, axis=axis), axis)


@triton.jit
def semi_crf_backward_kernel(
    w_ptr, u_ptr, places_ptr, a_ptr, y_ptr, dz_ptr, starts_ptr, ds_ptr, dw_ptr, du_ptr, T, K, L,
    BLOCK_K: tl.constexpr, BLOCK_L: tl.constexpr,
):  # fmt: skip
    sequence = tl.program_id(0).to(tl.int64)
    n, dz = tl.load(places_ptr + sequence), tl.load(dz_ptr + sequence)
    l, k = tl.arange(0, BLOCK_L), tl.arange(0, BLOCK_K)
    w = load_tile(w_ptr, l, l, L, L, 0.0)
    u = load_tile(u_ptr, k, l, K, L, -1e30)
    first = sequence * (T + 1)
    for t in range(n, T):
        tl.store(ds_ptr + (sequence * T + t) * L + l, tl.zeros([BLOCK_L], dtype=tl.float32), mask=l < L)
    ends = shares(tl.load(a_ptr + (first + n) * L + l, mask=l < L, other=-1e30), 0)
    over = tl.zeros([BLOCK_L], dtype=tl.float32)  # ends behind, less starts behind
    dw = tl.zeros([BLOCK_L, BLOCK_L], dtype=tl.float32)
    du = tl.zeros([BLOCK_K, BLOCK_L], dtype=tl.float32)
    for step in range(n):
        t = n - step
        inside = (k[:, None] < K) & (k[:, None] < t) & (l[None, :] < L)
        window = (first + t - 1 - k[:, None]) * L + l[None, :]
        v = tl.load(y_ptr + window, mask=inside, other=-1e30) + u
        segments = tl.where(inside, ends[None, :] * shares(v, 0), 0.0)
        du += segments
        starts = tl.load(starts_ptr + window, mask=inside, other=0.0)
        tl.store(starts_ptr + window, starts + segments, mask=inside)
        over += ends
        tl.store(ds_ptr + (sequence * T + t - 1) * L + l, dz * over, mask=l < L)
        tl.debug_barrier()  # starts are read back, by other lanes
        begun = tl.load(starts_ptr + (first + t - 1) * L + l, mask=l < L, other=0.0)
        over -= begun
        a = tl.load(a_ptr + (first + t - 1) * L + l, mask=(l < L) & (t >= 2), other=-1e30)
        pairs = begun[None, :] * shares(a[:, None] + w, 0)
        pairs = tl.where(t >= 2, pairs, 0.0)  # nothing ends at 0
        dw += pairs
        ends = tl.sum(pairs, axis=1)
    dw_mask = (l[:, None] < L) & (l[None, :] < L)
    tl.store(dw_ptr + (sequence * L + l[:, None]) * L + l[None, :], dz * dw, mask=dw_mask)
    du_mask = (k[:, None] < K) & (l[None, :] < L)
    tl.store(du_ptr + (sequence * K + k[:, None]) * L + l[None, :], dz * du, mask=du_mask)


@triton.jit
def sum_parts_kernel(part_ptr, sum_ptr, parts, count, BLOCK_P: tl.constexpr, BLOCK: tl.constexpr):
    cols = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK_P, BLOCK], dtype=tl.float32)
    for start in range(0, parts, BLOCK_P):
        total += load_tile(part_ptr, start + tl.arange(0, BLOCK_P), cols, parts, count, 0.0)
    tl.store(sum_ptr + cols, tl.sum(total, axis=0), mask=cols < count)


def summed(part, like):
    result = torch.empty_like(like)
    grid = (triton.cdiv(like.numel(), 64),)
    sum_parts_kernel[grid](part, result, part.shape[0], like.numel(), BLOCK_P=32, BLOCK=64)
    return result


class SemiCRF(torch.autograd.Function):
    @staticmethod
    def forward(ctx, s, w, u, places):
        s, w, u, places = (tensor.contiguous() for tensor in (s, w, u, places))
        z, a, y = semi_crf_forward(s, w, u, places)
        ctx.save_for_backward(s, w, u, places, a, y)
        return z

    @staticmethod
    def backward(ctx, dz):
        s, w, u, *others = ctx.saved_tensors
        (B, T, L), K, needs = s.shape, u.shape[0], ctx.needs_input_grad
        ds, starts = torch.empty_like(s), torch.zeros_like(others[1])
        dw, du = (torch.empty((B, *like.shape), device=s.device, dtype=torch.float32) for like in (w, u))
        semi_crf_backward_kernel[(B,)](
            w, u, *others, dz.contiguous(), starts, ds, dw, du, T, K, L, **tiling(s, w, u)
        )
        dw = summed(dw, w) if needs[1] else None
        return ds if needs[0] else None, dw, summed(du, u) if needs[2] else None, None


def semi_crf_autograd(s, w, u, places):
    return SemiCRF.apply(s, w, u, places)
