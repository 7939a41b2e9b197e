"""A record evaluated at several inputs close by at once: each copy has the gradients that it has alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from kernel_agent import forward
from kernel_agent.operations import budget, evaluations, oracle
from kernel_agent.torch_tl.handles import EXACT, NATIVE, KernelError
from oracle_support import HEAD, KERNELS, relative, stub

SEEDS = [3, 4, 5]
EPS = torch.finfo(torch.float32).eps
Found = list[dict[str, torch.Tensor]]


def recorded(path: Path, **dims: int) -> tuple[oracle.Case, evaluations.Recording]:
    """A call that was evaluated once."""
    fwd = forward.load(path)
    upstream = {"kind": "normal", "seed": 9}
    case = oracle.Case(
        fwd, {"id": 0, "dims": dims or fwd.sweep[0].dims, "seed": 5, "upstream": upstream}, None
    )
    recording = case.record(None)
    case.differentiate(recording)[0].release()
    return case, recording


def alone(case: oracle.Case, recording: evaluations.Recording, precision: str) -> Found:
    replays = [case.replay(recording, precision, seed, evaluations.NEARBY_REACH) for seed in SEEDS]
    return [case.gradients(replay, recording) for replay in replays]


def together(case: oracle.Case, recording: evaluations.Recording, precision: str) -> Found:
    replay = case.replay(recording, precision, SEEDS, evaluations.NEARBY_REACH)
    return replay.each_gradients(case.pairs(recording), recording.wanted)


def require_same(made: Found, right: Found, most: float) -> None:
    assert len(made) == len(right) == len(SEEDS)
    for got, wanted in zip(made, right, strict=True):
        assert got.keys() == wanted.keys()
        for name, values in wanted.items():
            assert got[name].dtype == values.dtype and relative(got[name], values) <= most, name


ADDRESSES = "grouped_gemm"  # reads them from memory


@pytest.mark.parametrize(
    "path", [path for path in KERNELS if path.stem != ADDRESSES], ids=lambda path: path.stem
)
def test_copies__have_the_gradients_that_each_has_alone(path: Path) -> None:
    case, recording = recorded(path)
    require_same(together(case, recording, EXACT), alone(case, recording, EXACT), 1e-12)
    try:
        require_same(together(case, recording, NATIVE), alone(case, recording, NATIVE), 4 * EPS)
    except KernelError as error:
        assert "a load that programs share" in error.message


ROWS = """
@triton.jit
def rows_kernel(x_ptr, w_ptr, y_ptr, N, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    cols = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * N + cols, mask=cols < N, other=0.0)
    w = tl.load(w_ptr + cols, mask=cols < N, other=0.0)
    tl.store(y_ptr + row * N + cols, x * w, mask=cols < N)


def make_args(dims, device="cuda", dtype=torch.float32):
    x = torch.randn(dims["M"], 5, device=device, dtype=dtype)
    return (x, torch.randn(5, device=device, dtype=dtype))


@autodiff(inputs_require_grad=(0, 1))
def rows(x, w):
    y = torch.empty_like(x)
    rows_kernel[(x.shape[0],)](x, w, y, 5, BLOCK=8)
    return y
"""


@pytest.mark.parametrize("programs", [2, 7, 341])
def test_what_all_programs_load__is_evaluated_alone_in_its_own_dtype(
    write: Callable[..., Path], programs: int
) -> None:
    """The rounding errors of its sums are held against a candidate, and no others."""
    case, recording = recorded(write(HEAD + ROWS), M=programs)
    require_same(together(case, recording, EXACT), alone(case, recording, EXACT), 1e-14)
    with pytest.raises(KernelError, match="a load that programs share"):
        together(case, recording, NATIVE)
    require_same(list(case.moved(recording, NATIVE, SEEDS)), alone(case, recording, NATIVE), 0.0)


def test_one_program__has_the_same_bits_in_every_copy(write: Callable[..., Path]) -> None:
    case, recording = recorded(write(HEAD + ROWS), M=1)
    for precision in (EXACT, NATIVE):
        require_same(together(case, recording, precision), alone(case, recording, precision), 0.0)


def test_load_of_some_programs__is_evaluated_alone_in_its_own_dtype(write: Callable[..., Path]) -> None:
    before = "    w = tl.load(w_ptr + cols, mask=cols < N, other=0.0)\n"
    assert before in ROWS
    part = ROWS.replace(
        before, "    w = x\n    if row > 1:\n        w = tl.load(w_ptr + cols, mask=cols < N, other=0.0)\n"
    )
    case, recording = recorded(write(HEAD + part), M=5)
    require_same(together(case, recording, EXACT), alone(case, recording, EXACT), 1e-14)
    with pytest.raises(KernelError, match="a load that programs share"):
        together(case, recording, NATIVE)


def test_more_programs_than_go_together__are_evaluated_alone(write) -> None:
    case, recording = recorded(write(HEAD + ROWS), M=342)
    for precision in (EXACT, NATIVE):
        with pytest.raises(KernelError, match="more programs than are evaluated together"):
            together(case, recording, precision)
        require_same(list(case.moved(recording, precision, SEEDS)), alone(case, recording, precision), 0.0)


ORDERED = """
@triton.jit
def carry_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    before = tl.load(y_ptr + at, mask=at < n, other=0.0)
    x = tl.load(x_ptr + tl.program_id(0) * n + at, mask=at < n, other=0.0)
    tl.store(y_ptr + at, before * x, mask=at < n)


@triton.jit
def side_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < n, other=0.0)
    if tl.sum(x) * 1e7 - tl.floor(tl.sum(x) * 1e7) > 0.5:
        tl.store(y_ptr + at, x * x, mask=at < n)
        tl.store(y_ptr + at, x * x * x, mask=at < n)
    else:
        tl.store(y_ptr + at, x, mask=at < n)


@triton.jit
def outside_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < n, other=0.0)
    there = (x * 0.0).to(tl.int64) + tl.where(at < n, at, 0)
    tl.store(y_ptr + at, x * tl.load(x_ptr + there), mask=at < n)


@triton.jit
def address_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    moved = (x_ptr.to(tl.int64) * 1).to(tl.pointer_type(tl.float32))
    tl.store(y_ptr + at, tl.load(moved + at, mask=at < n, other=0.0) * 2, mask=at < n)


"""


def ordered(write: Callable[..., Path], launch: str, make: str = "empty_like(x)") -> Path:
    return stub(write, f"y = torch.{make}\n{launch}\nreturn y", before=ORDERED)


def test_programs_that_depend_on_each_other__go_in_order_in_every_copy(write) -> None:
    path = ordered(write, "carry_kernel[(4,)](x, y, 6, BLOCK=8)", "ones(6)")
    case, recording = recorded(path, N=24)
    assert recording.recorder.tape.one_by_one == [True]
    for precision in (EXACT, NATIVE):
        require_same(together(case, recording, precision), alone(case, recording, precision), 0.0)


def test_copies_that_go_another_way__are_evaluated_alone(write) -> None:
    """Which stores have lanes that meet is known for the way of the first evaluation."""
    case, recording = recorded(ordered(write, "side_kernel[(6,)](x, y, 24, BLOCK=4)"), N=24)
    with pytest.raises(KernelError, match="another way through the kernels"):
        together(case, recording, EXACT)
    require_same(list(case.moved(recording, EXACT, SEEDS)), alone(case, recording, EXACT), 0.0)


def test_access_that_leaves_its_tensor__is_brought_back_into_its_own_copy(write, monkeypatch) -> None:
    """The place of it is data: in the first evaluation it lies inside."""
    case, recording = recorded(ordered(write, "outside_kernel[(1,)](x, y, 21, BLOCK=32)"), N=21)
    launch = recording.recorder.tape.entries[-1]
    far = ORDERED.replace("(x * 0.0).to(tl.int64)", "tl.full([BLOCK], 1000, tl.int64)")
    path = stub(
        write, "y = torch.empty_like(x)\noutside_kernel[(1,)](x, y, 21, BLOCK=32)\nreturn y", before=far
    )
    monkeypatch.setattr(launch, "function", forward.load(path).module.outside_kernel.fn)
    require_same(together(case, recording, EXACT), alone(case, recording, EXACT), 0.0)


def test_address_that_is_a_number__is_evaluated_alone(write) -> None:
    case, recording = recorded(ordered(write, "address_kernel[(1,)](x, y, 21, BLOCK=32)"), N=21)
    with pytest.raises(KernelError, match="an address as a number"):
        together(case, recording, EXACT)
    require_same(list(case.moved(recording, EXACT, SEEDS)), alone(case, recording, EXACT), 0.0)


def test_operations_of_the_host__are_of_each_copy(write) -> None:
    """In place, on a slice, into another dtype and into memory that is new."""
    body = "y = square(x * 2)\ny[3:9] += x[:6].exp()\nz = y.double().cumsum(0).float()\nreturn z * y.mean()"
    case, recording = recorded(stub(write, body), N=19)
    for precision in (EXACT, NATIVE):
        require_same(together(case, recording, precision), alone(case, recording, precision), 0.0)


def test_large_calls__are_evaluated_one_after_another(write, monkeypatch) -> None:
    case, recording = recorded(stub(write, "return square(x)"), N=24)
    copies: list[int] = []
    plain = case.replay

    def counted(*args, **kwargs):
        made = plain(*args, **kwargs)
        copies.append(made.copies)
        return made

    monkeypatch.setattr(case, "replay", counted)
    taken = budget.evaluation_bytes(recording.recorder.tape)
    for most, wanted in ((3 * taken, [3]), (3 * taken - 1, [1, 1, 1])):
        monkeypatch.setattr(budget, "SMALL", most)
        require_same(list(case.moved(recording, EXACT, SEEDS)), alone(case, recording, EXACT), 0.0)
        assert copies[: len(wanted)] == wanted
        copies.clear()


def test_addresses_that_are_read_from_memory__are_evaluated_alone() -> None:
    """Another copy's lie where other tensors do."""
    (path,) = (path for path in KERNELS if path.stem == ADDRESSES)
    case, recording = recorded(path)
    with pytest.raises(KernelError, match="not derived from one argument"):
        together(case, recording, EXACT)
    require_same(list(case.moved(recording, EXACT, SEEDS)), alone(case, recording, EXACT), 0.0)
