"""`torch.no_grad()` and the like in a forward are how it is run: its backward goes through what stands there,
as the oracle does. Where no copy can leave it out, what it cuts is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from diff_support import assert_right, draft
from kernel_agent.errors import Unusable

Write = Callable[..., Path]

CASES = [({"N": 37}, "normal"), ({"N": 16}, "normal"), ({"N": 1}, "normal")]
SOURCE = """
import functools

import torch
import triton
import triton.language as tl
from kernel_agent import autodiff
from torch.autograd.grad_mode import inference_mode as quick


@triton.jit
def squares(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < n, other=0.0)
    tl.store(y_ptr + at, x * x, mask=at < n)


def square(x):
    y = torch.empty_like(x)
    squares[(triton.cdiv(x.numel(), 16),)](x, y, x.numel(), BLOCK=16)
    return y


def quiet(function):
    @functools.wraps(function)
    def run(*args):
        with torch.no_grad():
            return function(*args)

    return run
{HELPERS}

@autodiff(inputs_require_grad=(0,)){DECORATOR}
def op(x):
{BODY}


SWEEP = [{"N": 37}]


def make_args(dims, device="cuda", dtype=torch.float32):
    return (torch.randn(dims["N"], 3, device=device, dtype=dtype),)
"""
TRIPLE = "def triple(x):\n    {}return x * 3"
QUIET_TRIPLE = TRIPLE.format("with torch.no_grad():\n        ")

# name: (what stands above the stub, its decorators, its body)
LEFT_OUT = {
    "all": ("", "", "with torch.no_grad():\n    y = square(x)\nreturn y"),
    "one_of_two": ("", "", "with torch.no_grad():\n    y = square(x)\nreturn square(x + y)"),
    "torch_alone": ("", "", "with torch.no_grad():\n    y = x * 3\nreturn square(x + y)"),
    "beside_another": (
        "",
        "",
        "with torch.inference_mode(), torch.no_grad():\n    y = square(x)\nreturn y + x",
    ),
    "flag": ("", "", "with torch.set_grad_enabled(x.dim() > 5):\n    y = square(x)\nreturn y + x"),
    "called_alone": ("", "", "torch.set_grad_enabled(False)\ny = square(x)\nreturn y + x"),
    "a_view": ("", "", "with torch.no_grad():\n    y = square(x.view(-1))\nreturn square(y.view(-1, 3)) + x"),
    "decorated_chain": ("", "\n@torch.no_grad()", "return square(square(x) + x)"),
    "decorated_without_brackets": ("", "\n@torch.no_grad", "return square(square(x) + x)"),
    "by_another_name": ("", "\n@quick()", "return square(square(x) + x)"),
    "function_of_autograd": (
        "class Twice(torch.autograd.Function):\n    @staticmethod\n    def forward(ctx, x):\n"
        + "        y = square(x)\n        with torch.no_grad():\n            z = y * 2 + x\n"
        + "        u = torch.empty_like(x)\n"
        + "        squares[(triton.cdiv(x.numel(), 16),)](z, u, x.numel(), BLOCK=16)\n        return u\n",
        "",
        "return Twice.apply(x) + x",
    ),
    "helper": (QUIET_TRIPLE, "", "return square(triple(x) + x)"),
    "decorated_helper": ("@torch.no_grad()\n" + TRIPLE.format(""), "", "return square(triple(x) + x)"),
}
REFUSED = {
    "function_within": (
        "",
        "",
        "@torch.no_grad()\ndef triple(x):\n    return x * 3\n\nreturn square(triple(x) + x)",
    ),
    "users_decorator": ("", "\n@quiet", "return square(x)"),
    "users_decorator_of_a_helper": ("@quiet\n" + TRIPLE.format(""), "", "return square(triple(x) + x)"),
    "handed_on": (QUIET_TRIPLE, "", "return square(sum(map(triple, [x, x])))"),
    "in_a_launch": (
        QUIET_TRIPLE,
        "",
        "y = torch.empty_like(x)\nsquares[(9,)](triple(x) + x, y, x.numel(), BLOCK=16)\nreturn y",
    ),
    "method": (
        "class Tripled:\n    def of(self, x):\n        with torch.no_grad():\n            return x * 3\n",
        "",
        "return square(Tripled().of(x) + x)",
    ),
    "method_that_ends_them": (
        "class Tripled:\n    def of(self, x):\n        torch.set_grad_enabled(False)\n        y = x * 3\n"
        + "        torch.set_grad_enabled(True)\n        return y\n",
        "",
        "return square(Tripled().of(x) + x)",
    ),
}
NOTHING_CUT = {
    "sizes": (
        "class Sizes:\n    @torch.no_grad()\n    def of(self, x):\n        return x.contiguous().numel()\n",
        "",
        "return square(x) * Sizes().of(x)",
    ),
    "memory": (
        "class Memory:\n    @torch.no_grad()\n    def of(self, x):\n        return torch.ones_like(x)\n",
        "",
        "return square(x) + Memory().of(x)",
    ),
    "detached": ("", "", "with torch.no_grad():\n    y = x.detach() * 3\nreturn square(x + y)"),
}


def source(parts: tuple[str, str, str]) -> str:
    helpers, decorator, body = parts
    text = SOURCE.replace("{HELPERS}", f"\n\n{helpers}\n" if helpers else "").replace(
        "{DECORATOR}", decorator
    )
    return text.replace("{BODY}", "\n".join("    " + line if line else "" for line in body.split("\n")))


@pytest.mark.parametrize("case", LEFT_OUT)
def test_gradients_switched_off__go_through_all_the_same(case: str, write: Write) -> None:
    file = write(source(LEFT_OUT[case]))
    result = draft(file, {"N": 37})
    assert "no_grad" not in result["backward"] and "inference_mode" not in result["backward"]
    assert_right(file, result, CASES)
    assert torch.is_grad_enabled()


@pytest.mark.parametrize("case", REFUSED)
def test_gradients_switched_off_where_no_copy_is_made__are_refused(case: str, write: Write) -> None:
    file = write(source(REFUSED[case]))
    with pytest.raises(Unusable, match="off") as caught:
        draft(file, {"N": 37})
    assert caught.value.kind == "unsupported_op" and "no_grad" in str(caught.value)
    assert torch.is_grad_enabled()


@pytest.mark.parametrize("case", REFUSED)
def test_remedy__followed__leads_to_a_backward(case: str, write: Write) -> None:
    text = source(REFUSED[case]).replace("with torch.no_grad():", "if True:")
    for line in (
        "    @torch.no_grad()\n",
        "        torch.set_grad_enabled(False)\n",
        "        torch.set_grad_enabled(True)\n",
    ):
        text = text.replace(line, "")
    file = write(text)
    assert_right(file, draft(file, {"N": 37}), CASES)


@pytest.mark.parametrize("case", NOTHING_CUT)
def test_gradients_switched_off_where_none_is_cut__are_no_matter(case: str, write: Write) -> None:
    file = write(source(NOTHING_CUT[case]))
    assert_right(file, draft(file, {"N": 37}), CASES)


def test_trace__leaves_torch_as_it_was(write: Write) -> None:
    before = [dict(vars(kind)) for kind in (torch.no_grad, torch.inference_mode, torch.set_grad_enabled)]
    draft(write(source(LEFT_OUT["one_of_two"])), {"N": 37})
    after = [dict(vars(kind)) for kind in (torch.no_grad, torch.inference_mode, torch.set_grad_enabled)]
    keys = ("__init__", "__enter__", "__exit__")
    assert [[b[k] for k in keys] for b in before] == [[a[k] for k in keys] for a in after]
    with torch.no_grad():
        assert not torch.is_grad_enabled()
