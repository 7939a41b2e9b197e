"""Products of float32 that a forward wants exact, as three products in TF32 each.

    tl.dot(a, b, input_precision="ieee")        tl.dot(a, b, input_precision="tf32x3")

Tensor cores have no float32: "ieee" multiplies and adds one number after the other, in registers that hold
all of a tile's operands. Of a number's 24 bits TF32 has 11, the rest of it 11 more: with a = A + a' and
b = B + b' the sum A B + A b' + a' B leaves out 2**-22 of a product. That is less than what a sum of a
thousand products in float32 loses: for rows of 1,024 an H200 was three to four times as near to float64 as
cuBLAS, and took a third of the time of the best tiles with "ieee" (bench/results/exact-products-h200.json).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..ir.nodes import Node, nodes_in, real
from ..ir.report import LineReport

IEEE, THREE = "ieee", "tf32x3"


def _found(effects: list[Any]) -> Iterator[Node]:
    """Products of float32 that are exact."""
    for node in nodes_in(effects):
        if node.op != "dot" or node.attrs["precision"] != IEEE or node.attrs.get("small"):
            continue
        if all(real(arg.dtype) == "float32" for arg in node.args[:2]):
            yield node


def offers(effects: list[Any]) -> bool:
    """Whether kernels with these effects have such products."""
    return any(True for _ in _found(effects))


def use(effects: list[Any], report: list[LineReport]) -> None:
    """Make them of three in TF32."""
    reason = "products of float32 are three of TF32 each, which leaves out 2**-22 of a product"
    for node in list(_found(effects)):
        node.attrs["precision"] = THREE
        if not any(one.reason == reason for one in report):
            report.append(LineReport(None, "dot", THREE, reason))
