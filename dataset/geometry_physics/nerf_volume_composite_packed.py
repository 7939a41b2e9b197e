"""Volume rendering of rays with packed samples.

Forward    T_i = exp(-sum_{j < i} s_j d_j),  w_i = T_i (1 - exp(-s_i d_i)),  C = sum_i w_i c_i  along a ray
Backward   with g_i = <c_i, dC>:  dc_i = w_i dC;  a denser sample shows more of itself and dims all behind it:
           ds_i = d_i (T_{i+1} g_i - sum_{j > i} w_j g_j)

Forward schedule: a program owns a ray and walks its samples by blocks, with a prefix sum of the optical depth
inside each. It saves the depth in front of every block, one number for 32 samples: block b of a ray that
begins at sample s has slot s // 32 + ray + b, and no two blocks have the same.
Backward schedule: the same owner walks the blocks from back to front. Within a block all is relative to the
light that enters it, T = exp(-depth) from the slot: w, and the sum over the samples behind, a reverse prefix
sum whose carry a block dims by its own depth. To take the depths of blocks from a saved total would need no
slots, but behind a deep ray the rounding of that total is as large as the depth in front. Every gradient has
one owner.

op: volume_rendering
schedule: reverse_scan, recompute_from_stats
difficulty: 3
dtypes: fp32
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


BLOCK = 32


@triton.jit
def load_samples(sigma_ptr, delta_ptr, rgb_ptr, i, end):
    """sigma, delta and (samples, 4) colours; zeros past the ray's end and in the fourth colour."""
    c = tl.arange(0, 4)
    sigma = tl.load(sigma_ptr + i, mask=i < end, other=0.0).to(tl.float32)
    delta = tl.load(delta_ptr + i, mask=i < end, other=0.0).to(tl.float32)
    rgb_mask = (i[:, None] < end) & (c[None, :] < 3)
    return (
        sigma,
        delta,
        tl.load(rgb_ptr + i[:, None] * 3 + c[None, :], mask=rgb_mask, other=0.0).to(tl.float32),
    )


@triton.jit
def composite_kernel(sigma_ptr, rgb_ptr, delta_ptr, offsets_ptr, color_ptr, depth_ptr, BLOCK: tl.constexpr):
    ray = tl.program_id(0).to(tl.int64)
    end = tl.load(offsets_ptr + ray + 1)
    c = tl.arange(0, 4)
    slot = depth_ptr + tl.load(offsets_ptr + ray) // BLOCK + ray
    depth = 0.0
    color = tl.zeros([4], dtype=tl.float32)
    for start in range(tl.load(offsets_ptr + ray), end, BLOCK):
        i = start + tl.arange(0, BLOCK)
        sigma, delta, rgb = load_samples(sigma_ptr, delta_ptr, rgb_ptr, i, end)
        tl.store(slot, depth)
        slot += 1
        tau = sigma * delta
        in_front = depth + tl.cumsum(tau, axis=0) - tau
        w = tl.exp(-in_front) * (1 - tl.exp(-tau))
        color += tl.sum(w[:, None] * rgb, axis=0)
        depth += tl.sum(tau, axis=0)
    tl.store(color_ptr + ray * 3 + c, color, mask=c < 3)


def composite_forward(sigma, rgb, delta, offsets):
    rays = offsets.numel() - 1
    color = torch.empty((rays, 3), device=rgb.device, dtype=rgb.dtype)
    depth = torch.empty(sigma.numel() // BLOCK + rays, device=rgb.device, dtype=torch.float32)
    composite_kernel[(rays,)](sigma, rgb, delta, offsets, color, depth, BLOCK=BLOCK)
    return color, depth


@autodiff(inputs_require_grad=(0, 1))
def composite(sigma, rgb, delta, offsets):
    """sigma, delta: (samples); rgb: (samples, 3); offsets: int64 (rays + 1), from 0 to samples."""
    return composite_forward(sigma.contiguous(), rgb.contiguous(), delta.contiguous(), offsets)[0]


def reference(sigma, rgb, delta, offsets):
    colors = []
    for begin, end in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True):
        tau = (sigma * delta)[begin:end]
        w = torch.exp(tau - tau.cumsum(0)) * (1 - torch.exp(-tau))
        colors.append((w[:, None] * rgb[begin:end]).sum(0))
    return torch.stack(colors)


SWEEP = [
    {"rays": 8192, "samples": 3 << 19},
    {"rays": 4096, "samples": 1 << 20},
    {"rays": 1021, "samples": 1500007},
]
SWEEP_CPU = [{"rays": 13, "samples": 90}, {"rays": 2, "samples": 75}]


def make_args(dims, device="cuda", dtype=torch.float32):
    rays, samples = dims["rays"], dims["samples"]
    ray = torch.randint(0, rays, (samples,), device=device).sort().values
    offsets = torch.searchsorted(ray, torch.arange(rays + 1, device=device))
    sigma = 4 * torch.rand(samples, device=device, dtype=dtype)
    rgb = torch.rand(samples, 3, device=device, dtype=dtype)
    return sigma, rgb, 0.01 + 0.1 * torch.rand(samples, device=device, dtype=dtype), offsets


# ---- backward ----


@triton.jit
def composite_backward_kernel(
    sigma_ptr,
    rgb_ptr,
    delta_ptr,
    offsets_ptr,
    depth_ptr,
    dcolor_ptr,
    dsigma_ptr,
    drgb_ptr,
    BLOCK: tl.constexpr,
):
    ray = tl.program_id(0).to(tl.int64)
    begin = tl.load(offsets_ptr + ray)
    end = tl.load(offsets_ptr + ray + 1)
    c = tl.arange(0, 4)
    dcolor = tl.load(dcolor_ptr + ray * 3 + c, mask=c < 3, other=0.0).to(tl.float32)
    behind = 0.0  # sum of w g over the blocks already walked, for light 1 in front of them
    blocks = tl.cdiv(end - begin, BLOCK)
    for step in range(blocks):
        block = blocks - 1 - step
        light = tl.exp(-tl.load(depth_ptr + begin // BLOCK + ray + block))
        i = begin + block * BLOCK + tl.arange(0, BLOCK)
        sigma, delta, rgb = load_samples(sigma_ptr, delta_ptr, rgb_ptr, i, end)
        tau = sigma * delta
        up_to = tl.cumsum(tau, axis=0)
        w = tl.exp(tau - up_to) * (1 - tl.exp(-tau))
        g = tl.sum(rgb * dcolor[None, :], axis=1)
        behind *= tl.exp(-tl.sum(tau, axis=0))
        sum_behind = behind + tl.cumsum(w * g, axis=0, reverse=True) - w * g
        dsigma = delta * light * (tl.exp(-up_to) * g - sum_behind)
        tl.store(dsigma_ptr + i, dsigma, mask=i < end)
        drgb_mask = (i[:, None] < end) & (c[None, :] < 3)
        drgb = (light * w)[:, None] * dcolor[None, :]
        tl.store(drgb_ptr + i[:, None] * 3 + c[None, :], drgb, mask=drgb_mask)
        behind += tl.sum(w * g, axis=0)


class Composite(torch.autograd.Function):
    @staticmethod
    def forward(ctx, sigma, rgb, delta, offsets):
        sigma, rgb, delta = sigma.contiguous(), rgb.contiguous(), delta.contiguous()
        color, depth = composite_forward(sigma, rgb, delta, offsets)
        ctx.save_for_backward(sigma, rgb, delta, offsets, depth)
        return color

    @staticmethod
    def backward(ctx, dcolor):
        sigma, rgb, delta, offsets, depth = ctx.saved_tensors
        dcolor = dcolor.contiguous()
        dsigma, drgb = torch.empty_like(sigma), torch.empty_like(rgb)
        composite_backward_kernel[(offsets.numel() - 1,)](
            sigma, rgb, delta, offsets, depth, dcolor, dsigma, drgb, BLOCK=BLOCK
        )
        needs = ctx.needs_input_grad
        return dsigma if needs[0] else None, drgb if needs[1] else None, None, None


def composite_autograd(sigma, rgb, delta, offsets):
    return Composite.apply(sigma, rgb, delta, offsets)
