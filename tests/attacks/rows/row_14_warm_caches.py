"""The L2 cache is kept warm or reserved."""

from suite import Attack

ATTACKS = [
    Attack(
        "a persisting carve-out",
        "scale_atomics",
        ((None, "\n\ntorch.cuda.cudart().cudaDeviceSetLimit(6, 1 << 25)\n"),),
        "forbidden: line .*torch.cuda.cudart",
    ),
    Attack(
        "a preferred allocator",
        "scale_atomics",
        ((None, "\n\ntorch.cuda.memory.change_current_allocator(None)\n"),),
        "forbidden: line .*torch.cuda.memory",
    ),
]
