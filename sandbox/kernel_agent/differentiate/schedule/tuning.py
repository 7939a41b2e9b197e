"""What a tuner may vary without a new proof: warps, stages, the configurations that the forward lists.

Block sizes in the forward's own `@triton.autotune` list are interchangeable by declaration. Those that the
stub computes are varied where it is proven that nothing hangs on them (`own_blocks`), and nowhere else.
"""

from __future__ import annotations

from typing import Any

from ...forward import Forward
from ...launches import jit_function
from ..ir.nodes import For, nodes_in, walk
from ..read.trace import Site
from ..reverse.sweep import Reverse
from ..reverse.written_once import Lanes
from . import own_blocks, own_lanes, own_tiles, row_tiles

MOST = 8
LAUNCHED = {"num_warps", "num_stages"}
LANES = 32  # of a warp
HELD = 2048  # elements that one warp holds in registers, 64 in each of its lanes
LISTED = "_kernel_agent_listed"  # where an autotuner keeps its configurations while it is bound to one


def menu(fwd: Forward, sites: list[Site]) -> list[dict[str, Any]]:
    """Configurations for the request's `config`, the likeliest first; not the one that the draft has."""
    found: list[dict[str, Any]] = []
    for site in sites:
        if (own := own_blocks.find(site)) is not None:
            found += own_blocks.offers(own, site)
        found += own_tiles.offers(site) + own_lanes.offers(site)
        found += row_tiles.offers(site)
        bound = site.launch.config or {}
        listed = [
            {**c.kwargs, "num_warps": c.num_warps, "num_stages": c.num_stages}
            for c in getattr(_tuner(fwd, site.kernel_name), "configs", ())
        ]
        found += [c for c in listed if any(c[k] != v for k, v in bound.items() if k in c)]
    warps = max(site.launch.num_warps for site in sites)
    few = min(_warps_with_work(sites), warps // 2)
    found += [{"num_warps": n} for n in dict.fromkeys((few, warps // 2, warps * 2)) if 1 <= n <= 16]
    if any(n.op == "dot" for s in sites for n in nodes_in(s.kernel.effects)):
        stages = max(site.launch.num_stages for site in sites)
        found += [{"num_stages": n} for n in (2, 3, 4) if n != stages]
    unique: list[dict[str, Any]] = []
    for config in found:
        if config not in unique:
            unique.append(config)
    unique.sort(key=lambda config: not config.get("apart"))
    return unique[:MOST]


def _warps_with_work(sites: list[Site]) -> int:
    """So many warps that each lane has two elements at least of the largest blocks: of fewer, warps do what
    others do, or nothing."""
    most = max(
        site.kernel.graph.elements(node.shape) for site in sites for node in nodes_in(site.kernel.effects)
    )
    return max(1, most // (2 * LANES))


def one_warp(reverse: Reverse, site: Site) -> list[dict[str, Any]]:
    """A configuration for a small block of which each step of a loop sums the lanes and writes its own: in
    one warp nobody waits for others at a barrier."""
    g = reverse.kernel.graph
    loops = [e for e in walk(reverse.effects) if isinstance(e, For) and e.order == "reverse"]
    carried = [(c, loop.source.region) for loop in loops if loop.source for c in loop.source.carries]
    small = any(
        len(c.phi.shape) == 2 and g.elements(c.phi.shape) <= HELD and Lanes.of(g, c, region)
        for c, region in carried
    )
    return [{"num_warps": 1}] if small and site.launch.num_warps > 2 else []


def offer(configs: list[dict[str, Any]], config: dict[str, Any], early: bool = True) -> None:
    """Put a configuration behind one that it extends, once; else before all others but those with tiles of
    each kernel's own, or (not `early`) before those of warps and stages alone."""
    if config not in configs:
        extended = [at for at, one in enumerate(configs) if one.items() < config.items()]
        before = sum(bool(one.get("apart")) if early else not one.keys() <= LAUNCHED for one in configs)
        configs.insert(extended[0] + 1 if extended else min(before, MOST - 1), config)
        del configs[MOST:]


def offer_behind(configs: list[dict[str, Any]], base: dict[str, Any], more: dict[str, Any]) -> None:
    """Put one of those on offer with something more behind all that extend it."""
    at = max(at for at, one in enumerate(configs) if base.items() <= one.items())
    configs.insert(at + 1, {**base, **more})
    del configs[MOST:]


def offer_beside(
    configs: list[dict[str, Any]], config: dict[str, Any], asking: set[str], behind: set[str]
) -> None:
    """Put a configuration behind the last that has one of `behind`; else before those of warps and stages
    alone, or a last one with a matrix. In place of one that is too many, the last that has none of `asking`:
    what asks something of the passes is there once."""
    plain = [at for at, one in enumerate(configs) if not one.keys() & asking]
    if config in configs or (len(configs) >= MOST and not plain):
        return
    if len(configs) >= MOST:
        del configs[plain[-1]]
    extended = [at for at, one in enumerate(configs) if one.keys() & behind]
    last = len(configs) - ("matrix" in configs[-1] if len(configs) > 1 else 0)
    before = next((at for at, one in enumerate(configs) if one.keys() <= LAUNCHED), last)
    configs.insert(extended[-1] + 1 if extended else before, config)


def offer_first(configs: list[dict[str, Any]], found: list[dict[str, Any]]) -> None:
    """Put configurations before all others, but for one that shares a loop out."""
    shared = [one for one in configs[:1] if one.keys() == {"shares"}]
    every = [*shared, *found, *configs]
    configs[:] = [one for at, one in enumerate(every) if one not in every[:at]][:MOST]


def offer_last(configs: list[dict[str, Any]], config: dict[str, Any]) -> None:
    """Put a configuration behind all others, in place of one that is too many."""
    configs[MOST - 1 :] = [config]


def _tuner(fwd: Forward, name: str) -> Any:
    """The autotuner around a kernel, None without one."""
    kernel: Any = getattr(fwd.module, name, None)
    while kernel is not None and not hasattr(kernel, "configs"):
        kernel = getattr(kernel, "fn", None)
    return kernel


def bind(fwd: Forward, config: dict[str, Any]) -> None:
    """Leave the forward's autotuners the configuration with these block sizes only, where they list it."""
    for name in (n for n, value in vars(fwd.module).items() if jit_function(value) is not None):
        tuner = _tuner(fwd, name)
        listed = [c for c in getattr(tuner, "configs", ()) if c.kwargs and c.kwargs.items() <= config.items()]
        if listed:
            tuner.__dict__.setdefault(LISTED, tuner.configs)
            tuner.configs = listed[:1]


def block_sizes(fwd: Forward, name: str) -> list[dict[str, Any]]:
    """The block sizes that the user's autotuner around a kernel may choose."""
    tuner = _tuner(fwd, name)
    return [dict(c.kwargs) for c in getattr(tuner, LISTED, getattr(tuner, "configs", ()))]


def apply(sites: list[Site], config: dict[str, Any]) -> None:
    """Use warps and stages for the backward of every launch."""
    for site in sites:
        site.launched_warps = site.launch.num_warps
        site.warps = "num_warps" in config or site.autotuned
        site.launch.num_warps = int(config.get("num_warps", site.launch.num_warps))
        site.stages = int(config["num_stages"]) if "num_stages" in config else None
