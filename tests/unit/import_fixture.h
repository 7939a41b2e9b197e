/* Modules in the manner of published packages, for the tests of importing. */
#ifndef IMPORT_FIXTURE_H
#define IMPORT_FIXTURE_H

#define MODULE_HEAD "\"\"\"Text of the module.\"\"\"\nimport torch\nimport triton\n\nSCALE = 2.0\n\n"
#define KERNEL(name, body) "\n@triton.jit\ndef " name "(x_ptr, N, BLOCK: tl.constexpr):\n    " body "\n\n"
#define CLASS(name, forward, backward)                                                                       \
    "\nclass " name                                                                                          \
    "(torch.autograd.Function):\n    @staticmethod\n    def forward(ctx, x):\n        " forward              \
    "\n\n    @staticmethod\n    def backward(ctx, dy):\n        " backward "\n"

/* A forward whose file is imported, the tools that it uses, and an operation with the imports it needs. */
#define FWD_FILE                                                                                             \
    "# Copyright (c) 2024 Some Body\nfrom .tools import *\n" KERNEL(                                         \
        "fwd", "return scale(x_ptr)") "def run(x):\n    fwd[(1,)](x, 1, BLOCK=2)\n"
#define TOOLS_FILE "WIDTH = 7\nSPARE = 8\n" KERNEL("scale", "return WIDTH") KERNEL("spare", "return SPARE")
#define OPS_FILE(imports, call)                                                                              \
    "import torch\n" imports "\n" KERNEL("bwd", "return x_ptr") CLASS("Op", call, "bwd[(1,)](dy, 1, BLOCK=2)")

#endif
