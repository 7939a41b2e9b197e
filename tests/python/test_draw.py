"""Inputs and upstream gradients: reproducible, and of the kinds that the protocol names."""

from __future__ import annotations

import errno
import os
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_agent import draw, forward, tensors, vary, watching
from kernel_agent.errors import Unusable
from sources import SCALE


def up(kind, shape, seed=3, layout=None, dtype=torch.float32, index=0, count=1):
    return draw.upstream(kind, seed, layout, shape, dtype, "cpu", index, count)


def test_upstream__normal__looks_normal_and_depends_on_seed_and_index():
    a = up("normal", (4000,))
    assert abs(a.mean()) < 0.1 and abs(a.std() - 1) < 0.1 and (a < 0).any()
    assert torch.equal(a, up("normal", (4000,)))
    assert not torch.equal(a, up("normal", (4000,), seed=4)) and not torch.equal(
        a, up("normal", (4000,), index=1)
    )


def test_upstream__onehot__has_one_one_at_places_that_vary():
    places = set()
    for seed in range(20):
        hot = up("onehot", (3, 7), seed=seed)
        assert hot.sum() == 1 and (hot != 0).sum() == 1
        places.add(int(hot.argmax()))
    assert len(places) > 5


def test_upstream__none_one__leaves_out_seed_modulo_count():
    made = [up("none_one", (4,), seed=5, index=i, count=3) for i in range(3)]
    assert [m is None for m in made] == [False, False, True]
    assert torch.equal(made[0], up("normal", (4,), seed=5))
    assert up("none_one", (4,), seed=5) is not None, "the only output always has an upstream"


def test_upstream__unknown_kind__is_refused():
    with pytest.raises(ValueError, match="sideways"):
        up("sideways", (2,))


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(draw.UPSTREAM_KINDS),
    st.sampled_from([None, *(name for name, layout in vary.LAYOUTS.items() if not layout.axes)]),
    st.lists(st.integers(0, 4), max_size=3),
    st.integers(0, 2**63 - 1),
    st.sampled_from([torch.float64, torch.float32, torch.float16, torch.bfloat16]),
)
def test_upstream__any_shape_and_dtype__is_exact(kind, layout, shape, seed, dtype):
    made = up(kind, tuple(shape), seed=seed, layout=layout, dtype=dtype)
    assert made.shape == torch.Size(shape) and made.dtype == dtype
    again = up(kind, tuple(shape), seed=seed, layout=layout, dtype=dtype)
    assert torch.equal(made, again) and made.stride() == again.stride()


def test_inputs__same_seed_in_another_process__same_bytes(write, tmp_path):
    import subprocess

    source = SCALE.replace(
        "    return (torch.randn(dims",
        "    import random, numpy\n"
        "    factor = random.random() + float(numpy.random.rand())\n"
        "    return (factor * torch.randn(dims",
    )
    path = write(source)
    (x,), _ = draw.make_inputs(forward.load(path), {"N": 9}, 2**62 + 3)
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from kernel_agent import draw, forward, tensors\n"
        "(x,), _ = draw.make_inputs(forward.load(sys.argv[2]), {'N': 9}, 2**62 + 3)\n"
        "tensors.save(sys.argv[3], {'x': x})\n"
    )
    package = forward.__file__.rsplit("/kernel_agent", 1)[0]
    out = tmp_path / "x.safetensors"
    subprocess.run([sys.executable, "-c", code, package, str(path), str(out)], check=True)
    assert torch.equal(tensors.load(out)["x"], x)


RETURNS = '    return (torch.randn(dims["N"], device=device, dtype=dtype),)\n'


@pytest.mark.parametrize(
    ("returned", "args", "kwargs"),
    [
        ("torch.ones(2)", 1, {}),
        ("[torch.ones(2), 3.0]", 2, {}),
        ("(torch.ones(2),), {'factor': 3.0}", 1, {"factor": 3.0}),
        ("{'x': torch.ones(2), 'factor': 4.0}", 0, {"factor": 4.0}),
    ],
)
def test_make_args__every_shape_of_answer__is_understood(returned, args, kwargs, write):
    fwd = forward.load(write(SCALE.replace(RETURNS, f"    return {returned}\n")))
    got_args, got_kwargs = draw.make_inputs(fwd, {"N": 2}, 0)
    assert len(got_args) == args and kwargs.items() <= got_kwargs.items()
    assert fwd.call(got_args, got_kwargs)[0] in (2.0, 3.0, 4.0)


@pytest.mark.parametrize("mode", ["interpret", "compile", "cuda"])
def test_seed__is_torchs_own__of_gpus_too_where_kernels_run_there(write, monkeypatch, mode):
    seeded = []
    own = torch.manual_seed
    monkeypatch.setattr(torch, "manual_seed", lambda seed: seeded.append(seed) or own(seed))
    fwd = forward.load(write(SCALE))
    fwd.mode = mode
    (drawn,), _ = draw.make_inputs(fwd, {"N": 8}, 3, device="cpu")
    own(3)
    assert torch.equal(drawn, torch.randn(8)) and seeded == [3] * (mode == "cuda")


def test_make_args__bfloat16_default__becomes_float32_on_the_cpu_unless_asked_for(write):
    fwd = forward.load(write(SCALE.replace("dtype=torch.float32", "dtype=torch.bfloat16")))
    assert draw.make_inputs(fwd, {"N": 2}, 0)[0][0].dtype == torch.float32
    assert draw.make_inputs(fwd, {"N": 2}, 0, dtype="bfloat16")[0][0].dtype == torch.bfloat16
    fixed = SCALE.replace('def make_args(dims, device="cuda", dtype=torch.float32)', "def make_args(dims)")
    fixed = fixed.replace("device=device, dtype=dtype", "dtype=torch.bfloat16")
    assert draw.make_inputs(forward.load(write(fixed, "fixed.py")), {"N": 2}, 0)[0][0].dtype == torch.float32


def test_setup__before_the_first_inputs__runs_once(write):
    source = SCALE + "\n\nCALLS = []\n\n\ndef setup():\n    CALLS.append(1)\n"
    fwd = forward.load(write(source))
    assert fwd.module.CALLS == []
    for _ in range(2):
        draw.make_inputs(fwd, {"N": 2}, 0)
    assert fwd.module.CALLS == [1]


def test_bind__missing_argument__is_make_args_type(write):
    fwd = forward.load(write(SCALE))
    with pytest.raises(Unusable) as caught:
        draw.bind(fwd, (), {})
    assert caught.value.kind == "make_args_type" and "'x'" in caught.value.message


def test_outputs__views_of_inputs_and_detached__are_not_differentiable(write):
    fwd = forward.load(
        write(
            SCALE.replace("    return y\n", "    return y, x[1:], y.detach(), y.data, None, 3, True, y > 0\n")
        )
    )
    args = (torch.randn(5),)
    outputs = draw.differentiable_outputs(fwd.call(args), args)
    assert [(o.kind, o.differentiable) for o in outputs] == [
        ("tensor", True),
        ("input", False),
        ("tensor", False),
        ("tensor", False),
        ("none", False),
        ("int", False),
        ("other", False),
        ("tensor", False),
    ]


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(3, 4).t(),
        torch.tensor(2.5, dtype=torch.float16),
        torch.zeros(0, 3),
        torch.randn(5).bfloat16(),
        torch.arange(6)[::2],
        torch.tensor([True, False, True]),
        torch.randn(4, dtype=torch.float64).expand(3, 4),
        torch.arange(-3, 3, dtype=torch.int8),
        torch.randn(4).to(torch.float8_e4m3fn),
        torch.randn(4).to(torch.float8_e5m2),
        torch.randn(3, requires_grad=True),
        torch.randn(3, dtype=torch.complex64).conj().imag,
    ],
)
def test_tensors__saved_and_loaded__are_equal(tensor, tmp_path):
    tensors.save(tmp_path / "t", {"a": torch.ones(1), "grad/x": tensor})
    loaded = tensors.load(tmp_path / "t")
    assert list(loaded) == ["a", "grad/x"]
    assert watching.same_bytes(loaded["grad/x"], tensor) and loaded["grad/x"].dtype == tensor.dtype


def test_tensors__file__has_the_published_layout(tmp_path):
    tensors.save(tmp_path / "t", {"x": torch.tensor([1.0, 2.0]), "i": torch.tensor([7], dtype=torch.int32)})
    data = (tmp_path / "t").read_bytes()
    length = int.from_bytes(data[:8], "little")
    assert (8 + length) % 64 == 0 and data[8:9] == b"{"
    assert data[8 : 8 + length].rstrip() == (
        b'{"x":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},'
        b'"i":{"dtype":"I32","shape":[1],"data_offsets":[64,68]}}'
    )
    assert data[8 + length :] == bytes.fromhex("0000803f00000040" + 56 * "00" + "07000000")
    assert list(tmp_path.iterdir()) == [tmp_path / "t"], "no temporary file stays"


def test_tensors__dtype_without_a_name__is_refused_before_anything_is_written(tmp_path):
    with pytest.raises(TypeError, match="complex"):
        tensors.save(tmp_path / "t", {"x": torch.zeros(1, dtype=torch.complex64)})
    assert list(tmp_path.iterdir()) == []


def test_tensors__no_room_for_all__is_an_error_before_any_is_copied_and_leaves_no_file(tmp_path, monkeypatch):
    def full(fd, offset, size):
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(os, "posix_fallocate", full)
    monkeypatch.delattr(tensors, "_copy")
    with pytest.raises(OSError, match=r"no room for \d+ bytes of tensors") as caught:
        tensors.save(tmp_path / "t", {"x": torch.zeros(1000)})
    assert caught.value.errno == errno.ENOSPC and list(tmp_path.iterdir()) == []


def test_tensors__file__has_its_blocks_before_the_first_copy(tmp_path, monkeypatch):
    """A store into a mapping of a file with holes ends the process when the disk is full."""
    sizes = []

    def look(tensor, memory, begin):
        status = (tmp_path / "t.part").stat()
        sizes.append((status.st_size, 512 * status.st_blocks))

    monkeypatch.setattr(tensors, "_copy", look)
    tensors.save(tmp_path / "t", {"x": torch.zeros(300_000)})
    ((size, taken),) = sizes
    assert taken >= size > 1_200_000


def test_tensors__copy_that_fails__leaves_no_file(tmp_path, monkeypatch):
    monkeypatch.delattr(tensors, "_copy")
    with pytest.raises(NameError):
        tensors.save(tmp_path / "t", {"x": torch.zeros(3)})
    assert list(tmp_path.iterdir()) == []


def test_upstream__on_a_gpu__is_drawn_there_in_float32(monkeypatch):
    """Stands in for CUDA: generator and values are asked for on the device, and nothing is moved to it."""
    asked = []
    randn, generator = torch.randn, torch.Generator

    def draw_there(shape, *, generator, dtype, device):
        asked.append((torch.device(device), dtype))
        return randn(shape, generator=generator, dtype=dtype)

    def there(device):
        asked.append((torch.device(device), None))
        return generator()

    monkeypatch.setattr(torch, "randn", draw_there)
    monkeypatch.setattr(torch, "Generator", there)
    for layout in (None, "stacked", "slice", "expanded"):
        asked.clear()
        made = draw.upstream("normal", 3, layout, (4, 5), torch.float16, "cuda", 0, 1)
        assert asked == [(torch.device("cuda"), None), (torch.device("cuda"), torch.float32)]
        assert made.dtype == torch.float16 and made.shape == (4, 5)
    again = draw.upstream("normal", 3, None, (4, 5), torch.float16, "cuda", 0, 1)
    assert torch.equal(draw.upstream("normal", 3, "stacked", (4, 5), torch.float16, "cuda", 0, 1), again)


def test_upstream__on_the_cpu__has_the_values_of_every_version():
    """Seeds that a run has kept draw the same case later."""
    assert up("normal", (3,), seed=3).tolist() == [
        -0.4435136616230011,
        -0.047323986887931824,
        -1.0215072631835938,
    ]
    assert up("onehot", (2, 3), seed=3).argmax() == 4


@pytest.mark.parametrize("way", [0, 1])
@pytest.mark.parametrize("table", [[0, 3, 4, 9, 20], [0, 0, 1, 1, 1, 4, 4, 7], [2, 3, 5, 6, 7]])
def test_rearranged__boundaries__still_increase_from_the_same_first_to_the_same_last(table, way):
    before = torch.tensor(table, dtype=torch.int32)
    after = draw.rearranged("ends", before, way)
    steps = after.diff()
    assert after.dtype == before.dtype and not torch.equal(after, before)
    assert (after[0], after[-1]) == (before[0], before[-1]) and (steps >= 0).all()
    assert (steps > 0).all() == (before.diff() > 0).all()
    assert torch.equal(after, draw.rearranged("ends", before, way))
    if way == 0 and len(table) == 5 and table[-1] == 20:
        assert steps[-1] > 10 > before.diff().min()


def test_rearranged__indices_and_masks__are_the_same_in_other_places():
    for table in (torch.tensor([3, 1, 2]), torch.tensor([[True, False], [False, False]])):
        after = draw.rearranged("idx", table, 0)
        assert not torch.equal(after, table) and torch.equal(after.roll(-1, 0), table)
    for values in ([0, 9], [5, 5, 5], 3, [0, 1, 2], [7], []):
        with pytest.raises(Unusable, match="idx is a tensor"):
            draw.rearranged("idx", torch.tensor(values, dtype=torch.int64), 0)


@pytest.mark.parametrize(
    ("value", "others"),
    [
        (True, [False]),
        (20, [21, 40, 10]),
        (0, [1]),
        (1e-6, [0.25]),
        (0.75, [0.625, 0.046875]),
        (0.5, [0.375, 0.03125]),
        (2.0, [3.0, 0.125]),
        (None, []),
    ],
)
def test_nearby__numbers_and_flags__have_other_values(value, others):
    assert [draw.nearby("n", value, way) for way in range(len(others))] == others
    with pytest.raises(Unusable):
        draw.nearby("n", value, len(others))


def test_follow__number_that_stands_for_no_index__is_another_in_tables_too():
    arguments = {
        "target": torch.tensor([3, -100, 0]),
        "x": torch.tensor([-100.0, 1.0]),
        "mask": torch.tensor([True, False]),
        "ignore": -99,
    }
    draw.follow(arguments, -100, -99)
    assert arguments["target"].tolist() == [3, -99, 0] and arguments["x"].tolist() == [-100.0, 1.0]
    assert arguments["mask"].tolist() == [True, False]


def test_number_that_stands_for_no_index__is_one_that_occurs_first_of_all():
    tables = [torch.tensor([[3, -100], [0, 3]]), torch.tensor([7, 7, 7])]
    assert draw.commonest_index(tables, -100) == 3
    assert draw.commonest_index(tables, -1) is None
    assert draw.commonest_index([torch.tensor([-100])], -100) is None


def test_nearby__tensor__is_said_to_be_one():
    with pytest.raises(Unusable, match="w is a tensor"):
        draw.nearby("w", torch.zeros(2), 0)
