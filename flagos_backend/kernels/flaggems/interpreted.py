"""FlagGems on host tensors: its kernels in Triton's interpreter, for the simulated device.

FlagGems knows no such mode. ``load`` gives it a device to find, kernels to launch and functions of the device library;
torch.cuda is left alone. Called by loading.py, before anything else imports flag_gems, with TRITON_INTERPRET=1 set.
"""

from __future__ import annotations

import ast
import copy
import hashlib
import importlib
import importlib.util
import inspect
import math
import os
import sys
import textwrap
import types
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime import jit as triton_jit
from triton.runtime.interpreter import InterpretedFunction, TensorHandle

_KERNEL = triton_jit.JITFunction


def load() -> types.ModuleType:
    """FlagGems, ready to compute on host tensors."""
    os.environ["GEMS_VENDOR"] = "nvidia"
    os.environ["FLAGGEMS_DB_URL"] = "sqlite:///:memory:"  # else it names its database after torch.cuda's device
    _close_interpreter_gaps()
    _let_kernels_look_compiled()
    _give_device()
    flag_gems = importlib.import_module("flag_gems")
    triton_jit.JITFunction = _KERNEL  # the interpreter constructs it itself
    _launch_directly()
    return flag_gems


# ---- Triton's interpreter: what compiled Triton does and it does not ----


def _close_interpreter_gaps() -> None:
    interpreter._lazy_and_or, interpreter._not = _lazy_and_or, _not
    interpreter.ASTTransformer.visit_BoolOp = _visit_bool_op
    interpreter.ASTTransformer.visit_UnaryOp = _visit_unary_op
    interpreter.ASTTransformer.visit_Compare = _visit_compare
    interpreter.ASTTransformer.visit_Assign = _with_visited_value(interpreter.ASTTransformer.visit_Assign)
    interpreter._implicit_cvt = _with_scalars(interpreter._implicit_cvt)
    builder = interpreter.InterpreterBuilder
    builder.create_dot = _create_dot(builder.create_dot)
    for name in ("create_masked_load", "create_masked_store", "create_atomic_rmw"):
        setattr(builder, name, _with_truth_values(getattr(builder, name)))
    interpreter.ReduceOps.generic_reduce = _reduce_by_halves
    InterpretedFunction.__init__ = _with_language(InterpretedFunction.__init__)
    tl.dtype.value = property(lambda dtype: dtype)  # a dtype is a constexpr only in compiled code


def _lazy_and_or(is_and: bool, first: Any, *rest: Callable[[], Any]) -> Any:
    """``and`` and ``or``: elementwise between tensors, as compiled Triton has it; Python's own between values."""
    result = first
    for operand in rest:
        if not isinstance(result, tl.tensor):
            if bool(getattr(result, "value", result)) is not is_and:
                return result
            result = operand()
            continue
        other = operand()
        other = getattr(other, "value", other) if isinstance(other, tl.constexpr) else other
        if isinstance(other, tl.tensor):
            result = result.logical_and(other) if is_and else result.logical_or(other)
        elif bool(other) is not is_and:
            result = (result & False) if is_and else (result | True)
    return result


def _visit_bool_op(transformer: ast.NodeTransformer, node: ast.BoolOp) -> ast.AST:
    visited = transformer.generic_visit(node)
    assert isinstance(visited, ast.BoolOp)
    nothing = ast.arguments(posonlyargs=[], args=[], kwonlyargs=[], kw_defaults=[], defaults=[])
    later = [ast.Lambda(args=nothing, body=value) for value in visited.values[1:]]
    arguments = [ast.Constant(value=isinstance(visited.op, ast.And)), visited.values[0], *later]
    function = ast.Name(id="_lazy_and_or", ctx=ast.Load())
    return ast.copy_location(ast.Call(func=function, args=arguments, keywords=[]), node)


def _not(value: Any) -> Any:
    return value == 0 if isinstance(value, tl.tensor) else not value


def _visit_unary_op(transformer: ast.NodeTransformer, node: ast.UnaryOp) -> ast.AST:
    visited = transformer.generic_visit(node)
    assert isinstance(visited, ast.UnaryOp)
    if not isinstance(visited.op, ast.Not):
        return visited
    function = ast.Name(id="_not", ctx=ast.Load())
    return ast.copy_location(ast.Call(func=function, args=[visited.operand], keywords=[]), node)


def _visit_compare(transformer: ast.NodeTransformer, node: ast.Compare) -> ast.AST:
    """``a < b < c`` is ``a < b and b < c``: Triton 3.6 and 3.7 leave it to Python, which asks a block for its truth."""
    if len(node.ops) == 1:
        return transformer.generic_visit(node)
    operands = [node.left, *node.comparators]
    pairs = zip(operands[:-1], node.ops, operands[1:], strict=True)
    parts = [ast.Compare(copy.deepcopy(left), [op], [copy.deepcopy(right)]) for left, op, right in pairs]
    both = ast.fix_missing_locations(ast.copy_location(ast.BoolOp(ast.And(), list(parts)), node))
    return _visit_bool_op(transformer, both)


def _with_visited_value(original: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Triton 3.6 and 3.7 do not look into what is assigned. Visiting it once more changes nothing."""

    def visit(transformer: ast.NodeTransformer, node: ast.Assign) -> Any:
        node.value = transformer.visit(node.value)
        return original(transformer, node)

    return visit


def _with_scalars(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A kernel's argument that is a float is a scalar of f32, and a truth value one of int1, as integers are scalars.
    Triton 3.6 and 3.7 hold truth values as integers of 32 bits, which they then refuse."""

    def convert(argument: Any) -> Any:
        if isinstance(argument, bool):
            return tl.tensor(TensorHandle(np.array([argument]), tl.int1), tl.int1)
        if isinstance(argument, float):
            return tl.tensor(TensorHandle(np.array([argument], np.float32), tl.float32), tl.float32)
        return original(argument)

    return convert


def _with_truth_values(original: Callable[..., Any]) -> Callable[..., Any]:
    """Masks that were computed of integers are still integers."""
    place = list(inspect.signature(original).parameters).index("mask") - 1

    def call(builder: Any, *arguments: Any) -> Any:
        mask = arguments[place]
        if mask is not None and mask.data.dtype != np.bool_:
            mask = TensorHandle(mask.data.astype(np.bool_), tl.int1)
        return original(builder, *arguments[:place], mask, *arguments[place + 1 :])

    return call


def _reduce_by_halves(operation: Any, tensors: tuple[tl.tensor, ...]) -> list[tl.tensor]:
    """A reduction with a function of the kernel's, on blocks; the interpreter's own takes milliseconds an element."""
    parts, axis = operation.unravel(tensors, operation.axis)
    data = [np.moveaxis(part.handle.data, axis, 0) for part in parts]
    while len(data[0]) > 1:
        half, odd = divmod(len(data[0]), 2)
        sides = (slice(0, half), slice(half, 2 * half))
        operands = [operation.to_tensor(d[s], p.dtype) for s in sides for d, p in zip(data, parts, strict=True)]
        combined = operation.combine_fn(*operands)
        combined = combined if isinstance(combined, tuple) else (combined,)
        rest = [d[2 * half :] for d in data] if odd else [d[:0] for d in data]
        data = [np.concatenate([c.handle.data, r]) for c, r in zip(combined, rest, strict=True)]
    results = [d[0] for d in data]
    if operation.keep_dims and operation.axis is not None:
        results = [np.expand_dims(result, axis) for result in results]
    elif operation.keep_dims:
        results = [result.reshape((1,) * tensors[0].handle.data.ndim) for result in results]
    return [operation.to_tensor(result, part.dtype) for result, part in zip(results, parts, strict=True)]


def _create_dot(original: Callable[..., Any]) -> Callable[..., Any]:
    """bf16 is held as raw bits, which must not be multiplied."""

    def widened(handle: TensorHandle) -> TensorHandle:
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        return TensorHandle((handle.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    return lambda builder, a, b, *rest: original(builder, widened(a), widened(b), *rest)


def _with_language(original: Callable[..., None]) -> Callable[..., None]:
    """Modules that import only names of the language lack ``tl``, which rewritten code uses."""

    def initialize(function: Any, fn: Any, **kwargs: Any) -> None:
        fn.__globals__.setdefault("tl", tl)
        original(function, fn, **kwargs)

    return initialize


# ---- what FlagGems asks of a kernel ----


class _LooksCompiled(type):
    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, InterpretedFunction | _KERNEL)

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        return _KERNEL(*args, **kwargs)


class _Kernel(metaclass=_LooksCompiled):
    """Stands for JITFunction while FlagGems is imported."""


def _let_kernels_look_compiled() -> None:
    triton.runtime.JITFunction = triton_jit.JITFunction = _Kernel
    InterpretedFunction.src = property(lambda function: _source(function.fn))
    InterpretedFunction.cache_key = property(lambda f: hashlib.md5(_source(f.fn).encode()).hexdigest())
    InterpretedFunction.__globals__ = property(lambda function: function.fn.__globals__)
    InterpretedFunction.params = property(lambda function: [])
    InterpretedFunction.signature = property(lambda function: inspect.signature(function.fn))


def _source(fn: Any) -> str:
    text = textwrap.dedent(inspect.getsource(fn))
    return text[text.index("def ") :]


# ---- the device ----


class _Generator:
    """A Philox state: seed, offset."""

    def __init__(self) -> None:
        self._state = torch.tensor([2024, 0], dtype=torch.int64)

    def get_state(self) -> torch.Tensor:
        return self._state.view(torch.uint8).clone()

    def set_state(self, state: torch.Tensor) -> None:
        self._state = state.clone().view(torch.int64)


class _DeviceModule:
    """As much of torch.cuda as FlagGems calls. Not available, so that it looks for no architecture."""

    default_generators = (_Generator(),)
    _properties = types.SimpleNamespace(major=8, minor=0, multi_processor_count=4, L2_cache_size=1 << 20)

    def device(self, *_: Any) -> Any:
        return nullcontext()

    _DeviceGuard = device

    def device_count(self) -> int:
        return 1

    def current_device(self) -> int:
        return 0

    def is_available(self) -> bool:
        return False

    def get_device_name(self, *_: Any) -> str:
        return "interpreter"

    def get_device_properties(self, *_: Any) -> Any:
        return self._properties

    def get_device_capability(self, *_: Any) -> tuple[int, int]:
        return (8, 0)


class _Torch(types.ModuleType):
    """torch, for a module that asks torch.cuda itself how large the device is."""

    cuda = _DeviceModule()

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def _give_device() -> None:
    """Loads FlagGems' backend alone and fills in what it would detect, before the rest of FlagGems asks for it."""
    spec = importlib.util.find_spec("flag_gems")
    assert spec is not None and spec.submodule_search_locations
    root = spec.submodule_search_locations[0]
    for name, path in (("flag_gems", root), ("flag_gems.runtime", f"{root}/runtime")):
        package = types.ModuleType(name)
        package.__path__ = [path]
        sys.modules[name] = package
    backend: Any = importlib.import_module("flag_gems.runtime.backend")
    del sys.modules["flag_gems"], sys.modules["flag_gems.runtime"]
    information = backend.get_vendor_module("nvidia").vendor_info
    information.device_name, information.dispatch_key = "cpu", "CPU"
    backend.device_name, backend.torch_device_object = "cpu", _DeviceModule()
    library = _device_library()
    backend.set_torch_backend_device_fn = backend.set_tl_extra_backend_module = lambda *_: None
    backend.get_tl_extra_backend_module = lambda: library


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    **{name: getattr(np, name) for name in ("exp", "exp2", "expm1", "fmod", "isinf", "isnan", "log", "log1p", "rint")},
    **{name: getattr(np, name) for name in ("sin", "cos", "tan", "sinh", "cosh", "tanh", "floor", "trunc")},
    "acos": np.arccos,
    "atan": np.arctan,
    "atan2": np.arctan2,
    "div_rn": np.divide,
    "div_rz": lambda a, b: np.trunc(a / b),
    "erf": np.vectorize(math.erf, otypes=[np.float64]),
    "finitef": np.isfinite,
    "isfinited": np.isfinite,
    "pow": np.power,
    "rsqrt": lambda x: 1 / np.sqrt(x),
}


def _device_library() -> types.ModuleType:
    """Functions of the vendor's library, which the interpreter cannot call, on NumPy."""
    module = types.ModuleType("flaggems_device_library")
    for name, function in _FUNCTIONS.items():
        setattr(module, name, _on_tensors(function))
    return module


def _on_tensors(function: Callable[..., Any]) -> Callable[..., tl.tensor]:
    def call(*arguments: Any, **_: Any) -> tl.tensor:
        tensor = next(a for a in arguments if isinstance(a, tl.tensor))
        if tensor.dtype in (tl.float16, tl.bfloat16):
            raise ValueError(f"the device's library has no function of {tensor.dtype}")
        values = [a.handle.data if isinstance(a, tl.tensor) else np.asarray(getattr(a, "value", a)) for a in arguments]
        found = np.asarray(function(*values))
        if found.dtype == np.bool_:
            return tl.tensor(TensorHandle(found, tl.int1), tensor.type.with_element_ty(tl.int1))
        return tl.tensor(TensorHandle(found.astype(tensor.handle.data.dtype), tensor.dtype), tensor.type)

    return call


# ---- launching ----


def _launch_directly() -> None:
    """No cached launches, no tuning: each kernel runs with the configuration of the smallest blocks."""
    libentry: Any = importlib.import_module("flag_gems.utils.libentry")
    settings: Any = importlib.import_module("flag_gems.utils.codegen_config_utils")
    for config in settings.CODEGEN_COFIGS.values():
        if config is not None:
            config.prefer_block_pointer = False  # gone from newer Triton
    for name, module in list(sys.modules.items()):
        if name.endswith("_nvidia.heuristics_config_utils"):
            module.__dict__["torch"] = _Torch("torch")
    libentry.LibEntry.run = _run_entry
    libentry.LibTuner.run = triton.runtime.Autotuner.run = _run_smallest
    libentry.LibTuner.cache_key = "interpreter"


def _run_entry(entry: Any, *args: Any, **kwargs: Any) -> Any:
    strided = sys.modules["flag_gems.utils.tensor_wrapper"].StridedBuffer

    def plain(value: Any) -> Any:
        if not isinstance(value, strided):
            return value
        assert value.offset == 0 and value.dtype == value._base.dtype, "a reinterpreted buffer"
        return value._base

    options = {"warmup": False} | {name: plain(value) for name, value in kwargs.items()}
    return entry.fn.run(*map(plain, args), **options), {}


def _run_smallest(tuner: Any, *args: Any, **kwargs: Any) -> Any:
    tuner.nargs = dict(zip(tuner.arg_names, args, strict=False))
    smallest = min(tuner.configs, key=lambda config: math.prod(v for v in config.kwargs.values() if isinstance(v, int)))
    return tuner.fn.run(*args, **{**kwargs, **smallest.all_kwargs()})
