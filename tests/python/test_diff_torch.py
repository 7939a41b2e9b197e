"""Generated functions in what torch wraps around functions: compile, autocast, checkpoints, DDP.

torch.compile makes no launch of Triton's without a GPU: there the kernels are stand-ins of torch operations,
and what is asked is whether the generated host code is one graph. Elsewhere kernels are interpreted.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from diff_support import ROOT, draft, pair_text
from kernel_agent import launches
from torch.utils.checkpoint import checkpoint

DDP = """
import os
import sys
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

sys.path[:0] = [{package!r}, {folder!r}]
from kernel_agent import launches

launches.set_mode("interpret")
import rms_norm_pair

rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method="file://{folder}/meeting", rank=rank, world_size=2)


class Norm(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.linspace(0.5, 1.5, 24))

    def forward(self, x):
        return rms_norm_pair.rms_norm_autograd(x, self.weight)


def inputs(rank):
    return torch.randn(2, 3, 24, generator=torch.Generator().manual_seed(rank))


model = DistributedDataParallel(Norm())
model(inputs(rank)).square().sum().backward()
weight = torch.linspace(0.5, 1.5, 24).requires_grad_()
for each in (inputs(0), inputs(1)):
    torch.nn.functional.rms_norm(each, (24,), weight, 1e-6).square().sum().backward()
torch.testing.assert_close(model.module.weight.grad, weight.grad / 2, rtol=1e-4, atol=1e-4)
dist.destroy_process_group()
os._exit(0)  # torch may end threads of its own that it has not joined
"""


def made(name: str, dims: dict[str, Any], folder: Path) -> ModuleType:
    """The module of an example and its backward."""
    file = ROOT / f"examples/{name}.py"
    pair = folder / f"{name}_pair.py"
    pair.write_text(pair_text(file.read_text(), draft(file, dims)["backward"]))
    spec = importlib.util.spec_from_file_location(pair.stem, pair)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    launches.set_mode("interpret")
    return module


@pytest.fixture
def norm(tmp_path: Path) -> ModuleType:
    return made("rms_norm", {"B": 2, "T": 3, "N": 24}, tmp_path)


class StandIn:
    """In place of a kernel: a function of the launch's arguments by name."""

    def __init__(self, kernel: Any, function: Any) -> None:
        self.names, self.function = list(kernel.arg_names), function

    def __getitem__(self, grid: Any) -> Any:
        def launch(*args: Any, **kwargs: Any) -> None:
            given = dict(zip(self.names, args, strict=False)) | kwargs
            self.function(given)

        return launch


def softmax_forward(given: dict[str, Any]) -> None:
    given["y_ptr"].copy_(torch.softmax(given["x_ptr"], -1))


def softmax_backward(given: dict[str, Any]) -> None:
    y, dy = torch.softmax(given["x_ptr"], -1), given["d_y_ptr"]
    given["d_x_ptr"].copy_((dy - (dy * y).sum(-1, keepdim=True)) * y)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compile__takes_forward_and_backward_as_one_graph(backend: str, tmp_path: Path) -> None:
    module = made("softmax", {"M": 5, "N": 33}, tmp_path)
    names = [n for n in vars(module) if n.startswith("softmax_kernel")]
    for name in names:
        standing = softmax_backward if "_bwd" in name else softmax_forward
        setattr(module, name, StandIn(getattr(module, name), standing))
    x = torch.randn(5, 33, requires_grad=True)
    torch._dynamo.reset()
    compiled = torch.compile(module.softmax_autograd, fullgraph=True, backend=backend)
    compiled(x).square().sum().backward()
    want = torch.autograd.grad(torch.softmax(x, -1).square().sum(), x)[0]
    torch.testing.assert_close(x.grad, want)


def test_checkpoint__runs_the_forward_again_for_the_same_gradients(norm: ModuleType) -> None:
    x, w = torch.randn(2, 3, 24, requires_grad=True), torch.randn(24, requires_grad=True)
    plain = torch.autograd.grad(norm.rms_norm_autograd(x, w).square().sum(), (x, w))
    for reentrant in (False, True):
        y = checkpoint(norm.rms_norm_autograd, x, w, use_reentrant=reentrant)
        y.square().sum().backward()
        torch.testing.assert_close((x.grad, w.grad), plain)
        x.grad = w.grad = None


def test_autocast__changes_no_gradients_type(norm: ModuleType) -> None:
    x, w = torch.randn(2, 3, 24, requires_grad=True), torch.randn(24, requires_grad=True)
    mix = torch.randn(24, 24, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.float16):
        y = norm.rms_norm_autograd(x @ mix, w)  # halves meet a float32 weight
        assert y.dtype == torch.float16
    y.float().square().sum().backward()
    assert [t.grad.dtype for t in (x, w, mix)] == [torch.float32] * 3  # type: ignore[union-attr]
    grads = [t.grad.clone() for t in (x, w, mix)]  # type: ignore[union-attr]
    x.grad = w.grad = mix.grad = None
    torch.nn.functional.rms_norm(x @ mix, (24,), w, 1e-6).square().sum().backward()
    for got, t in zip(grads, (x, w, mix), strict=True):
        assert (got - t.grad).norm() < 2e-2 * t.grad.norm()  # type: ignore[operator, union-attr]


def test_ddp__averages_the_gradients_of_two_processes(norm: ModuleType, tmp_path: Path) -> None:
    script = tmp_path / "ranks.py"
    script.write_text(DDP.format(package=str(ROOT / "sandbox"), folder=str(tmp_path)))
    env = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen([sys.executable, str(script), str(rank)], env=env, stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    for rank in ranks:
        _, said = rank.communicate()
        assert rank.returncode == 0, said
