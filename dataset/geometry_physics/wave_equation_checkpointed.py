"""Steps of the wave equation with a velocity field, as in seismic inversion; only some states are kept.

Forward    w_0, w_1 given;  w_{k+2} = 2 w_{k+1} - w_k + v L w_{k+1} for k = 0..T-1, v the squared velocity,
           L the sum of the four neighbours less four times the point, 0 outside; the result is w_{T+1}
Backward   with a_{T+1} = dw_{T+1}, a_{T+2} = 0:  a_{k+1} = 2 a_{k+2} + L (v a_{k+2}) - a_{k+3}, a wave that
           runs backward in time, since L is its own transpose;  dv = sum_k a_{k+2} L w_{k+1};
           dw_1 = a_1, and w_0 stands in one step alone, with a minus:  dw_0 = -a_2

Forward schedule: a launch a step; a program owns a tile of points of one field. Every STRIDE steps the pair
(w_k, w_{k+1}) is kept, which is only not freeing it: two states carry on from there.
Backward schedule: from the last segment to the first. The states of a segment are made anew from its pair by
the forward's own kernel, then walked in reverse: memory of 2 T / STRIDE + STRIDE states in place of T, for
one more forward. A reverse step is local but for the neighbours: a point's owner gathers v a around it,
writes the next a, and adds a L w to its own dv, which no other program touches between launches.

op: wave_pde
schedule: reverse_scan, recompute_from_stats, gather_transpose
difficulty: 4
dtypes: fp32
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


BLOCK = 256
STRIDE = 4  # steps in a segment; about the root of twice the steps is least memory


@triton.jit
def at(ptr, y, x, p, Y, X):
    inside = (p < Y * X) & (y >= 0) & (y < Y) & (x >= 0) & (x < X)
    return tl.load(ptr + y * X + x, mask=inside, other=0.0)


@triton.jit
def laplacian(ptr, y, x, p, Y, X):
    around = at(ptr, y - 1, x, p, Y, X) + at(ptr, y + 1, x, p, Y, X)
    around += at(ptr, y, x - 1, p, Y, X) + at(ptr, y, x + 1, p, Y, X)
    return around - 4 * at(ptr, y, x, p, Y, X)


@triton.jit
def step_kernel(before_ptr, now_ptr, v_ptr, after_ptr, Y, X, BLOCK: tl.constexpr):
    field = tl.program_id(1).to(tl.int64) * Y * X
    p = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    y, x, now_ptr = p // X, p % X, now_ptr + field
    v = at(v_ptr + field, y, x, p, Y, X)
    w = 2 * at(now_ptr, y, x, p, Y, X) - at(before_ptr + field, y, x, p, Y, X)
    w += v * laplacian(now_ptr, y, x, p, Y, X)
    tl.store(after_ptr + field + p, w, mask=p < Y * X)


def step(before, now, v):
    B, Y, X = now.shape
    after = torch.empty_like(now)
    step_kernel[(triton.cdiv(Y * X, BLOCK), B)](before, now, v, after, Y, X, BLOCK=BLOCK)
    return after


def wave_forward(w0, w1, v, T):
    """The result, and the pairs that segments begin with."""
    if not w0.shape == w1.shape == v.shape or T < 1:
        raise ValueError(f"w0 {tuple(w0.shape)}, w1 {tuple(w1.shape)}, v {tuple(v.shape)}, {T} steps")
    before, now, kept = w0, w1, []
    for k in range(T):
        if k % STRIDE == 0:
            kept += [before, now]
        before, now = now, step(before, now, v)
    return now, kept


@autodiff(inputs_require_grad=(0, 1, 2))
def wave_steps(w0, w1, v, T):
    """w0, w1, v: float32 (B, Y, X); v up to a half where steps should be stable."""
    return wave_forward(w0.contiguous(), w1.contiguous(), v.contiguous(), T)[0]


def reference(w0, w1, v, T):
    for _ in range(T):
        p = torch.nn.functional.pad(w1, (1, 1, 1, 1))
        around = p[:, :-2, 1:-1] + p[:, 2:, 1:-1] + p[:, 1:-1, :-2] + p[:, 1:-1, 2:]
        w0, w1 = w1, 2 * w1 - w0 + v * (around - 4 * w1)
    return w1


SWEEP = [{"B": 8, "Y": 512, "X": 512, "T": 40}, {"B": 3, "Y": 401, "X": 733, "T": 9}]
SWEEP_CPU = [{"B": 2, "Y": 9, "X": 14, "T": 7}, {"B": 1, "Y": 13, "X": 22, "T": 4}]


def make_args(dims, device="cuda", dtype=torch.float32):
    shape = [dims[name] for name in "BYX"]
    w0, w1 = (torch.randn(shape, device=device, dtype=dtype) for _ in range(2))
    return (w0, w1, 0.1 + 0.3 * torch.rand(shape, device=device, dtype=dtype)), {"T": max(1, dims["T"])}


# ---- backward ----


@triton.jit
def step_backward_kernel(
    w_ptr, v_ptr, a_ptr, later_ptr, out_ptr, dv_ptr, dw0_ptr, Y, X,
    LAST: tl.constexpr, FIRST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """a_{k+1} from a_{k+2} and a_{k+3}, and what step k adds to dv; w is w_{k+1}."""
    field = tl.program_id(1).to(tl.int64) * Y * X
    p = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    y, x, a_ptr, v_ptr = p // X, p % X, a_ptr + field, v_ptr + field
    a, own = at(a_ptr, y, x, p, Y, X), field + p
    out = at(a_ptr, y - 1, x, p, Y, X) * at(v_ptr, y - 1, x, p, Y, X)
    out += at(a_ptr, y + 1, x, p, Y, X) * at(v_ptr, y + 1, x, p, Y, X)
    out += at(a_ptr, y, x - 1, p, Y, X) * at(v_ptr, y, x - 1, p, Y, X)
    out += at(a_ptr, y, x + 1, p, Y, X) * at(v_ptr, y, x + 1, p, Y, X)
    out += 2 * a - 4 * a * at(v_ptr, y, x, p, Y, X)
    dv = a * laplacian(w_ptr + field, y, x, p, Y, X)
    if not LAST:
        out -= tl.load(later_ptr + own, mask=p < Y * X, other=0.0)
        dv += tl.load(dv_ptr + own, mask=p < Y * X, other=0.0)
    tl.store(out_ptr + own, out, mask=p < Y * X)
    tl.store(dv_ptr + own, dv, mask=p < Y * X)
    if FIRST:
        tl.store(dw0_ptr + own, -a, mask=p < Y * X)


class WaveSteps(torch.autograd.Function):
    @staticmethod
    def forward(ctx, w0, w1, v, T):
        w0, w1, v = w0.contiguous(), w1.contiguous(), v.contiguous()
        result, kept = wave_forward(w0, w1, v, T)
        ctx.save_for_backward(v, *kept)
        ctx.T = T
        return result

    @staticmethod
    def backward(ctx, a):
        v, *kept = ctx.saved_tensors
        (B, Y, X), T, needs = v.shape, ctx.T, ctx.needs_input_grad
        a, later, dv, dw0 = a.contiguous(), None, torch.empty_like(v), torch.empty_like(v)
        grid = (triton.cdiv(Y * X, BLOCK), B)
        for begin in reversed(range(0, T, STRIDE)):
            states = kept[2 * (begin // STRIDE) :][:2]
            for _ in range(min(STRIDE, T - begin) - 1):
                states.append(step(states[-2], states[-1], v))
            for k in reversed(range(begin, min(begin + STRIDE, T))):
                out = torch.empty_like(v)
                step_backward_kernel[grid](
                    states[k + 1 - begin], v, a, later, out, dv, dw0, Y, X,
                    LAST=k == T - 1, FIRST=k == 0, BLOCK=BLOCK,
                )  # fmt: skip
                a, later = out, a
        return dw0 if needs[0] else None, a if needs[1] else None, dv if needs[2] else None, None


def wave_steps_autograd(w0, w1, v, T):
    return WaveSteps.apply(w0, w1, v, T)
