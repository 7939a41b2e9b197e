"""What host code of a backward may name: imports resolved to dotted names, and closed lists of those.

    names = Names(tree)
    names.path(node)            "torch.nn.functional.softmax" for F.softmax, None for what no import bound
    judge(path)                 None, or (rule, sentence) for a path that is not on the lists

Lists of what is allowed, not of what is not: a name that nobody thought of is rejected. Reads syntax trees
only.
"""

from __future__ import annotations

import ast

from ..source import tree_nodes, words

_DTYPES = words(
    """float16 bfloat16 float32 float64 half float double float8_e4m3fn float8_e5m2 float8_e4m3fnuz
    float8_e5m2fnuz int8 int16 int32 int64 uint8 uint16 uint32 uint64 short int long bool complex32 complex64
    complex128"""
)
# Allocation, views, copies, sums of partial results, work on indices, and questions. What these compute with
# floating values all the same is found by the record of the operations that really run.
_TORCH = _DTYPES | words(
    """empty empty_like empty_strided empty_permuted zeros zeros_like ones ones_like full full_like arange
    tensor as_tensor scalar_tensor clone cat concat concatenate stack hstack vstack split chunk tensor_split
    unbind reshape view_as_real view_as_complex permute transpose swapaxes movedim moveaxis squeeze unsqueeze
    flatten ravel unflatten narrow select diagonal as_strided broadcast_to broadcast_tensors broadcast_shapes
    t flip roll tile repeat_interleave constant_pad_nd atleast_1d atleast_2d sum
    argsort sort searchsorted bucketize bincount unique unique_consecutive nonzero cumsum diff argmax argmin
    max min maximum minimum floor_divide remainder eq ne lt le gt ge equal any all numel
    Tensor Size device dtype layout memory_format finfo iinfo is_tensor is_floating_point is_complex
    is_grad_enabled no_grad promote_types result_type can_cast get_default_dtype contiguous_format strided
    preserve_format channels_last channels_last_3d inf nan pi e __version__ is_autocast_enabled
    get_autocast_gpu_dtype get_autocast_dtype
    autograd.Function autograd.function.Function autograd.function.once_differentiable
    autograd.function.FunctionCtx amp.custom_fwd amp.custom_bwd cuda.amp.custom_fwd cuda.amp.custom_bwd
    cuda.is_available cuda.current_device cuda.device cuda.device_of cuda.device_count
    cuda.get_device_properties cuda.get_device_capability cuda.get_device_name cuda.is_bf16_supported
    xpu.is_available xpu.current_device xpu.device_count xpu.get_device_properties xpu.get_device_capability
    xpu.get_device_name
    version.cuda version.hip version.xpu compiler.is_compiling"""
)
_TRITON = words(
    """jit autotune heuristics Config cdiv next_power_of_2 constexpr constexpr_function __version__
    runtime.jit runtime.autotune runtime.Config runtime.driver.active.get_current_target
    runtime.driver.active.get_active_torch_device runtime.driver.active.utils.get_device_properties
    tools.tensor_descriptor.TensorDescriptor runtime.JITFunction"""
)
_STANDARD = {
    "typing": """Any Annotated Callable ClassVar Concatenate Dict Final FrozenSet Generic Iterable Iterator
        Generator List Literal Mapping MutableMapping NamedTuple NewType NoReturn Optional ParamSpec Protocol
        Self Sequence Set Sized SupportsFloat SupportsInt TYPE_CHECKING Tuple Type TypeAlias TypeGuard TypeVar
        TypedDict Union assert_never cast overload""",
    "collections": "namedtuple defaultdict OrderedDict deque Counter",
    "collections.abc": "Callable Iterable Iterator Generator Mapping MutableMapping Sequence Set Sized",
    "dataclasses": "dataclass field fields replace asdict astuple is_dataclass",
    "functools": "partial reduce cache lru_cache",
    "itertools": """product chain repeat count cycle islice zip_longest pairwise accumulate combinations
        permutations groupby takewhile dropwhile starmap""",
    "contextlib": "nullcontext",
    "enum": "Enum IntEnum StrEnum Flag IntFlag auto unique",
    "operator": "add sub mul floordiv mod neg index itemgetter eq ne lt le gt ge",
}
_ALLOWED = {
    f"{root}.{name}"
    for root, listed in (("torch", " ".join(_TORCH)), ("triton", " ".join(_TRITON)), *_STANDARD.items())
    for name in listed.split()
}
# Modules that may be imported, and stand before a dot; none is a value.
_PACKAGES = words(
    """torch torch.nn torch.nn.functional torch.autograd torch.autograd.function torch.amp torch.cuda
    torch.cuda.amp torch.xpu triton triton.language triton.language.core triton.language.math
    triton.language.random
    triton.language.standard triton.language.semantic triton.language.extra triton.language.extra.libdevice
    triton.language.extra.cuda triton.language.extra.cuda.libdevice triton.runtime triton.runtime.driver
    triton.tools triton.tools.tensor_descriptor math"""
) | frozenset(_STANDARD)
MODULES = frozenset({"torch", "triton", "math", "__future__"} | {name.split(".")[0] for name in _STANDARD})

# Torch operations that could compute a gradient, by the last part of their name, as methods of tensors too.
MATH = words(
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
AUTOGRAD = words("backward grad gradcheck enable_grad checkpoint compile vjp jvp set_grad_enabled")
# What torch's and triton's modules import themselves.
BEHIND = words(
    """os sys gc inspect ctypes builtins subprocess importlib pickle threading warnings linecache traceback
    types collections contextlib weakref functools operator re ast json pathlib tempfile socket"""
)
# Below torch and triton: files, other processes and threads, generators, timers, allocators, streams.
BELOW = BEHIND | words(
    """load save from_file hub package jit multiprocessing distributed futures serialization storage utils
    backends testing cudart memory Event Stream stream graph CUDAGraph initial_seed seed manual_seed random
    get_rng_state manual_seed_all overrides fx"""
)
# Of any object. Frames, their code and what they were called with; hooks, which run host code later; ways to
# hand a tensor's values to host code, or to change them by it.
FRAMES = words(
    """gi_frame gi_code gi_yieldfrom gi_running cr_frame cr_code cr_await cr_origin cr_running
    ag_frame ag_code ag_await ag_running tb_frame tb_next tb_lasti f_back f_builtins f_code f_globals
    f_lasti f_lineno f_locals f_trace f_generator co_code co_consts co_names co_varnames
    func_globals func_code mro with_traceback"""
)
HOOKS = words(
    """register_hook register_post_accumulate_grad_hook register_prehook register_forward_hook
    register_forward_pre_hook register_full_backward_hook register_multi_grad_hook saved_tensors_hooks
    add_pre_run_hook pre_run_hooks"""
)
GRAPH = words("grad_fn next_functions retain_grad accumulate_grad")
# Of a tensor: how it came about, and what training has made of it since. No gradient hangs on that, and no
# case of a check has it as training does.
TRAINING = words("is_leaf grad retains_grad is_inference is_shared output_nr")
# Of a kernel, beside the launch: the same whether it is compiled or not.
OF_KERNELS = words("fn arg_names params warmup run")
# Settings of torch around a call: a check leaves them as they are.
AROUND = frozenset(
    {f"torch.{name}" for name in words("is_autocast_enabled get_autocast_gpu_dtype get_autocast_dtype")}
    | {"torch.compiler.is_compiling", "torch.get_float32_matmul_precision"}
    | {f"torch.backends.{name}.allow_tf32" for name in ("cuda.matmul", "cudnn")}
)
VALUES = words(
    """tolist numpy from_numpy untyped_storage typed_storage storage frombuffer asarray apply_ map_ map2_
    set_ share_memory_"""
)

# What people's own modules say to whoever runs them: it gives nothing back.
SAYING = frozenset({"warnings.warn"})
# Of a module that people wrote themselves, outside of what is checked: ways to code that runs beside it.
HIDDEN = (FRAMES | words("__globals__ __code__ __closure__ __subclasses__ __builtins__")) - words(
    "mro with_traceback f_lineno"
)
SETTINGS = ("torch.backends.", "os.environ")
_WAYS = words(
    """sys.modules sys.meta_path sys.path_hooks sys._getframe sys._current_frames sys.settrace sys.setprofile
    gc.get_objects gc.get_referrers gc.get_referents importlib.reload importlib.import_module
    inspect.currentframe inspect.stack inspect.getouterframes"""
)
_WAYS_BELOW = ("builtins.", "ctypes.", "unittest.mock.", "importlib._", "_ctypes.")

_HONEST = "host code allocates, views, copies, adds up partial results and sorts indices"


def imported(node: ast.Import | ast.ImportFrom) -> list[str]:
    """The dotted names that it imports."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return [_module(node) + alias.name for alias in node.names]


class Names:
    """What the imports of a module bind, anywhere in it."""

    def __init__(self, tree: ast.Module) -> None:
        self.imported: dict[str, str] = {}
        self.several = set[str]()  # names that imports bind to different things
        for node in tree_nodes(tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    name = alias.name if alias.asname else alias.name.split(".")[0]
                    self._bind(alias.asname or name, name)
            elif isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    self._bind(alias.asname or alias.name, _module(node) + alias.name)
        self.hidden = _hidden(tree)

    def _bind(self, name: str, path: str) -> None:
        if self.imported.get(name, path) != path:
            self.several.add(name)
        self.imported[name] = path

    def path(self, node: ast.AST) -> str | None:
        """The dotted name that a chain of attributes stands for, None where no import is at its root."""
        if isinstance(node, ast.Attribute):
            base = self.path(node.value)
            return None if base is None else f"{base}.{node.attr}"
        if isinstance(node, ast.Name) and node not in self.hidden:
            return self.imported.get(node.id)
        return None


def _module(node: ast.ImportFrom) -> str:
    """With a dot behind it, as what is imported from it wants."""
    return "." * node.level + (f"{node.module}." if node.module else "")


_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


def _hidden(tree: ast.Module) -> set[ast.AST]:
    """Names inside a function or comprehension that has a variable of that name: they mean no import."""
    found: set[ast.AST] = set()
    for scope in tree_nodes(tree):
        if isinstance(scope, _SCOPES):
            inside: list[ast.AST] = [*scope.body] if isinstance(scope.body, list) else [scope.body]
            own = {arg.arg for arg in tree_nodes(scope.args) if isinstance(arg, ast.arg)} | stored_in(inside)
        elif isinstance(scope, _COMPREHENSIONS):
            inside = [scope]
            own = stored_in([generator.target for generator in scope.generators])
        else:
            continue
        found |= {n for s in inside for n in tree_nodes(s) if isinstance(n, ast.Name) and n.id in own}
    return found


def stored_in(todo: list[ast.AST]) -> set[str]:
    """Names that statements bind in the scope they stand in, but for those that are imported there."""
    stored, others, todo = set[str](), set[str](), list(todo)
    while todo:
        node = todo.pop()
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            stored.add(node.id)
        elif isinstance(node, (ast.Global, ast.Nonlocal)):
            others |= set(node.names)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            others |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
        if not isinstance(node, (*_SCOPES, *_COMPREHENSIONS, ast.ClassDef)):
            todo.extend(ast.iter_child_nodes(node))
    return stored - others


def is_kernel(node: ast.FunctionDef, names: Names) -> bool:
    """Decorated with triton.jit, whatever it was imported as, and not with something that is only called
    so."""
    decorators = [d.func if isinstance(d, ast.Call) else d for d in node.decorator_list]
    return any(names.path(d) in ("triton.jit", "triton.runtime.jit") for d in decorators)


def allowed(path: str) -> bool:
    """Whether host code may name it."""
    root, _, rest = path.partition(".")
    if path in _ALLOWED or root == "__future__" or path == "kernel_agent.autodiff":
        return True
    if path in _PACKAGES:
        return False
    parts = rest.split(".")
    if path.startswith("triton.language.") or root == "math":
        return bool(rest) and not any(part.startswith("_") or part in BEHIND for part in parts)
    return root == "torch" and parts[0] in _DTYPES and len(parts) == 2 and not parts[1].startswith("_")


def judge(path: str) -> tuple[str, str] | None:
    """The rule that naming it breaks, and the sentence; None for what host code may name."""
    if allowed(path):
        return None
    root, *parts = path.split(".")
    if path in _PACKAGES:
        return "forbidden", f"uses {path} itself as a value: write out what is taken of it"
    if root not in ("torch", "triton"):
        listed = _STANDARD.get(path.rpartition(".")[0])
        more = f"only {', '.join(listed.split())} are known to be harmless there" if listed else importable()
        return "import", f"uses {path}: {more}"
    if path.startswith(("torch.ops.", "torch._C", "torch.utils.cpp_extension", "torch.library")):
        return "torch_math", f"uses {path}"
    if path.startswith(("torch.autograd.", "torch.func.")) or parts[-1] in AUTOGRAD and root == "torch":
        return "autograd", f"uses {path}: autograd must not make the gradient"
    if root == "triton" or BELOW & set(parts) or any(part.startswith(("_", "set_")) for part in parts):
        return "forbidden", f"uses {path}"
    return "torch_math", f"uses {path}: kernels must compute the gradient, {_HONEST}"


def judge_import(path: str) -> tuple[str, str] | None:
    """The same of an import: a package may be imported, what is taken of it is judged where it is named."""
    return None if path in _PACKAGES else judge(path)


def leads_to_others(path: str) -> bool:
    """Whether it gives hold of modules, frames or objects that the file did not make."""
    ours = path.startswith("kernel_agent.") and not path.startswith("kernel_agent.autodiff")
    return path in _WAYS or ours or path.startswith(_WAYS_BELOW)


def importable() -> str:
    return f"only {', '.join(sorted(MODULES - {'__future__'}))} are imported"
