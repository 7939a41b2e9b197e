/* Small pairs for tests of the store: sources are texts, never run. */
#ifndef PAIR_FIXTURE_H
#define PAIR_FIXTURE_H

/* A row reduction; the arguments are kernel name, a variable's name and a comment. */
#define ROW_KERNEL(name, variable, comment)                                                                  \
    "@triton.jit\n"                                                                                          \
    "def " name "(x_ptr, y_ptr, N, BLOCK: tl.constexpr):\n"                                                  \
    "    " variable " = tl.program_id(0)" comment "\n"                                                       \
    "    cols = tl.arange(0, BLOCK)\n"                                                                       \
    "    x = tl.load(x_ptr + " variable " * N + cols, mask=cols < N, other=0.0)\n"                           \
    "    tl.store(y_ptr + " variable ", tl.sum(x * x, axis=0))\n\n\n"

/* A tiled product: loops, dots, no reduction. */
#define DOT_KERNEL                                                                                           \
    "@triton.jit\n"                                                                                          \
    "def product(a_ptr, b_ptr, c_ptr, K, BLOCK: tl.constexpr):\n"                                            \
    "    r = tl.arange(0, BLOCK)\n"                                                                          \
    "    acc = tl.zeros([BLOCK, BLOCK], dtype=tl.float32)\n"                                                 \
    "    for k in range(0, K, BLOCK):\n"                                                                     \
    "        a = tl.load(a_ptr + r[:, None] * K + k + r[None, :], mask=k + r[None, :] < K, other=0.0)\n"     \
    "        b = tl.load(b_ptr + (k + r[:, None]) * BLOCK + r[None, :], mask=k + r[:, None] < K, "           \
    "other=0.0)\n"                                                                                           \
    "        acc += tl.dot(a, b)\n"                                                                          \
    "    tl.store(c_ptr + r[:, None] * BLOCK + r[None, :], acc)\n\n\n"

#define STUB_OF(kernel)                                                                                      \
    "@autodiff(inputs_require_grad=(0,))\n"                                                                  \
    "def run(x):\n"                                                                                          \
    "    y = torch.empty_like(x)\n"                                                                          \
    "    " kernel "[(x.shape[0],)](x, y, x.shape[1], BLOCK=64)\n"                                            \
    "    return y\n\n\n"
#define STUB STUB_OF("kernel")

#define HEAD(op, schedule)                                                                                   \
    "\"\"\"Sum of squares: a note with a colon.\n\nForward: y = sum x^2\nop: prose, not the block\n\nMore "  \
    "prose.\n\n"                                                                                             \
    "op: " op "\nschedule: " schedule "\ndifficulty: 3\ndtypes: fp32; bf16\n\"\"\"\n\n"                      \
    "import torch\nimport triton\nimport triton.language as tl\n\n\n"

#define BACKWARD                                                                                             \
    "# ---- backward ----\n\n\n"                                                                             \
    "@triton.jit\ndef back(dx_ptr):\n    tl.store(dx_ptr, 0.0)\n\n\n"                                        \
    "class F(torch.autograd.Function):\n    pass\n\n\ndef run_autograd(x):\n    return F.apply(x)\n"

#define ROW_PAIR                                                                                             \
    HEAD("square_sum", "row_reduce_correct, recompute_from_stats")                                           \
    ROW_KERNEL("kernel", "row", "") STUB BACKWARD
#define ROW_PAIR_RENAMED                                                                                     \
    HEAD("square_sum", "partials_then_reduce")                                                               \
    ROW_KERNEL("norm_forward", "i", "  # the row") STUB_OF("norm_forward") BACKWARD
#define DOT_PAIR HEAD("matmul", "swap_owner") DOT_KERNEL STUB_OF("product") BACKWARD

#endif
