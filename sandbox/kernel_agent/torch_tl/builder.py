"""The operations that Triton's semantic layer would emit as IR, performed on torch tensors.

Method names are those of Triton's IR builder. Integers are two's complement in torch's signed dtypes, so
signedness is in the operation (`sdiv`, `udiv`), as in LLVM. Where a derivative is not unique, these rules
hold:

  maximum, minimum   the gradient goes to the strictly greater (smaller) operand, on a tie to the second one
  abs                0 at 0;    clamp: passes where lo <= x <= hi
  max, min reduction the first of equal elements gets all of it
  floor, ceil, comparisons, integers: zero
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NoReturn

import numpy as np
import torch
import triton.language as tl
from triton._C.libtriton import ir

from kernel_agent import libdevice
from kernel_agent.source import words
from kernel_agent.torch_tl import reductions
from kernel_agent.torch_tl.handles import (
    BlockPointer,
    Constant,
    Handle,
    KernelError,
    NeedsOrder,
    Pointer,
    int_dtype,
    lane_view,
    unsigned,
)
from kernel_agent.torch_tl.memory import Memory

REMEDIES = {
    "create_inline_asm": "write the computation with triton.language operations",
    "create_map_elementwise": "write the function with elementwise operations and tl.where",
    "create_dot_scaled": "dequantise the operands and use tl.dot",
    "create_descriptor_reduce": "use tl.atomic_add with pointers",
}


MOST_CONSTANTS = 10_000
_constants: dict[tuple[Any, ...], Handle] = {}


class OldValues(Handle):
    """What an atomic found, computed when somebody looks: only then the order of programs matters."""

    def __init__(self, compute: Callable[[], torch.Tensor]) -> None:
        self._compute = compute
        self._value: torch.Tensor | None = None

    @property
    def data(self) -> torch.Tensor:  # type: ignore[override]
        if self._value is None:
            self._value = self._compute()
        return self._value


def element_of(ty: tl.dtype) -> tl.dtype:
    """The scalar element that a type describes, through blocks and pointers."""
    while hasattr(ty, "element_ty"):
        ty = ty.element_ty
    return ty


class Builder:
    """See the module. One per launch: `grid` and the group's program ids are set before the kernel runs."""

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        self.device = memory.device
        self.grid: tuple[int, ...] = (1, 1, 1)
        self.options = SimpleNamespace(
            extern_libs=None,
            debug=False,
            sanitize_overflow=False,
            arch=None,
            supported_fp8_dtypes=("fp8e5", "fp8e5b16", "fp8e4nv", "fp8e4b8"),
            deprecated_fp8_dot_operand_dtypes=(),
            # Compiled float32 products are tf32 unless the kernel says otherwise; interpreted ones exact.
            default_dot_input_precision="tf32" if memory.compiled else "ieee",
            allowed_dot_input_precisions=("tf32", "tf32x3", "ieee", "bf16x3", "bf16x6"),
            max_num_imprecise_acc_default=0,
            backend_name="torch",
        )
        self.codegen_fns = {"min_dot_size": lambda lhs, rhs: (1, 1, 1)}

    def __getattr__(self, name: str) -> NoReturn:
        if not name.startswith(("create_", "get_")):
            raise AttributeError(name)
        what = name.removeprefix("create_").removeprefix("get_")
        raise KernelError(f"the operation {what} is not supported", remedy=REMEDIES.get(name))

    # ---- types: Triton's own type objects stand for themselves

    def get_ptr_ty(self, element: tl.dtype, address_space: int) -> tl.dtype:
        return tl.pointer_type(element, address_space)

    def get_block_ty(self, element: tl.dtype, shape: Sequence[int]) -> tl.dtype:
        return tl.block_type(element, list(shape))

    # ---- constants

    def constant(self, value: Any, dtype: torch.dtype) -> Handle:
        """A scalar, made once for each value: on a GPU that is a wait for a copy."""
        key = (dtype, self.device, type(value), value if value and value == value else repr(value))
        made = _constants.get(key)
        if made is None:
            if len(_constants) >= MOST_CONSTANTS:
                _constants.clear()
            data = torch.tensor([value], dtype=dtype, device=self.device)
            made = Handle(data)
            if type(value) in (int, bool) and not dtype.is_floating_point:
                made = Constant(data, bool(value) if dtype == torch.bool else int(value))
            _constants[key] = made
        return made

    def float_constant(self, value: float, ty: tl.dtype) -> Handle:
        return self.constant(value, self.memory.value_dtype(ty))

    def get_fp32(self, value: float) -> Handle:
        return self.float_constant(float(np.float32(value)), tl.float32)

    def get_null_value(self, ty: tl.dtype) -> Handle:
        return self.constant(0, self.memory.value_dtype(ty.scalar))

    def get_all_ones_value(self, ty: tl.dtype) -> Handle:
        return self.constant(True if ty.scalar.name == "int1" else -1, int_dtype(ty))

    # ---- programs

    def create_get_program_id(self, axis: int) -> Handle:
        programs, (nx, ny, nz) = self.memory.programs, self.grid
        if self.memory.copies > 1:
            programs = programs % (nx * ny * nz)
        ids = (programs // (ny * nz), (programs // nz) % ny, programs % nz)[axis]
        return Handle(ids if (nx, ny, nz)[axis] > 1 else ids[:1])

    def create_get_num_programs(self, axis: int) -> Handle:
        return self.constant(self.grid[axis], torch.int32)

    # ---- elementwise

    def create_udiv(self, a: Handle, b: Handle) -> Handle:
        return self._unsigned_binary(a, b, lambda x, y: x // y)

    def create_urem(self, a: Handle, b: Handle) -> Handle:
        return self._unsigned_binary(a, b, lambda x, y: x % y)

    def _unsigned_binary(self, a: Handle, b: Handle, act: Callable[[Any, Any], Any]) -> Handle:
        if a.data.dtype == torch.int64:
            x, y = (side.cpu().numpy().view(np.uint64) for side in (a.data, b.data))
            result = act(x, np.where(y == 0, np.uint64(1), y)).view(np.int64)
            return Handle(torch.from_numpy(np.ascontiguousarray(result)).to(self.device))
        divisor = unsigned(b.data)
        result = act(unsigned(a.data), torch.where(divisor == 0, 1, divisor))
        return Handle(result.to(a.data.dtype))

    def create_lshr(self, a: Handle, b: Handle) -> Handle:
        if a.data.dtype != torch.int64:
            return Handle((unsigned(a.data) >> b.data.to(torch.int64)).to(a.data.dtype))
        keep = torch.where(b.data == 0, -1, (1 << (64 - b.data.clamp(1, 63))) - 1)
        return Handle((a.data >> b.data) & keep)

    def create_umulhi(self, a: Handle, b: Handle) -> Handle:
        if a.data.dtype == torch.int64:
            return Handle(umulhi64(a.data, b.data))
        bits = 8 * a.data.element_size()
        product = unsigned(a.data) * unsigned(b.data)
        return Handle((product >> bits).to(a.data.dtype))

    def compared(self, act: Callable[..., torch.Tensor], a: Handle, b: Handle) -> torch.Tensor:
        """The outcome of a comparison of floats."""
        decided = act(a.data, b.data)
        return self.memory.kinks.settle(decided, a.data, b.data) if self.memory.kinks else decided

    def stepped(self, act: Callable[[torch.Tensor], torch.Tensor], x: Handle) -> Handle:
        return Handle(self.memory.kinks.step(act, x.data) if self.memory.kinks else act(x.data))

    def create_floor(self, x: Handle) -> Handle:
        return self.stepped(torch.floor, x)

    def create_ceil(self, x: Handle) -> Handle:
        return self.stepped(torch.ceil, x)

    def create_fabs(self, x: Handle) -> Handle:
        if self.memory.kinks is None:
            return Handle(torch.abs(x.data))
        zero = Handle(torch.zeros_like(x.data))
        sign = torch.where(self.compared(torch.gt, x, zero), 1.0, -1.0)
        return Handle(x.data * sign.masked_fill(x.data == 0, 0.0).to(x.data.dtype))

    def create_minnumf(self, a: Handle, b: Handle) -> Handle:
        return Handle(pick_number(a.data, b.data, self.compared(torch.lt, a, b)))

    def create_maxnumf(self, a: Handle, b: Handle) -> Handle:
        return Handle(pick_number(a.data, b.data, self.compared(torch.gt, a, b)))

    def create_minimumf(self, a: Handle, b: Handle) -> Handle:
        return Handle(torch.where(self.compared(torch.lt, a, b) | torch.isnan(a.data), a.data, b.data))

    def create_maximumf(self, a: Handle, b: Handle) -> Handle:
        return Handle(torch.where(self.compared(torch.gt, a, b) | torch.isnan(a.data), a.data, b.data))

    def create_clampf(self, x: Handle, low: Handle, high: Handle, propagate_nan: Any) -> Handle:
        below, above = self.compared(torch.lt, x, low), self.compared(torch.gt, x, high)
        clamped = torch.where(below, low.data, torch.where(above, high.data, x.data))
        if propagate_nan == ir.PROPAGATE_NAN.NONE:
            clamped = torch.where(torch.isnan(x.data), low.data, clamped)
        return Handle(clamped)

    def create_select(self, condition: Handle, a: Handle, b: Handle) -> Handle:
        data = torch.where(condition.data, a.data, b.data)
        if isinstance(a, Pointer) and isinstance(b, Pointer):
            known = a.cell if a.cell is b.cell else None
            return Pointer(
                data, a.element, known, a.name if a.name == b.name else None, a.detached or b.detached
            )
        return Handle(data)

    def create_extern_elementwise(
        self, lib: str, path: str, symbol: str, args: list[Handle], ty: Any, pure: bool
    ) -> Handle:
        function = libdevice.FUNCTIONS.get(symbol)
        if function is None:
            raise KernelError(
                f"the external function {symbol} is not supported", remedy="use a triton.language operation"
            )
        data = function(*(arg.data for arg in args))
        return Handle(data.to(self.memory.value_dtype(element_of(ty))))

    # ---- casts

    def _to_float(self, src: Handle, ty: tl.dtype) -> Handle:
        return Handle(src.data.to(self.memory.value_dtype(element_of(ty))))

    def create_fp_to_fp(self, src: Handle, ty: tl.dtype, rounding: Any) -> Handle:
        return self._to_float(src, ty)

    create_si_to_fp = _to_float
    create_fp_ext = _to_float
    create_fp_trunc = _to_float

    def create_ui_to_fp(self, src: Handle, ty: tl.dtype) -> Handle:
        dtype = self.memory.value_dtype(element_of(ty))
        if src.data.dtype == torch.int64:
            value = src.data.to(torch.float64)
            return Handle(torch.where(src.data < 0, value + 2.0**64, value).to(dtype))
        return Handle(unsigned(src.data).to(dtype))

    def create_fp_to_si(self, src: Handle, ty: tl.dtype) -> Handle:
        return Handle(src.data.detach().to(int_dtype(ty)))

    def create_fp_to_ui(self, src: Handle, ty: tl.dtype) -> Handle:
        value = src.data.detach().to(torch.float64)
        if int_dtype(ty) == torch.int64:
            value = torch.where(value >= 2.0**63, value - 2.0**64, value)
        return Handle(value.to(torch.int64).to(int_dtype(ty)))

    def create_int_cast(self, src: Handle, ty: tl.dtype, is_signed: bool) -> Handle:
        data = src.data if is_signed else unsigned(src.data)
        return Handle(data.to(int_dtype(ty)))

    def create_bitcast(self, src: Handle, ty: tl.dtype) -> Handle:
        target = ty.scalar
        if isinstance(src, Pointer) and target.is_ptr():
            return Pointer(src.data, target.element_ty, src.cell, src.name, src.detached)
        if target.is_int() and not src.data.dtype.is_floating_point and int_dtype(target) == src.data.dtype:
            return src
        raise KernelError(
            "a bit cast between floats and integers cannot be evaluated in float64",
            remedy="use arithmetic (tl.exp2, tl.floor, tl.where) in place of the bits",
        )

    def create_int_to_ptr(self, src: Handle, ty: tl.dtype) -> Pointer:
        return Pointer(src.data.to(torch.int64), ty.scalar.element_ty)

    def create_ptr_to_int(self, src: Handle, ty: tl.dtype) -> Handle:
        self.memory.require_single("an address as a number")
        return Handle(src.data.to(int_dtype(ty)))

    # ---- shapes

    def create_make_range(self, ty: tl.dtype, start: int, stop: int) -> Handle:
        return Handle(torch.arange(start, stop, dtype=torch.int32, device=self.device).unsqueeze(0))

    def create_splat(self, ty: tl.dtype, scalar: Handle) -> Handle:
        shape = [int(size) for size in ty.shape]
        data = scalar.data
        if data.requires_grad or data.shape[0] > 1:
            return scalar.like(lane_view(data, len(shape)).expand(-1, *shape))
        return scalar.like(data.expand(1, *shape))

    def create_unsplat(self, block: Handle) -> Handle:
        return block.like(block.data.reshape(block.data.shape[0], -1)[:, 0])

    def create_broadcast(self, block: Handle, shape: Sequence[int]) -> Handle:
        return block.like(block.data.expand(-1, *map(int, shape)))

    def create_expand_dims(self, block: Handle, axis: int) -> Handle:
        return block.like(block.data.unsqueeze(axis + 1))

    def create_reshape(self, block: Handle, shape: Sequence[int], allow_reorder: bool) -> Handle:
        return block.like(block.data.reshape(block.data.shape[0], *(int(size) for size in shape)))

    def create_trans(self, block: Handle, order: Sequence[int]) -> Handle:
        return block.like(block.data.permute(0, *(int(axis) + 1 for axis in order)))

    def create_split(self, block: Handle) -> tuple[Handle, Handle]:
        return block.like(block.data[..., 0]), block.like(block.data[..., 1])

    def create_gather(self, src: Handle, index: Handle, axis: int) -> Handle:
        batch = max(src.data.shape[0], index.data.shape[0])
        data, at = (side.data.expand(batch, *side.data.shape[1:]) for side in (src, index))
        return Handle(torch.gather(data, axis + 1, at.to(torch.int64)))

    def create_histogram(self, data: Handle, bins: int, mask: Handle | None) -> Handle:
        edges = torch.arange(bins, device=self.device)
        hits = data.data.unsqueeze(-1) == edges
        if mask is not None:
            hits = hits & mask.data.unsqueeze(-1)
        return Handle(hits.sum(1).to(torch.int32))

    def create_dot(self, a: Handle, b: Handle, acc: Handle, input_precision: Any, imprecise: Any) -> Handle:
        wide = acc.data.dtype
        if wide in (torch.float16, torch.bfloat16):
            wide = torch.float32
        left, right = a.data.to(wide), b.data.to(wide)
        cut = input_precision == ir.INPUT_PRECISION.TF32 and a.data.dtype == torch.float32
        if cut:
            self.memory.in_tf32 = True
            left, right = tf32(left), tf32(right)
        product = torch.matmul(left, right)
        if cut and product.requires_grad:
            product.register_hook(tf32)  # its gradient is an operand of two products of the same kind
        return Handle((product + acc.data.to(wide)).to(acc.data.dtype))

    # ---- along an axis of the data

    def reduced(self, name: str, axis: int, inputs: list[Handle]) -> tuple[Handle, ...]:
        found = reductions.reduce_known(name, blocks_of(inputs), axis)
        if self.memory.maxima is not None and reductions.is_extreme(name):
            found[0] = self.memory.maxima.taken(found[0])
        return tuple(map(Handle, found))

    def scanned(self, name: str, axis: int, inputs: list[Handle], reverse: bool) -> tuple[Handle, ...]:
        blocks = reductions.scan_known(name, flipped(blocks_of(inputs), axis, reverse), axis)
        return tuple(map(Handle, flipped(blocks, axis, reverse)))

    # ---- memory

    def create_addptr(self, ptr: Pointer, offset: Handle) -> Pointer:
        size = max(1, ptr.element.primitive_bitwidth // 8)
        return ptr.like(torch.add(ptr.data, offset.data, alpha=size))

    def create_load(self, ptr: Pointer, cache: Any, eviction: Any, volatile: bool) -> Handle:
        return self._load(ptr, None, None)

    def create_masked_load(
        self, ptr: Pointer, mask: Handle, other: Handle | None, cache: Any, eviction: Any, volatile: bool
    ) -> Handle:
        return self._load(ptr, mask.data, other.data if other else None)

    def _load(self, ptr: Pointer, mask: torch.Tensor | None, other: torch.Tensor | None) -> Handle:
        return Handle(self.memory.load(ptr, mask, other))

    def create_store(self, ptr: Pointer, value: Handle, cache: Any, eviction: Any) -> None:
        self.memory.store(ptr, value.data, None)

    def create_masked_store(
        self, ptr: Pointer, value: Handle, mask: Handle, cache: Any, eviction: Any
    ) -> None:
        self.memory.store(ptr, value.data, mask.data)

    def create_atomic_rmw(
        self, op: Any, ptr: Pointer, value: Handle, mask: Handle, sem: Any, scope: Any
    ) -> Handle:
        return self.atomic(op.name.lower().removeprefix("f"), ptr, value, mask)  # FADD is an add

    def atomic(self, update: str, ptr: Pointer, value: Handle, mask: Handle) -> Handle:
        everywhere = mask.value if isinstance(mask, Constant) else bool(mask.data.all())
        active = None if everywhere else mask.data
        return OldValues(self.memory.atomic(update, ptr, value.data, active))

    def create_atomic_cas(
        self, ptr: Pointer, expected: Handle, value: Handle, sem: Any, scope: Any
    ) -> Handle:
        if self.memory.launch_programs > 1 and not self.memory.ordered:
            raise NeedsOrder
        self.memory.synchronised = True
        found = self.memory.load(ptr, None, None)
        self.memory.store(ptr, torch.where(found == expected.data, value.data, found), None)
        return Handle(found)

    def create_make_block_ptr(
        self,
        base: Pointer,
        shape: list[Handle],
        strides: list[Handle],
        offsets: list[Handle],
        block_shape: list[int],
        order: list[int],
    ) -> BlockPointer:
        return BlockPointer(base, shape, strides, offsets, block_shape)

    def create_advance(self, ptr: BlockPointer, offsets: list[Handle]) -> BlockPointer:
        moved = [Handle(old.data + by.data) for old, by in zip(ptr.offsets, offsets, strict=True)]
        return replace(ptr, offsets=moved)

    def create_tensor_pointer_load(
        self, ptr: BlockPointer, check: Sequence[int], padding: Any, cache: Any, eviction: Any, volatile: bool
    ) -> Handle:
        address, mask = self._block_addresses(ptr, ptr.offsets, check)
        return self._load(address, mask, self._padding(address, padding))

    def create_tensor_pointer_store(
        self, ptr: BlockPointer, value: Handle, check: Sequence[int], cache: Any, eviction: Any
    ) -> None:
        address, mask = self._block_addresses(ptr, ptr.offsets, check)
        self.memory.store(address, value.data, mask)

    def create_make_tensor_descriptor(
        self,
        base: Pointer,
        shape: list[Handle],
        strides: list[Handle],
        block_shape: list[int],
        signed: bool,
        padding: Any,
    ) -> BlockPointer:
        return BlockPointer(base, shape, strides, [], block_shape, padding)

    def create_descriptor_load(
        self, desc: BlockPointer, offsets: list[Handle], cache: Any, eviction: Any
    ) -> Handle:
        address, mask = self._block_addresses(desc, offsets, range(len(desc.shape)))
        return self._load(address, mask, self._padding(address, desc.padding))

    def create_descriptor_store(self, desc: BlockPointer, value: Handle, offsets: list[Handle]) -> None:
        address, mask = self._block_addresses(desc, offsets, range(len(desc.shape)))
        self.memory.store(address, value.data, mask)

    def create_descriptor_gather(self, desc: BlockPointer, rows: Handle, column: Handle, ty: Any) -> Handle:
        address, mask = self._row_addresses(desc, rows, column)
        return self._load(address, mask, self._padding(address, desc.padding))

    def create_descriptor_scatter(
        self, desc: BlockPointer, value: Handle, rows: Handle, column: Handle
    ) -> None:
        address, mask = self._row_addresses(desc, rows, column)
        self.memory.store(address, value.data, mask)

    def _block_addresses(
        self, ptr: BlockPointer, offsets: list[Handle], check: Sequence[int]
    ) -> tuple[Pointer, torch.Tensor | None]:
        dims = len(ptr.block_shape)
        address, mask = lane_view(ptr.base.data, dims), None
        size = max(1, ptr.base.element.primitive_bitwidth // 8)
        for axis, extent in enumerate(ptr.block_shape):
            steps = torch.arange(extent, dtype=torch.int64, device=self.device)
            at = lane_view(offsets[axis].data.to(torch.int64), dims) + steps.reshape(
                [-1 if d == axis else 1 for d in range(dims)]
            )
            address = address + at * lane_view(ptr.strides[axis].data, dims) * size
            if axis in check:
                inside = (at >= 0) & (at < lane_view(ptr.shape[axis].data, dims))
                mask = inside if mask is None else mask & inside
        if mask is not None:
            batch = max(mask.shape[0], address.shape[0])
            mask = mask.expand(batch, *ptr.block_shape)
        return ptr.base.like(address), mask

    def _row_addresses(
        self, desc: BlockPointer, rows: Handle, column: Handle
    ) -> tuple[Pointer, torch.Tensor]:
        """Addresses of (rows, block width) for a descriptor's gather and scatter."""
        across = torch.arange(desc.block_shape[-1], dtype=torch.int64, device=self.device) + lane_view(
            column.data, 2
        )
        down = rows.data.to(torch.int64).unsqueeze(-1)
        size = max(1, desc.base.element.primitive_bitwidth // 8)
        steps = down * lane_view(desc.strides[0].data, 2) + across * lane_view(desc.strides[1].data, 2)
        height, width = (lane_view(extent.data, 2) for extent in desc.shape)
        mask = (down >= 0) & (down < height) & (across >= 0) & (across < width)
        return desc.base.like(lane_view(desc.base.data, 2) + steps * size), mask

    def _padding(self, address: Pointer, padding: Any) -> torch.Tensor | None:
        if padding != ir.PADDING_OPTION.PAD_NAN:
            return None
        return torch.full((), math.nan, dtype=self.memory.value_dtype(address.element), device=self.device)


def divisible(divisor: torch.Tensor) -> torch.Tensor:
    """A divisor with 1 for 0, which has no result."""
    return torch.where(divisor == 0, torch.ones_like(divisor), divisor)


def blocks_of(inputs: list[Handle]) -> list[torch.Tensor]:
    """The data of handles, with one batch axis."""
    return list(torch.broadcast_tensors(*(handle.data for handle in inputs)))


def flipped(blocks: list[torch.Tensor], axis: int, reverse: bool) -> list[torch.Tensor]:
    return [block.flip(axis) for block in blocks] if reverse else blocks


def pick_number(a: torch.Tensor, b: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
    """a where `first`, else b; but never a NaN if the other is a number."""
    return torch.where(first | torch.isnan(b), a, b)


def tf32(data: torch.Tensor) -> torch.Tensor:
    """float32 values with tf32's 10 bits of mantissa; the gradient passes as if they were not.

    The rest is cut off, as tensor cores do with operands that nobody rounded before (Triton does not, cuBLAS
    does): all products err to one side, and their sum by three times of what it would rounded.
    """
    plain = data.detach().contiguous()
    cut = (plain.view(torch.int32) & ~0x1FFF).view(torch.float32)
    return data + torch.where(torch.isfinite(plain), cut - plain, 0.0)


def umulhi64(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """High 64 bits of the unsigned product, from products of 32-bit halves."""
    low32 = (1 << 32) - 1
    a_low, a_high = a & low32, (a >> 32) & low32
    b_low, b_high = b & low32, (b >> 32) & low32
    cross = a_high * b_low + (((a_low * b_low) >> 32) & low32)
    middle = (cross & low32) + a_low * b_high
    return a_high * b_high + ((cross >> 32) & low32) + ((middle >> 32) & low32)


def _plain(act: Callable[..., torch.Tensor]) -> Callable[..., Handle]:
    """A builder method that applies `act` to the data of its operands."""

    def method(self: Builder, *operands: Handle) -> Handle:
        return Handle(act(*(operand.data for operand in operands)))

    return method


def _float_compare(act: Callable[..., torch.Tensor]) -> Callable[..., Handle]:
    def method(self: Builder, a: Handle, b: Handle) -> Handle:
        return Handle(self.compared(act, a, b))

    return method


def _unsigned_compare(act: Callable[..., torch.Tensor]) -> Callable[..., Handle]:
    """Compare as unsigned: flipping the sign bit maps unsigned order to signed order."""

    def method(self: Builder, a: Handle, b: Handle) -> Handle:
        if a.data.dtype == torch.int64:
            flip = torch.iinfo(torch.int64).min
            return Handle(act(a.data ^ flip, b.data ^ flip))
        return Handle(act(unsigned(a.data), unsigned(b.data)))

    return method


def _unsigned_pick(act: Callable[..., torch.Tensor]) -> Callable[..., Handle]:
    def method(self: Builder, a: Handle, b: Handle) -> Handle:
        first = _unsigned_compare(act)(self, a, b).data
        return Handle(torch.where(first, a.data, b.data))

    return method


def _typed_constant(ty: tl.dtype) -> Callable[[Builder, Any], Handle]:
    def method(self: Builder, value: Any) -> Handle:
        if ty.is_floating():
            return self.float_constant(value, ty)
        bits = ty.primitive_bitwidth
        if bits > 1 and value >= 1 << (bits - 1):
            value -= 1 << bits
        return self.constant(value, int_dtype(ty))

    return method


PLAIN: dict[str, Callable[..., torch.Tensor]] = {
    "fadd add": torch.add,
    "fsub sub": torch.sub,
    "fmul mul": torch.mul,
    "precise_divf fdiv": torch.div,
    "frem": torch.fmod,
    "shl": torch.bitwise_left_shift,
    "ashr": torch.bitwise_right_shift,
    "and": torch.bitwise_and,
    "or": torch.bitwise_or,
    "xor": torch.bitwise_xor,
    "minsi": torch.minimum,
    "maxsi": torch.maximum,
    "icmpSLE": torch.le,
    "icmpSLT": torch.lt,
    "icmpSGE": torch.ge,
    "icmpSGT": torch.gt,
    "icmpEQ fcmpOEQ fcmpUEQ": torch.eq,
    "icmpNE fcmpONE fcmpUNE": torch.ne,
    "fma": lambda x, y, z: x * y + z,
    "iabs": torch.abs,
    "sqrt precise_sqrt": torch.sqrt,
    "sdiv": lambda x, y: torch.div(x, divisible(y), rounding_mode="trunc"),
    "srem": lambda x, y: torch.fmod(x, divisible(y)),
    "cat": lambda x, y: torch.cat(torch.broadcast_tensors(x, y), 1),
    "join": lambda x, y: torch.stack(torch.broadcast_tensors(x, y), -1),
    **{name: getattr(torch, name) for name in words("exp exp2 log log2 rsqrt sin cos erf")},
}
FLOAT = {
    "fcmpOLE fcmpULE": torch.le,
    "fcmpOLT fcmpULT": torch.lt,
    "fcmpOGE fcmpUGE": torch.ge,
    "fcmpOGT fcmpUGT": torch.gt,
}
UNSIGNED = {"icmpULE": torch.le, "icmpULT": torch.lt, "icmpUGE": torch.ge, "icmpUGT": torch.gt}
SIGNED = (tl.int1, tl.int8, tl.int16, tl.int32, tl.int64)
CONSTANTS = (*SIGNED, tl.uint8, tl.uint16, tl.uint32, tl.uint64)
FLOAT_CONSTANTS = (tl.float16, tl.bfloat16, tl.float64, tl.float8e4nv, tl.float8e5)
NARROW = (tl.float8e4nv, tl.float8e4b15, tl.float8e4b8, tl.float8e5, tl.float8e5b16)
TYPE_GETTERS = {"half": tl.float16, "float": tl.float32, "double": tl.float64}
TYPE_GETTERS |= {ty.name: ty for ty in (tl.bfloat16, *NARROW, *SIGNED, tl.void)}


def _complete() -> None:
    """Give Builder the methods that differ only by name."""
    for names, act in PLAIN.items():
        for name in names.split():
            setattr(Builder, f"create_{name}", _plain(act))
    for names, act in FLOAT.items():
        for name in names.split():
            setattr(Builder, f"create_{name}", _float_compare(act))
    for name, act in UNSIGNED.items():
        setattr(Builder, f"create_{name}", _unsigned_compare(act))
    for name, act in {"minui": torch.lt, "maxui": torch.gt}.items():
        setattr(Builder, f"create_{name}", _unsigned_pick(act))
    for name, ty in TYPE_GETTERS.items():
        setattr(Builder, f"get_{name}_ty", lambda self, ty=ty: ty)
    for name in ("barrier", "assume", "print", "assert"):  # no effect on values
        setattr(Builder, f"create_{name}", lambda self, *args: None)
    for ty in CONSTANTS + FLOAT_CONSTANTS:
        setattr(Builder, f"get_{ty.name}", _typed_constant(ty))


_complete()
