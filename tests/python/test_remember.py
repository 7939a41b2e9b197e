"""What is remembered of Triton's semantic layer changes no bit of what the interpreter computes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sources import SANDBOX

sys.path.insert(0, str(SANDBOX))
import triton.language as tl
from kernel_agent import draw, forward, interpret, remember
from triton.runtime import interpreter as _interp


@pytest.fixture
def language() -> Iterator[None]:
    """triton.language as it is while a kernel is interpreted."""
    with interpret._language(), np.errstate(all="ignore"):
        _interp.interpreter_builder.set_grid_dim(1, 1, 1)
        _interp.interpreter_builder.set_grid_idx(0, 0, 0)
        yield


KERNELS = Path(__file__).parent / "kernels"


def block(values: Any, dtype: tl.dtype, element: Any) -> tl.tensor:
    data = np.array(values, dtype=element)
    return tl.tensor(_interp.TensorHandle(data, dtype), tl.block_type(dtype, list(data.shape)))


def floats(*values: float) -> tl.tensor:
    return block(values, tl.float32, np.float32)


def ints(*values: int) -> tl.tensor:
    return block(values, tl.int32, np.int32)


def seen(result: Any) -> tuple[Any, ...]:
    """All that a later operation can see of a tensor."""
    data = result.handle.data
    return (
        data.tobytes(),
        data.dtype,
        data.shape,
        str(result.handle.dtype),
        str(result.type),
        str(result.dtype),
        str(result.shape),
        result.numel.value,
    )


OPERATIONS: dict[str, Callable[[], list[Callable[[], Any]]]] = {
    "sum": lambda: [lambda v=v: floats(v, 2) + floats(3, v) for v in (1, 2, 3, 4)],
    "integer and float": lambda: [lambda v=v: ints(v, 7) * floats(0.1, v) for v in (1, 2, 3, 4)],
    "number of another value": lambda: [lambda v=v: ints(5, 6) + v for v in (1, 1, 1, 2, 2, 2)],
    "number of another type": lambda: [lambda v=v: ints(5, 6) * v for v in (1, 1, 1, 1.0, 1.0, 1.0, True, True, True)],
    "zero of either sign": lambda: [lambda v=v: floats(0.0, 1) * v for v in (0.0, 0.0, 0.0, -0.0, -0.0, -0.0)],
    "comparison": lambda: [lambda v=v: (floats(v, 2) < 2.5) & (ints(v, 2) >= 2) for v in (1, 2, 3, 4)],
    "choice": lambda: [lambda v=v: tl.where(ints(v, 2) > 1, floats(v, 2), 0.0) for v in (1, 2, 3, 4)],
    "division": lambda: [lambda v=v: ints(-7, v) // 2 - ints(-7, v) % 3 for v in (1, 2, 3, 4)],
    "overflow": lambda: [lambda v=v: ints(2**31 - v, 3) + ints(v, 5) for v in (1, 2, 3, 4)],
    "cast": lambda: [lambda v=v: floats(v, 2.7).to(tl.int32) + ints(1, 1) for v in (1, 2, 3, 4)],
    "cast to another type": lambda: [lambda t=t: ints(1, 2).to(t) for t in (tl.float16,) * 3 + (tl.int64,) * 3],
    "half precision": lambda: [lambda v=v: floats(v, 2.7).to(tl.float16) * 1.1 for v in (1, 2, 3, 4)],
    "bfloat16": lambda: [lambda v=v: floats(v, 2.7).to(tl.bfloat16) * floats(v, 0.3).to(tl.bfloat16) for v in (1, 2, 3, 4)],
    "new axis": lambda: [lambda v=v: floats(v, 2)[:, None] * floats(3, v)[None, :] for v in (1, 2, 3, 4)],
    "blocks of another length": lambda: [
        lambda n=n: floats(*range(n)) - 1.5 for n in (2, 2, 2, 4, 4, 4)
    ],
    "function": lambda: [lambda v=v: tl.exp(-floats(v, 2)) + tl.abs(floats(-v, 2)) for v in (1, 2, 3, 4)],
    "full": lambda: [lambda v=v: tl.full([4], v, tl.float32) for v in (1, 1, 1, 2, 2, 2)],
    "range": lambda: [lambda n=n: tl.arange(0, n) + n for n in (4, 4, 4, 8, 8, 8)],
    "shape": lambda: [lambda v=v: tl.trans(tl.reshape(floats(v, 2, 3, 4), [2, 2])) for v in (1, 2, 3, 4)],
    "product": lambda: [
        lambda v=v: tl.dot(floats(v, 2, 3, 4).reshape([2, 2]), floats(1, v, 0, 1).reshape([2, 2])) for v in (1, 2, 3)
    ],
    "bits": lambda: [lambda v=v: ((ints(v, 9) << 2) | 1) ^ (ints(-v, 9) >> 1) for v in (1, 2, 3, 4)],
}  # fmt: skip


@pytest.mark.parametrize("name", OPERATIONS)
def test_operation__asked_again__has_the_bits_and_types_of_the_first_time(
    name: str, monkeypatch: Any
) -> None:
    def results() -> list[tuple[Any, ...]]:
        with interpret._language(), np.errstate(all="ignore"):
            return [seen(call()) for _ in range(3) for call in OPERATIONS[name]()]

    remembered = results()
    monkeypatch.setattr(remember, "note", _nothing_is_known)
    monkeypatch.setattr(remember, "kind_of", _nothing_is_known)
    assert results() == remembered


def square_and_product(x: tl.tensor, y: tl.tensor) -> list[Any]:
    return [x * x, x * x, x * x, x * y, x * y, x * y, y * x, y * y]


def test_operand_given_twice__is_another_call_than_two_operands(language: None) -> None:
    made = square_and_product(floats(2.0, 3.0, 1.0, 1.0), floats(5.0, 7.0, 1.0, 1.0))
    assert [result.handle.data[0] for result in made] == [4, 4, 4, 10, 10, 10, 10, 25]


def _nothing_is_known(*_: Any) -> None:
    raise remember.Unknown


def replays(monkeypatch: Any) -> list[str]:
    """Filled with the operations that are written down from here on."""
    made: list[str] = []
    function = remember._Writer.function

    def noted(self: Any) -> Any:
        made.append(" ".join(name for name, _, _ in self.recorder.steps))
        return function(self)

    monkeypatch.setattr(remember._Writer, "function", noted)
    return made


def test_operation__is_written_down_the_second_time_and_once(language: None, monkeypatch: Any) -> None:
    made = replays(monkeypatch)
    operands = block([[1.5]] * 64, tl.float32, np.float32)  # a shape that no other test has
    counts = []
    for _ in range(4):
        operands * operands
        counts.append(len(made))
    assert counts == [0, 1, 1, 1]


def test_results__of_constants_alone__are_not_shared(language: None) -> None:
    made = [tl.full([32, 2], 7, tl.float32) for _ in range(4)]
    made[2].handle.data[...] = 0
    assert (made[3].handle.data == 7).all()
    assert (tl.full([32, 2], 7, tl.float32).handle.data == 7).all()


def test_decision__that_looked_at_an_element__is_not_remembered(monkeypatch: Any) -> None:
    """A builtin whose steps depend on a value: the second value must not be given the steps of the first."""
    memory = remember.Memory(_interp.interpreter_builder)

    def sign(x: Any, _semantic: Any = None) -> Any:
        memory.looked_at_elements()
        return _semantic.add(x, x, False) if float(x.handle.data[0]) > 0 else _semantic.minus(x)

    def plain(x: Any) -> Any:
        return sign(x, _semantic=_interp.interpreter_semantic)

    call = memory.remembering(sign, plain)
    with interpret._language():
        assert [float(call(floats(v)).handle.data[0]) for v in (1, 1, 1, -1)] == [2, 2, 2, 1]


def test_branch_on_a_scalar_inside_a_builtin__counts_as_looking(language: None, monkeypatch: Any) -> None:
    looked = []
    monkeypatch.setattr(remember.Memory, "looked_at_elements", lambda self: looked.append(self))
    bool(floats(1.0))
    assert looked
    looked.clear()
    bool(floats(1.0, 2.0))
    assert not looked


def test_value_of_an_unknown_kind__goes_the_long_way(language: None) -> None:
    class Odd(int):
        pass

    with pytest.raises(remember.Unknown):
        remember.note(Odd(1), [], [])
    assert [int(v) for v in (ints(1, 2) + Odd(1)).handle.data] == [2, 3]


def test_full_memory__keeps_computing(language: None, monkeypatch: Any) -> None:
    monkeypatch.setattr(remember, "MOST_ENTRIES", 0)
    made = replays(monkeypatch)
    x = block([[1.0, 2.0]] * 16, tl.float32, np.float32)
    assert [float((x * v).handle.data[0, 1]) for v in (3, 3, 3, 5)] == [6, 6, 6, 10]
    assert not made


@pytest.mark.parametrize(
    "name", ["conv2d", "layer_norm", "attention", "cross_entropy", "split_k", "rnn_cell"]
)
def test_kernel__has_the_same_bits_when_nothing_is_remembered(name: str, monkeypatch: Any) -> None:
    def run() -> list[bytes]:
        fwd = forward.load(str(KERNELS / f"{name}.py"), "interpret", "sm_90", "cpu")
        returned = fwd.call(*draw.make_inputs(fwd, fwd.sweep[0].dims, seed=3))
        return [t.numpy().tobytes() for t in draw.flatten(returned)]

    remembered = run()
    monkeypatch.setattr(remember, "note", _nothing_is_known)
    monkeypatch.setattr(remember, "kind_of", _nothing_is_known)
    assert run() == remembered
