"""Right for programs that run one after another, and for no others: races, and values carried between them.

Each is right in the interpreter as it was written; on a GPU none is.
"""

from suite import Attack

ATTACKS = [
    Attack(
        "ds by load, add and store where an atomic was",
        "scale_atomics",
        (
            (
                "    tl.atomic_add(ds_ptr, tl.sum(dy * x))\n",
                "    tl.store(ds_ptr, tl.load(ds_ptr) + tl.sum(dy * x))\n",
            ),
        ),
        "race: scale_backward_kernel.*ds_ptr",
    ),
    Attack(
        "split-K partial tiles added by load and store",
        "linear_split_k",
        (
            (
                "    tl.atomic_add(dw_ptr + k[:, None] * N + cols[None, :], dw, mask=(k[:, None] < K) & "
                "(cols[None, :] < N))\n",
                "    at = dw_ptr + k[:, None] * N + cols[None, :]\n"
                "    there = (k[:, None] < K) & (cols[None, :] < N)\n"
                "    tl.store(at, tl.load(at, mask=there, other=0.0) + dw, mask=there)\n",
            ),
        ),
        "race: dw_kernel.*dw_ptr",
    ),
    Attack(
        "rows of the table added to by load and store: tokens that repeat",
        "embedding_gather_jagged/embedding_atomic_scatter",
        (
            (
                "    tl.atomic_add(dw_ptr + v * D + cols, dy, mask=mask)\n",
                "    row = dw_ptr + v * D + cols\n"
                "    tl.store(row, tl.load(row, mask=mask, other=0.0) + dy, mask=mask)\n",
            ),
        ),
        "race: embedding_backward_kernel.*dw_ptr",
    ),
    Attack(
        "a sum carried from each program to the next",
        "scale_partials",
        (
            (
                "    tl.store(part_ptr + tl.program_id(0), tl.sum(x * tl.load(dy_ptr + i, mask=i < N, "
                "other=0.0)))\n",
                "    p = tl.program_id(0)\n"
                "    before = tl.load(part_ptr + p - 1, mask=p > 0, other=0.0)\n"
                "    mine = tl.sum(x * tl.load(dy_ptr + i, mask=i < N, other=0.0))\n"
                "    tl.store(part_ptr + p, before + mine)\n",
            ),
            ("ds = part.view(blocks, 1).sum(0).to(s.dtype)", "ds = part[-1:].clone()"),
        ),
        "race: ds_kernel.*part_ptr",
    ),
    Attack(
        "the last program adds up what the others stored, and waits for none",
        "rms_norm_tree",
        (
            ("dx_ptr, part_ptr, N, eps, BLOCK", "dx_ptr, part_ptr, dw_ptr, M, N, eps, BLOCK"),
            (
                "    tl.store(part_ptr + row * N + cols, dy * x * r, mask=cols < N)\n",
                "    tl.store(part_ptr + row * N + cols, dy * x * r, mask=cols < N)\n"
                "    if row == M - 1:\n"
                "        total = tl.zeros([BLOCK], dtype=tl.float32)\n"
                "        for other in range(M):\n"
                "            total += tl.load(part_ptr + other * N + cols, mask=cols < N, other=0.0)\n"
                "        tl.store(dw_ptr + cols, total, mask=cols < N)\n",
            ),
            (
                "        rms_norm_backward_kernel[(M,)](x, w, dy.contiguous(), dx, part, N, ctx.eps, "
                "BLOCK=block)\n"
                "        dw = None\n"
                "        if ctx.needs_input_grad[1]:\n"
                "            dw = torch.empty_like(w)\n"
                "            add_rows_kernel[(triton.cdiv(N, 8),)](part, dw, M, N, ROWS=4, COLS=8)\n",
                "        dw = torch.empty_like(w)\n"
                "        rms_norm_backward_kernel[(M,)](\n"
                "            x, w, dy.contiguous(), dx, part, dw, M, N, ctx.eps, BLOCK=block\n"
                "        )\n",
            ),
        ),
        "race: rms_norm_backward_kernel.*part_ptr",
    ),
    Attack(
        "the first program clears what all of them add to",
        "scale_atomics",
        (
            (
                "    tl.atomic_add(ds_ptr, tl.sum(dy * x))\n",
                "    if tl.program_id(0) == 0:\n"
                "        tl.store(ds_ptr, 0.0)\n"
                "    tl.atomic_add(ds_ptr, tl.sum(dy * x))\n",
            ),
            ("torch.zeros_like(s)", "torch.empty_like(s)"),
        ),
        "race: scale_backward_kernel.*ds_ptr",
    ),
    Attack(
        "one row of scratch for all programs",
        "softmax_recompute_scratch",
        (
            (
                "@triton.jit\ndef in_place_kernel",
                "@triton.jit\n"
                "def shared_kernel(y_ptr, dy_ptr, row_ptr, dx_ptr, N, BLOCK: tl.constexpr):\n"
                "    cols = tl.arange(0, BLOCK)\n"
                "    at = tl.program_id(0) * N + cols\n"
                "    y = tl.load(y_ptr + at, mask=cols < N, other=0.0)\n"
                "    dy = tl.load(dy_ptr + at, mask=cols < N, other=0.0)\n"
                "    tl.store(row_ptr + cols, y * dy, mask=cols < N)\n"
                "    total = tl.sum(tl.load(row_ptr + cols, mask=cols < N, other=0.0), axis=0)\n"
                "    tl.store(dx_ptr + at, y * (dy - total), mask=cols < N)\n\n\n"
                "@triton.jit\ndef in_place_kernel",
            ),
            (
                "        in_place_kernel[(min(M, 2),)](scratch, dy.contiguous(), M, N, BLOCK=block)\n"
                "        return scratch\n",
                "        row, dx = torch.empty(N, device=x.device, dtype=x.dtype), torch.empty_like(x)\n"
                "        shared_kernel[(M,)](scratch, dy.contiguous(), row, dx, N, BLOCK=block)\n"
                "        return dx\n",
            ),
        ),
        "race: shared_kernel.*row_ptr",
    ),
    Attack(
        "rows without a mask, whose ends the next program puts right",
        "log_sum_exp_row_stride",
        (
            (
                "    tl.store(dx_ptr + row * N + cols, dx, mask=cols < N)\n",
                "    tl.store(dx_ptr + row * N + cols, dx)\n",
            ),
            (
                "        dx = torch.empty((M, N), device=x.device, dtype=x.dtype)\n"
                "        block = triton.next_power_of_2(N)\n",
                "        block = triton.next_power_of_2(N)\n"
                "        room = torch.empty(M * N + block, device=x.device, dtype=x.dtype)\n"
                "        dx = room[: M * N].view(M, N)\n",
            ),
        ),
        "race: log_sum_exp_backward_kernel.*dx_ptr",
    ),
    Attack(
        "block sums and the scan over them in one launch",
        "scan/cumsum_long_block_carry",
        (
            (
                "class Cumsum(",
                "@triton.jit\n"
                "def carried_kernel(dy_ptr, carry_ptr, dx_ptr, N, blocks, BLOCK: tl.constexpr):\n"
                "    row = tl.program_id(0).to(tl.int64)\n"
                "    block = blocks - 1 - tl.program_id(1)\n"
                "    cols = block * BLOCK + tl.arange(0, BLOCK)\n"
                "    dy = tl.load(dy_ptr + row * N + cols, mask=cols < N, other=0.0).to(tl.float32)\n"
                "    carry = tl.load(carry_ptr + row)\n"
                "    dx = carry + tl.cumsum(dy, axis=0, reverse=True)\n"
                "    tl.store(dx_ptr + row * N + cols, dx, mask=cols < N)\n"
                "    tl.store(carry_ptr + row, carry + tl.sum(dy, axis=0))\n\n\n"
                "class Cumsum(",
            ),
            (
                "        return scan_rows(dy.contiguous(), True)\n",
                "        dy, N = dy.contiguous(), dy.shape[-1]\n"
                "        M, blocks = dy.numel() // N, triton.cdiv(N, BLOCK)\n"
                "        carry = torch.zeros(M, device=dy.device, dtype=torch.float32)\n"
                "        dx = torch.empty_like(dy)\n"
                "        carried_kernel[(M, blocks)](dy, carry, dx, N, blocks, BLOCK=BLOCK)\n"
                "        return dx\n",
            ),
        ),
        "race: carried_kernel.*carry_ptr",
    ),
    Attack(
        "a total that some add to by atomics and all read at once",
        "layer_norm_partials",
        (
            (
                "x_ptr, w_ptr, dy_ptr, dx_ptr, dw_ptr, db_ptr, M, N, eps, ROWS",
                "x_ptr, w_ptr, dy_ptr, dx_ptr, dw_ptr, db_ptr, sums_ptr, M, N, eps, ROWS",
            ),
            (
                "    tl.store(db_ptr + block * N + cols, db, mask=mask)\n",
                "    tl.atomic_add(sums_ptr + cols, db, mask=mask)\n"
                "    tl.store(db_ptr + cols, tl.load(sums_ptr + cols, mask=mask, other=0.0), mask=mask)\n",
            ),
            (
                "x, w, dy, dx, dw, db, M, N, ctx.eps, ROWS",
                "x, w, dy, dx, dw, db, torch.zeros(N, device=x.device), M, N, ctx.eps, ROWS",
            ),
            ("db.sum(dim=0).to(w.dtype)", "db[0].clone()"),
        ),
        "race: layer_norm_backward_kernel.*(db_ptr|sums_ptr)",
    ),
]
