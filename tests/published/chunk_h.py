"""The states between chunks of gated linear attention, h' = exp(g) h + k^T v, and the last."""

import torch
import triton
import triton.language as tl
from kernel_agent import autodiff
from ops.op import exp
from ops.utils import input_guard, packed, prepare_chunk_offsets


@triton.heuristics(
    {
        "USE_INITIAL_STATE": lambda args: args["h0"] is not None,
        "STORE_FINAL_STATE": lambda args: args["ht"] is not None,
        "IS_VARLEN": lambda args: args["cu_seqlens"] is not None,
    }
)
@triton.autotune(
    configs=[
        triton.Config({"BK": BK, "BV": BV}, num_warps=num_warps, num_stages=num_stages)
        for BK in [16, 32]
        for BV in [16, 32]
        for num_warps in [1, 2, 4]
        for num_stages in [2, 3]
    ],
    key=["BT", "USE_G", "USE_GK"],
)
@triton.jit(do_not_specialize=["T"])
def chunk_fwd_kernel_h(
    k, v, h, g, gk, h0, ht, cu_seqlens, split_offsets, T, H: tl.constexpr, K: tl.constexpr, V:
    tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, USE_G: tl.constexpr, USE_GK:
    tl.constexpr, USE_INITIAL_STATE: tl.constexpr, STORE_FINAL_STATE: tl.constexpr, IS_VARLEN:
    tl.constexpr,
):  # fmt: skip
    i_k, i_v, i_nh = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    i_n, i_h = i_nh // H, i_nh % H
    if IS_VARLEN:
        bos = tl.load(cu_seqlens + i_n).to(tl.int32)
        eos = tl.load(cu_seqlens + i_n + 1).to(tl.int32)
        T = eos - bos
        NT = tl.cdiv(T, BT)
        boh = tl.load(split_offsets + i_n).to(tl.int32)
    else:
        bos, eos = i_n * T, i_n * T + T
        NT = tl.cdiv(T, BT)
        boh = i_n * NT

    # [BK, BV]
    b_h = tl.zeros([BK, BV], dtype=tl.float32)
    if USE_INITIAL_STATE:
        p_h0 = tl.make_block_ptr(h0 + i_nh * K * V, (K, V), (V, 1), (i_k * BK, i_v * BV), (BK, BV), (1, 0))
        b_h = tl.load(p_h0, boundary_check=(0, 1)).to(tl.float32)

    for i_t in range(NT):
        o_h = ((boh + i_t) * H + i_h).to(tl.int64) * K * V
        p_h = tl.make_block_ptr(h + o_h, (K, V), (V, 1), (i_k * BK, i_v * BV), (BK, BV), (1, 0))
        tl.store(p_h, b_h.to(p_h.dtype.element_ty), boundary_check=(0, 1))

        p_k = tl.make_block_ptr(
            k + (bos * H + i_h) * K, (K, T), (1, H * K), (i_k * BK, i_t * BT), (BK, BT), (0, 1)
        )
        p_v = tl.make_block_ptr(
            v + (bos * H + i_h) * V, (T, V), (H * V, 1), (i_t * BT, i_v * BV), (BT, BV), (1, 0)
        )
        # [BK, BT]
        b_k = tl.load(p_k, boundary_check=(0, 1))
        # [BT, BV]
        b_v = tl.load(p_v, boundary_check=(0, 1))
        last_idx = min((i_t + 1) * BT, T) - 1

        # scalar decay
        if USE_G:
            b_g_last = tl.load(g + bos * H + last_idx * H + i_h)
            p_g = g + bos * H + (i_t * BT + tl.arange(0, BT)) * H + i_h
            b_h *= exp(b_g_last)
            b_g = tl.load(p_g, mask=(i_t * BT + tl.arange(0, BT) < T), other=0.0)
            b_v = (b_v * exp(b_g_last - b_g)[:, None]).to(b_v.dtype)

        # vector decay, h = diag(gk) h
        if USE_GK:
            p_gk = tl.make_block_ptr(
                gk + (bos * H + i_h) * K, (K, T), (1, H * K), (i_k * BK, i_t * BT), (BK, BT), (0, 1)
            )
            p_gk_last = gk + (bos + last_idx) * H * K + i_h * K + i_k * BK + tl.arange(0, BK)
            b_gk_last = tl.load(p_gk_last, mask=(i_k * BK + tl.arange(0, BK) < K), other=0.0)
            b_h *= exp(b_gk_last)[:, None]
            b_gk = tl.load(p_gk, boundary_check=(0, 1))
            b_k = (b_k * exp(b_gk_last[:, None] - b_gk)).to(b_k.dtype)

        b_h += tl.dot(b_k, b_v)

    if STORE_FINAL_STATE:
        p_ht = tl.make_block_ptr(ht + i_nh * K * V, (K, V), (V, 1), (i_k * BK, i_v * BV), (BK, BV), (1, 0))
        tl.store(p_ht, b_h.to(p_ht.dtype.element_ty), boundary_check=(0, 1))


@autodiff(inputs_require_grad=(0, 1, 2, 3, 4))
@input_guard
def chunk_fwd_h(
    k, v, g=None, gk=None, h0=None, output_final_state=False, cu_seqlens=None, chunk_size=16,
    states_in_fp32=False,
):  # fmt: skip
    B, T, H, K, V = *k.shape, v.shape[-1]
    BT = chunk_size
    # the number of sequences in the batch
    if cu_seqlens is None:
        N, NS, split_offsets = B, B * triton.cdiv(T, BT), None
    else:
        split_offsets = prepare_chunk_offsets(cu_seqlens, BT)
        N, NS = len(cu_seqlens) - 1, split_offsets[-1].item()
    h = k.new_empty(1 if cu_seqlens is not None else B, NS // (1 if cu_seqlens is not None else B), H, K, V,
                    dtype=k.dtype if not states_in_fp32 else torch.float)  # fmt: skip
    ht = k.new_empty(N, H, K, V, dtype=torch.float) if output_final_state else None

    def grid(meta):
        return (triton.cdiv(K, meta["BK"]), triton.cdiv(V, meta["BV"]), N * H)

    chunk_fwd_kernel_h[grid](
        k=k, v=v, h=h, g=g, gk=gk, h0=h0, ht=ht, cu_seqlens=cu_seqlens, split_offsets=split_offsets,
        T=T, H=H, K=K, V=V, BT=BT, USE_G=g is not None, USE_GK=gk is not None,
    )  # fmt: skip
    return h, ht


SWEEP = [
    {"B": 2, "T": 40, "H": 2, "K": 20, "V": 24, "gate": "g", "state": True, "packed": False},
    {"B": 1, "T": 45, "H": 2, "K": 16, "V": 16, "gate": "gk", "state": True, "packed": True},
    {"B": 1, "T": 35, "H": 1, "K": 33, "V": 16, "gate": "none", "state": False, "packed": False},
]
SWEEP_CPU = SWEEP


def make_args(dims, device="cuda", dtype=torch.float32):
    B, T, H, K, V = (dims[name] for name in "BTHKV")
    k = torch.randn(B, T, H, K, device=device, dtype=dtype) / K**0.5
    v = torch.randn(B, T, H, V, device=device, dtype=dtype)
    g = -0.1 * torch.rand(B, T, H, device=device, dtype=dtype).cumsum(1) if dims["gate"] == "g" else None
    gk = -0.1 * torch.rand(B, T, H, K, device=device, dtype=dtype).cumsum(1) if dims["gate"] == "gk" else None
    cu = packed(T, device) if dims["packed"] and B == 1 else None
    N = B if cu is None else len(cu) - 1
    h0 = torch.randn(N, H, K, V, device=device, dtype=dtype) if dims["state"] else None
    return (k, v, g, gk, h0), {"output_final_state": dims["state"], "cu_seqlens": cu}
