import torch, triton
import triton.language as tl
from kernel_agent import autodiff


# Gatter und Wert liegen in zwei Matrizen gleicher Form; jede Zeile wird in Kacheln zerlegt.
@triton.jit
def gatter_kern(
    G,
    W,
    A,
    spalten,
    SCHRITT_G: tl.constexpr,
    SCHRITT_W: tl.constexpr,
    SCHRITT_A: tl.constexpr,
    KACHEL: tl.constexpr,
):
    zeile = tl.program_id(0).to(tl.int64)
    stelle = tl.program_id(1) * KACHEL + tl.arange(0, KACHEL)
    gueltig = stelle < spalten
    g = tl.load(G + zeile * SCHRITT_G + stelle, mask=gueltig, other=0.0).to(tl.float32)
    w = tl.load(W + zeile * SCHRITT_W + stelle, mask=gueltig, other=0.0).to(tl.float32)
    # Sigmoid von Hand
    s = 1.0 / (1.0 + tl.exp(-g))
    tl.store(A + zeile * SCHRITT_A + stelle, g * s * w, mask=gueltig)


@autodiff(inputs_require_grad=(0, 1))
def gatter(g, w):
    zeilen, spalten = g.shape
    a = torch.empty_like(g)
    gatter_kern[zeilen, triton.cdiv(spalten, 512)](
        g, w, a, spalten, g.stride(0), w.stride(0), a.stride(0), 512
    )
    return a
