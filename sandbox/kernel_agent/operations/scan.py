"""Operation scan: reads a candidate's source and says what an honest Triton backward does not contain.

Nothing is executed. The scan is the first of several guards (a record of the backward's torch operations, a
rerun without launches, the verdict itself): it gives early and readable reasons, and need not catch what
those catch.

`reject` findings end an attempt; `warn` findings are shown to whoever wrote it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .. import handwritten
from ..source import MARKER, autodiff_names, parse, read, words

ALLOWED_MODULES = frozenset({"torch", "triton", "math", "__future__"})
FORBIDDEN_NAMES = words(
    """exec eval compile open input breakpoint exit quit globals locals vars __import__ getattr setattr
    delattr os sys gc inspect ctypes subprocess importlib builtins pathlib pickle threading
    multiprocessing socket __name__ __file__ __spec__ __loader__ __package__ __cached__ __dict__"""
)
# Below torch and triton: files, other processes and threads, generators, timers, allocators, streams.
FORBIDDEN_ATTRIBUTES = words(
    """os sys gc inspect ctypes builtins subprocess importlib pickle threading load save from_file hub
    package jit multiprocessing distributed futures serialization storage utils backends testing cudart
    memory Event Stream stream graph CUDAGraph initial_seed seed manual_seed random get_rng_state
    manual_seed_all"""
)
# Methods of any object: they run host code later, or hand over a tensor's values to it.
_HOOKS = words(
    "register_hook register_post_accumulate_grad_hook register_prehook register_forward_hook "
    "saved_tensors_hooks"
)
_VALUES = words("tolist numpy from_numpy untyped_storage frombuffer asarray")

# Torch operations that could compute a gradient, by the last part of their name. What is left is honest host
# work: allocation, views, casts, contiguous(), sums over partial results that kernels wrote, and sorting of
# indices. What has no name here (operators, aliases) is found by the record of the operations that really
# run.
_MATH = words(
    """matmul mm bmm addmm baddbmm addbmm addmv addr mv dot vdot inner outer einsum tensordot chain_matmul
    linear bilinear conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d softmax
    log_softmax softmin logsumexp cross_entropy nll_loss layer_norm rms_norm group_norm batch_norm
    instance_norm scaled_dot_product_attention relu gelu silu sigmoid tanh elu leaky_relu softplus mish
    hardtanh threshold exp exp2 log log2 log1p expm1 sin cos tan sqrt rsqrt pow reciprocal erf erfc var
    std var_mean std_mean norm cumprod cummax cummin logcumsumexp gather scatter scatter_ scatter_add
    scatter_add_ index_add index_add_ scatter_reduce index_select embedding where masked_fill masked_fill_
    mul_ div_ sub_ addcmul addcdiv lerp topk fft ifft rfft irfft solve inv cholesky qr svd vmap vjp jvp
    jacrev jacfwd jacobian"""
)
_AUTOGRAD = frozenset({"backward", "grad", "gradcheck", "enable_grad", "checkpoint", "compile", "vjp", "jvp"})
_AUTOGRAD_FINE = frozenset({"Function", "function", "once_differentiable"})


@dataclass(frozen=True)
class Finding:
    rule: str
    severity: str
    line: int
    message: str


def run(request: dict[str, Any], scratch: Path) -> dict[str, Any]:
    """The result of docs/protocol.md's op scan. Raises Unusable("syntax") for a file that does not parse."""
    file = str(Path(request["file"]).resolve())
    source = read(file)
    return scan(source, parse(source, file))


def scan(source: str, tree: ast.Module) -> dict[str, Any]:
    """Findings in order of lines, the entry's name and the kernels' names."""
    start = backward_starts(source)
    scanner = _Scanner(tree, start)
    findings = sorted(scanner.findings(), key=lambda finding: (finding.line, finding.rule))
    return {
        "findings": [asdict(finding) for finding in findings],
        "entry": scanner.entry_name,
        "kernels": sorted(scanner.kernels, key=lambda name: scanner.kernels[name].lineno),
    }


def backward_starts(source: str) -> int | None:
    """The line of the marker, None where there is none."""
    for number, text in enumerate(source.splitlines(), start=1):
        if text.strip() == MARKER:
            return number
    return None


def _last_name(node: ast.expr) -> str | None:
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else None


def _dotted(node: ast.expr) -> str:
    """`torch.autograd.grad` for a dotted name, with `?` for what is not a name."""
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else "?"


def _is_kernel(node: ast.FunctionDef) -> bool:
    """Decorated with triton.jit, not with something that is only called so."""
    decorators = [d.func if isinstance(d, ast.Call) else d for d in node.decorator_list]
    return any(_dotted(d) in ("triton.jit", "jit", "triton.runtime.jit") for d in decorators)


def _is_launch(node: ast.AST) -> bool:
    """kernel[grid](...)"""
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript)


_DEFINITIONS = (ast.FunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom, ast.Assign, ast.AnnAssign)


def _bound(node: ast.stmt) -> set[str]:
    """Names that a definition or assignment at the top level binds; imports may repeat the forward's."""
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        return {node.name}
    if isinstance(node, (ast.Assign, ast.AnnAssign)):
        return {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    return set()


def _is_name(node: ast.expr, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


class _Scanner:
    """The backward part of one file: everything after the marker, or the whole file where there is none."""

    def __init__(self, tree: ast.Module, start: int | None) -> None:
        self.tree = tree
        self.start = start
        self.body = [node for node in tree.body if node.lineno > (start or 0)]
        functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
        self.kernels = {node.name: node for node in functions if _is_kernel(node)}
        self.own = handwritten.find_any(tree) if start is None else None
        self.entry = self._find_entry(functions)
        self.function = self._find_function()
        self.torch_names = self._torch_names()
        self.foreign = self._foreign_names() if self.own is not None else set()
        self.stub_texts = self._stub_texts()
        self.forward_side = self._forward_side()
        self.taking_part = self._taking_part()
        self.judged = {node for part in self.taking_part for node in ast.walk(part)}

    def _find_entry(self, functions: list[ast.FunctionDef]) -> ast.FunctionDef | None:
        names = autodiff_names(self.tree)
        stubs = [
            node.name
            for node in functions
            for decorator in node.decorator_list
            if isinstance(decorator, ast.Call) and _last_name(decorator.func) in names
        ]
        wanted = {f"{name}_autograd" for name in stubs}
        top = [node for node in self.body if isinstance(node, ast.FunctionDef)]
        entries = [node for node in top if node.name in wanted]
        if not entries and self.own is not None:
            entries = [node for node in top if node.name in (stubs or [self.own.name])]
        return entries[-1] if entries else None

    @property
    def entry_name(self) -> str | None:
        """The entry; of a module that people wrote themselves maybe an alias of `apply`."""
        if self.entry is not None:
            return self.entry.name
        return self.own.name if self.own is not None else None

    def _find_function(self) -> ast.ClassDef | None:
        """The last class derived from torch.autograd.Function."""
        found = None
        for node in self.body:
            if isinstance(node, ast.ClassDef) and any(_last_name(base) == "Function" for base in node.bases):
                found = node
        return found

    def _torch_names(self) -> set[str]:
        """Names that mean torch or one of its modules: tells a method of a tensor from a function."""
        names = {"torch"}
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                names |= {
                    (a.asname or a.name).split(".")[0] for a in node.names if a.name.split(".")[0] == "torch"
                }
            elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
                names |= {a.asname or a.name for a in node.names}
        return names

    def _functions(self) -> dict[str, ast.FunctionDef]:
        """Host functions of the top level."""
        return {f.name: f for f in self.tree.body if isinstance(f, ast.FunctionDef) and not _is_kernel(f)}

    def _reached(self, roots: list[ast.FunctionDef]) -> list[ast.FunctionDef]:
        """The roots and every host function of the file that they name, directly or not."""
        functions, found, todo = self._functions(), list[ast.FunctionDef](), list(roots)
        while todo:
            node = todo.pop()
            if node in found:
                continue
            found.append(node)
            names = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
            todo += [functions[name] for name in sorted(names & functions.keys())]
        return found

    def _stub_texts(self) -> set[str]:
        """Every expression of the stub, and of what it calls, as written in the forward part."""
        names = {self.entry.name.removesuffix("_autograd")} if self.entry is not None else set()
        stubs = [f for f in self._functions().values() if f.name in names and f not in self.body]
        reached = [f for f in self._reached(stubs) if f not in self.body]
        return {ast.dump(node) for f in reached for node in ast.walk(f) if isinstance(node, ast.expr)}

    def _forward_side(self) -> set[ast.AST]:
        """Nodes of the entry, of a Function's forward and of their helpers, that no backward reaches.

        A forward of several launches may have to be written out there, with the torch operations that the
        stub does in between: those, word for word, are the user's own. That they are done no more often than
        by the stub is for the record of operations to say (candidate.py).
        """
        methods = [method for method in self._methods() if method.name in ("forward", "setup_context")]
        backwards = [method for method in self._methods() if method not in methods]
        roots = methods + ([self.entry] if self.entry is not None else [])
        shared = self._reached(backwards)
        mine = [f for f in self._reached(roots) if f not in shared and (f in self.body or f in methods)]
        return {node for f in mine for node in ast.walk(f)}

    def _is_stubs_own(self, node: ast.expr) -> bool:
        """Of a module that people wrote themselves the whole forward is."""
        return node in self.forward_side and (self.own is not None or ast.dump(node) in self.stub_texts)

    def _is_mine(self, node: ast.AST) -> bool:
        return node in self.judged if self.own is not None else node.lineno > (self.start or 0)  # type: ignore[attr-defined]

    def _taking_part(self) -> list[ast.AST]:
        """The autograd functions, the entry, and the host functions that they name."""
        if self.own is None:
            return []
        classes = handwritten.functions_of(self.tree)
        roots = [item for c in classes for item in c.body if isinstance(item, ast.FunctionDef)]
        reached = self._reached(roots + ([self.entry] if self.entry is not None else []))
        return [*classes, *(f for f in reached if f not in roots)]

    def _foreign_names(self) -> set[str]:
        """Names bound by imports of other modules than torch, triton and math."""
        names = set()
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                found = [(alias.name, alias.asname or alias.name) for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                found = [(node.module or ".", alias.asname or alias.name) for alias in node.names]
            else:
                continue
            names |= {
                name.split(".")[0] for module, name in found if module.split(".")[0] not in ALLOWED_MODULES
            }
        return names - {"autodiff"}

    def findings(self) -> Iterator[Finding]:
        yield from self._structure()
        yield from self._imports()
        yield from self._module_level()
        yield from self._stores()
        for node in self._host_nodes():
            yield from self._node(node)
        for kernel in self.kernels.values():
            if kernel.lineno > (self.start or 0):
                yield from self._kernel(kernel)

    def _structure(self) -> Iterator[Finding]:
        last = self.tree.body[-1].lineno if self.tree.body else 1
        if self.start is None:
            yield Finding(
                "marker",
                "warn",
                1,
                f"the file has no line {MARKER!r}: what takes part in the check is scanned",
            )
        if self.entry_name is None:
            yield Finding("entry", "reject", last, "there is no function <stub>_autograd")
        if self.function is None:
            yield Finding(
                "function", "reject", last, "there is no class derived from torch.autograd.Function"
            )
            return
        methods = {node.name: node for node in self.function.body if isinstance(node, ast.FunctionDef)}
        backward = methods.get("backward")
        if "forward" not in methods or backward is None:
            line = self.function.lineno
            yield Finding("function", "reject", line, f"class {self.function.name} lacks forward or backward")
        elif not self._launches(backward, set()):
            yield Finding("no_launch", "reject", backward.lineno, "the backward launches no Triton kernel")

    def _launches(self, node: ast.AST, seen: set[str]) -> bool:
        """Whether a launch is reached from here, directly or through functions of this file."""
        functions = self._functions()
        for inner in ast.walk(node):
            if _is_launch(inner):
                return True
            name = inner.id if isinstance(inner, ast.Name) else None
            if name in functions and name not in seen and self._launches(functions[name], seen | {name}):
                return True
        return False

    def _imports(self) -> Iterator[Finding]:
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                modules = [node.module or "."]
            else:
                continue
            names = [alias.name for alias in node.names] if isinstance(node, ast.ImportFrom) else []
            for part in [part for module in modules for part in module.split(".")[1:]] + names:
                if self._is_mine(node) and (part in FORBIDDEN_ATTRIBUTES or part.startswith("_")):
                    yield Finding("forbidden", "reject", node.lineno, f"imports {part}")
            for module in modules:
                root = module.split(".")[0]
                if root not in ALLOWED_MODULES and not (root == "kernel_agent" and self.start is None):
                    allowed = "only torch, triton and math are imported"
                    severity = "reject" if self._is_mine(node) else "warn"
                    yield Finding("import", severity, node.lineno, f"imports {module}: {allowed}")

    def _module_level(self) -> Iterator[Finding]:
        """The backward part defines; it runs nothing at import, and leaves the forward part's names alone."""
        if self.own is not None:
            return
        before = {
            name for node in self.tree.body if node.lineno <= (self.start or 0) for name in _bound(node)
        }
        for node in self.body:
            is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
            if not is_text and not isinstance(node, _DEFINITIONS):
                message = "only imports, definitions and assignments stand at the top level"
                yield Finding("module_code", "reject", node.lineno, message)
            for name in _bound(node):
                if name in before or name == "jit":
                    message = f"gives {name} another meaning: the forward part stays as it is"
                    yield Finding("redefined", "reject", node.lineno, message)

    def _stores(self) -> Iterator[Finding]:
        """Attributes are set on the context of a Function only: anything else patches what others rely on."""
        contexts: set[ast.AST] = set()
        for method in self._methods():
            name = method.args.args[0].arg if method.args.args else ""
            nodes = list(ast.walk(method))
            rebound = any(
                isinstance(node, ast.Name) and node.id == name and not isinstance(node.ctx, ast.Load)
                for node in nodes
            )
            contexts |= {
                n for n in nodes if isinstance(n, ast.Attribute) and _is_name(n.value, name) and not rebound
            }
        for node in self._host_nodes():
            if (
                isinstance(node, ast.Attribute)
                and not isinstance(node.ctx, ast.Load)
                and node not in contexts
            ):
                yield Finding(
                    "patch",
                    "reject",
                    node.lineno,
                    f"sets {_dotted(node)}, which is no attribute of a context",
                )

    def _methods(self) -> Iterator[ast.FunctionDef]:
        """forward, backward and setup_context of the Functions."""
        for node in self.body:
            if isinstance(node, ast.ClassDef) and any(_last_name(base) == "Function" for base in node.bases):
                yield from (item for item in node.body if isinstance(item, ast.FunctionDef))

    def _kernel(self, kernel: ast.FunctionDef) -> Iterator[Finding]:
        """A kernel's body is triton.language: interpreted, it could otherwise run any host code."""
        host = {n.name for n in self.tree.body if isinstance(n, (ast.FunctionDef, ast.ClassDef))}
        host -= set(self.kernels)
        own = {arg.arg for arg in ast.walk(kernel.args) if isinstance(arg, ast.arg)}
        names = [n for n in ast.walk(kernel) if isinstance(n, ast.Name)]
        own |= {n.id for n in names if isinstance(n.ctx, ast.Store)}
        foreign = (self.torch_names | FORBIDDEN_NAMES | host) - own
        for statement in kernel.body:
            for node in ast.walk(statement):
                if isinstance(node, ast.Name) and node.id in foreign:
                    message = f"the kernel {kernel.name} uses {node.id}, which is not triton.language"
                    yield Finding("kernel", "reject", node.lineno, message)
                elif isinstance(node, ast.Attribute) and node.attr.startswith("__"):
                    message = f"the kernel {kernel.name} uses {_dotted(node)}"
                    yield Finding("kernel", "reject", node.lineno, message)

    def _host_nodes(self) -> Iterator[ast.AST]:
        """Nodes of the backward part outside kernels; of a module that people wrote themselves what takes
        part in the check."""
        todo: list[ast.AST] = list(self.body) if self.own is None else list(self.taking_part)
        while todo:
            node = todo.pop()
            if isinstance(node, ast.FunctionDef) and _is_kernel(node):
                continue
            yield node
            todo.extend(ast.iter_child_nodes(node))

    def _node(self, node: ast.AST) -> Iterator[Finding]:
        if isinstance(node, ast.Try) and self._launches(node, set()):
            yield Finding(
                "try", "reject", node.lineno, "a launch inside try can hide a failure behind a fallback"
            )
        elif isinstance(node, ast.Name) and node.id in FORBIDDEN_NAMES and not self._is_variable(node.id):
            yield Finding("forbidden", "reject", node.lineno, f"uses {node.id}")
        elif isinstance(node, ast.Name) and node.id in self.foreign and node not in self.forward_side:
            yield Finding(
                "import", "reject", node.lineno, f"uses {node.id}, which is neither torch nor triton"
            )
        elif isinstance(node, ast.Attribute):
            yield from self._attribute(node)
        elif (
            isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult) and not self._is_stubs_own(node)
        ):
            yield Finding("torch_math", "reject", node.lineno, "multiplies matrices outside a kernel (@)")
        elif isinstance(node, ast.Call):
            yield from self._call(node)

    def _is_variable(self, name: str) -> bool:
        """A parameter may well be called `input`; nothing harmful hides behind that name."""
        return name in ("input", "vars") and any(
            isinstance(node, ast.arg) and node.arg == name for node in ast.walk(self.tree)
        )

    def _attribute(self, node: ast.Attribute) -> Iterator[Finding]:
        dotted = _dotted(node)
        if node.attr.startswith("__") and node.attr not in ("__name__", "__doc__"):
            yield Finding("forbidden", "reject", node.lineno, f"uses {dotted}")
        if dotted.startswith(("torch.autograd.", "torch.func.")) and node.attr not in _AUTOGRAD_FINE:
            yield Finding("autograd", "reject", node.lineno, f"uses {dotted}")
        parts = dotted.split(".")
        below = parts[0] in self.torch_names | {"triton", "tl"}
        hidden = any(part.startswith(("_", "set_")) for part in parts[1:])
        if (below and (hidden or FORBIDDEN_ATTRIBUTES & set(parts[1:]))) or node.attr in _HOOKS:
            yield Finding("forbidden", "reject", node.lineno, f"uses {dotted}")
        if node.attr in _VALUES and not self._is_stubs_own(node):
            yield Finding(
                "torch_math", "reject", node.lineno, f"uses {dotted}: host code gets a tensor's values"
            )
        if dotted.startswith(("torch.ops.", "torch._C", "torch.utils.cpp_extension", "torch.library")):
            yield Finding("torch_math", "reject", node.lineno, f"uses {dotted}")

    def _call(self, node: ast.Call) -> Iterator[Finding]:
        name = _last_name(node.func)
        if name is None:
            return
        dotted = _dotted(node.func)
        root = dotted.split(".")[0]
        if isinstance(node.func, ast.Name) and name not in self.torch_names:
            return  # a function of this file, or a builtin: scanned where it is written
        if root in ("tl", "math", "triton"):
            return
        if name in _AUTOGRAD and not self._own_backward(node):
            yield Finding(
                "autograd", "reject", node.lineno, f"calls {dotted}(): autograd must not make the gradient"
            )
        elif name in _MATH and not self._is_stubs_own(node):
            yield Finding(
                "torch_math", "reject", node.lineno, f"calls {dotted}(): kernels must compute the gradient"
            )

    def _own_backward(self, node: ast.Call) -> bool:
        """`Scale.backward(...)` of a Function in this file is an ordinary call."""
        owner = node.func.value if isinstance(node.func, ast.Attribute) else None
        classes = {c.name for c in self.tree.body if isinstance(c, ast.ClassDef)}
        return isinstance(owner, ast.Name) and owner.id in classes
