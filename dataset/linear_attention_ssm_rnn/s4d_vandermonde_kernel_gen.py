"""The convolution kernel of a diagonal state-space model (S4D): a sum of damped waves for each channel.

Forward    with a = dt_h A_hn complex:   K_hl = 2 Re sum_n C_hn e^{l a}
           = 2 sum_n e^{l dt Ar} (Cr cos(l dt Ai) - Ci sin(l dt Ai))
Backward   for each (h, n), with E = e^{l dt Ar}, four sums over l are enough:
           s_c = sum dK E cos,  s_s = sum dK E sin,  m_c = sum l dK E cos,  m_s = sum l dK E sin;
           dCr = 2 s_c,  dCi = -2 s_s;  with  pr = 2 (Cr m_c - Ci m_s),  pi = -2 (Cr m_s + Ci m_c):
           dAr = dt pr,  dAi = dt pi,  ddt = sum_n (Ar pr + Ai pi)

Forward schedule: a program owns (channel, tile of l) and loops over tiles of n. The Vandermonde matrix e^{l
a}, N L numbers a channel, exists a tile at a time; complex numbers are pairs of real tiles.
Backward schedule: the owner is turned round. Every (h, n) of the forward was read by all tiles of l; now a
program owns a channel and a tile of n and loops over l, rebuilds the waves, and reduces four numbers a wave
in registers. C enters after the loop only: the sums are those of dK against the waves and their first
moments. dC and dA are stored once; ddt is a sum over n as well, so each tile of n stores a slot, and a second
kernel adds slots.

op: s4d_kernel
schedule: swap_owner, recompute_from_stats, partials_then_reduce
difficulty: 4
dtypes: fp32
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


BLOCK_N = 16
BLOCK_L = 64


@triton.jit
def load_pair(re_ptr, im_ptr, h, n, N):
    re = tl.load(re_ptr + h * N + n, mask=n < N, other=0.0)
    return re, tl.load(im_ptr + h * N + n, mask=n < N, other=0.0)


@triton.jit
def waves(dt, ar, ai, l):
    """Real and imaginary parts of e^{l dt A}, waves by places."""
    size = tl.exp((dt * ar)[:, None] * l[None, :])
    angle = (dt * ai)[:, None] * l[None, :]
    return size * tl.cos(angle), size * tl.sin(angle)


@triton.jit
def s4d_kernel(
    ar_ptr, ai_ptr, cr_ptr, ci_ptr, dt_ptr, k_ptr, N, L, BLOCK_N: tl.constexpr, BLOCK_L: tl.constexpr
):
    h = tl.program_id(1).to(tl.int64)
    places = tl.program_id(0) * BLOCK_L + tl.arange(0, BLOCK_L)
    l, dt = places.to(tl.float32), tl.load(dt_ptr + h)
    total = tl.zeros([BLOCK_L], dtype=tl.float32)
    for start in range(0, N, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        ar, ai = load_pair(ar_ptr, ai_ptr, h, n, N)
        cr, ci = load_pair(cr_ptr, ci_ptr, h, n, N)
        re, im = waves(dt, ar, ai, l)
        total += tl.sum(cr[:, None] * re - ci[:, None] * im, axis=0)
    tl.store(k_ptr + h * L + places, 2.0 * total, mask=places < L)


@autodiff(inputs_require_grad=(0, 1, 2, 3, 4))
def s4d(ar, ai, cr, ci, dt, length):
    """ar, ai, cr, ci: (H, N), the parts of A and C, ar negative; dt: (H). Gives (H, length)."""
    ar, ai, cr, ci, dt = (tensor.contiguous() for tensor in (ar, ai, cr, ci, dt))
    (H, N), L = ar.shape, length
    k = torch.empty((H, L), device=ar.device, dtype=ar.dtype)
    s4d_kernel[(triton.cdiv(L, BLOCK_L), H)](ar, ai, cr, ci, dt, k, N, L, BLOCK_N=BLOCK_N, BLOCK_L=BLOCK_L)
    return k


def reference(ar, ai, cr, ci, dt, length):
    l = torch.arange(length, device=ar.device, dtype=ar.dtype)
    size = torch.exp((dt[:, None] * ar)[..., None] * l)
    angle = (dt[:, None] * ai)[..., None] * l
    return 2 * (size * (cr[..., None] * torch.cos(angle) - ci[..., None] * torch.sin(angle))).sum(1)


SWEEP = [{"H": 512, "N": 32, "L": 1024}, {"H": 130, "N": 50, "L": 1021}]
SWEEP_CPU = [{"H": 3, "N": 20, "L": 70}, {"H": 2, "N": 8, "L": 64}]


def make_args(dims, device="cuda", dtype=torch.float32):
    H, N = dims["H"], dims["N"]
    ar = -0.5 - 0.5 * torch.rand(H, N, device=device, dtype=dtype)
    ai = 3.14 * torch.rand(H, N, device=device, dtype=dtype) * N
    cr, ci = (torch.randn(H, N, device=device, dtype=dtype) for _ in range(2))
    return ar, ai, cr, ci, 0.001 + 0.1 * torch.rand(H, device=device, dtype=dtype), dims["L"]


# ---- backward ----


@triton.jit
def s4d_backward_kernel(
    ar_ptr, ai_ptr, cr_ptr, ci_ptr, dt_ptr, dk_ptr, dar_ptr, dai_ptr, dcr_ptr, dci_ptr, slots_ptr, N, L,
    BLOCK_N: tl.constexpr, BLOCK_L: tl.constexpr,
):  # fmt: skip
    h = tl.program_id(1).to(tl.int64)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    dt = tl.load(dt_ptr + h)
    ar, ai = load_pair(ar_ptr, ai_ptr, h, n, N)
    cr, ci = load_pair(cr_ptr, ci_ptr, h, n, N)
    s_c = tl.zeros([BLOCK_N], dtype=tl.float32)
    s_s = tl.zeros([BLOCK_N], dtype=tl.float32)
    m_c = tl.zeros([BLOCK_N], dtype=tl.float32)
    m_s = tl.zeros([BLOCK_N], dtype=tl.float32)
    for start in range(0, L, BLOCK_L):
        places = start + tl.arange(0, BLOCK_L)
        dk = tl.load(dk_ptr + h * L + places, mask=places < L, other=0.0)
        l = places.to(tl.float32)
        re, im = waves(dt, ar, ai, l)
        s_c += tl.sum(re * dk[None, :], axis=1)
        s_s += tl.sum(im * dk[None, :], axis=1)
        m_c += tl.sum(re * (l * dk)[None, :], axis=1)
        m_s += tl.sum(im * (l * dk)[None, :], axis=1)
    pr, pi = 2.0 * (cr * m_c - ci * m_s), -2.0 * (cr * m_s + ci * m_c)
    tl.store(dcr_ptr + h * N + n, 2.0 * s_c, mask=n < N)
    tl.store(dci_ptr + h * N + n, -2.0 * s_s, mask=n < N)
    tl.store(dar_ptr + h * N + n, dt * pr, mask=n < N)
    tl.store(dai_ptr + h * N + n, dt * pi, mask=n < N)
    tl.store(slots_ptr + tl.program_id(0) * tl.num_programs(1) + h, tl.sum(ar * pr + ai * pi, axis=0))


@triton.jit
def sum_slots_kernel(slots_ptr, ddt_ptr, slots, H, BLOCK: tl.constexpr):
    h = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for slot in range(slots):
        total += tl.load(slots_ptr + slot * H + h, mask=h < H, other=0.0)
    tl.store(ddt_ptr + h, total, mask=h < H)


class S4D(torch.autograd.Function):
    @staticmethod
    def forward(ctx, ar, ai, cr, ci, dt, length):
        inputs = tuple(tensor.contiguous() for tensor in (ar, ai, cr, ci, dt))
        ctx.save_for_backward(*inputs)
        return s4d(*inputs, length)

    @staticmethod
    def backward(ctx, dk):
        inputs, needs = ctx.saved_tensors, ctx.needs_input_grad
        (H, N), L, tiles = inputs[0].shape, dk.shape[1], triton.cdiv(inputs[0].shape[1], BLOCK_N)
        grads = [torch.empty_like(tensor) for tensor in inputs]
        slots = torch.empty((tiles, H), device=dk.device, dtype=torch.float32)
        s4d_backward_kernel[(tiles, H)](
            *inputs, dk.contiguous(), *grads[:4], slots, N, L, BLOCK_N=BLOCK_N, BLOCK_L=BLOCK_L
        )
        if needs[4]:
            sum_slots_kernel[(triton.cdiv(H, 64),)](slots, grads[4], tiles, H, BLOCK=64)
        return *(grad if needed else None for grad, needed in zip(grads, needs[:5], strict=True)), None


def s4d_autograd(ar, ai, cr, ci, dt, length):
    return S4D.apply(ar, ai, cr, ci, dt, length)
