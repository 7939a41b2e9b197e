"""Gated activations behind one flag. Part of a model's layer file, with what such files carry along."""

import functools
import math
import os

import torch
import triton
import triton.language as tl
from kernel_agent import autodiff

MAX_WARPS = int(os.environ.get("GLU_MAX_WARPS", "16"))


def ceil_to(value, step):
    return (value + step - 1) // step * step


@functools.lru_cache(maxsize=None)
def launch_shape(columns, element_size):
    limit = 65536 // element_size
    block = triton.next_power_of_2(columns)
    if block > limit:
        raise RuntimeError(f"rows of {columns} are too long")
    warps = 4
    if block >= 32768:
        warps = 32
    elif block >= 8192:
        warps = 16
    elif block >= 2048:
        warps = 8
    return block, min(warps, MAX_WARPS)


def parameter_count(hidden, inner, layers):
    return layers * 3 * hidden * inner


def init_scale(fan_in, gain=1.0):
    return gain / math.sqrt(fan_in)


class FeedForwardConfig:
    def __init__(self, hidden, inner, activation="silu", bias=False):
        self.hidden, self.inner, self.activation, self.bias = hidden, ceil_to(inner, 64), activation, bias

    def bytes_of_weights(self, element_size=2):
        return parameter_count(self.hidden, self.inner, 1) * element_size


@triton.jit
def _tanh(z):
    return 2.0 * tl.sigmoid(2.0 * z) - 1.0


@triton.jit
def _act(z, KIND: tl.constexpr):
    if KIND == 0:
        return z * tl.sigmoid(z)
    elif KIND == 1:
        return 0.5 * z * (1.0 + _tanh(0.7978845608 * (z + 0.044715 * z * z * z)))
    else:
        return tl.maximum(z, 0.0)


@triton.jit
def _glu_fwd(gate_ptr, up_ptr, out_ptr, row_stride, n_cols, KIND: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    gate_ptr += row * row_stride
    up_ptr += row * row_stride
    out_ptr += row * row_stride
    col = tl.arange(0, BLOCK_SIZE)
    keep = col < n_cols
    gate = tl.load(gate_ptr + col, mask=keep, other=0).to(tl.float32)
    up = tl.load(up_ptr + col, mask=keep, other=0)
    tl.store(out_ptr + col, _act(gate, KIND).to(up.dtype) * up, mask=keep)


KINDS = {"silu": 0, "gelu": 1, "relu": 2}


@autodiff(inputs_require_grad=(0, 1))
def glu(gate, up, activation="silu"):
    shape = gate.shape
    gate, up = gate.reshape(-1, shape[-1]), up.reshape(-1, shape[-1])
    out = torch.empty_like(gate)
    block, warps = launch_shape(shape[-1], gate.element_size())
    _glu_fwd[(gate.shape[0],)](
        gate, up, out, gate.stride(0), shape[-1], KINDS[activation], block, num_warps=warps
    )
    return out.reshape(shape)
