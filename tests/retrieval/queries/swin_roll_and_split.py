import torch
import triton
import triton.language as tl
from kernel_agent import autodiff


@triton.jit
def roll_windows(img, win, H, W, C, S, WS: tl.constexpr, BC: tl.constexpr):
    b, tok = tl.program_id(0), tl.program_id(1)
    nw = W // WS
    w_id, inner = tok // (WS * WS), tok % (WS * WS)
    y = (w_id // nw * WS + inner // WS + S) % H
    x = (w_id % nw * WS + inner % WS + S) % W
    c = tl.arange(0, BC)
    v = tl.load(img + ((b * H + y) * W + x) * C + c, mask=c < C)
    tl.store(win + (b * H * W + tok) * C + c, v, mask=c < C)


@autodiff(inputs_require_grad=(0,))
def shifted_windows(img, ws=7, shift=3):
    B, H, W, C = img.shape
    out = img.new_empty(B * (H // ws) * (W // ws), ws * ws, C)
    roll_windows[(B, H * W)](img, out, H, W, C, shift, WS=ws, BC=triton.next_power_of_2(C))
    return out
