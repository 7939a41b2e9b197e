"""The host side: trace one call of the stub and find what each launch reads, writes and wants gradients for.

The inputs of the traced call require gradients and torch records the graph of its torch operations; a launch
is replaced by a marker that makes what it writes depend on what it reads. So activity crosses views, casts
and several launches without any assumption, and no kernel has to run.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from ... import draw
from ...errors import Unusable
from ...forward import Forward, launch_intercept
from ...launches import Launch, jit_function
from ...source import tree_nodes, words
from ..ir import address_tables
from ..ir.nodes import Node, Store, nodes_in, reachable, sides, walk
from ..ir.refusal import Refusal
from ..ir.spelling import gradient_name
from ..ir.values import Arg, Kernel
from ..prove import cover
from ..prove.overwrite import number_of
from . import adopted_calls, grad_mode
from .block_sizes import Blocks, Grid, Tiles
from .block_uses import Uses
from .home import Home, asked_by, home_of, rules_of
from .host_functions import HostFunctions
from .host_values import Host
from .kernel_values import language_name
from .left import is_left
from .normalise import Builder
from .parted import CONSTRUCT


@dataclass
class Site:
    """One `kernel[grid](...)` in the source, and what the traced call passed there."""

    call: ast.Call
    host: ast.FunctionDef
    kernel_name: str
    params: list[str]  # the kernel's parameters
    given_names: list[str]  # the parameters and options that the launch passes, in the order of the call
    positional: list[str]  # those without a keyword
    launch: Launch
    args: dict[str, Arg]
    kernel: Kernel
    source: ast.FunctionDef  # of the kernel
    home: Home
    written: list[str] = field(default_factory=list)  # pointer parameters that the kernel writes
    outputs: list[str] = field(default_factory=list)  # those that carry gradients
    class_name: str = ""
    unpacked: list[str] = field(default_factory=list)  # the names that the launch passes with `**`
    tables: dict[str, ast.expr] = field(default_factory=dict)  # tables of pointers by parameter, as written
    taken: set[int] = field(default_factory=set)  # lines that ask for the addresses in them
    # An output that is a view, as written: autograd looks for it first.
    first: tuple[str, ast.expr] | None = None
    # Outputs that held differentiable values: elements written.
    replaced: dict[str, Node] = field(default_factory=dict)
    added: list[str] = field(default_factory=list)  # written with atomic adds only
    autotuned: bool = False
    configs: list[dict[str, Any]] = field(default_factory=list)  # that its autotuner lists
    blocks: Blocks | None = None  # that the backward has instead of the launch's
    stages: int | None = None  # num_stages of the backward, where it is chosen
    warps: bool = False  # the backward's num_warps is chosen here, not by the launch
    launched_warps: int = 0  # those of the launch
    heuristics: dict[str, ast.expr] = field(default_factory=dict)  # rules that the backward can have as text
    # What is called for rules that are no lambdas there, and the arguments that they read; None: any.
    rules: dict[str, tuple[str, set[str] | None]] = field(default_factory=dict)
    before: dict[str, list[str]] = field(default_factory=dict)  # by heuristic, those whose values it may read
    optional: set[str] = field(default_factory=set)  # outputs that a call may leave out: None is passed
    # Outputs that hold nothing here, and may in another call: elements written, where that is known.
    empty: dict[str, Node | None] = field(default_factory=dict)
    # tensors that the call changes after this launch: what the backward needs of them is copied
    overwritten: set[str] = field(default_factory=set)
    # inputs whose elements share memory, and which the call does not return as they are
    expanded: set[str] = field(default_factory=set)
    left: list[str] = field(default_factory=list)  # written, and no outputs: left.py
    held: list[str] = field(default_factory=list)  # outputs whose values lose their gradient: _note_held()
    # The launches here that calls with other sizes make.
    others: Callable[[], list[Launch]] = list
    # The kernel of calls that agree with facts; of those of which a block is a whole row; with names for
    # uses of blocks.
    again: Callable[..., Kernel] | None = None

    @property
    def uses(self) -> Uses:
        """Names of the backward's own for uses of blocks."""
        return self.blocks.uses if isinstance(self.blocks, Grid) else Uses()

    @property
    def lines(self) -> range:
        """Of the launch, in the user's file."""
        return range(self.call.lineno, (self.call.end_lineno or self.call.lineno) + 1)


class _Mark(torch.autograd.Function):
    """Stands for a launch while tracing: the first `count` tensors are written and depend on the others."""

    @staticmethod
    def forward(ctx: Any, count: int, *tensors: torch.Tensor) -> Any:
        ctx.mark_dirty(*tensors[:count])
        return tuple(tensors[:count]) if count > 1 else tensors[0]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise RuntimeError("a traced call is never run backwards")


@dataclass
class Untraced:
    """A launch in the source that no traced call has made."""

    host: ast.FunctionDef
    call: ast.Call
    kernel_name: str


# Names of a generated Function: its locals, and the functions that it may call.
OURS = words("ctx grid pointed upstream tiles splits programs row_warps grid_0 grid_1 grid_2 torch triton")
OURS |= words("forward_grid")
TILES = "tiles"  # a name of OURS that a Function has only itself, and another one where a parameter has it
CALLED = words("laid_out passed_on handed_on sums_for gradient_of summed finished disjoint ordered distinct")
CALLED |= words("sequences_apart summed_both at_most longest separate own untraced passed behind divided")
CALLED |= words("address_of table_of walked mark_order order_of")

Call = tuple[tuple[Any, ...], dict[str, Any]]
Folds = frozenset[tuple[str, int]]  # conditions, by file and line


def trace(
    fwd: Forward,
    first: Call,
    others: Iterable[Call] = (),
    folds: Folds = frozenset(),
    blocks: Sequence[Blocks] = (),
) -> tuple[list[Site], list[Untraced]]:
    """Run the stub once with inputs that want gradients and see its launches; no kernel is executed. While
    the file has a launch that was not made or that no gradient went through, or an output that may hold
    something in another call, the stub is called with others: a size may choose its kernel, and what is None
    in one call wants a gradient in another.
    `folds`: conditions in kernels of which only the branch that is taken is read.
    `blocks`: of launches that are read with other blocks than they pass."""
    calls = [
        (function, node)
        for function in HostFunctions(fwd.tree).by_name.values()
        for node in tree_nodes(function)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript)
    ]
    sites: dict[tuple[int, int], Site] = {}
    _trace(fwd, first, calls, sites, folds, blocks)
    untraced = _untraced(fwd, calls, sites)
    for call in others if untraced or any(map(_may_be_more, sites.values())) else ():
        more: dict[tuple[int, int], Site] = {}
        try:
            _trace(fwd, call, calls, more, folds, blocks)
        except Unusable:
            continue  # a size that the stub does not take
        for key, site in more.items():
            known = sites.setdefault(key, site)
            known.overwritten |= site.overwritten
            # What it finds in an output counts too.
            if {*site.held, *site.replaced} & known.empty.keys() or len(site.outputs) > len(known.outputs):
                sites[key] = site
        untraced = _untraced(fwd, calls, sites)
        if not untraced and not any(map(_may_be_more, sites.values())):
            break
    return list(sites.values()), untraced


def other_launches(fwd: Forward, calls: Iterable[Callable[[], Call]], sites: list[Site]) -> None:
    """Give the sites the launches that other calls make, seen when a side of a flag asks for them."""
    found: list[Launch] = []

    @functools.cache
    def see() -> None:
        for call in calls:
            with contextlib.suppress(Exception), torch.no_grad(), launch_intercept(found.append):
                args, kwargs = call()
                fwd.call(args, kwargs)

    def of(site: Site) -> list[Launch]:
        see()
        return [one for one in found if one.site[0] == fwd.path and one.site[1] in site.lines]

    for site in sites:
        site.others = site.kernel.graph.others = functools.partial(of, site)


def _untraced(fwd: Forward, calls: list, sites: dict[tuple[int, int], Site]) -> list[Untraced]:
    """Launches by the stub and what it calls that are not among `sites`."""
    hosts = HostFunctions(fwd.tree)
    called, rest = set[str](), [fwd.stub_name]
    while rest:
        if (name := rest.pop()) in hosts.by_name and name not in called:
            called.add(name)
            rest += [hosts.named(n.id) for n in tree_nodes(hosts.by_name[name]) if isinstance(n, ast.Name)]
    return [
        Untraced(host, call, call.func.value.id)
        for host, call in calls
        if host.name in called
        and (call.lineno, call.col_offset) not in sites
        and isinstance(call.func.value, ast.Name)
        and jit_function(getattr(fwd.module, call.func.value.id, None)) is not None
    ]


def _trace(
    fwd: Forward,
    given: Call,
    calls: list,
    sites: dict[tuple[int, int], Site],
    folds: Folds,
    blocks: Sequence[Blocks],
) -> None:
    """Add the launches of one call to `sites`; what is known of an earlier call stays."""
    functions = HostFunctions(fwd.tree).by_name
    settled = set(sites)
    failure: list[Refusal] = []
    seen: list[tuple[tuple[int, int], str, torch.Tensor, int]] = []  # with the tensor's version

    def see(launch: Launch) -> None:
        try:
            own = next((b for b in blocks if launch.site[1] in b.lines), None)
            site = _site(fwd, own.launch(launch) if own else launch, calls, functions, taken, folds, own)
            adopted_calls.check(fwd.path, HostFunctions(fwd.tree), launch.name, fwd.stub_name)
            key = (site.call.lineno, site.call.col_offset)
            known = sites.get(key)
            if known is None or key not in settled and _more_active(site, known):
                sites[key] = site
            if known is not None and key not in settled:
                sites[key].replaced = {**known.replaced, **site.replaced}
            _mark(site, launch, taken)
            args = [value for name in launch.args for value in _tensors(site, launch, name, taken)]
            cut = next((one for one in off if not one.is_within(fwd.path, site.call)), None)
            if cut and site.outputs and any(value.requires_grad for value in args):
                raise cut.refuse()
            tensors = {n: v for n, v in launch.args.items() if isinstance(v, torch.Tensor)}
            seen.extend((key, name, value, value._version) for name, value in tensors.items())
        except Refusal as refusal:
            failure.append(refusal.at(None, fwd.path).seen_from(fwd.path, launch.site[1]))
            raise

    args, kwargs = given
    bound = fwd.signature.bind(*args, **kwargs)
    bound.apply_defaults()
    inputs: set[int] = set()
    for name in fwd.grads:
        value = bound.arguments[name]
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            bound.arguments[name] = value.detach().requires_grad_(True)
            inputs.add(value.untyped_storage().data_ptr())
    try:
        with (
            address_tables.addresses_taken(fwd.path) as taken,
            launch_intercept(see),
            grad_mode.left_out(fwd, failure) as off,
        ):
            taken.wanted = inputs
            returned = fwd.call(bound.args, bound.kwargs)
    except Exception:
        if failure:
            raise failure[0] from None
        raise
    for key, name, value, version in seen:
        if value._version != version:
            sites[key].overwritten.add(name)
        kept = any(value is output for output in draw.tensors_in(returned))
        if sites[key].args[name].active and _is_expanded(value) and not kept:
            sites[key].expanded.add(name)
    if not sites:
        message = f"{fwd.stub_name}() launches no kernel"
        raise Refusal("stub", message, "Launch a Triton kernel in the stub.", fwd.stub_line)


def _is_expanded(t: torch.Tensor) -> bool:
    return any(step == 0 and size > 1 for step, size in zip(t.stride(), t.shape, strict=True))


def _launched(call: ast.Call) -> str | None:
    """The name before the brackets of `kernel[grid](...)`; None where no name stands there."""
    callee = call.func.value  # type: ignore[attr-defined]
    return callee.id if isinstance(callee, ast.Name) else None


def _written(
    fwd: Forward, launch: Launch, calls: list, functions: dict[str, ast.FunctionDef]
) -> tuple[ast.FunctionDef, ast.Call, ast.FunctionDef, Home]:
    """Where the file has a launch: the host function, the call in it, and the kernel with its own file."""
    file, line = launch.site
    if file != fwd.path:
        why = fwd.adopted.reason(file, line) if fwd.adopted is not None else ""
        message = f"{Path(file).name}:{line}: {launch.name} is launched from another file{why}"
        remedy = "Launch it in this file, or in a function of a module that the stub calls by its name."
        raise Refusal("launch", message, remedy, fwd.stub_line)
    here = [(f, c) for f, c in calls if c.lineno <= line <= (c.end_lineno or c.lineno)]
    if len(here) != 1:
        message = f"the launch of {launch.name} cannot be found in the source"
        remedy = "Give every launch a line of its own." if here else f"Write {launch.name}[grid](...) there."
        raise Refusal("launch", message, remedy, line)
    host, call = here[0]
    kernel = jit_function(getattr(fwd.module, _launched(call) or "", None))
    if kernel is None or kernel.fn is not launch.fn:
        message = (
            f"the kernel of a launch must have a name at the top level, and {launch.name} is computed here"
        )
        remedy = (
            "Name it there, with its autotuner if it has one, and write name[grid](...): one launch a kernel."
        )
        raise Refusal("launch", message, remedy).at(call)
    home = home_of(fwd, launch, functions, call)
    source = home.functions.get(launch.name)
    if source is None:
        where = f" of {Path(home.path).name}" if home.imported else ""
        message = f"{launch.name} is not defined at the top level{where}"
        raise Refusal("launch", message, "Define the kernel at the top level.").at(call)
    return host, call, source, home


def _interpreted(made: Callable[[frozenset[int]], Builder], folded: frozenset[int]) -> tuple[Builder, Kernel]:
    """A kernel, read without those branches besides `folded` that leave in a name what cannot be used."""
    while True:
        builder = made(folded)
        try:
            return builder, builder.kernel()
        except Refusal as refusal:
            if refusal.fold is None or refusal.fold in folded:
                raise
            folded |= {refusal.fold}


def _reader(
    fwd: Forward,
    source: ast.FunctionDef,
    home: Home,
    args: dict[str, Arg],
    folds: Folds,
    blocks: Blocks | None,
) -> Callable[..., tuple[Builder, Kernel]]:
    """What reads a kernel, with what is known of some of its calls, and of a block that is a whole row."""
    here = frozenset(line for path, line in folds if path == home.path)
    own = blocks.uses if isinstance(blocks, Grid) else Uses()

    def read(
        facts: dict[tuple, bool] | None = None, whole: str | None = None, uses: Uses = own
    ) -> tuple[Builder, Kernel]:
        def made(folded: frozenset[int]) -> Builder:
            known = {n: replace(args[block], name=n) for n, block in uses.of.items()} | args
            builder = Builder(source, home.module, home.functions, known, folded, facts, whole)
            builder.uses = uses
            builder.tl = language_name(fwd.module) if home.imported else builder.tl
            builder.spread = (blocks.rows, blocks.axis) if isinstance(blocks, Tiles) else None
            return builder

        try:
            return _interpreted(made, here)
        except Refusal as refusal:
            raise refusal.at(source, home.path) from None

    return read


def _site(
    fwd: Forward,
    launch: Launch,
    calls: list,
    functions: dict[str, ast.FunctionDef],
    taken: address_tables.Taken,
    folds: Folds,
    blocks: Blocks | None,
) -> Site:
    host, call, source, home = _written(fwd, launch, calls, functions)
    params = [a.arg for a in source.args.args]
    _check_names(params, source)
    positional = _positional(params, call, launch)
    unpacked = _unpacked(call, launch)
    given = [*positional, *(k.arg for k in call.keywords if k.arg is not None), *unpacked]
    args = _arguments(launch, lambda name: _expression(call, params, name), taken)
    passed = {n: _expression(call, params, n) for n in args if n in given}
    values_of = _values_of(fwd, host, functions, passed, args)
    _note_equal(args, values_of, passed, call)
    reads_active = any(a.active and not a.none or a.behind and a.behind.active for a in args.values())

    read = _reader(fwd, source, home, args, folds, blocks)
    builder, kernel = read()
    if _note_indices(builder, args):
        builder, kernel = read()
    stored = {s.base.attrs["name"] for s in builder.stored if not builder.untaken(s.region)}
    kept = {n for n in kernel.inplace if not args[n].active or n not in stored}
    kept = {n for n in kept if is_left(fwd.stub_name, host, call, passed.get(n))}
    if any(args[name].active for name in kept):  # a tensor that stands there because none is needed
        for name in kept:
            args[name].active = False
        builder, kernel = read()
    read_of = dict.fromkeys(one[0].attrs["name"] for one in builder.loaded)
    loaded = [n for n in read_of if n in given and n not in kept]
    if _note_choices(launch, args, values_of, {n: _expression(call, params, n) for n in loaded}):
        reads_active = True
        builder, kernel = read()
    added = [n for n in kernel.inplace - kept if not args[n].active and _is_float(args[n])]
    if reads_active and added:  # what a launch adds to may be constant here, and not in another call
        for name in added:
            args[name].active = True
        builder, kernel = read()
    name = _launched(call) or ""
    site = Site(call, host, name, params, given, positional, launch, args, kernel, source, home)
    site.unpacked, site.autotuned, site.blocks = unpacked, launch.config is not None, blocks
    site.written = list(dict.fromkeys(s.base.attrs["name"] for s in builder.stored))
    stores = [e for e in walk(kernel.effects) if isinstance(e, Store)]
    site.added = [
        n for n in site.written if all(s.kind == "atomic_add" for s in stores if s.base.attrs["name"] == n)
    ]
    _note_heuristics(fwd, site)
    builder.g.sized, builder.g.strides = _sized(site), _strides(site)
    _note_tables(site, builder, taken)
    for name in sorted(site.written, key=lambda n: n in site.tables):  # tables last: they are many tensors
        if name in kept:
            site.left.append(name)
            continue
        values = _tensors(site, launch, name, taken)
        written = [s for s in stores if s.base.attrs["name"] == name]
        if name in given and name not in site.tables and all(map(_asked_for, written)):
            site.optional.add(name)
        missing = args[name].none and name in site.optional and any(s.value.is_float for s in written)
        if (values or missing) and all(value.is_floating_point() for value in values) and reads_active:
            site.outputs.append(name)
            own = name in site.added or name in kernel.inplace
            if own:
                continue
            if any(value.requires_grad for value in values):
                _note_held(site, builder, name)
            elif name in given and not values_of.fresh(_expression(call, params, name), call):
                site.empty[name] = cover.overwritten(kernel, name, program_axes(site))
    _note_view(site, taken)
    for name in site.outputs:
        for base in builder.entries.get(name, [kernel.params[name]]):
            base.active = True

    site.again = None if site.tables else functools.partial(_again, site, read)
    return site


def _again(
    site: Site,
    read: Callable[..., tuple[Builder, Kernel]],
    facts: dict[tuple, bool],
    whole: str | None,
    uses: Uses | None = None,
) -> Kernel:
    """The kernel of a site, read with more known: Site.again."""
    builder, kernel = read(facts, whole) if uses is None else read(facts, whole, uses)
    known = site.kernel.graph
    builder.g.sized, builder.g.strides, builder.g.others = known.sized, known.strides, known.others
    for name in site.held:
        builder.read_before(name)
    for name in site.outputs:
        kernel.params[name].active = True
    return kernel


def _check_names(params: list[str], source: ast.FunctionDef) -> None:
    """Refuse parameters that the text around the generated kernels has other values by the names of."""
    ours = {
        made
        for n in params
        for made in (gradient_name(n), f"{gradient_name(n)}_out", f"before_{n}", f"span_{n}")
    }
    for name in params:
        if name in ours | (OURS - {TILES}) or name.startswith(("tape_", "check_")):
            raise _name_is_taken(name, source)


def check_called(text: str, site: Site) -> None:
    """Refuse parameters by the names of functions that the text of a Function calls."""
    for name in site.params:
        if name in CALLED and re.search(rf"(?<![\w.]){name}\(", text):
            raise _name_is_taken(name, site.source)


def _name_is_taken(name: str, source: ast.FunctionDef) -> Refusal:
    message = f"`{name}` is a name that the backward of {source.name} gives to a value of its own"
    return Refusal("name", message, f"Rename `{name}` in the kernel.", source.lineno)


def _tensors(site: Site, launch: Launch, name: str, taken: address_tables.Taken) -> list[torch.Tensor]:
    """The tensors that a launch reads or writes through a parameter."""
    value = launch.args[name]
    if name in site.tables:
        return taken.behind(value) or []
    return [value] if isinstance(value, torch.Tensor) else []


def _values_of(
    fwd: Forward,
    host: ast.FunctionDef,
    functions: dict[str, ast.FunctionDef],
    written: dict[str, ast.expr],
    args: dict[str, Arg],
) -> Host:
    """What the text says about the tensors of a launch. What is None here may carry a gradient elsewhere,
    unless it is made of parameters that want none."""
    outside = [n for n in fwd.tree.body if not isinstance(n, ast.FunctionDef)]
    handed = {n.id for one in outside for n in tree_nodes(one) if isinstance(n, ast.Name)}
    constant = {fwd.stub_name: {p.name for p in fwd.params} - set(fwd.grads)}
    values_of = Host(host, functions, constant, handed)
    for name, expression in written.items():
        if args[name].none and values_of.of_constants(expression):
            args[name].active = False
    return values_of


def _note_equal(args: dict[str, Arg], host: Host, written: dict[str, ast.expr], call: ast.Call) -> None:
    """Parameters that every such launch passes one and the same number, the stride of a buffer that is read
    and written, say."""
    first: dict[tuple[str, Any], str] = {}
    for name, expression in written.items():
        if args[name].kind == "int" and expression is not call and (text := host.measured(expression)):
            known = first.setdefault((text, args[name].value), name)
            args[name].equal = None if known == name else known


def _note_indices(builder: Builder, args: dict[str, Arg]) -> bool:
    """What is None here and addresses something where it is not has integers. Whether there is any."""
    places = [offset for _, offset, _, _ in builder.loaded] + [store.offset for store in builder.stored]
    regions = [r for _, _, _, region in builder.loaded for r in region.chain()]
    places += [bound for region in regions for bound in region.bounds or ()]
    counted = reachable(places, _summed)
    found = {n.args[0].attrs["name"] for n in counted if n.op == "load" and n.args[0].attrs.get("none")}
    found = {name for name in found if _is_float(args[name])}
    for name in found:
        args[name].dtype, args[name].active = "int64", False
    return bool(found)


def _summed(node: Node) -> list[Node]:
    """What is an integer where a value is one."""
    if node.op == "ifout":
        return sides(node)
    return [] if node.op == "compare" else list(node.args[node.op == "where" :])


def _note_choices(launch: Launch, args: dict[str, Arg], host: Host, loaded: dict[str, ast.expr]) -> bool:
    """What is constant here only by a choice of the host has a gradient too. Whether there is any."""
    found = [n for n, e in loaded.items() if _is_float(args[n]) and not args[n].active and host.changes(e)]
    for name in found:
        args[name].active = True
        # So that what is made of it is seen to have one, too.
        _Mark.apply(1, launch.args[name], torch.zeros((), requires_grad=True))
    return bool(found)


def _note_held(site: Site, builder: Builder, name: str) -> None:
    """An output holds differentiable values: they lose their gradient where the launch overwrites them."""
    kernel, grid = site.kernel, site.launch.grid
    whole = cover.overwritten(kernel, name, program_axes(site))
    if whole is not None and number_of(kernel, whole, grid) == site.launch.args[name].numel():
        site.replaced[name] = whole
    elif name in site.tables:
        raise Refusal(
            "shared output",
            f"`{name}` of {site.launch.name} already holds differentiable values that this launch does not "
            "read",
            "Give every launch an output of its own, and combine them with torch; or overwrite all of it.",
        ).at(site.call)
    else:
        builder.read_before(name)
        site.held.append(name)


def _is_float(arg: Arg) -> bool:
    return (arg.dtype or "").startswith(("float", "bfloat"))


def _asked_for(store: Store) -> bool:
    """Whether a store stands in a branch that is taken by what the launch passes, or is not."""
    conditions = [region.cond for region in store.region.chain() if region.cond is not None]
    return any(
        all(n.op not in ("pid", "iv", "phi", "loopout", "load", "arange") for n in nodes_in([condition]))
        for condition in conditions
    )


def _note_view(site: Site, taken: address_tables.Taken) -> None:
    """A Function that writes into a view gets it first: torch takes that one for what is modified."""
    found = [n for n in site.outputs if any(t._is_view() for t in _tensors(site, site.launch, n, taken))]
    if not found:
        return
    written = _expression(site.call, site.params, found[0])
    if len(site.outputs) > 1 or written is site.call:
        raise Refusal(
            CONSTRUCT,
            f"`{found[0]}` is a view, and autograd follows a launch into a view only where that is its one "
            "output",
            "Allocate the output in the shape that the kernel wants, launch, and view the result.",
        ).at(site.call)
    site.first = found[0], written
    site.given_names.remove(found[0])
    site.given_names.insert(0, found[0])


def _note_tables(site: Site, builder: Builder, taken: address_tables.Taken) -> None:
    """Which parameters are tables of pointers; refuse what cannot be made again around the backward."""

    def refuse(message: str, remedy: str) -> Refusal:
        return Refusal(address_tables.CONSTRUCT, message, remedy).at(site.call)

    for name in site.params:
        if name not in builder.entries:
            continue
        written = _expression(site.call, site.params, name)
        if not isinstance(written, (ast.Name, ast.Attribute, ast.Subscript)):
            raise refuse(f"`{name}` has no name in the stub", "Put the table into a variable, and pass that.")
        site.tables[name] = written
        tensors = _tensors(site, site.launch, name, taken)
        lines = {taken.lines[t.data_ptr()] for t in tensors}
        if not all(site.host.lineno <= line <= (site.host.end_lineno or line) for line in lines):
            raise refuse(
                f"the addresses in `{name}` are taken outside {site.host.name}()",
                "Call data_ptr() in the function that launches the kernel.",
            )
        if taken.cut_off(tensors):
            raise refuse(
                f"`{name}` has the address of a detached input",
                "Call data_ptr() on the input itself; pass what wants no gradient in a table of its own.",
            )
        site.taken |= lines
        if name in site.written:
            address_tables.check_written(name, tensors, refuse)


def _positional(params: list[str], call: ast.Call, launch: Launch) -> list[str]:
    """The parameters that a launch passes unnamed. `*x.stride()` stands for as many as are left."""
    if not any(isinstance(a, ast.Starred) for a in call.args):
        return params[: len(call.args)]
    count = next((i for i, name in enumerate(params) if name in launch.keywords), len(params))
    return params[:count]


def _unpacked(call: ast.Call, launch: Launch) -> list[str]:
    """The names that a launch passes with `**`: neither call, autotuner nor heuristic spells them out."""
    if all(k.arg is not None for k in call.keywords):
        return []
    known = {k.arg for k in call.keywords} | set(launch.config or ()) | set(launch.heuristics)
    tuned = launch.config is not None  # an autotuner passes options like num_warps as well
    return [n for n in launch.keywords if n not in known and not (tuned and n not in launch.args)]


def _note_heuristics(fwd: Forward, site: Site) -> None:
    """How the backward computes what heuristics do: by the rule's text, or by the rule."""
    site.heuristics = site.home.heuristics(site.source)
    given = {n: v for n, v in site.launch.args.items() if n in site.given_names} | (site.launch.config or {})
    computed = site.launch.heuristics
    for name, (holder, rule) in rules_of(getattr(fwd.module, site.kernel_name), site.kernel_name).items():
        text = site.heuristics.get(name)
        before = [one for one in computed if one in given and one not in site.given_names]
        site.before[name] = before
        try:
            asked = None if isinstance(text, ast.Lambda) else asked_by(rule, given)
        except KeyError as error:
            message = f"`{name}` reads `{error.args[0]}`, which the launch does not pass"
            raise Refusal("heuristics", message).at(site.call) from None
        site.rules[name] = text.id if isinstance(text, ast.Name) else f'{holder}.values["{name}"]', asked
        if name in computed:
            given[name] = computed[name]


def _expression(call: ast.Call, params: list[str], name: str) -> ast.expr:
    """What stands for a parameter in a launch; the launch where that cannot be said."""
    for keyword in call.keywords:
        if keyword.arg == name:
            return keyword.value
    at = params.index(name)
    unclear = at >= len(call.args) or any(isinstance(a, ast.Starred) for a in call.args[: at + 1])
    return call if unclear else call.args[at]


def _strides(site: Site) -> frozenset[str]:
    """The parameters that the launch passes a tensor's stride, as it or under a name."""

    def is_stride(value: ast.expr) -> bool:
        return any(
            isinstance(n, ast.Attribute) and n.attr == "stride" or isinstance(n, ast.Name) and n.id in named
            for n in tree_nodes(value)
        )

    named = set[str]()
    for node in tree_nodes(site.host):
        for target in node.targets if isinstance(node, ast.Assign) else ():
            pairs: list[tuple[ast.expr, ast.expr]] = [(target, node.value)]  # type: ignore[attr-defined]
            if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):  # type: ignore[attr-defined]
                pairs = list(zip(target.elts, node.value.elts, strict=False))  # type: ignore[attr-defined]
            for one, value in pairs:
                if any(isinstance(n, ast.Attribute) and n.attr == "stride" for n in tree_nodes(value)):
                    named |= {n.id for n in tree_nodes(one) if isinstance(n, ast.Name)}
    given = [name for name in site.given_names if name in site.params]
    return frozenset(name for name in given if is_stride(_expression(site.call, site.params, name)))


def _sized(site: Site) -> frozenset[str]:
    """The parameters that may follow the sizes of the host's arguments: no literal, nor a name of one."""
    sized = {a.arg for a in tree_nodes(site.host.args) if isinstance(a, ast.arg)}

    def follows(value: ast.expr) -> bool:
        if isinstance(value, ast.IfExp):
            return follows(value.body) or follows(value.orelse)
        if isinstance(value, ast.Name):
            return value.id in sized
        return any(follows(part) for part in ast.iter_child_nodes(value) if isinstance(part, ast.expr))

    count = -1
    while count != len(sized):
        count = len(sized)
        for node in tree_nodes(site.host):
            if isinstance(node, ast.Assign):
                targets = node.targets if follows(node.value) else []
            else:
                targets = [node.target] if isinstance(node, (ast.AugAssign, ast.For, ast.NamedExpr)) else []
            sized |= {n.id for t in targets for n in tree_nodes(t) if isinstance(n, ast.Name)}
    given = [name for name in site.given_names if name in site.params]
    passed = {name for name in given if follows(_expression(site.call, site.params, name))}
    return frozenset(passed.union(site.launch.heuristics))


def _arguments(
    launch: Launch, where: Callable[[str], ast.expr], taken: address_tables.Taken
) -> dict[str, Arg]:
    out = {}
    for name, value in launch.args.items():
        value = getattr(value, "value", value) if type(value).__name__ == "constexpr" else value
        if isinstance(value, torch.Tensor):
            dtype = str(value.dtype).removeprefix("torch.").replace("bool", "int1")
            active = value.requires_grad and value.is_floating_point()
            out[name] = Arg(name, "pointer", None, dtype, active, value.untyped_storage().data_ptr())
            out[name].behind = address_tables.behind_of(name, taken.behind(value))
        elif name in launch.constexprs:
            out[name] = Arg(name, "constexpr", value)
        elif value is None:
            out[name] = Arg(name, "pointer", None, "float32", True, none=True)
        elif isinstance(value, float):
            out[name] = Arg(name, "float", value)
        elif isinstance(value, (bool, int)):
            out[name] = Arg(name, "int", int(value))
        else:
            message = f"`{name}` of {launch.name} is a {type(value).__name__}"
            remedy = "Pass tensors and numbers of Python: float(...) or int(...) make one."
            raise Refusal("launch argument", message, remedy).at(where(name))
    return out


def program_axes(site: Site) -> list[int]:
    """Grid axes that may have more than one program: all but a literal 1."""
    _, written = grid_written(site)
    if any(isinstance(e, ast.Starred) for e in written):  # then an entry's place is not its axis
        written = []
    single = {i for i, e in enumerate(written) if isinstance(e, ast.Constant) and e.value == 1}
    single -= {site.blocks.axis} if site.blocks is not None else set()
    return [axis for axis in range(len(site.launch.grid)) if axis not in single]


def grid_written(site: Site) -> tuple[ast.arguments | None, list[ast.expr]]:
    """The entries of a launch's grid as written, with the parameters of the function that returns them; none
    where that cannot be said."""
    grid = site.call.func.slice  # type: ignore[attr-defined]
    given = None
    if isinstance(grid, ast.Name):
        name = grid.id
        named = [*Host(site.host, {}).assigned.get(name, []), *_returned(site.host, name)]
        grid = named[0] if len(named) == 1 and named[0] is not None else grid
        made = [n for n in tree_nodes(site.host) if isinstance(n, ast.FunctionDef) and n.name == name]
        given = made[0].args if len(made) == 1 else None
    given = grid.args if isinstance(grid, ast.Lambda) else given
    grid = grid.body if isinstance(grid, ast.Lambda) else grid
    return given, grid.elts if isinstance(grid, (ast.Tuple, ast.List)) else []


def grid_rows(site: Site, varied: set[str]) -> dict[int, str] | None:
    """The axes of a grid that share a range out, `cdiv(range, meta["BLOCK"])`, with the block's name, where
    the other axes hang on no meta-parameter of `varied`; None where that cannot be said."""
    given, written = grid_written(site)
    if len(written) != len(site.launch.grid) or any(isinstance(e, ast.Starred) for e in written):
        return None
    if given is not None and (len(given.args) != 1 or given.vararg or given.kwonlyargs or given.defaults):
        return None
    computed = [n for n in tree_nodes(site.host) if isinstance(n, ast.FunctionDef) and n.args is given]
    if any(len(one.body) > 1 for one in computed):  # what it computes first may hang on them
        return None
    rows: dict[int, str] = {}
    for axis, entry in enumerate(written):
        asked = given is not None and _asks(entry, given.args[0].arg)
        if not asked:
            continue
        match entry:
            case ast.Call(
                ast.Name("cdiv") | ast.Attribute(_, "cdiv"),
                [whole, ast.Subscript(ast.Name(), ast.Constant(str(block)))],
                [],
            ) if given is not None and not _asks(whole, given.args[0].arg):
                if block in varied:
                    rows[axis] = block
            case _:
                return None
    return rows


def _asks(expression: ast.expr, name: str) -> bool:
    return any(isinstance(n, ast.Name) and n.id == name for n in tree_nodes(expression))


def _returned(host: ast.FunctionDef, name: str) -> list[ast.expr | None]:
    """What the functions of a name in a host function return."""
    made = [
        n for n in tree_nodes(host) if isinstance(n, ast.FunctionDef) and n.name == name and n is not host
    ]
    return [n.value for one in made for n in tree_nodes(one) if isinstance(n, ast.Return)]


def _is_of_input(t: torch.Tensor) -> bool:
    """Whether a tensor is one that a gradient is asked of, or a view of it."""
    whole = t._base if t._base is not None else t
    return whole.requires_grad and whole.is_leaf


def _more_active(new: Site, old: Site) -> bool:
    count = [sum(a.active or bool(a.behind and a.behind.active) for a in s.args.values()) for s in (new, old)]
    return count[0] > count[1]


def _may_be_more(site: Site) -> bool:
    """Whether another call may show more of a launch than the one that was seen."""
    return bool(site.empty) or not site.outputs


def _mark(site: Site, launch: Launch, taken: address_tables.Taken) -> None:
    """Make the written buffers depend on what the kernel reads."""
    written: list[torch.Tensor] = []
    for name in site.outputs:
        tensors = _tensors(site, launch, name, taken)
        if torch.is_grad_enabled() and any(map(_is_of_input, tensors)):
            message = f"`{name}` is an input that wants a gradient, and this launch overwrites it"
            remedy = "Launch on a copy: x = x.clone(). Autograd lets nobody change an input's values."
            raise Refusal("in-place access", message, remedy).at(site.call)
        written += tensors
    if not written:
        return
    ids = {id(t) for t in written}
    read = [value for name in launch.args for value in _tensors(site, launch, name, taken)]
    sources = [value for value in read if value.requires_grad and id(value) not in ids]
    if sources or any(t.requires_grad for t in written):
        _Mark.apply(len(written), *written, *sources)
