"""Functions that a generated section may need beside its kernels, as text."""

from __future__ import annotations

import re

from ..ir.names import LINEAR_STEP, LINEAR_STEPS
from ..reverse.rules import SMALL_DOT, TURNED
from .emit import TANH

LAID_OUT = '''
def laid_out(t, strides):
    """`t` with the given strides: a kernel addresses an upstream gradient like the output it belongs to."""
    if t.stride() == strides:
        return t
    return torch.empty_strided(t.shape, strides, dtype=t.dtype, device=t.device).copy_(t)
'''

PASSED_ON = '''
def passed_on(t, written=None):
    """A copy of an upstream gradient, of which kernels replace `written` elements."""
    d = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device)
    return d if written == t.numel() else d.copy_(t)
'''

GRADIENT_OF = '''
def gradient_of(t, accumulate=False, copies=None, written=None):
    """Zeros laid out like `t`: float32 where parts are added up, with a leading axis of `copies` for \
partial sums.

    Kernels that write each of `written` elements once leave nothing of a tensor (or copy) so large to zero.
    """
    if t is None:
        return None
    if any(step == 0 and size > 1 for step, size in zip(t.stride(), t.shape)):
        raise ValueError("an expanded tensor shares memory between its elements: pass .contiguous()")
    dtype = torch.float32 if accumulate and t.element_size() < 4 else t.dtype
    shape, strides = t.shape, t.stride()
    if copies is not None:
        span = 1 + sum((size - 1) * step for size, step in zip(shape, strides))
        shape, strides = (copies, *shape), (span, *strides)
    d = torch.empty_strided(shape, strides, dtype=dtype, device=t.device)
    return d if written == t.numel() else d.zero_()
'''

HANDED_ON = '''
def handed_on(d, t, written):
    """The gradient of `t`: `d` itself, of which kernels would write a copy, where it is laid out like `t`."""
    if t is None or d is None or (d.shape, d.stride(), d.dtype) != (t.shape, t.stride(), t.dtype):
        return gradient_of(t, written=written)
    return d if written == t.numel() else gradient_of(t, written=written)
'''

SUMS_FOR = '''
def sums_for(t, reached):
    """Memory for sums of the gradient of `t`, to so many elements of which a launch adds, and whether those
    are so few that they are cleared alone. Else all of it is zero: float32 where `t` is less.
    """
    few = t is not None and t.element_size() < 4 and 6 * reached < t.numel()
    if not few:
        return gradient_of(t, accumulate=True), False
    return torch.empty_strided(t.shape, t.stride(), dtype=torch.float32, device=t.device), True
'''

LINEAR = '''
@triton.jit
def linear_step(a1, b1, a2, b2):
    """Two steps of h = a h + b in one: the combine function of the scans below."""
    return a1 * a2, b1 * a2 + b2
'''

LINEAR_STEPS_TEXT = '''
@triton.jit
def linear_steps(rows, factors, values):
    """h[i] = factors[i] h[i - 1] + values[i] along the first axis, of which `rows` are the numbers.

    A scan multiplies factors first. With some above 1 such a product may be infinite or lost though h is not:
    then one step follows the other.
    """
    if tl.max(tl.abs(factors)) <= 1.0:
        h = tl.associative_scan((factors, values), 0, linear_step)[1]
    else:
        h = values
        last = tl.sum(tl.where(rows == 0, values, 0.0), axis=0)
        for i in range(1, values.shape[0]):
            now = rows == i
            factor = tl.sum(tl.where(now, factors, 0.0), axis=0)
            last = factor * last + tl.sum(tl.where(now, values, 0.0), axis=0)
            h = tl.where(now, tl.expand_dims(last, 0), h)
    return h
'''

TURNED_TEXT = '''
@triton.jit
def {name}{turned}{count}({left}, {right}):
    """{name} for a scan from the end: the right operand comes first there."""
    return {name}({right}, {left})
'''

SMALL_DOT_TEXT = '''
@triton.jit
def small_dot(a, b, PRECISION: tl.constexpr):
    """A product of blocks that may sum over fewer than the 16 that tl.dot wants."""
    if a.shape[1] < 16:  # summed over the last axis: Triton 3.6 adds a short one in the middle up repeatedly
        product = tl.sum(a[:, None, :].to(tl.float32) * tl.trans(b)[None, :, :].to(tl.float32), axis=2)
    else:
        product = tl.dot(a, b, input_precision=PRECISION)
    return product
'''

TANH_TEXT = '''
@triton.jit
def tanh_f32(x):
    """tanh of float32 without branches: libdevice's has two, and takes longer than what is loaded for it.

    Within 2e-6 of it, relative: by exp(2 x), and by a polynomial where that has no digits.
    """
    square = x * x
    near = (1.3333334e-1 - 5.3968254e-2 * square) * square - 3.3333334e-1
    far = 1.0 - 2.0 / (1.0 + tl.exp2(2.8853901 * x))
    return tl.where(square < 0.0625, x + x * square * near, far)
'''

SUMMED = '''
@triton.jit
def sum_partials(parts_ptr, total_ptr, count, span, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Add `count` rows of `span` elements."""
    cols = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([ROWS, BLOCK], parts_ptr.dtype.element_ty)
    for first in range(0, count, ROWS):
        rows = first + tl.arange(0, ROWS)
        offs = rows[:, None].to(tl.int64) * span + cols[None, :]
        total += tl.load(parts_ptr + offs, mask=(rows[:, None] < count) & (cols[None, :] < span), other=0.0)
    tl.store(total_ptr + cols, tl.sum(total, axis=0), mask=cols < span)


def summed(parts, t):
    """The sum of private rows (rows, *t.shape), laid out like `t` and in its type."""
    if t is None:
        return None
    total = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device)
    span = parts.stride(0)
    if t.numel():
        sum_partials[(triton.cdiv(span, 32),)](parts, total, parts.shape[0], span, ROWS=256, BLOCK=32)
    return total
'''

SUMMED_BOTH = '''
@triton.jit
def sum_both(
    parts_ptr, total_ptr, count, span, more_ptr, more_total_ptr, more_count, more_span,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Add the rows of two gradients in one launch."""
    if tl.program_id(1) == 0:
        sum_partials(parts_ptr, total_ptr, count, span, ROWS, BLOCK)
    else:
        sum_partials(more_ptr, more_total_ptr, more_count, more_span, ROWS, BLOCK)


def summed_both(parts, t, more, u):
    """The sums of the private rows of two gradients, which are laid out like `t` and `u`."""
    if t is None or u is None or 0 in (t.numel(), u.numel()):
        return summed(parts, t), summed(more, u)
    totals = [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device) for x in (t, u)]
    span, more_span = parts.stride(0), more.stride(0)
    sum_both[(triton.cdiv(max(span, more_span), 32), 2)](
        parts, totals[0], parts.shape[0], span, more, totals[1], more.shape[0], more_span, ROWS=256, BLOCK=32
    )
    return totals
'''

OWN = '''
def own(t):
    """`t`, copied where elements share memory, as an expanded tensor's do: each has a gradient of its own."""
    shared = isinstance(t, torch.Tensor) and any(s == 0 and n > 1 for s, n in zip(t.stride(), t.shape))
    return t.contiguous() if shared else t
'''

FINISHED = '''
def finished(d, t):
    """The accumulated gradient in the type of `t`."""
    return None if t is None else d.to(t.dtype)
'''

DISJOINT = '''
def disjoint(*dims):
    """Check that (stride, extent) pairs reach no element twice: kernels store where programs may not meet."""
    reach = 0
    long = [] if any(e == 0 for _, e in dims) else [(abs(s), e) for s, e in dims if e is None or e > 1]
    for stride, extent in sorted(long, key=lambda d: d[0]):
        if stride <= reach:
            raise ValueError(f"the layout {dims} of a gradient overlaps itself: pass .contiguous()")
        reach = float("inf") if extent is None else reach + (extent - 1) * stride
'''

APART = '''
def ordered(t):
    """Whether `t` does not decrease: the sequences that it bounds have rows of their own then."""
    starts = t.flatten()
    return (starts[1:] >= starts[:-1]).all() & t.is_contiguous()


def distinct(t, width, count):
    """Whether `count` rows of a table of numbers differ, and none is negative: each is of one program."""
    rows = t.flatten()[: count * width].view(-1, width).long()
    keys = ((rows[:, 0] << 32) + rows[:, -1]).sort().values
    return (rows >= 0).all() & (keys[1:] > keys[:-1]).all() & t.is_contiguous()


def sequences_apart(*known):
    """Check that no row is of two sequences, and no part of one of two programs: one wait for the device."""
    if not bool(torch.stack(known).all()):
        raise ValueError("where packed sequences begin, or their parts, are not in order or meet")
'''

AT_MOST = '''
def at_most(grid, axis, count):
    """Check that a launch has no more programs along an axis than one for each row."""
    if grid[axis] > count:
        raise ValueError(f"{grid[axis]} programs along axis {axis}, of {count}, would write the same rows")
'''

ORDER = '''
@triton.jit
def mark_order(t_ptr, mark_ptr, count, LEAST: tl.constexpr, BLOCK: tl.constexpr):
    """Leave 0 where `count` numbers do not decrease, from LEAST on, else NaN."""
    falls = tl.zeros([BLOCK], tl.int32)
    for first in range(0, count, BLOCK):
        at = first + tl.arange(0, BLOCK)
        number = tl.load(t_ptr + at, mask=at < count, other=0)
        before = tl.load(t_ptr + at - 1, mask=(at > 0) & (at < count), other=0)
        if LEAST is not None:
            before = tl.where(at > 0, before, LEAST)
            falls += ((number < before) & (at < count)).to(tl.int32)
        else:
            falls += ((number < before) & (at > 0) & (at < count)).to(tl.int32)
    tl.store(mark_ptr, tl.where(tl.sum(falls, axis=0) > 0, float("nan"), 0.0))


def order_of(t, least=None):
    """0 for gradients that rely on the order of `t`, NaN where it decreases: nobody waits for the device."""
    if not t.is_contiguous():
        raise ValueError("numbers that bound groups of rows have to lie beside each other")
    mark = torch.empty(1, dtype=torch.float32, device=t.device)
    mark_order[(1,)](t, mark, t.numel(), LEAST=least, BLOCK=1024)
    return mark
'''

WALKED = '''
def walked(programs, step, tiles=None):
    """Check that programs that take every `step`-th tile have each once: so many, or one for each tile."""
    if programs != step and not (tiles is not None and tiles <= programs <= step):
        raise ValueError(f"{programs} programs, each {step} tiles on: some are left out, or had twice")
'''

LONGEST = '''
def longest(grid, device, steps):
    """The greatest number of steps that a program takes; `steps` of the programs' ids, which data decides."""
    shapes = ((-1, 1, 1), (1, -1, 1), (1, 1, -1))
    ids = [torch.arange(n, device=device).view(shape) for n, shape in zip([*grid, 1, 1], shapes)]
    return int(steps(ids).max())
'''

SEPARATE = '''
def separate(written, read):
    """Check that a launch writes to other memory than it reads from, as in the calls that were traced."""
    known = [t for t in (*written, *read) if isinstance(t, torch.Tensor) and t.numel()]
    places = {id(t): t.data_ptr() for t in known}
    taken = {places.get(id(t)) for t in written} - {None, 0}  # 0: no memory
    if any(places.get(id(t)) in taken for t in read):
        raise NotImplementedError("a launch writes to what it also reads, as in no call that was traced")
'''

UNSAVED = '''
class Unsaved:
    """In place of the context of a forward: what that leaves for its own backward is not needed."""

    needs_input_grad = (True,) * 99

    def save_for_backward(self, *tensors):
        pass

    mark_dirty = mark_non_differentiable = save_for_forward = set_materialize_grads = save_for_backward
'''

PARTS = '''
def parted(t):
    """The parts of a tensor along its first axis: over its memory, and to autograd tensors of their own."""
    return [part.detach() for part in t.unbind()]
'''

UNTRACED = '''
def untraced(kernel, line):
    """In place of a launch that no traced size made: it has no backward."""
    raise NotImplementedError(f"line {line} launches {kernel}: no size in SWEEP did when this was written")
'''

TABLES = '''
def address_of(t, pointed):
    """An address for a table of pointers; `pointed` remembers which tensor it is of."""
    known = pointed.setdefault(t.data_ptr(), t)
    if known is not t and (known.shape != t.shape or known.stride() != t.stride()):
        raise ValueError("two tensors at one address in a table of pointers: pass .clone() of one")
    return t.data_ptr()


def behind(pointed, *tables):
    """The tensors that tables of pointers point to, table after table."""
    addresses = [int(address) for table in tables for address in table.flatten().cpu()]
    if any(address not in pointed for address in addresses):
        raise ValueError("a table of pointers holds an address that is not a tensor's data_ptr()")
    return [pointed[address] for address in addresses]


def divided(tensors, *tables):
    """What is behind each table."""
    tensors = iter(tensors)
    return [[next(tensors) for _ in range(table.numel())] for table in tables]


def table_of(tensors, like):
    """The addresses of tensors, as a table like another one."""
    return torch.tensor([t.data_ptr() for t in tensors], dtype=like.dtype, device=like.device)
'''

PASSED = '''
def passed(values, *names):
    """What a launch unpacks with `**`: its Function takes these names, in this order."""
    if set(values) != set(names):
        raise TypeError(f"the backward is made for a launch that unpacks {names}, not {tuple(values)}")
    return [values[name] for name in names]
'''


def scan_helpers(text: str) -> list[str]:
    """The jit functions that kernels call."""
    steps = f"{LINEAR_STEPS}(" in text
    scans = [LINEAR] * (steps or any(f"{LINEAR_STEP}{end}" in text for end in "),"))
    scans += [LINEAR_STEPS_TEXT] * steps
    scans += [_turned(*found) for found in sorted(set(re.findall(rf"\b(\w+){TURNED}(\d+)\b", text)))]
    found = {SMALL_DOT: SMALL_DOT_TEXT, TANH: TANH_TEXT}
    return scans + [helper for name, helper in found.items() if f"{name}(" in text]


def _turned(name: str, count: str) -> str:
    left, right = (", ".join(f"{side}{i + 1}" for i in range(int(count))) for side in "ab")
    return TURNED_TEXT.format(name=name, turned=TURNED, count=count, left=left, right=right)


def host_helpers(text: str) -> list[str]:
    """The functions that host code calls, where its text alone says so."""
    named = [LAID_OUT, PASSED_ON, GRADIENT_OF, HANDED_ON, SUMS_FOR, SUMMED, SUMMED_BOTH]
    named += [FINISHED, DISJOINT, APART, AT_MOST, ORDER, WALKED, LONGEST, SEPARATE]
    both = _is_called(SUMMED_BOTH, text)  # calls summed() itself
    needed = {SUMMED: both, GRADIENT_OF: _is_called(HANDED_ON, text) or _is_called(SUMS_FOR, text)}
    return [helper for helper in named if _is_called(helper, text) or needed.get(helper)]


def _is_called(helper: str, text: str) -> bool:
    """Whether a text calls the function that a helper's text defines last."""
    name = helper.split("\ndef ")[-1].split("(")[0]
    return f"{name}(" in text
