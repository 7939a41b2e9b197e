"""Compiled kernels by what they are compiled from: operation compile, and how a child reads the shared cache.

Triton's front end turns Python into IR: quick, and it needs the user's code, so every process does it anew.
The back end turns the IR into a binary: slow, and a function of the IR, of a few options and of the compiler.
`Source` is all of that but the compiler, as one text; its SHA-256 is the name of the entry. Nobody can plant
an entry for a kernel of somebody else, nor one that is not what the source compiles to: entries are made from
a source by operation compile alone, in a process that executes no Python of users or candidates, one source a
process (docs/jail.md). The C modules that launch kernels are treated alike.

A child asks `obtain` or, once `install` was called, compiles as ever: what is in the folder of the cache is
taken from there, and what is not is noted for the daemon in the scratch, as `compile-<key>.json`.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import functools
import hashlib
import inspect
import json
import re
import struct
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import BaseBackend, GPUTarget
from triton.compiler import ASTSource, make_backend

from .errors import Unusable, describe

_PROGBITS, _EXECUTED = 1, 4  # a section's kind and flag, in ELF
_NOP = 0x7918  # its first two bytes
FORMAT = 1  # of sources and entries; another number makes other keys
_ENTRY_MAX = 64 << 20
# Options that change the code, name no file and pass no flag to a tool. With any other one the kernel is not
# shared.
_OPTIONS = (
    "num_warps", "num_stages", "num_ctas", "maxnreg", "enable_fp_fusion", "launch_cooperative_grid",
    "launch_pdl", "default_dot_input_precision", "sanitize_overflow", "debug",
)  # fmt: skip
_PLAIN = (bool, int, str)
_MODULES = ("cuda_utils", "__triton_launcher")  # what Triton itself builds from C


@dataclasses.dataclass(frozen=True)
class Source:
    """What is compiled: `kind` "kernel" with Triton's IR, or "module" with C."""

    kind: str
    text: str
    target: tuple[str, int, int] | None = None
    options: tuple[tuple[str, Any], ...] = ()  # where they differ from the backend's defaults, by name
    name: str = ""  # of a module
    libraries: tuple[str, ...] = ()

    def canonical(self) -> str:
        """The same text for the same source, in every process."""
        return json.dumps({"format": FORMAT, **dataclasses.asdict(self)}, sort_keys=True)

    @property
    def key(self) -> str:
        return hashlib.sha256(self.canonical().encode()).hexdigest()

    @classmethod
    def parse(cls, text: str) -> Source:
        """Raises Unusable for what canonical() would not have written, or what is no plain source."""
        try:
            fields = json.loads(text)
            if fields.pop("format") != FORMAT:
                raise ValueError("another format")
            fields["target"] = fields["target"] and tuple(fields["target"])
            fields["options"] = tuple((name, value) for name, value in fields["options"])
            fields["libraries"] = tuple(fields["libraries"])
            source = cls(**fields)
            known = all(name in _OPTIONS and isinstance(value, _PLAIN) for name, value in source.options)
            if source.canonical() != text or not known or not isinstance(source.text, str):
                raise ValueError("not as this program writes it")
        except (ValueError, TypeError, KeyError, AttributeError) as exc:
            raise Unusable("internal", f"not a source of a kernel: {describe(exc)}") from exc
        return source


# ---- from Python to a source


def lower(kernel: ASTSource, backend: BaseBackend, target: GPUTarget, options: Any) -> Source | None:
    """The source of a specialised kernel; None where it is not shared. Raises what the front end raises."""
    from triton._C.libtriton import ir

    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    given = {
        "target": target,
        "options": options,
        "codegen_fns": backend.get_codegen_implementation(options),
        "module_map": backend.get_module_map(),
        "context": context,
    }
    wanted = inspect.signature(kernel.make_ir).parameters  # older versions take no target
    module = kernel.make_ir(**{name: given[name] for name in wanted})
    first = next(iter(_stages(backend, options).values()))
    return _kernel_source(first(module, {}), backend, target, options)


def _kernel_source(module: Any, backend: BaseBackend, target: GPUTarget, options: Any) -> Source | None:
    usual = vars(backend.parse_options({}))
    other = {name: value for name, value in vars(options).items() if value != usual.get(name)}
    if not all(name in _OPTIONS and isinstance(value, _PLAIN) for name, value in other.items()):
        return None
    # Without locations: the same kernel in another file, or some lines further down, is the same source.
    text = module.str_nodebug() if hasattr(module, "str_nodebug") else str(module)
    arch = (target.backend, int(target.arch), int(target.warp_size))
    return Source("kernel", text, arch, tuple(sorted(other.items())))


def _stages(backend: BaseBackend, options: Any) -> dict[str, Any]:
    """The backend's steps in order, "ttir" first."""
    stages: dict[str, Any] = {}
    if "language" in inspect.signature(backend.add_stages).parameters:
        from triton.backends.compiler import Language

        backend.add_stages(stages, options, Language.TRITON)
    else:  # before Triton 3.4
        backend.add_stages(stages, options)  # type: ignore[call-arg]
    return stages


# ---- from a source to an entry


def build(source: Source) -> dict[str, Any]:
    """The entry of a source, compiled here: `facts`, `metadata` and the products of every step in `asm`,
    bytes in base 64."""
    with tempfile.TemporaryDirectory() as folder:
        return (_build_module if source.kind == "module" else _build_kernel)(source, Path(folder))


def _build_kernel(source: Source, folder: Path) -> dict[str, Any]:
    from triton._C.libtriton import ir

    assert source.target is not None
    target = GPUTarget(*source.target)
    backend = make_backend(target)
    options = backend.parse_options(dict(source.options))
    (folder / "kernel.ttir").write_text(source.text)
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    with contextlib.chdir(folder):  # the path gets into the binary, and the same source gives the same bytes
        product = ir.parse_mlir_module("kernel.ttir", context)
    product.context = context
    before = {"target": target, **vars(options)}
    metadata = dict(before)
    asm = {}
    for name, stage in list(_stages(backend, options).items())[1:]:
        product = stage(product, metadata)
        asm[name] = _packed(product)
    made = {name: value for name, value in metadata.items() if name not in before or before[name] != value}
    return {"facts": binary_facts(_unpacked(asm["cubin"]), metadata["shared"]), "metadata": made, "asm": asm}


def _build_module(source: Source, folder: Path) -> dict[str, Any]:
    from triton.runtime import build as triton_build

    if source.name not in _MODULES:
        raise Unusable("internal", f"no module of Triton's: {source.name}")
    driver = _driver() if source.libraries else None
    path = folder / f"{source.name}.c"
    path.write_text(source.text)
    so = triton_build._build(
        source.name,
        str(path),
        str(folder),
        driver.library_dirs() if driver else [],
        list(driver.include_dirs) if driver else [],
        list(driver.libraries) if driver else [],
        [],
    )
    return {"facts": {}, "metadata": {}, "asm": {"so": _packed(Path(so).read_bytes())}}


def _driver() -> Any:
    from triton.backends.nvidia import driver

    return driver


def _packed(product: Any) -> Any:
    return {"base64": base64.b64encode(product).decode()} if isinstance(product, bytes) else str(product)


def _unpacked(product: Any) -> Any:
    return base64.b64decode(product["base64"]) if isinstance(product, dict) else product


def toolchain() -> str:
    """A name for the compiler that is installed: its version, and names, sizes and times of its files."""
    root = Path(triton.__file__).parent
    parts = [triton.__version__, str(FORMAT), hashlib.sha256(Path(__file__).read_bytes()).hexdigest()]
    for folder in ("_C", "backends", "compiler", "language", "runtime"):
        for path in sorted((root / folder).rglob("*")):
            if path.is_file() and path.suffix != ".pyc":
                status = path.stat()
                parts.append(f"{path} {status.st_size} {status.st_mtime_ns}")
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def run(request: dict[str, Any], scratch: Path) -> dict[str, Any]:
    """The result of docs/protocol.md's op compile."""
    if request.get("source") is None:
        return {"toolchain": toolchain()}
    source = Source.parse(request["source"])
    try:
        return json.loads(json.dumps({"key": source.key, **build(source)}, default=vars))
    except Unusable:
        raise
    except OSError as exc:  # of this machine (ptxas may not be executed, say), not of the kernel
        raise Unusable("internal", f"the compiler cannot be run: {describe(exc)}") from exc
    except Exception as exc:  # whatever the compiler raises is the finding
        raise Unusable("unsupported_op", f"the kernel does not compile: {describe(exc)}") from exc


# ---- the shared cache, as a child sees it: to be read


@dataclasses.dataclass
class _Shared:
    folder: Path | None = None
    noted: dict[str, Source] = dataclasses.field(default_factory=dict)
    hits: int = 0


_shared = _Shared()


def use(folder: str | None) -> None:
    """Read entries in `folder` from now on. None: there is no shared cache."""
    _shared.folder = Path(folder) if folder else None
    _shared.noted.clear()
    _shared.hits = 0


def note(source: Source) -> None:
    """Ask the daemon for an entry of this source."""
    _shared.noted[source.key] = source


def leave(scratch: Path) -> dict[str, Any]:
    """What this process found, for its result; what it wants to have compiled is put into the scratch."""
    for key, source in _shared.noted.items():
        (scratch / f"compile-{key}.json").write_text(source.canonical())
    return {"hits": _shared.hits, "wanted": list(_shared.noted)} if _shared.hits or _shared.noted else {}


def find(source: Source) -> dict[str, Any] | None:
    """The entry of the shared cache; None, and noted, where there is none."""
    if _shared.folder is None:
        return None
    path = _shared.folder / f"{source.key}.json"
    with contextlib.suppress(OSError, ValueError):
        if path.stat().st_size <= _ENTRY_MAX:
            entry = json.loads(path.read_text())
            _shared.hits += 1
            return entry
    note(source)
    return None


def obtain(source: Source) -> dict[str, Any]:
    """The entry: from the cache, or made here for this process alone. Raises what the compiler raises."""
    return find(source) or build(source)


def install() -> None:
    """Let Triton's own compilations of this process read the shared cache."""
    with contextlib.suppress(RuntimeError):  # a Triton without this backend shares nothing
        _wrap_stages(type(make_backend(GPUTarget("cuda", 90, 32))))
        _wrap_module_build()


def _wrap_stages(backend_class: type[BaseBackend]) -> None:
    plain = backend_class.add_stages
    if hasattr(plain, "kernel_agent_plain"):
        return

    @functools.wraps(plain)
    def add_stages(self: BaseBackend, stages: dict[str, Any], options: Any, *language: Any) -> None:
        plain(self, stages, options, *language)
        if next(iter(stages)) == "ttir":
            _read_first(self, stages, options)

    add_stages.kernel_agent_plain = plain  # type: ignore[attr-defined]
    backend_class.add_stages = add_stages  # type: ignore[method-assign]


def _read_first(backend: BaseBackend, stages: dict[str, Any], options: Any) -> None:
    """After "ttir" the source is known: either every later step is read from its entry, or none."""
    later = {name: stage for name, stage in stages.items() if name != "ttir"}
    start = next(iter(later))
    asm: dict[str, Any] = {}

    def step(name: str, product: Any, metadata: dict[str, Any]) -> Any:
        if name == start:
            source = _kernel_source(product, backend, backend.target, options)
            entry = find(source) if source is not None else None
            if entry is not None:
                asm.update(entry["asm"])
                metadata.update(entry["metadata"])
        return _unpacked(asm[name]) if name in asm else later[name](product, metadata)

    for name in later:
        stages[name] = lambda product, metadata, name=name: step(name, product, metadata)


def _wrap_module_build() -> None:
    from triton.runtime import build as triton_build

    plain = triton_build._build
    if hasattr(plain, "kernel_agent_plain"):
        return

    def build_module(name: str, src: str, srcdir: str, *rest: Any) -> str:
        libraries = tuple(
            rest[2]
        )  # after the folders of libraries and headers, which the driver's module knows
        source = Source("module", Path(src).read_text(), name=name, libraries=libraries)
        entry = find(source) if name in _MODULES else None
        if entry is None:
            return plain(name, src, srcdir, *rest)
        path = Path(srcdir) / f"{name}.so"
        path.write_bytes(_unpacked(entry["asm"]["so"]))
        return str(path)

    build_module.kernel_agent_plain = plain  # type: ignore[attr-defined]
    triton_build._build = build_module


# ---- what a binary costs


def binary_facts(cubin: bytes, shared: int) -> dict[str, int | None]:
    """Registers and spilled bytes per thread, shared bytes per block and instructions of one binary."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = _tool("cuobjdump", "--dump-resource-usage", file.name)
    registers = re.search(r"REG:(\d+)", usage)
    stack = re.search(r"STACK:(\d+)", usage)
    local = re.search(r"LOCAL:(\d+)", usage)
    return {
        "registers": int(registers.group(1)) if registers else None,
        "spills": max(int(m.group(1)) for m in (stack, local) if m) if stack or local else None,
        "shared": shared,
        "instructions": _instructions(cubin) or None,
    }


def _instructions(cubin: bytes) -> int:
    """How many an ELF file of compute capability 7.0 or newer has: 16 bytes each, without those that do
    nothing, which fill it up. Counted here: nvdisasm takes ten times as long as all else that is compiled."""
    table, size, count = (
        struct.unpack_from(form, cubin, at)[0] for form, at in (("<Q", 40), ("<H", 58), ("<H", 60))
    )
    found = 0
    for header in range(table, table + size * count, size):
        kind, flags = struct.unpack_from("<IQ", cubin, header + 4)
        if kind == _PROGBITS and flags & _EXECUTED:
            start, length = struct.unpack_from("<QQ", cubin, header + 24)
            words = struct.iter_unpack("<H14x", cubin[start : start + length])
            found += sum(word != _NOP for (word,) in words)
    return found


def _tool(name: str, *arguments: str) -> str:
    """Output of one of the CUDA tools in Triton's package; empty where it is missing or fails."""
    path = getattr(triton.knobs.nvidia, name).path
    done = subprocess.run([path, *arguments], capture_output=True, text=True, timeout=60, check=False)
    return done.stdout if done.returncode == 0 else ""
