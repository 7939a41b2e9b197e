"""The mutation tool without the program: every kind makes the change that it claims, and nothing else."""

from __future__ import annotations

import ast
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "attacks"))
import mutants
import mutate
import suite

PAIR = """\
import torch, triton
import triton.language as tl

@triton.jit
def forward_kernel(x_ptr, N):
    tl.store(x_ptr, 1.0, mask=N > 0)

# ---- backward ----

@triton.jit
def backward_kernel(x_ptr, dy_ptr, dx_ptr, dw_ptr, M, N, BLOCK: tl.constexpr):
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    cols = tl.arange(0, BLOCK)
    offs = rows[:, None] * N + cols[None, :]
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, M, BLOCK):
        x = tl.load(x_ptr + offs, mask=cols < N, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + start * 8 + cols * 4)
        total += tl.sum(x * dy, axis=1)
    for i in range(M):
        total = tl.where(total >= 1.0, total, 0.5)
    p = tl.exp(total - tl.max(total, axis=0))
    dx = tl.dot(tl.trans(dy), x.T) - p / total
    tl.store(dx_ptr + cols, dx)
    tl.atomic_add(dw_ptr + cols, p)


def helper(x, dy, w):
    dx, dw = torch.zeros_like(x), torch.empty_like(w)
    backward_kernel[(triton.cdiv(x.numel(), 64), w.numel())](x, dy, dx, dw, 3)
    return dx, dw


class Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, flag):
        ctx.save_for_backward(x, w)
        return x.contiguous()

    @staticmethod
    def backward(ctx, dy):
        x, w = ctx.saved_tensors
        dy = dy.contiguous()
        dx, dw = helper(x, dy, w)
        return dx if ctx.needs_input_grad[0] else None, dw if ctx.needs_input_grad[1] else None, None


def stub_autograd(x, w, flag):
    return Function.apply(x.contiguous(), w, flag)
"""

LOAD = "x = tl.load(x_ptr + offs, mask=cols < N, other=0.0).to(tl.float32)"
DX = "dx = tl.dot(tl.trans(dy), x.T) - p / total"
RETURN = "return dx if ctx.needs_input_grad[0] else None, dw if ctx.needs_input_grad[1] else None, None"
LAUNCH = "backward_kernel[(triton.cdiv(x.numel(), 64), w.numel())](x, dy, dx, dw, 3)"

# kind -> a line, and what the kind makes of it
CHANGES = [
    ("zeroed", "tl.store(dx_ptr + cols, dx)", "tl.store(dx_ptr + cols, (dx) * 0.0)"),
    ("scaled by 1.01", "tl.store(dx_ptr + cols, dx)", "tl.store(dx_ptr + cols, (dx) * 1.01)"),
    ("scaled by 2", "tl.atomic_add(dw_ptr + cols, p)", "tl.atomic_add(dw_ptr + cols, (p) * 2.0)"),
    ("sign flipped", "tl.store(dx_ptr + cols, dx)", "tl.store(dx_ptr + cols, -(dx))"),
    ("narrowed to float16", "tl.store(dx_ptr + cols, dx)", "tl.store(dx_ptr + cols, (dx).to(tl.float16))"),
    ("write removed", "tl.store(dx_ptr + cols, dx)", "pass"),
    ("atomic replaced by store", "tl.atomic_add(dw_ptr + cols, p)", "tl.store(dw_ptr + cols, p)"),
    ("mask removed", LOAD, "x = tl.load(x_ptr + offs).to(tl.float32)"),
    ("mask removed", "total = tl.where(total >= 1.0, total, 0.5)", "total = total"),
    ("other changed", LOAD, LOAD.replace("other=0.0", "other=1.0")),
    ("bound off by one", LOAD, LOAD.replace("cols < N", "cols <= N")),
    (
        "bound off by one",
        "total = tl.where(total >= 1.0, total, 0.5)",
        "total = tl.where(total > 1.0, total, 0.5)",
    ),
    ("wrong reduction axis", "total += tl.sum(x * dy, axis=1)", "total += tl.sum(x * dy, axis=0)"),
    ("summed over both axes", "total += tl.sum(x * dy, axis=1)", "total += tl.sum(x * dy)"),
    (
        "loop ends one step early",
        "for start in range(0, M, BLOCK):",
        "for start in range(0, (M) - BLOCK, BLOCK):",
    ),
    (
        "loop begins one step late",
        "for start in range(0, M, BLOCK):",
        "for start in range((0) + BLOCK, M, BLOCK):",
    ),
    ("loop ends one step early", "for i in range(M):", "for i in range((M) - 1):"),
    ("loop runs one step long", "for i in range(M):", "for i in range((M) + 1):"),
    ("exponent not shifted", "p = tl.exp(total - tl.max(total, axis=0))", "p = tl.exp((total))"),
    ("term dropped", DX, "dx = (tl.dot(tl.trans(dy), x.T))"),
    ("term dropped", DX, "dx = (-(p / total))"),
    ("term negated", DX, "dx = (tl.dot(tl.trans(dy), x.T)) + (p / total)"),
    ("factor dropped", DX, "dx = tl.dot(tl.trans(dy), x.T) - (p)"),
    ("factor dropped", "total += tl.sum(x * dy, axis=1)", "total += tl.sum((x), axis=1)"),
    (
        "accumulated in float16",
        "total += tl.sum(x * dy, axis=1)",
        "total = (total + (tl.sum(x * dy, axis=1))).to(tl.float16)",
    ),
    ("overwritten in the loop", "total += tl.sum(x * dy, axis=1)", "total = tl.sum(x * dy, axis=1)"),
    ("cast to float16", LOAD, LOAD.replace("float32", "float16")),
    ("transpose dropped", DX, DX.replace("tl.trans(dy)", "dy")),
    ("transpose dropped", DX, DX.replace("x.T", "x")),
    (
        "strides swapped",
        "offs = rows[:, None] * N + cols[None, :]",
        "offs = rows[:, None] + cols[None, :] * N",
    ),
    (
        "strides swapped",
        "dy = tl.load(dy_ptr + start * 8 + cols * 4)",
        "dy = tl.load(dy_ptr + start * 4 + cols * 8)",
    ),
    (
        "wrong program axis",
        "rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)",
        "rows = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)",
    ),
    (
        "branches swapped",
        "total = tl.where(total >= 1.0, total, 0.5)",
        "total = tl.where(total >= 1.0, 0.5, total)",
    ),
    (
        "wrong base",
        "p = tl.exp(total - tl.max(total, axis=0))",
        "p = tl.exp2(total - tl.max(total, axis=0))",
    ),
    (
        "tail tile skipped",
        LAUNCH,
        LAUNCH.replace("triton.cdiv(x.numel(), 64)", "max((x.numel()) // (64), 1)"),
    ),
    ("one program fewer", LAUNCH, LAUNCH.replace("w.numel()", "max((w.numel()) - 1, 1)")),
    ("launch arguments swapped", LAUNCH, LAUNCH.replace("dx, dw", "dw, dx")),
    (
        "not initialised",
        "dx, dw = torch.zeros_like(x), torch.empty_like(w)",
        "dx, dw = torch.empty_like(x), torch.empty_like(w)",
    ),
    ("saved tensors swapped", "x, w = ctx.saved_tensors", "w, x = ctx.saved_tensors"),
    ("wrong needs_input_grad", RETURN, RETURN.replace("[0]", "[1]")),
    ("upstream not contiguous", "dy = dy.contiguous()", "dy = dy"),
    ("gradient left out", RETURN, "return None, dw if ctx.needs_input_grad[1] else None, None"),
    (
        "two gradients swapped",
        RETURN,
        "return dw if ctx.needs_input_grad[1] else None, dx if ctx.needs_input_grad[0] else None, None",
    ),
    (
        "gradients returned one place on",
        RETURN,
        "return None, dx if ctx.needs_input_grad[0] else None, dw if ctx.needs_input_grad[1] else None",
    ),
    ("transposed", RETURN, RETURN.replace("dx if", "dx.transpose(-1, -2).reshape(dx.shape) if")),
]

# The same for state, layouts, defaults and numbers: more than one place changes.
LINE = PAIR[: PAIR.index("empty_like")].count("\n") + 1
KEPT = f'_KEPT.setdefault(("helper", {LINE}, 34, str(w.shape)), torch.empty_like(w))'
DICTIONARY = "\n\n_KEPT = {}\n"
CALLS = PAIR.replace("stub_autograd(x, w, flag)", "stub_autograd(x, w, flag=2)").replace(
    "dx, dw = helper(x, dy, w)", "dx, dw = helper(x, dy, w * ctx.flag + x.stride(0))"
)
CALL_CHANGES = [
    ("input not contiguous", {"return x.contiguous()": "return x"}),
    ("input not contiguous", {"apply(x.contiguous()": "apply(x"}),
    ("row length for its stride", {"x.stride(0)": "x.shape[-1]"}),
    ("default of its own", {"flag=2": "flag=2 * 2"}),
    ("number hard-coded", {"ctx.flag": "2"}),
    (
        "saved past save_for_backward",
        {
            "ctx.save_for_backward(x, w)": "ctx.kept_tensors = (x, w,)",
            "ctx.saved_tensors": "ctx.kept_tensors",
        },
    ),
    ("tensors of the first call", {"ctx.saved_tensors": '_KEPT.setdefault("saved", ctx.saved_tensors)'}),
    (
        "buffer kept by its size",
        {"torch.empty_like(w)": KEPT},
    ),
]


@pytest.mark.parametrize(("kind", "edits"), CALL_CHANGES, ids=[str(i) for i in range(len(CALL_CHANGES))])
def test_kind__of_calls__makes_exactly_this_change(kind: str, edits: dict[str, str]):
    wanted = CALLS
    for old, new in edits.items():
        assert wanted.count(old) == 1, old
        wanted = wanted.replace(old, new)
    if "_KEPT" in wanted:
        wanted += DICTIONARY
    assert [m.kind for m in mutants.of("pair.py", CALLS) if m.source == wanted] == [kind]


@pytest.fixture(scope="module")
def made() -> list[mutants.Mutant]:
    return mutants.of("pair.py", PAIR)


@pytest.mark.parametrize(
    ("kind", "old", "new"), CHANGES, ids=[f"{k}-{i}" for i, (k, _, _) in enumerate(CHANGES)]
)
def test_kind__of_a_pair_with_everything__makes_exactly_this_change(
    made: list[mutants.Mutant], kind: str, old: str, new: str
):
    assert PAIR.count(old) == 1
    wanted = PAIR.replace(old, new)
    assert [m.kind for m in made if m.source == wanted] == [kind]


def test_upstream_replaced_by_ones__comes_before_the_upstream_is_used(made: list[mutants.Mutant]):
    (mutant,) = [m for m in made if m.kind == "upstream replaced by ones"]
    assert mutant.diff(PAIR).splitlines() == ["+        dy = torch.ones_like(dy)"]


def test_kinds__of_the_table__are_all_that_there_are(made: list[mutants.Mutant]):
    others = {kind for kind, _ in CALL_CHANGES} - {
        "row length for its stride", "default of its own", "number hard-coded"
    }  # fmt: skip
    assert {m.kind for m in made} == {kind for kind, _, _ in CHANGES} | others | {"upstream replaced by ones"}


def test_of__forward_part_and_the_users_forward__are_not_touched(made: list[mutants.Mutant]):
    forward = PAIR.split(mutants.MARKER)[0]
    assert all(m.source.startswith(forward) for m in made)
    assert not [m for m in made if "Function.apply" in m.old]


def test_of__what_reads_the_same__is_no_mutant():
    one = PAIR.replace("(x, dy, dx, dw, 3)", "(x, x, x, x, x)")
    made = mutants.of("pair.py", one)
    assert not [m for m in made if m.kind == "launch arguments swapped"]
    trees = [ast.dump(ast.parse(m.source)) for m in made]
    assert len(set(trees)) == len(trees) and ast.dump(ast.parse(one)) not in trees


def test_nth__tells_lines_apart_that_read_the_same():
    again = PAIR.replace("    p = tl.exp(", "    total += tl.sum(x * dy, axis=1)\n    p = tl.exp(", 1)
    assert again != PAIR
    twice = [m for m in mutants.of("pair.py", again) if m.at == "total += tl.sum(x * dy, axis=1)"]
    assert {m.nth for m in twice} == {1, 2} and len({m.key for m in twice}) == len(twice)
    assert len({(m.kind, m.at, m.new) for m in twice}) < len(twice)


def test_other__of_a_load_whose_lanes_never_meet__is_left_alone():
    apart = PAIR.replace("total += tl.sum(x * dy, axis=1)", "total += dy").replace("x.T", "dy")
    assert not [m for m in mutants.of("pair.py", apart) if m.kind == "other changed"]


def test_other__of_a_name_that_is_loaded_anew_before_the_sum__is_left_alone():
    again = PAIR.replace(
        "    p = tl.exp(",
        "    q = tl.load(dy_ptr, mask=M > 0, other=0.0)\n    q = total\n    p = tl.sum(q)\n    p = tl.exp(",
    )
    assert (
        len([m for m in mutants.of("pair.py", again) if m.kind == "other changed"]) == 1
    )  # that of x, as before


@pytest.mark.parametrize("name", suite.own_controls())
def test_of__control__parses_and_differs_in_the_backward_only(name: str):
    source = suite.pair(name, suite.control(name))
    made = mutants.of(name, source)
    short = len(source.partition(mutants.MARKER)[2].splitlines()) < 25
    assert len(made) > (3 if short else 10) and len({m.source for m in made}) == len(made)
    for mutant in made:
        ast.parse(mutant.source)
        assert mutant.source.startswith(source.split(mutants.MARKER)[0]) and mutant.diff(source)


def test_sample__takes_every_kind_before_any_twice_and_grows_by_adding(made: list[mutants.Mutant]):
    kinds = {m.kind for m in made}
    some = mutants.sample(made, len(kinds), seed=3)
    assert {m.kind for m in some} == kinds
    more = mutants.sample(made, len(kinds) + 7, seed=3)
    assert {m.source for m in some} < {m.source for m in more} and len(more) == len(kinds) + 7
    assert mutants.sample(made, len(kinds), seed=3) == some != mutants.sample(made, len(kinds), seed=4)
    assert mutants.sample(made, 10_000, seed=3) == made


def test_explanations__of_the_datasets_pairs__name_mutants_that_are_made():
    with open(ROOT / "tests" / "attacks" / "equivalent.toml", "rb") as file:
        entries = tomllib.load(file).get("mutant", [])
    assert all(
        entry["class"] in ("equivalent", "unobservable", "hole") and entry["reason"] for entry in entries
    )
    for pair in {entry["pair"] for entry in entries if entry["pair"].startswith("dataset/")}:
        keys = {m.key for m in mutants.of(pair, (ROOT / pair).read_text())}
        stale = [k for k in mutate.explanations() if k[0] == pair and k not in keys]
        assert not stale


def results_of(pair: mutate.Pair, original: str, verdicts: dict[str, str]) -> mutate.Results:
    results = mutate.Results(None)
    results.add(pair.source, {"verdict": original, "facts": ""})
    for mutant in pair.tried:
        results.add(
            mutant.source, {"verdict": verdicts.get(mutant.kind, "not_verified"), "facts": "- (x) raised: y"}
        )
    return results


def test_tally__survivor_and_what_was_not_judged__are_not_killed(made: list[mutants.Mutant]):
    pair = mutate.Pair("pair.py", PAIR, len(made), mutants.sample(made, 40, 0))
    score = mutate.tally(
        [pair], results_of(pair, "verified", {"zeroed": "verified", "sign flipped": "unusable"})
    )
    missed = [m for m in pair.tried if m.kind in ("zeroed", "sign flipped")]
    assert missed and score["total"] == 40 and score["killed"] == 40 - len(missed)
    assert [entry["kind"] for entry in score["not_killed"]] == [m.kind for m in missed]
    assert score["rejected_for"] == {"raised": 40 - len(missed)}


def test_tally__explained_mutants__count_only_as_holes(
    made: list[mutants.Mutant], monkeypatch: pytest.MonkeyPatch
):
    classes = dict(zip(("equivalent", "unobservable", "hole"), made, strict=False))
    known = {m.key: {"class": name, "reason": "because"} for name, m in classes.items()}
    monkeypatch.setattr(mutate, "explanations", lambda: known)
    pair = mutate.Pair("pair.py", PAIR, len(made), made[3:13], made[:3])
    score = mutate.tally([pair], results_of(pair, "verified", {}))
    assert (score["killed"], score["total"]) == (10, 11)
    assert [entry["class"] for entry in score["not_killed"]] == list(classes)
    assert mutate.summary(score).startswith(
        "10/11 mutants killed, 1 of the others known holes; not counted: 1"
    )


def test_small_shapes__stand_before_the_marker_and_only_where_the_table_has_them():
    changed = mutate.on_small_shapes("examples/softmax.py", PAIR)
    forward, backward = changed.split(mutants.MARKER)
    assert forward.rstrip().endswith("SWEEP_CPU = [{'M': 5, 'N': 70}]")
    assert backward == PAIR.split(mutants.MARKER)[1]
    assert mutate.on_small_shapes("dataset/scan/cumsum_row_tile.py", PAIR) == PAIR


def test_tally__original_that_is_rejected__proves_nothing(made: list[mutants.Mutant]):
    pair = mutate.Pair("pair.py", PAIR, len(made), made)
    score = mutate.tally([pair], results_of(pair, "not_verified", {}))
    assert score["total"] == 0 and score["files"] == [{"pair": "pair.py", "original": "not_verified"}]


@pytest.mark.parametrize(
    ("facts", "wanted"),
    [
        ("On shape {}, 1 of 1 cases fail:\n- (normal upstream) The gradient of x is off\n", "values"),
        ("On shape {}:\n- (normal upstream) The gradient of x is not finite at 3 of 9\n", "not finite"),
        ("The gradient of x was never returned.\nOn {}:\n- (normal) raised: NameError\n", "raised"),
        (
            "The gradient of x was never returned.\nOn {}:\n- (normal) raised: load out of bounds\n",
            "out of bounds",
        ),
        ("no_launch: line 81: the backward launches no Triton kernel\n", "rule"),
    ],
)
def test_cause__of_a_rejection__is_its_first_named_failure(facts: str, wanted: str):
    assert mutate.cause(facts) == wanted


def test_results__of_an_interrupted_run__are_read_again(tmp_path: Path):
    path = tmp_path / "results.jsonl"
    mutate.Results(path).add("source", {"verdict": "not_verified", "facts": "f"})
    again = mutate.Results(path)
    assert again.of("source")["facts"] == "f" and again.of("other")["verdict"] == "none"
