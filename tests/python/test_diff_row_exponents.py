"""Factors of rows that the exponents of their weights hold: log-sum-exp in place of maximum and sum."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from diff_support import MARKER, ROOT, assert_right, draft, edits_of, pair_text
from kernel_agent import draw
from kernel_agent.differentiate.ir.graph import Graph
from kernel_agent.differentiate.ir.nodes import Node, TapeStore, nodes_in
from kernel_agent.differentiate.schedule.row_exponents import applies, move
from kernel_agent.forward import load

ATTENTION = ROOT / "examples/attention.py"
WITH_LSE = ROOT / "dataset/attention/flash_attn_causal_split_dq_dkdv.py"
FOLDED = {"logsumexp": 1}
CAUSAL = {"B": 1, "H": 2, "N": 130, "D": 16, "causal": True}
RAGGED = [(CAUSAL, "normal"), ({"B": 2, "H": 1, "N": 37, "D": 24, "causal": False}, "transposed")]
NATURAL = (  # exponentials of base e, and no number that scores are multiplied with behind their product
    ("tl.exp2(", "tl.exp("),
    (" * (scale * log2e)\n        visible = cols[None, :] < N", "\n        visible = cols[None, :] < N"),
)


@pytest.fixture
def changed(tmp_path: Path):
    return edits_of(ATTENTION.read_text(), tmp_path / "attention.py", once=False)


@pytest.fixture
def with_lse(tmp_path: Path) -> Path:
    """An attention that returns the logarithm of each row's sum as well."""
    file = tmp_path / "with_lse.py"
    text = WITH_LSE.read_text().partition(MARKER)[0].rstrip() + "\n"
    returned = "return attention_forward(q.contiguous(), k.contiguous(), v.contiguous())"
    assert text.count(f"{returned}[0]") == 1
    file.write_text(text.replace(f"{returned}[0]", returned))
    return file


def loops(result: dict) -> list[str]:
    """What is done in the innermost loops of the backward's kernels."""
    backward = result["backward"].partition("def attention_kernel_saving")[0]
    return re.findall(r"\n    for [^\n]*\n((?:        [^\n]*\n|\n)+)", backward)


def test_attention__has_fewer_operations_for_each_score() -> None:
    plain, result = (draft(ATTENTION, CAUSAL, config=config) for config in ({}, FOLDED))
    assert "factor[" in plain["backward"] and "factor[" not in result["backward"]
    assert "row_max + tl.log2(row_sum)" in result["backward"]
    before, after = (["\n".join(loops(one)).count(op) for op in ("* ", "factor[")] for one in (plain, result))
    assert before[1] == 3 and after[1] == 0 and after[0] < before[0]
    assert_right(ATTENTION, result, RAGGED)


def test_main_kernel_keeps_for_owners__what_a_row_adds() -> None:
    """It is a sum over what the forward had stored: nobody loads that once more."""
    (backward,) = re.findall(
        r"def attention_kernel_bwd_v_k\(.*?\n@", draft(ATTENTION, CAUSAL, config=FOLDED)["backward"], re.S
    )
    assert "o_ptr" not in backward.replace("d_o_ptr", "") and "spill_d_row_sum" in backward
    assert "saved_row" not in backward


def test_it_goes_with_tiles_formed_transposed_and_blocks_of_its_own() -> None:
    config = {**FOLDED, "turned": 1, "BLOCK_M": 64, "BLOCK_N": 64, "num_warps": 4}
    result = draft(ATTENTION, CAUSAL, config=config)
    assert "log_sum[None, :]" in result["backward"]
    assert_right(ATTENTION, result, RAGGED)


def test_it_is_offered_behind_tiles_formed_transposed__once() -> None:
    configs = draft(ATTENTION, CAUSAL)["report"]["configs"]
    at = configs.index(FOLDED)
    assert configs[at - 1].get("turned") and "logsumexp" not in str(configs[:at] + configs[at + 1 :])
    assert FOLDED not in draft(ATTENTION, CAUSAL, config=FOLDED)["report"]["configs"]
    assert FOLDED not in draft(ATTENTION, CAUSAL, schedule="atomic")["report"]["configs"]


def test_asking_whether_it_could_be__leaves_the_draft_as_it_is(monkeypatch) -> None:
    plain = draft(ATTENTION, CAUSAL)
    monkeypatch.setattr("kernel_agent.differentiate.schedule.row_exponents.applies", lambda *_: False)
    assert draft(ATTENTION, CAUSAL)["backward"] == plain["backward"]


def test_natural_exponentials_of_scores_as_they_are(changed) -> None:
    file = changed(*NATURAL)
    result = draft(file, CAUSAL, config=FOLDED)
    assert "row_max + tl.log(row_sum)" in result["backward"] and "spill_d_row_sum" in result["backward"]
    assert_right(file, result, RAGGED)


def reference(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs of a causal attention, and log2 of the sums of exponentials of base 2."""
    N, D = q.shape[-2:]
    future = torch.ones(N, N, dtype=torch.bool).triu(1)
    s = (D**-0.5 * q @ k.transpose(-1, -2)).masked_fill(future, -torch.inf)
    return torch.softmax(s, dim=-1) @ v, torch.logsumexp(s, dim=-1) / math.log(2)


@pytest.mark.parametrize(("times", "bound"), [(1, 1e-5), (16, 1e-3)])
def test_row_with_nothing_from_upstream_but_for_its_sum(
    with_lse: Path, tmp_path: Path, times: int, bound: float
) -> None:
    """Of three rows one has something for its outputs alone, one for its logarithm alone, and one nothing,
    whose exponentials may be too large for a number."""
    result = draft(with_lse, {"B": 1, "H": 1, "N": 70, "D": 16}, config=FOLDED)
    assert "log_sum" in result["backward"]
    pair = tmp_path / "pair.py"
    pair.write_text(pair_text(with_lse.read_text(), result["backward"]))
    fwd = load(str(pair))
    args, kwargs = draw.make_inputs(fwd, {"B": 1, "H": 1, "N": 70, "D": 16}, 0)
    args = [a * times if isinstance(a, torch.Tensor) else a for a in args]
    exact = [a.double().requires_grad_() if isinstance(a, torch.Tensor) else a for a in args]
    args = [a.requires_grad_() if isinstance(a, torch.Tensor) else a for a in args]
    out = getattr(fwd.module, f"{fwd.stub_name}_autograd")(*args, **kwargs)
    expected = reference(*exact)
    upstreams = [torch.randn_like(one) for one in out]
    rows = torch.arange(70) % 3
    upstreams[0][..., rows != 0, :] = 0
    upstreams[1].view(-1, 70)[:, rows != 1] = 0
    torch.autograd.backward(out, upstreams)
    torch.autograd.backward(expected, [up.double() for up in upstreams])
    for mine, other in zip(args, exact, strict=True):
        if isinstance(mine, torch.Tensor):
            assert (mine.grad.double() - other.grad).norm() <= bound * other.grad.norm()


def test_rows_that_see_nothing_and_are_not_stored__have_no_part(changed) -> None:
    """Of their sum, which is 0, there is no logarithm."""
    file = changed(
        ("visible = cols[None, :] < N\n", "visible = (cols[None, :] < N) & (offs_m[:, None] > 2)\n"),
        ('row_max = tl.full([BLOCK_M], -float("inf")', "row_max = tl.full([BLOCK_M], -1.0e30"),
        ("        mask=in_rows,\n", "        mask=in_rows & (offs_m[:, None] > 2),\n"),
        ("o = torch.empty_like(q)", "o = torch.zeros_like(q)"),
    )
    result = draft(file, CAUSAL, config=FOLDED)
    assert "log_sum" in result["backward"]
    assert_right(file, result, RAGGED)


class Softmax:
    """The adjoint of weights p = exp2(score - least) with the factor of their rows, in a loop."""

    def __init__(self) -> None:
        self.g = g = Graph()
        rows, columns = (
            g.intern("constexpr", (), {"name": n, "value": v}, "int32", ())
            for n, v in {"ROWS": 64, "COLUMNS": 32}.items()
        )
        self.row, self.tile = (rows,), (rows, columns)
        self.scale = g.intern("param", (), {"name": "scale"}, "float32", ())
        self.up, self.out = self.loaded(self.tile), self.loaded(self.tile)
        self.total, self.least = self.loaded(self.row), self.loaded(self.row)
        self.inverse = g.div(g.number(1), self.total)
        self.zero = g.compare("==", self.up, g.number(0))
        some = g.reduce("max", g.where(self.zero, g.number(0), g.number(1)), 1)
        cond = g.compare(">", some, g.number(0))
        self.factor = g.make("where", (cond, self.inverse, g.number(0)), {"kept": True}, "float32", self.row)
        self.score, self.dot = self.loaded(self.tile), self.loaded(self.tile)
        self.p = g.call("exp2", g.sub(self.score, g.expand(self.least, 1)))
        self.rest = self.sum_of(g.mul(g.mul(self.up, self.out), g.expand(self.inverse, 1)))

    def loaded(self, shape: tuple) -> Node:
        return self.g.fresh("load", {}, "float32", shape, self.g.top)

    def sum_of(self, product: Node, axis: int = 1) -> Node:
        """What a row adds: 0 where nothing comes from upstream."""
        return self.g.reduce("sum", self.g.where(self.zero, self.g.number(0), self.g.neg(product)), axis)

    def scaled(self, value: Node, number: Node | None = None) -> Node:
        return self.g.mul(value, number or self.scale)

    def adjoint(self, weight: Node | None = None, rest: Node | None = None) -> Node:
        g = self.g
        summed = g.add(g.mul(self.dot, g.expand(self.factor, 1)), g.expand(rest or self.rest, 1))
        return g.mul(summed, weight or self.p)

    def factored(self, weight: Node | None = None) -> Node:
        return self.g.mul(weight or self.p, self.g.expand(self.factor, 1))

    def moved(self, *values: Node) -> list[Node] | None:
        """These after the factor was moved into exponents; None where it stays."""
        g = self.g
        stores = [TapeStore(f"t{i}", g.const(0), value, g.top) for i, value in enumerate(values)]
        reverse = SimpleNamespace(effects=stores, kernel=SimpleNamespace(graph=g), say=lambda *_: None)
        move(reverse, [self.factor])
        made = [store.value for store in reverse.effects]
        assert applies(SimpleNamespace(effects=stores, kernel=reverse.kernel), [self.factor]) == (
            made != list(values)
        )
        return None if made == list(values) else made


def test_weights_and_their_adjoint__have_no_factor_left() -> None:
    s = Softmax()
    p, adjoint = s.moved(s.factored(), s.scaled(s.adjoint()))
    assert p.op == "call" and s.factor not in set(nodes_in([p, adjoint]))
    summed, weight = adjoint.args
    assert weight is p and summed.op == "add" and summed.args[0] is s.scaled(s.dot)
    (log_sum,) = (n for n in nodes_in([p]) if n.hint == "log_sum")
    assert log_sum.args[0] is s.factor.args[0]


def test_number_of_some_users_alone__is_left_to_them() -> None:
    s = Softmax()
    other = s.adjoint()
    _, one, two = s.moved(s.factored(), s.scaled(other), s.g.neg(other))
    assert one.op == "mul" and one.args[1] is s.scale and two.op == "neg" and one.args[0] is two.args[0]


def test_number_of_each_element__is_no_number_of_the_sum() -> None:
    s = Softmax()
    each = s.loaded(s.tile)
    _, one = s.moved(s.factored(), s.scaled(s.adjoint(), each))
    assert one.args[1] is each


def test_rows_with_an_upstream_of_their_own__are_asked_for_it() -> None:
    s = Softmax()
    g, other = s.g, s.loaded(s.row)
    rest = g.add(g.where(g.compare("==", other, g.number(0)), g.number(0), g.div(other, s.total)), s.rest)
    p, _ = s.moved(s.factored(), s.adjoint(rest=rest))
    (log_sum,) = (n for n in nodes_in([p]) if n.hint == "log_sum")
    assert log_sum.args[0].op == "or"


def test_what_is_in_the_graph_already__keeps_its_name() -> None:
    s = Softmax()
    there = s.g.neg(s.g.mul(s.up, s.out))
    s.rest.args[0].args[2].hint = "named"
    assert s.moved(s.factored(), s.adjoint()) and there.hint is None


STAYS: dict[str, Callable[[Softmax], list[Node] | None]] = {
    "something else has the factor": lambda s: s.moved(s.factored(), s.g.neg(s.factor)),
    "a column has it": lambda s: s.moved(s.factored(), s.adjoint(), s.g.expand(s.factor, 0)),
    "weights have it that are others": lambda s: s.moved(
        s.factored(), s.factored(s.g.call("exp2", s.g.sub(s.dot, s.g.expand(s.least, 1))))
    ),
    "something is added to it": lambda s: s.moved(s.factored(), s.g.add(s.dot, s.g.expand(s.factor, 1))),
    "nothing but products have it": lambda s: s.moved(s.adjoint()),
    "weights are no exponentials": lambda s: s.moved(
        s.factored(s.g.call("sqrt", s.g.sub(s.score, s.g.expand(s.least, 1))))
    ),
    "exponents are no differences": lambda s: s.moved(s.factored(s.g.call("exp2", s.score))),
    "what is subtracted is of columns": lambda s: s.moved(
        s.factored(s.g.call("exp2", s.g.sub(s.score, s.g.expand(s.loaded(s.tile[1:]), 0))))
    ),
    "the adjoint is another's too": lambda s: s.moved(
        s.factored(), s.adjoint(), s.g.neg(s.adjoint().args[0])
    ),
    "the product is another's too": lambda s: s.moved(
        s.factored(), s.adjoint(), s.g.neg(s.adjoint().args[0].args[0])
    ),
    "the product has no sum": lambda s: s.moved(
        s.factored(), s.g.mul(s.g.mul(s.dot, s.g.expand(s.factor, 1)), s.p)
    ),
    "the adjoint is of another weight": lambda s: s.moved(s.factored(), s.adjoint(weight=s.score)),
    "a row adds what is not over the sum": lambda s: s.moved(
        s.factored(), s.adjoint(rest=s.sum_of(s.g.mul(s.up, s.out)))
    ),
    "a row adds what is over another sum": lambda s: s.moved(
        s.factored(), s.adjoint(rest=s.g.div(s.least, s.loaded(s.row)))
    ),
    "a row adds what has another factor": lambda s: s.moved(
        s.factored(), s.adjoint(rest=s.sum_of(s.g.mul(s.up, s.g.expand(s.least, 1))))
    ),
    "a row adds a part that is not over the sum": lambda s: s.moved(
        s.factored(), s.adjoint(rest=s.g.add(s.rest, s.least))
    ),
    "a row adds its largest": lambda s: s.moved(
        s.factored(), s.adjoint(rest=s.g.reduce("max", s.rest.args[0], 1))
    ),
    "a row adds something else where nothing comes": lambda s: s.moved(
        s.factored(),
        s.adjoint(rest=s.g.reduce("sum", s.g.where(s.zero, s.g.number(1), s.rest.args[0].args[2]), 1)),
    ),
}


@pytest.mark.parametrize("why", STAYS)
def test_factor__stays_where(why: str) -> None:
    assert STAYS[why](Softmax()) is None
