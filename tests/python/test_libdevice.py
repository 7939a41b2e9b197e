"""Every function that Triton exports for use in kernels, by every path: known to the interpreter, the oracle
and the differentiator, or on a list of what is not supported."""

from __future__ import annotations

import importlib
import inspect
import math
import pkgutil
import re
import struct
from pathlib import Path
from typing import Any

import pytest
import test_diff_rules
import test_torch_tl as operations
import torch
import triton.language as tl
from diff_support import assert_right, draft
from kernel_agent import compat
from kernel_agent import libdevice as oracle
from kernel_agent.differentiate.read import functions, language
from kernel_agent.torch_tl import EXACT, NATIVE
from kernel_agent.vocabulary import _ATOMICS
from test_torch_tl import Evaluation, interpreted
from triton.language import extra
from triton.language.extra.cuda import libdevice

SYMBOL = re.compile(r'dtype\("(\w+)"\)[^:]*:\s*\("(__nv_\w+)"')


def symbols(name: str) -> list[str]:
    return [symbol for _, symbol in SYMBOL.findall(inspect.getsource(getattr(libdevice, name)))]


def exported(module: Any) -> list[str]:
    found = [name for name in dir(module) if not name.startswith("_") and name != "core"]
    return [name for name in found if callable(getattr(module, name))]


# What a kernel may not, or need not, call: types, hints to the compiler, parts of other functions.
TYPES = re.compile(
    r"^(u?int\d+|float\d+\w*|bfloat16|void|\w+_type|dtype|const|constexpr|tensor|tuple|slice|str_to_ty)$"
)
PARTS = {
    "PropagateNan", "bitonic_merge", "condition", "pair_uniform_to_normal", "philox", "philox_impl", "pi32_t",
    "reduce_or", "uint_to_uniform_float", "tensor_descriptor", "range", "static_print", "device_print", "must_use_result",
}  # fmt: skip
# The descriptors of a kernel are tried by their methods, which call these.
METHODS = {"load_tensor_descriptor", "store_tensor_descriptor"}
NOT_SUPPORTED = {"dot_scaled", "inline_asm_elementwise", "map_elementwise"}


def tried() -> set[str]:
    """Names that the oracle's tests call, as functions, as operators or as methods."""
    text = Path(operations.__file__).read_text()
    text += "".join(
        Path(__file__).with_name(name).read_text() for name in ("test_races.py", "test_oracle.py")
    )
    return set(re.findall(r"(?:tl|math|libdevice)\.(\w+)", text)) | set(re.findall(r"\.(\w+)\(", text))


def test_language__every_name_is_tried_or_listed() -> None:
    operators = {"add", "sub", "mul"}
    known = tried() | _ATOMICS | PARTS | METHODS | NOT_SUPPORTED | operators
    names = [
        name for name in exported(tl) if not TYPES.match(name) and not inspect.ismodule(getattr(tl, name))
    ]
    assert [name for name in names if name not in known] == []


def test_libdevice__every_function_is_the_oracles_or_listed() -> None:
    names = exported(libdevice)
    assert len(names) > 190
    missing = {n for n in names if not all(symbol in oracle.FUNCTIONS for symbol in symbols(n))}
    assert missing == oracle.UNSUPPORTED
    assert all(symbols(name) for name in names if name not in ("isnan", "isinf")), (
        "a function without symbols"
    )


def test_libdevice__every_path_of_import_has_the_same_names() -> None:
    # fast_tanhf is ROCm's alone
    portable = importlib.import_module("triton.language.extra.libdevice")
    assert set(exported(portable)) <= set(exported(libdevice)) | {"core", "fast_tanhf"}
    paths = [module.name for module in pkgutil.walk_packages(extra.__path__, extra.__name__ + ".")]
    assert {p.rpartition(".")[2] for p in paths} == {"cuda", "hip", "gdc", "libdevice", "utils"}


def test_differentiator__every_function_has_a_rule_or_is_refused_by_name() -> None:
    """What is left are integers, bits, and functions whose derivative is none that Triton has."""
    left = {n for n in exported(libdevice) if not functions.known(n)} - set(language.TABLE)
    integers = {
        n for n in left if re.match(r"(u?int|u?ll|double)2|double_as|float_as|longlong_as|u?int_as", n)
    }
    bits = {
        "brev",
        "byte_perm",
        "clz",
        "ffs",
        "hadd",
        "hiloint2double",
        "mul24",
        "mulhi",
        "popc",
        "rhadd",
        "sad",
    }
    assert left - integers - bits == {"lgamma", "tgamma", "nextafter"} | oracle.UNSUPPORTED


FLOATS = {
    "erfcinv": ("libdevice.erfcinv(z)", lambda x, z: torch.erfinv(1 - z)),
    "erfcx": ("libdevice.erfcx(x)", lambda x, z: torch.special.erfcx(x)),
    "norm3d": ("libdevice.norm3d(x, z, x + 1.0)", lambda x, z: (x * x + z * z + (x + 1) ** 2).sqrt()),
    "rnorm4d": ("libdevice.rnorm4d(x, z, x, z)", lambda x, z: (2 * x * x + 2 * z * z).rsqrt()),
    "ldexp": ("libdevice.ldexp(x, j)", None),
    "logb": ("libdevice.logb(z) + x", lambda x, z: torch.floor(torch.log2(z)) + x),
    "remainder": ("libdevice.remainder(x * 5, z)", lambda x, z: 5 * x - z * torch.round(5 * x / z)),
    "ilogb": ("libdevice.ilogb(z).to(tl.float32) * x", lambda x, z: torch.floor(torch.log2(z)) * x),
    "float2int_rd": ("libdevice.float2int_rd(x).to(tl.float32) * z", lambda x, z: torch.floor(x) * z),
    "float2ll_rz": ("libdevice.float2ll_rz(x * 9).to(tl.float32) * z", lambda x, z: torch.trunc(x * 9) * z),
    "llrint": ("libdevice.llrint(x * 3).to(tl.float32) + z", lambda x, z: torch.round(x * 3) + z),
    "int2float_rn": ("libdevice.int2float_rn(i) * x", None),
    "exp10": ("libdevice.exp10(x)", lambda x, z: 10**x),
    "fast_expf": ("libdevice.fast_expf(x) * z", lambda x, z: x.exp() * z),
    "rcp_rn": ("libdevice.rcp_rn(z) * x", lambda x, z: x / z),
    "fma_rd": ("libdevice.fma_rd(x, z, x)", lambda x, z: x * z + x),
}  # fmt: skip


@pytest.mark.parametrize("name", FLOATS)
def test_float_function__equals_torch_and_the_interpreter(name: str, tmp_path: Path) -> None:
    body, expected = FLOATS[name]
    kernel = operations.snippet(f"y = {body}", operations.N, tmp_path)
    given = operations.inputs()
    x, z = (given[key].double() for key in ("x_ptr", "z_ptr"))
    if expected is None:
        want = x * 2.0 ** given["j_ptr"] if name == "ldexp" else given["i_ptr"] * x
    else:
        want = expected(x, z)
    exact = operations.exact_function(kernel, given, operations.N)
    torch.testing.assert_close(exact(x, z), want, rtol=1e-6, atol=1e-7)
    tensors = given | {"y_ptr": torch.zeros(operations.N)}
    torch.testing.assert_close(interpreted(kernel, tensors)["y_ptr"], want.float(), rtol=3e-5, atol=1e-5)


def bits_of(value: float) -> int:
    return struct.unpack("<i", struct.pack("<f", value))[0]


INTEGERS = {
    "brev": ("libdevice.brev(i)", lambda x, i, j: _signed(int(f"{i & 0xFFFFFFFF:032b}"[::-1], 2))),
    "ffs": ("libdevice.ffs(i)", lambda x, i, j: (i & -i).bit_length()),
    "clz": ("libdevice.clz(j)", lambda x, i, j: 32 - j.bit_length()),
    "mulhi": ("libdevice.mulhi(i * 123456789, j * 98765432)", lambda x, i, j: _signed(i * 123456789) * _signed(j * 98765432) >> 32),
    "mul24": ("libdevice.mul24(i, j)", lambda x, i, j: i * j),
    "hadd": ("libdevice.hadd(i, j)", lambda x, i, j: (i + j) >> 1),
    "rhadd": ("libdevice.rhadd(i, j)", lambda x, i, j: (i + j + 1) >> 1),
    "sad": ("libdevice.sad(i, j, j.to(tl.uint32)).to(tl.int32)", lambda x, i, j: abs(i - j) + j),
    "byte_perm": ("libdevice.byte_perm(i, j, 0x4012)", lambda x, i, j: _signed(_permuted(i, j))),
    "float_as_int": ("libdevice.float_as_int(x)", lambda x, i, j: bits_of(x)),
    "bits and back": ("libdevice.float_as_int(libdevice.int_as_float(libdevice.float_as_int(x)))", lambda x, i, j: bits_of(x)),
    "float2int_rn": ("libdevice.float2int_rn(x * 7)", lambda x, i, j: round(x * 7)),
    "llround": ("libdevice.llround(x).to(tl.int32)", lambda x, i, j: int(math.copysign(math.floor(abs(x) + 0.5), x))),
    "high and low": (
        "libdevice.double2hiint(libdevice.hiloint2double(i + 1072693248, j)) + "
        "libdevice.double2loint(libdevice.hiloint2double(i, j))",
        lambda x, i, j: i + 1072693248 + j,
    ),
}  # fmt: skip


def _signed(value: int) -> int:
    return (value + (1 << 31)) % (1 << 32) - (1 << 31)


def _permuted(i: int, j: int) -> int:
    data = struct.pack("<ii", i, j)
    return int.from_bytes(bytes(data[at] for at in (2, 1, 0, 4)), "little")


@pytest.mark.parametrize("name", INTEGERS)
def test_integer_function__equals_python_and_the_interpreter(name: str, tmp_path: Path) -> None:
    body, expected = INTEGERS[name]
    kernel = operations.snippet(f"y = {body}", operations.N, tmp_path)
    tensors = operations.inputs(3) | {"y_ptr": torch.zeros(operations.N, dtype=torch.int32)}
    columns = (tensors[key].tolist() for key in ("x_ptr", "i_ptr", "j_ptr"))
    want = [expected(x, i, j) for x, i, j in zip(*columns, strict=True)]
    for precision in (NATIVE, EXACT):
        evaluation = Evaluation(precision, **tensors)
        evaluation.launch(kernel)
        assert evaluation["y_ptr"].tolist() == want
    assert interpreted(kernel, tensors)["y_ptr"].tolist() == want


def test_interpreter__names_a_function_that_it_does_not_have() -> None:
    with pytest.raises(NotImplementedError, match="__nv_jn is not supported"):
        compat._as_torch_has_it("__nv_jn")


# Functions with a rule: an expression of x (M, N), y (N) and z (M), and the range of the inputs.
RULES: dict[str, tuple[str, float, float]] = {
    **{
        name: (f"libdevice.{name}(x * y[None, :]) + z[:, None]", low, high)
        for name, low, high in [
            ("exp10", -1, 1), ("log10", 0.5, 2), ("cbrt", 0.5, 2), ("rcbrt", 0.5, 2), ("sinpi", -1, 1), ("cospi", -1, 1),
            ("sinh", -1, 1), ("cosh", -1, 1), ("tan", -0.9, 0.9), ("asin", -0.8, 0.8), ("acos", -0.8, 0.8), ("atan", -2, 2),
            ("acosh", 1.2, 2), ("erfcx", -1, 1), ("erfinv", -0.8, 0.8), ("erfcinv", 0.6, 1.1), ("normcdf", -1, 1),
            ("normcdfinv", 0.4, 0.9), ("cyl_bessel_i0", -2, 2), ("cyl_bessel_i1", 0.2, 2), ("fast_expf", -1, 1),
            ("fast_logf", 0.5, 2), ("fast_sinf", -1, 1), ("rcp_rn", 0.5, 2), ("saturatef", -1.5, 1.5), ("sqrt_rz", 0.5, 2),
        ]
    },
    **{
        name: (f"libdevice.{name}(x + z[:, None], y[None, :])", low, high)
        for name, low, high in [
            ("atan2", 0.3, 2), ("hypot", 0.3, 2), ("rhypot", 0.3, 2), ("fmod", 0.3, 2), ("remainder", 0.3, 2), ("fdim", -2, 2),
            ("copysign", -2, 2), ("fast_powf", 0.5, 2), ("fast_dividef", 0.5, 2), ("div_rz", 0.5, 2), ("add_rd", -2, 2),
        ]
    },
    "norm3d": ("libdevice.norm3d(x, y[None, :] + 0 * x, z[:, None] + 0 * x)", 0.3, 2),
    "rnorm4d": ("libdevice.rnorm4d(x, y[None, :] + 0 * x, z[:, None] + 0 * x, x)", 0.3, 2),
    "fma_rn": ("libdevice.fma_rn(x, y[None, :] + x, z[:, None] + x)", -2, 2),
    "ldexp": ("libdevice.ldexp(x * y[None, :], rows[:, None] % 3 + 0 * cols[None, :]) + z[:, None]", -2, 2),
    "steps": ("libdevice.rint(x) * y[None, :] + libdevice.trunc(3 * x) * z[:, None] + libdevice.round(x)", -2, 2),
    "to integers": ("libdevice.float2int_rn(3 * x).to(tl.float32) * y[None, :] + libdevice.llrint(x).to(tl.float32) * z[:, None]", -2, 2),
    "by name": ("libdevice.atan2(arg1=y[None, :], arg0=x + z[:, None])", 0.3, 2),
    "float remainder": ("(x + z[:, None]) % y[None, :]", 0.3, 2),
    "predicates": ("tl.where(libdevice.isinf(x).to(tl.int1), y[None, :], x * z[:, None])", -2, 2),
}  # fmt: skip


@pytest.mark.parametrize("name", RULES)
def test_rule__of_an_external_function(name: str, tmp_path: Path) -> None:
    expression, low, high = RULES[name]
    file = test_diff_rules.write(tmp_path, f"    out = {expression}", low, high)
    result = draft(file, {"M": 16, "N": 32})
    sizes = [({"M": 16, "N": 32}, "normal"), ({"M": 13, "N": 45}, "normal")]
    assert_right(file, result, sizes, 2e-4 if "inv" in name else 5e-5)
