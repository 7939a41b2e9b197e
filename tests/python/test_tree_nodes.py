"""source.tree_nodes: what ast.walk finds, in its order, but for contexts."""

from __future__ import annotations

import ast
from pathlib import Path

from kernel_agent.source import tree_nodes

EVERY_NODE = """
from a.b import c as d, e
import f
@g(1, h=2)
def i(j: int, /, k=3, *l: "m", n: o = 4, **p) -> q: "text"
async def r():
    async with s as t, u: await v
    async for w in x: yield
    return [y async for z in aa if bb]
class Cc(Dd, ee=ff): gg: int = 5
global_ = hh = ii[jj:kk:ll, ...]
mm += nn if oo else not pp
del qq, rr.ss
for tt in uu: continue
else: pass
while vv < ww <= xx: break
with yy: raise zz from aaa
try: assert bbb, ccc
except ddd as eee: pass
except fff: pass
finally: ggg = lambda hhh, *iii: {**jjj, "kkk": {lll, *mmm}}
try: pass
except* nnn: pass
match ooo:
    case {"ppp": 1, **qqq}: pass
    case [Rrr(sss, ttt=uuu), *vvv] | None: pass
    case www as xxx if yyy: pass
print(f"{zzz!r:>{width}} {more}", (yield), *stars, **more)
{a for a in b}, {a: b for a in c if d}, (a for a in b for c in d), (x := -1)
def last():
    global g1, g2
    def inner():
        nonlocal n1
        yield from last
"""


def test_nodes__of_every_kind__are_those_of_walk_in_its_order():
    trees = [ast.parse(path.read_text()) for path in Path(__file__).parent.glob("*.py")]
    written = ast.parse(EVERY_NODE, type_comments=True)
    kinds = {type(node) for node in ast.walk(written)}
    missing = {ast.For, ast.While, ast.Match, ast.MatchMapping, ast.TryStar, ast.NamedExpr} - kinds
    assert not missing
    for tree in (written, *trees):
        all_but_contexts = [node for node in ast.walk(tree) if not isinstance(node, ast.expr_context)]
        assert list(tree_nodes(tree)) == all_but_contexts


def test_nodes__put_below_one_that_was_not_reached_yet__are_found():
    tree = ast.parse("a + b")
    found = []
    for node in tree_nodes(tree):
        if isinstance(node, ast.Expr):
            node.value.right = ast.Name("c", ast.Load())
        found.append(getattr(node, "id", None))
    assert "a" in found and "c" in found and "b" not in found
