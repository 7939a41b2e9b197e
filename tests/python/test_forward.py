"""Loading forward files, and running their stubs on the CPU."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from kernel_agent import devices, draw, forward, launches
from sources import SCALE, SCALE_PAIR
from triton.runtime.errors import OutOfResources

HEAD = "import torch\nimport triton\nimport triton.language as tl\nfrom kernel_agent import autodiff\n"
TAIL = """
SWEEP = [{"N": 40}]


def make_args(dims, device="cuda", dtype=torch.float32):
    return (torch.randn(dims["N"], device=device, dtype=dtype),)
"""


def call(path, dims=None, seed=0, **options):
    fwd = forward.load(path)
    args, kwargs = draw.make_inputs(fwd, dims or fwd.sweep[0].dims, seed, **options)
    return fwd, args, fwd.call(args, kwargs)


def test_load__plain_file__finds_everything(write):
    fwd = forward.load(write(SCALE))
    assert fwd.stub_name == "scale" and fwd.grads == ("x",)
    assert [p.name for p in fwd.params] == ["x", "factor"]
    assert [(s.dims, s.required) for s in fwd.sweep] == [({"N": 8}, True), ({"N": 100}, False)]
    assert (
        list(fwd.kernels) == ["scale_kernel"]
        and fwd.entry_name == "scale_autograd"
        and fwd.dtype == torch.float32
    )


def test_load__pair_with_inline_mark__has_entry(write):
    fwd = forward.load(write(SCALE_PAIR))
    assert fwd.grads == ("x",) and callable(getattr(fwd.module, fwd.entry_name))


def test_sweep__with_a_dtype__travels_as_its_name_and_comes_back(write):
    source = SCALE.replace('{"N": 8}', '{"N": 8, "dtype": torch.float16, "like": "torch.float16"}')
    source = source.replace("dtype=torch.float32):", "dtype=None):\n    dtype = dtype or dims['dtype']")
    source = source.replace("return (torch", "assert dims['like'] == 'torch.float16'\n    return (torch")
    fwd = forward.load(write(source))
    assert fwd.sweep[0].dims == {"N": 8, "dtype": "torch.float16", "like": "torch.float16"}
    nested = source.replace('{"N": 8,', '{"dims": {"N": 8,').replace('"torch.float16"}', '"torch.float16"}}')
    assert forward.load(write(nested, "nested.py")).dtype_dims == fwd.dtype_dims == {"dtype"}
    assert fwd.dtype == torch.float16
    (x,), _ = draw.make_inputs(fwd, fwd.sweep[0].dims, 1)
    assert x.dtype == torch.float16
    (x,), _ = draw.make_inputs(fwd, fwd.sweep[0].dims, 1, dtype="float32")
    assert x.dtype == torch.float32


def test_call__grid_with_ragged_tail__computes_all(write):
    _, (x,), y = call(write(SCALE), {"N": 37})
    assert torch.equal(y, 2 * x)


FEATURES = (
    HEAD
    + """
@triton.jit
def combine(a, b):
    return a + b


@triton.jit
def row_sum(x, n):
    total = tl.reduce(x, 0, combine)
    return total / n


@triton.autotune(
    configs=[triton.Config({"BLOCK": 64}, num_warps=2), triton.Config({"BLOCK": 128})], key=["n"]
)
@triton.heuristics({"EVEN": lambda args: args["n"] % args["BLOCK"] == 0})
@triton.jit
def kernel(x_ptr, y_ptr, n, steps, flag, scale, EVEN: tl.constexpr, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    if EVEN:
        x = tl.load(x_ptr + offsets)
    else:
        x = tl.load(x_ptr + offsets, mask=offsets < n, other=0.0)
    i = 0
    while i < steps:
        x = x * scale
        i += 1
    for k in range(0, steps):
        x += k
    if flag:
        x = -x
    x = tl.where(offsets < n, x, 0.0)
    tl.store(y_ptr + offsets, x - row_sum(x, n) + tl.sum(x, 0) - tl.max(x, axis=0), mask=offsets < n)


@autodiff(inputs_require_grad=(0,))
def features(x, *, steps=3, flag=True):
    y = torch.empty_like(x)
    kernel[lambda meta: (triton.cdiv(x.numel(), meta["BLOCK"]),)](x, y, x.numel(), steps, flag, 0.5)
    return y
"""
    + TAIL
)


def test_configuration__without_a_gpu__each_has_its_turn(write):
    fwd = forward.load(write(FEATURES))
    taken = []

    def note(launch):
        taken.append(launch.config["BLOCK"])
        return launch.run()

    args, kwargs = draw.make_inputs(fwd, fwd.sweep[0].dims, 0)
    for turn in range(3):
        with launches.launch_intercept(note), launches.configuration(turn):
            fwd.call(args, kwargs)
    fwd.call(args, kwargs)
    assert taken == [64, 128, 64]


@pytest.mark.parametrize("every, first", [(False, [32, 64]), (True, [32, 64, 128])])
def test_autotuner__on_a_gpu__tries_every_configuration_once_or_none(every, first, write, monkeypatch):
    """A stand-in for the launches below: no configuration of 32 fits this GPU, and 128 is the fastest."""
    fwd = forward.load(write(FEATURES.replace("configs=[", "configs=[triton.Config({'BLOCK': 32}), ")))
    taken, clock = [], [0.0]

    class Launcher:
        def run(self, *_, BLOCK, **__):
            taken.append(BLOCK)
            if BLOCK == 32:
                raise OutOfResources(300000, 232448, "shared memory")
            clock[0] += 1 / BLOCK

    tuner = fwd.module.kernel
    monkeypatch.setattr(tuner, "fn", Launcher())
    monkeypatch.setattr(launches._state, "mode", "cuda")
    monkeypatch.setattr(launches._state, "every", every)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(launches, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    chosen = []
    for n in (40, 41, 41):
        tuner.run(None, None, n, 3, True, 0.5, grid=(1,))
        chosen.append(tuner.best_config.kwargs["BLOCK"])
    tried = list(dict.fromkeys(taken))
    assert tried == first and chosen == [128 if every else 64, 64, 64]
    at_41 = taken[taken.index(32, 1) :]
    assert at_41 == [32, 64, 64, 64, 64]  # two trials, the call itself, and the next


def test_call__autotune_heuristics_helpers_and_loops__run(write):
    path = write(FEATURES)
    fwd = forward.load(path)
    (x,), kwargs = draw.make_inputs(fwd, {"N": 40}, 1)
    seen = []
    with forward.launch_intercept(lambda launch: (seen.append(launch), launch.run())):
        y = fwd.call((x,), kwargs)
    v = -(x * 0.125 + 3)
    assert torch.allclose(y, v - v.mean() + v.sum() - max(v.max(), 0), atol=1e-5)
    (launch,) = seen
    assert launch.config == {"BLOCK": 64} and launch.num_warps == 2 and launch.num_stages == 3
    assert launch.heuristics == {"EVEN": False} and launch.args["EVEN"] is False
    assert launch.grid == (1,) and launch.constexprs == ("EVEN", "BLOCK") and launch.args["flag"] is True
    assert launch.fn.__name__ == "kernel" and launch.globals is fwd.module.__dict__
    assert any(a["asked"] == "autotune benchmark" for a in fwd.device_answers)


def test_intercept__launch_not_run__leaves_output_alone(write):
    fwd = forward.load(write(SCALE))
    with forward.launch_intercept(lambda launch: launch.args["y_ptr"].fill_(7)):
        assert torch.equal(fwd.call((torch.zeros(5),)), torch.full((5,), 7.0))


def test_intercept__nested__inner_first_then_outer_each_time(write):
    fwd = forward.load(write(SCALE))
    order = []

    def outer(launch):
        order.append("outer")
        return launch.run()

    def inner(launch):
        order.append("inner")
        launch.run()
        launch.run()

    with forward.launch_intercept(outer), forward.launch_intercept(inner):
        fwd.call((torch.ones(3),))
    assert order == ["inner", "outer", "outer"]


ASKS = (
    HEAD
    + """
DEVICE = triton.runtime.driver.active.get_active_torch_device()
SMS = triton.runtime.driver.active.utils.get_device_properties(DEVICE.index)["multiprocessor_count"]
CAPABILITY = torch.cuda.get_device_capability()
IS_HIP = triton.runtime.driver.active.get_current_target().backend == "hip"


@triton.jit
def copy_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    tl.store(y_ptr + offsets, tl.load(x_ptr + offsets, mask=offsets < n), mask=offsets < n)


@autodiff(inputs_require_grad=(0,))
def copy(x):
    assert x.is_cuda and x.device == DEVICE
    assert torch.cuda.is_available()
    y = torch.zeros(x.shape, device="cuda")
    scratch = torch.empty(4, device=x.device)
    with torch.cuda.device(x.device):
        copy_kernel[(1,)](x, y, x.numel(), BLOCK=64)
    torch.cuda.synchronize()
    return y.to(DEVICE)
"""
    + TAIL
)


OF_ANY_DEVICE = (
    ASKS.replace("torch.cuda.device(x.device)", "torch.get_device_module().device(x.device)")
    .replace("torch.cuda.is_available()", 'torch.accelerator.current_accelerator().type == "cuda"')
    .replace("torch.cuda.synchronize()", "torch.accelerator.synchronize()")
)


def test_device_questions__by_names_for_any_device__are_answered_too(write):
    fwd, (x,), y = call(write(OF_ANY_DEVICE))
    assert torch.equal(x, y)
    asked = {note["asked"] for note in fwd.device_answers}
    assert {"torch.get_device_module", "torch.accelerator.synchronize"} <= asked


def test_device_questions__without_gpu__are_answered_for_target_and_recorded(write):
    fwd, (x,), y = call(write(ASKS))
    assert torch.equal(x, y) and y.device.type == "cpu"
    assert (fwd.module.CAPABILITY, fwd.module.SMS, fwd.module.IS_HIP) == ((9, 0), 132, False)
    lines = ASKS.splitlines()
    asked = {(a["asked"], lines[a["line"] - 1].strip()) for a in fwd.device_answers}
    assert ("torch.cuda.get_device_capability", "CAPABILITY = torch.cuda.get_device_capability()") in asked
    assert ("Tensor.is_cuda", "assert x.is_cuda and x.device == DEVICE") in asked
    assert ('device "cuda"', 'y = torch.zeros(x.shape, device="cuda")') in asked
    assert not torch.cuda.is_available(), "the answer is for the user's code only"


def test_device_questions__of_a_check__hear_of_few_processors(write):
    fwd = forward.load(write(ASKS), processors=devices.FEW_PROCESSORS)
    assert fwd.module.SMS == devices.FEW_PROCESSORS < 132 and fwd.module.CAPABILITY == (9, 0)


def test_device_questions__file_above_this_package__package_hears_the_truth():
    answers = devices.Answers(str(Path(forward.__file__).parents[2]), devices.Target.parse("sm_90"))
    assert answers.from_user(sys._getframe())
    seen = []
    with devices.answering(answers):
        draw.upstream("normal", 0, None, (2,), torch.float32, "cpu", 0, 1)
        seen.append(torch.ones(1).is_cuda)
    assert seen == [True] and all(a["asked"] == "Tensor.is_cuda" for a in answers.given)


def test_device_questions__of_a_library__are_answered_with_the_line_of_the_file(write, tmp_path):
    site = tmp_path / "site-packages"
    site.mkdir()
    (site / "asking_library.py").write_text(
        "import torch\n\nDEVICE = torch.cuda.current_device()\nNAME = str(torch.ones(1).device)\n"
    )
    sys.path.append(str(site))
    try:
        fwd = forward.load(write("from asking_library import DEVICE, NAME\n" + SCALE))
    finally:
        sys.path.remove(str(site))
        sys.modules.pop("asking_library", None)
    assert (fwd.module.DEVICE, fwd.module.NAME) == (0, "cuda:0")
    asked = {answer["asked"]: answer["line"] for answer in fwd.answers.given}
    assert asked["torch.cuda.current_device"] == asked["Tensor.device"] == 1


CLASSES = """from __future__ import division
import torch

GRAPHS: dict = {}


class Timed(torch.cuda.Event):
    pass


def graph_of(key: int) -> torch.cuda.CUDAGraph | None:
    return GRAPHS.get(key)


def on(stream: torch.cuda.Stream | torch.cuda.Event | None = None) -> None:
    return None


EVENT = torch.cuda.Event
ARE = [isinstance(None, EVENT), isinstance(EVENT, type), issubclass(Timed, EVENT)]
"""


def test_device_questions__classes_that_nothing_is_asked_of__stay_classes(write):
    """Libraries have them in annotations that are evaluated as they are imported, and for a base."""
    before = torch.cuda.CUDAGraph, torch.cuda.Event, torch.cuda.Stream
    fwd = forward.load(write(SCALE.replace("import torch\n", CLASSES, 1)))
    assert fwd.module.ARE == [False, True, True]
    assert (torch.cuda.CUDAGraph, torch.cuda.Event, torch.cuda.Stream) == before


def test_file_that_reads_what_it_may_not__is_told_what_can_be_read(write):
    """As a child is told by the jail."""
    text = "raise PermissionError(13, 'Permission denied', '/home/me/lib/__init__.py')\n" + SCALE
    with pytest.raises(forward.Unusable, match="cannot be imported: PermissionError") as refused:
        forward.load(write(text))
    assert "--path DIR" in refused.value.remedy and "pip install -e" in refused.value.remedy


def test_text_and_versions__do_not_tell_that_there_is_no_gpu():
    answers = devices.Answers(str(Path(__file__).parent), devices.Target.parse("sm_90"))
    x = torch.ones(2, dtype=torch.float16)
    before = (torch.__version__, torch.version.cuda, repr(x))
    with devices.answering(answers):
        assert repr(x) == f"{x}" == "tensor([1., 1.], device='cuda:0', dtype=torch.float16)"
        assert f"{x.sum():.1f}" == "2.0" and repr(x.new_empty(0, 2)).count("cuda:0") == 1
        assert torch.version.cuda and "cpu" not in torch.__version__
    assert (torch.__version__, torch.version.cuda, repr(x)) == before


def test_answers__of_files_within_each_other__are_undone_to_what_was_there(write):
    truth = torch.cuda.device_count, torch.cuda.get_device_name, torch.version.cuda, torch.__version__
    outer, inner = (devices.Answers(str(Path(__file__).parent), devices.Target.parse("sm_90")) for _ in "12")
    inner.target = devices.Target.parse("sm_80")
    for within in ([outer, inner], [inner], [inner, outer], [outer]):
        with contextlib.ExitStack() as stack:
            for answers in within:
                stack.enter_context(devices.answering(answers))
                assert torch.cuda.get_device_name() == answers.target.card.name
        now = torch.cuda.device_count, torch.cuda.get_device_name, torch.version.cuda, torch.__version__
        assert all(one is other for one, other in zip(now, truth, strict=True))


def test_device_questions__other_target__other_answer(write):
    assert forward.load(write(ASKS), target="sm_80").module.CAPABILITY == (8, 0)


@pytest.mark.parametrize(
    "line",
    [
        "torch.cuda.Event(enable_timing=True)",
        "torch.cuda.max_memory_allocated()",
        "torch.Generator(device='cuda')",
    ],
)
def test_device_questions__unanswerable__names_the_line(write, line):
    source = SCALE.replace("    y = torch.empty_like(x)\n", f"    {line}\n    y = torch.empty_like(x)\n")
    with pytest.raises(forward.Unusable) as caught:
        call(write(source))
    assert caught.value.kind == "needs_gpu"
    assert caught.value.line == source[: source.index(line)].count("\n") + 1


def test_out_of_bounds__store_past_the_end__names_the_kernel_line(write):
    source = SCALE.replace("tl.store(y_ptr + offsets, x * factor, mask=mask)", "tl.store(y_ptr + offsets, x)")
    with pytest.raises(forward.Unusable) as caught:
        call(write(source))
    assert caught.value.kind == "stub_raised" and "writes out of bounds" in caught.value.message
    assert "tl.store" in source.splitlines()[caught.value.line - 1]


def test_kernel_argument__unknown_keyword__is_an_error_as_on_a_gpu(write):
    with pytest.raises(forward.Unusable, match="BLOK"):
        call(write(SCALE.replace("BLOCK=16)", "BLOCK=16, BLOK=3)")))
