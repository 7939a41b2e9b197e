import torch
import triton
import triton.language as tl
from kernel_agent import autodiff


@triton.jit
def erabu(q, k, v, erabi, o, T, S: tl.constexpr, G: tl.constexpr, D: tl.constexpr, BS: tl.constexpr, sc):
    # 一つのプログラムが一つの問い合わせと一群の頭を持つ
    t = tl.program_id(0)
    kvh = tl.program_id(1)
    n_kv = tl.num_programs(1)
    g = tl.arange(0, G)
    d = tl.arange(0, D)
    base_q = (t * n_kv + kvh) * G * D
    x = tl.load(q + base_q + g[:, None] * D + d[None, :])
    m = tl.full((G,), float("-inf"), tl.float32)
    z = tl.zeros((G,), tl.float32)
    a = tl.zeros((G, D), tl.float32)
    for s in range(S):
        # 選ばれた塊の番号
        blk = tl.load(erabi + (t * n_kv + kvh) * S + s)
        pos = blk * BS + tl.arange(0, BS)
        ok = (pos <= t) & (pos >= 0)
        kk = tl.load(k + (pos[None, :] * n_kv + kvh) * D + d[:, None], mask=ok[None, :], other=0.0)
        vv = tl.load(v + (pos[:, None] * n_kv + kvh) * D + d[None, :], mask=ok[:, None], other=0.0)
        w = tl.where(ok[None, :], tl.dot(x, kk) * sc, -1e30)
        mm = tl.maximum(m, tl.max(w, 1))
        w = tl.exp(w - mm[:, None])
        r = tl.exp(m - mm)
        z = z * r + tl.sum(w, 1)
        a = a * r[:, None] + tl.dot(w.to(vv.dtype), vv)
        m = mm
    tl.store(o + base_q + g[:, None] * D + d[None, :], a / z[:, None])


@autodiff(inputs_require_grad=(0, 1, 2))
def sentaku_chui(q, k, v, erabi):
    T, HK, G, D = q.shape
    o = torch.empty_like(q)
    erabu[(T, HK)](q, k, v, erabi, o, T, erabi.shape[-1], G, D, 32, D**-0.5)
    return o
