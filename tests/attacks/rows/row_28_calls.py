"""Right for the one way in which make_args calls: other outputs used, other inputs wanted, other numbers."""

from suite import Attack

ATTACKS = [
    Attack(
        "an eps written into the backward",
        "rms_norm_tree",
        (("part, N, ctx.eps, BLOCK", "part, N, 1e-6, BLOCK"),),
        "another eps",
    ),
    Attack(
        "a temperature written into the backward",
        "distance_kernel/soft_rank_pairwise_sigmoid",
        (("ds, N, ctx.t, BLOCK_I", "ds, N, 0.7, BLOCK_I"),),
        "another t",
    ),
    Attack(
        "a seed written into the backward",
        "dropout_sampling/dropout_philox_seed_replay",
        (("apply_mask(dy.contiguous(), ctx.p, ctx.seed)", "apply_mask(dy.contiguous(), ctx.p, 20)"),),
        "another seed",
    ),
    Attack(
        "a threshold written into the backward",
        "loss/huber_mean_two_level",
        (("dx, dy, n, ctx.delta,", "dx, dy, n, 1.0,"),),
        "another delta",
    ),
    Attack(
        "another default than the stub's, where every call gives the value",
        "distance_kernel/soft_rank_pairwise_sigmoid",
        (("def soft_rank_autograd(s, t=1.0):", "def soft_rank_autograd(s, t=2.0):"),),
        r"t=2.0 where soft_rank\(\) has t=1.0",
    ),
    Attack(
        "two of three outputs unused",
        "three_flags",
        (
            (
                "        dx, n = torch.empty_like(x), x.numel()\n",
                "        dx, n = torch.empty_like(x), x.numel()\n"
                "        if [da, db, dc].count(None) == 2:\n            given = [x, x, x]\n",
            ),
        ),
        "upstream of one output",
    ),
    Attack(
        "the first and the third output unused",
        "three_flags",
        (
            (
                '        has = {"HAS_A": da is not None, "HAS_B": db is not None,',
                '        has = {"HAS_A": da is not None, "HAS_B": db is not None and not da is dc,',
            ),
        ),
        "upstream of one output",
    ),
    Attack(
        "two of four inputs wanted",
        "linalg_solver/tridiagonal_thomas_adjoint",
        (
            (
                "lam, x, da, db, dc, n, S, BLOCK=256)",
                "lam, x, da, db, dc, n, S - (sum(ctx.needs_input_grad) == 2), BLOCK=256)",
            ),
        ),
        "and [abcd] want gradients",
    ),
    Attack(
        "the outer two of four inputs wanted",
        "linalg_solver/tridiagonal_thomas_adjoint",
        (
            (
                "        return tuple(\n",
                "        outer = ctx.needs_input_grad == (True, False, False, True)\n"
                "        da = db if outer else da\n        return tuple(\n",
            ),
        ),
        "and d want gradients",
    ),
    Attack(
        "a gradient for an input that no position names",
        "rope_positional/rope_half_rotation_tables",
        (("cos, sin, -1), None, None\n", "cos, sin, -1), torch.zeros_like(cos), None\n"),),
        "unnamed: the backward returns a gradient for cos",
    ),
]
