import torch
import triton
import triton.language as tl
from kernel_agent import autodiff


@triton.jit
def nucleo_focal(logitos, blancos, perdida, n, alfa, gamma, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    m = i < n
    x = tl.load(logitos + i, mask=m, other=0.0).to(tl.float32)
    y = tl.load(blancos + i, mask=m, other=0.0).to(tl.float32)
    # entropia cruzada binaria sin desbordamiento
    ec = tl.maximum(x, 0.0) - x * y + tl.log(1.0 + tl.exp(-tl.abs(x)))
    p = tl.sigmoid(x)
    pt = p * y + (1 - p) * (1 - y)
    peso = tl.exp(gamma * tl.log(1.0 - pt + 1e-12))
    tl.store(perdida + i, (alfa * y + (1 - alfa) * (1 - y)) * peso * ec, mask=m)


@autodiff(inputs_require_grad=(0,))
def perdida_focal(logitos, blancos, alfa=0.25, gamma=2.0):
    perdida = torch.empty_like(logitos)
    nucleo_focal[(triton.cdiv(logitos.numel(), 512),)](
        logitos, blancos, perdida, logitos.numel(), alfa, gamma, 512
    )
    return perdida
