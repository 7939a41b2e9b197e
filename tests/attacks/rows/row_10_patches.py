"""A timer, a statistic, a comparison or the harness is patched."""

from suite import Attack


def patch(name: str, text: str, reason: str = "patch: line") -> Attack:
    return Attack(name, "scale_atomics", ((None, f"\n\n{text}\n"),), reason)


ATTACKS = [
    patch("do_bench", "triton.testing.do_bench = lambda *args, **kwargs: 1e-6"),
    patch("the events' timer", "torch.cuda.Event.elapsed_time = lambda self, other: 1e-6"),
    patch("torch.equal, which finds modified inputs", "torch.equal = lambda a, b: True"),
    patch("a patch below another name", "alias = torch.Tensor\nalias.clone = lambda self: self"),
    patch("a patch in a loop", "for torch.equal in [lambda a, b: True]:\n    pass"),
    patch("a patch by walrus and subscript", 'vars(torch)["equal"] = lambda a, b: True', "forbidden: line"),
    patch(
        "the autograd engine",
        "torch.autograd.grad = lambda *args, **kwargs: args[1]",
        "autograd: line|patch: line",
    ),
    patch(
        "the autograd engine below another name",
        "import torch.autograd as engine\n\nengine.grad = lambda *args, **kwargs: args[1]",
    ),
    patch("the clock", "import time\n\ntime.perf_counter = lambda: 0.0", "import: line .* time"),
    patch("triton's launcher", "triton.runtime.jit.JITFunction.run = lambda *args, **kwargs: None"),
    patch("triton.language", "tl.load = lambda *args, **kwargs: 0.0"),
]
