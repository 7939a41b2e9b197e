"""What a tuner is offered that asks something of the passes, beside warps and stages (`schedule.tuning`)."""

from __future__ import annotations

import math
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

from .ir.refusal import Refusal
from .plans import BROKEN, Asked, Scheduled, keeps_matrices, planned, splittable
from .read import block_sizes
from .schedule import (
    exact_products,
    own_blocks,
    own_tiles,
    saved_tiles,
    split_loops,
    step_matrices,
    step_tiles,
    tuning,
    turned_tiles,
    whole_steps,
)

if TYPE_CHECKING:
    from ..launches import Launch
    from .ir.nodes import Node
    from .pipeline import Draft
    from .read.trace import Site

RUNS = (512, 2048)  # programs that walk the entries of a table, in all
PLACES = (0.25, 0.5, 0.75)  # in a grid, of programs that stand for others
ASKING = {one.name for one in fields(Asked)}  # what a configuration asks of the passes
TABLE = 3  # tiles that are offered beside rows of a table
STAGES = 3  # of tiles that are formed transposed: operands of a product are all that is loaded ahead


def offer(draft: Draft, plan: Scheduled) -> None:
    """Add what a tuner may ask of the passes."""
    for config in () if plan.fused is not None and plan.saved else plan.offers:
        tuning.offer(draft.configs, config)
    _offer_for_products(draft, plan)
    _offer_turned(draft, plan)
    _offer_for_data(draft, plan)
    _offer_for_matrices(draft, plan)
    if not draft.asked.tf32x3 and exact_products.offers(plan.effects):
        tuning.offer_first(draft.configs, [{"tf32x3": 1}])


def _offer_turned(draft: Draft, plan: Scheduled) -> None:
    """Tiles that owner kernels form transposed: alone, where they have rows enough then; else, and also, with
    the smallest blocks on offer that have so many, and a stage more for what they walk: nothing else is on
    its way while warps wait for a product. Behind it the factors of rows in exponents."""
    graph = plan.reverse.kernel.graph
    if draft.schedule == "atomic":
        return
    kernels = [made for made in plan.owner.kernels if turned_tiles.turned(graph, made.effects) is not None]
    sizes = {name for made in kernels for name in turned_tiles.rows_of(made.effects)}
    if sizes and not draft.asked.turned:
        name = min(sizes)
        given = plan.site.args[name].value if name in plan.site.args else 0
        wide = [config for config in draft.configs if config.get(name, 0) >= turned_tiles.ROWS]
        if wide:
            least = min(wide, key=_size)
            tuning.offer_behind(draft.configs, least, {"turned": 1, **_staged(plan.site, least)})
        if given >= turned_tiles.ROWS or not wide:
            alone = {"turned": 1, **_staged(plan.site, {})}
            tuning.offer_beside(draft.configs, alone, ASKING, {"turned"})
    if plan.could_fold:
        tuning.offer_beside(draft.configs, {"logsumexp": 1}, ASKING, {"turned"})


def _size(config: dict[str, Any]) -> int:
    """Of the tile that blocks make."""
    return math.prod(value for name, value in config.items() if name not in tuning.LAUNCHED)


def _staged(site: Site, config: dict[str, Any]) -> dict[str, Any]:
    """Three stages, if that is more than the launch has and shared memory can hold them: two blocks of rows
    each, beside two of columns."""
    own = own_blocks.find(site) if site.blocks is None else None
    if own is None or site.launch.num_stages >= STAGES or "num_stages" in config:
        return {}
    given = {name: arg.value for name, arg in site.args.items() if name in (own.rows, own.columns)}
    rows, columns = ({**given, **config}[name] for name in (own.rows, own.columns))
    held = 2 * (STAGES * max(rows, columns) + min(rows, columns)) * own.width * own.bytes
    return {"num_stages": STAGES} if held <= own_blocks.SHARED else {}


def offer_unmasked(draft: Draft, plan: Scheduled) -> None:
    """Loops of products that walk whole tiles without masks, where a known launch has programs with some:
    behind what else is done for each score, or all that says which kernels there are and how wide their
    blocks, which a variant has beside it."""
    site, graph = plan.site, plan.reverse.kernel.graph
    if draft.asked.unmasked:
        return
    found = [(grid, one) for effects, grid in splittable(plan) for one in whole_steps.find(graph, effects)]
    launches = [site.launch, *site.others()] if found else []
    if any(_has_whole_steps(plan, launch, grid, one) for launch in launches for grid, one in found):
        tuning.offer_beside(draft.configs, {"unmasked": 1}, ASKING, {"turned", "logsumexp"})


def _has_whole_steps(
    plan: Scheduled, launch: Launch, grid: list[Node] | None, one: whole_steps.Found
) -> bool:
    """Whether that is worth it in a loop of a kernel with this grid, or with the forward's."""
    graph = plan.reverse.kernel.graph
    known = graph.example_of(launch.args, launch.grid)
    known |= {graph.param(f"grid_{axis}").id: count for axis, count in enumerate(launch.grid)}
    values = split_loops.Values(known)
    counts = launch.grid if grid is None else [values.of(count) for count in grid]
    for place in PLACES:
        pids = {graph.pid(axis).id: int((count or 1) * place) for axis, count in enumerate(counts)}
        if split_loops.is_worth(one, known | pids):
            return True
    return False


def offer_constants(draft: Draft) -> None:
    """Kernels that are compiled for small integers: behind what says which kernels there are and how wide
    their blocks, which a variant has beside it if that was faster, before warps and stages."""
    tuning.offer(draft.configs, {"constants": 1}, early=False)


def offer_whole(draft: Draft) -> None:
    """Kernels without masks in blocks that lie wholly inside: also behind what says how wide blocks are."""
    tuning.offer(draft.configs, {"whole": 1}, early=False)


def offer_scans(draft: Draft, plan: Scheduled) -> None:
    """Steps of linear recurrences in tiles: early, as each step waits for its loads. Asked once kernels are
    written down, as it names values."""
    if not draft.asked.scan and plan.shared is None:
        for config in reversed(step_tiles.offers(plan.reverse, plan.reverse.effects)):
            tuning.offer(draft.configs, config)


def _offer_for_products(draft: Draft, plan: Scheduled) -> None:
    """Beside tiles of each kernel's own, or alone: operands that are computed once; and tiles that the
    forward saves."""
    site, wide = plan.site, next((config for config in draft.configs if config.get("apart")), {})
    if draft.schedule == "atomic":
        return
    if plan.owner.could_prepare:
        tuning.offer(draft.configs, {**wide, "operands": 1}, early=False)
    own = own_tiles.of_all(site) if wide else None
    if own is None:
        return
    named = site if isinstance(site.blocks, block_sizes.Grid) else own_tiles.named(site, own)
    asked = replace(draft.asked, apart=True, operands=False)
    try:
        reverse = (
            plan.reverse if not own.uses.of else planned(named, "", replace(asked, saved=False), []).reverse
        )
        if not saved_tiles.offers(reverse, site if not own.uses.of else named, own):
            return
        saving = planned(named, "", replace(asked, saved=True), []).owner
    except (Refusal, *BROKEN):
        return
    tuning.offer(draft.configs, {**wide, "saved": 1})
    if saving.could_prepare:
        tuning.offer(draft.configs, {**wide, "saved": 1, "operands": 1})


def _offer_for_data(draft: Draft, plan: Scheduled) -> None:
    """What gives owners to gradients at places that data says, or few atomic adds."""
    asked, owner = draft.asked, plan.owner
    found: list[dict[str, Any]] = [{"runs": n} for n in RUNS] if owner.could_run else [{}]
    if owner.could_own:
        found = [{"disjoint": 1, **config} for config in found]
    if draft.schedule == "atomic" or asked.disjoint or asked.runs or not found[0] or plan.site.again is None:
        return
    site = replace(plan.site, kernel=plan.site.again({}, None))
    try:
        other = planned(site, "", replace(asked, disjoint=owner.could_own, runs=RUNS[0]), [])
    except (Refusal, *BROKEN):
        return
    if other.totals.kept < plan.totals.kept or other.added:
        for config in reversed(own_tiles.of_table(plan.site, found[0])[:TABLE] + found):
            tuning.offer(draft.configs, config)


def _offer_for_matrices(draft: Draft, plan: Scheduled) -> None:
    """Tiles of an adjoint as a matrix, with blocks that the main kernel may have then, as it holds no sums of
    whole rows: the two largest that rows of all sizes in SWEEP leave room for, or the forward's. First where
    rows are so wide that a product takes longer than a tile to store and load, else last."""
    if not plan.could_store or not keeps_matrices(plan.site, draft.asked):
        return
    own = own_blocks.find(plan.site) if plan.site.blocks is None else None
    larger: list[dict[str, Any]] = []
    if own is not None:
        own = replace(own, width=max(own.width, draft.asked.longest.get(own.width, 0)))
        sizes = {config[own.rows]: config for config in own_blocks.offers(own, plan.site, sums=False)[::-1]}
        given = plan.site.args[own.rows].value
        larger = [sizes[size] for size in sorted(sizes, reverse=True) if size > given]
    found = [{**config, "matrix": 1} for config in [*larger, {}][:2]]
    if own is not None and own.width >= step_matrices.WIDE:
        tuning.offer_first(draft.configs, found)
    else:
        tuning.offer_last(draft.configs, found[0])
