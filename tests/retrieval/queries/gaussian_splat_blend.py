import torch
import triton
import triton.language as tl
from kernel_agent import autodiff


@triton.jit
def blend(mean, inv_cov, opacity, colour, start, image, W, P: tl.constexpr):
    tile = tl.program_id(0)
    p = tile * P + tl.arange(0, P)
    px, py = (p % W).to(tl.float32), (p // W).to(tl.float32)
    trans = tl.full((P,), 1.0, tl.float32)
    acc = tl.zeros((P,), tl.float32)
    for g in range(tl.load(start + tile), tl.load(start + tile + 1)):
        dx = px - tl.load(mean + 2 * g)
        dy = py - tl.load(mean + 2 * g + 1)
        a, b, c = tl.load(inv_cov + 3 * g), tl.load(inv_cov + 3 * g + 1), tl.load(inv_cov + 3 * g + 2)
        alpha = tl.load(opacity + g) * tl.exp(-0.5 * (a * dx * dx + c * dy * dy) - b * dx * dy)
        acc += trans * alpha * tl.load(colour + g)
        trans *= 1.0 - alpha
    tl.store(image + p, acc)


@autodiff(inputs_require_grad=(0, 1, 2, 3))
def rasterise(mean, inv_cov, opacity, colour, start, H, W):
    image = torch.empty(H, W, device=mean.device)
    blend[(H * W // 256,)](mean, inv_cov, opacity, colour, start, image, W, P=256)
    return image
