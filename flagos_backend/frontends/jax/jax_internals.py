"""Every touch point with JAX's private API, in one file: looked up by name, so that a JAX which differs is named.

Used by all other modules of the front end, which touch nothing below ``jax._src`` and ``jaxlib`` themselves.
Written for jax 0.10 to 0.12; what differs between releases is detected by signature, not by version number.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import io
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np

from flagos_backend.frontends.jax.errors import JaxApiChanged

Options = Mapping[str, str | int | list[int] | float | bool]
JAXLIB_VERSION: str = importlib.import_module("jaxlib.version").__version__
#: What jax._src.callback.emit_python_callback returns: result values, the new token, the host callback object.
EmittedCallback = tuple[Sequence[Any], Any, Any]


def lookup(module: str, path: str) -> Any:
    """The object at a dotted ``path`` of a private ``module``. Raises JaxApiChanged where this JAX has none."""
    place = f"{module}.{path}"
    try:
        found: Any = importlib.import_module(module)
        for name in path.split("."):
            found = getattr(found, name)
    except (ImportError, AttributeError) as error:
        raise changed(place, str(error)) from error
    return found


def changed(name: str, reason: str) -> JaxApiChanged:
    """The error for a private name that is not what this file expects."""
    return JaxApiChanged(version=jax.__version__, name=name, reason=reason, place="the JAX front end of flagos")


def _takes(function: Any, parameter: str) -> bool:
    return parameter in inspect.signature(function).parameters


def _has_primitive(module: str, name: str) -> bool:
    try:
        return hasattr(importlib.import_module(module), name)
    except ImportError:
        return False


# ---- Platforms -----------------------------------------------------------------------------------------------------


def requested_platforms() -> tuple[str, ...]:
    """The platforms that JAX_PLATFORMS or jax_platforms name; empty: JAX looks for all."""
    named = lookup("jax._src.config", "jax_platforms").value or ""
    return tuple(name.strip() for name in named.split(",") if name.strip())


def is_registered(platform: str) -> bool:
    """Whether JAX has a backend factory of this name."""
    return platform in lookup("jax._src.xla_bridge", "_backend_factories")


def register_plugin(platform: str, library: str, priority: int, options: Callable[[], Options]) -> None:
    """Register a PJRT plugin. ``options`` is called when the client is made.

    A client that cannot be made leaves JAX's other platforms usable unless the user named this one, and no warning
    calls the platform experimental.
    """
    register = lookup("jax._src.xla_bridge", "register_plugin")
    register(platform, priority=priority, library_path=library, options=options)
    registration = lookup("jax._src.xla_bridge", "_backend_factories")[platform]
    for field, value in (("fail_quietly", True), ("experimental", False)):
        if not hasattr(registration, field):
            raise changed(f"jax._src.xla_bridge.BackendRegistration.{field}", "the field is gone")
        setattr(registration, field, value)


def register_unavailable(platform: str, priority: int, message: Callable[[], str]) -> None:
    """Make a platform known by name only: naming it raises ``message()``, and nothing else changes."""

    def factory() -> Any:
        raise RuntimeError(message())

    lookup("jax._src.xla_bridge", "register_backend_factory")(platform, factory, priority=priority, fail_quietly=True)


# ---- What JAX enables for a fixed list of platforms ----------------------------------------------------------------


def enable_donation(platform: str) -> None:
    """Let JAX donate arguments of programs for this platform."""
    platforms = lookup("jax._src.interpreters.mlir", "_platforms_with_donation")
    if platform not in platforms:
        platforms.append(platform)


def enable_compilation_cache(platform: str) -> None:
    """Let JAX's persistent compilation cache hold this platform's executables."""
    module = importlib.import_module("jax._src.compilation_cache")
    original = lookup("jax._src.compilation_cache", "is_cache_used")
    if getattr(original, "flagos_platform", None) == platform:
        return

    @functools.wraps(original)
    def is_cache_used(backend: Any) -> bool:
        if backend.platform == platform:
            # The list of platforms is inside the function; what it decides for "cpu" holds for this one.
            backend = SimpleNamespace(platform="cpu", supports_executable_serialization=True)
        return bool(original(backend))

    is_cache_used.flagos_platform = platform  # type: ignore[attr-defined]
    setattr(module, "is_cache_used", is_cache_used)  # noqa: B010


def raise_interrupts(mark: str) -> None:
    """Have a compile whose error has ``mark`` raise KeyboardInterrupt: errors of PJRT are of one class."""

    def interrupt(error: BaseException) -> BaseException | None:
        return KeyboardInterrupt() if mark in str(error) else None

    interrupt.flagos_mark = mark  # type: ignore[attr-defined]
    handlers = lookup("jax._src.compiler", "_XLA_RUNTIME_ERROR_HANDLERS")
    if not any(getattr(handler, "flagos_mark", None) == mark for handler in handlers):
        lookup("jax._src.compiler", "register_xla_runtime_error_handler")(interrupt)


def enable_export(targets: Iterable[str]) -> None:
    """Let jax.export write programs that call these custom calls: their meaning does not change between releases."""
    lookup("jax._src.export._export", "_CUSTOM_CALL_TARGETS_GUARANTEED_STABLE").update(targets)


def enable_python_callbacks(platform: str, emit: Callable[..., EmittedCallback]) -> None:
    """Route emit_python_callback of programs that are lowered for this platform alone to ``emit``."""
    modules = [importlib.import_module("jax._src.callback"), importlib.import_module("jax.interpreters.mlir")]
    original = lookup("jax._src.callback", "emit_python_callback")
    if getattr(original, "flagos_platform", None) == platform:
        return

    @functools.wraps(original)
    def emit_python_callback(ctx: Any, *args: Any, **kwargs: Any) -> EmittedCallback:
        chosen = emit if tuple(ctx.module_context.platforms) == (platform,) else original
        result: EmittedCallback = chosen(ctx, *args, **kwargs)
        return result

    emit_python_callback.flagos_platform = platform  # type: ignore[attr-defined]
    for module in modules:
        if hasattr(module, "emit_python_callback"):
            setattr(module, "emit_python_callback", emit_python_callback)  # noqa: B010


def has_backend(platform: str) -> bool:
    """Whether JAX has made a client of this platform."""
    return platform in lookup("jax._src.xla_bridge", "backends")()


def array_from_dlpack(capsule: Any, device: Any, copy: bool | None, device_type: int) -> Any:
    """jaxlib's array over the memory of a DLPack capsule, on a device whose client takes it as its own."""
    convert = lookup("jaxlib._jax", "dlpack_managed_tensor_to_buffer")
    try:
        return convert(capsule, device, None, copy, device_type)
    except TypeError:  # Before 0.10.2 it did not ask for the type of device.
        return convert(capsule, device, None, copy)


def wrap_dlpack(
    export: Callable[..., Any],
    device_of: Callable[[Any], tuple[int, int] | None],
    import_: Callable[[Any, Any, bool | None], Any],
) -> None:
    """Put functions for one platform in front of jax.Array's DLPack methods and jax.dlpack.from_dlpack.

    ``device_of`` gives None for arrays of other platforms and ``import_`` for tensors that are not for this one.
    """
    array_type = lookup("jax._src.array", "ArrayImpl")
    if getattr(array_type.__dlpack__, "flagos_wrapper", False):
        return
    original_export, original_device, original_import = (
        array_type.__dlpack__,
        array_type.__dlpack_device__,
        lookup("jax.dlpack", "from_dlpack"),
    )

    @functools.wraps(original_export)
    def __dlpack__(self: Any, *, dl_device: Any = None, copy: bool | None = None, **options: Any) -> Any:
        if device_of(self) is None:
            return original_export(self, dl_device=dl_device, copy=copy, **options)
        return export(self, dl_device=dl_device, copy=copy, **options)

    @functools.wraps(original_device)
    def __dlpack_device__(self: Any) -> tuple[Any, int]:
        found: tuple[Any, int] = device_of(self) or original_device(self)
        return found

    @functools.wraps(original_import)
    def from_dlpack(external_array: Any, device: Any = None, copy: bool | None = None) -> Any:
        array = import_(external_array, device, copy)
        return original_import(external_array, device=device, copy=copy) if array is None else array

    __dlpack__.flagos_wrapper = True  # type: ignore[attr-defined]
    array_type.__dlpack__ = __dlpack__
    array_type.__dlpack_device__ = __dlpack_device__
    for module in ("jax.dlpack", "jax._src.dlpack"):
        setattr(importlib.import_module(module), "from_dlpack", from_dlpack)  # noqa: B010


# ---- Lowering ------------------------------------------------------------------------------------------------------


def primitive(module: str, name: str) -> Any | None:
    """A primitive of JAX, or None where this release does not have it."""
    return getattr(importlib.import_module(module), name) if _has_primitive(module, name) else None


def register_lowering(primitive: Any, rule: Callable[..., Any], platform: str) -> None:
    """Register a lowering rule for one platform, which JAX must know already."""
    lookup("jax._src.interpreters.mlir", "register_lowering")(primitive, rule, platform=platform)


def registered_primitives() -> dict[Any, frozenset[str | None]]:
    """Every primitive with a lowering rule, and the platforms of its rules; None stands for all platforms."""
    platforms: dict[Any, set[str | None]] = {}
    for default in lookup("jax._src.interpreters.mlir", "_lowerings"):
        platforms.setdefault(default, set()).add(None)
    for platform, rules in lookup("jax._src.interpreters.mlir", "_platform_specific_lowerings").items():
        for specific in rules:
            platforms.setdefault(specific, set()).add(platform)
    return {key: frozenset(value) for key, value in platforms.items()}


def lower_function(function: Callable[..., Any], *, multiple_results: bool = True) -> Callable[..., Any]:
    """The lowering rule that traces a JAX function and inlines it."""
    rule: Callable[..., Any] = lookup("jax._src.interpreters.mlir", "lower_fun")(
        function, multiple_results=multiple_results
    )
    return rule


def lower_ragged_dot(ctx: Any, *operands: Any, **parameters: Any) -> Any:
    """A product of ragged groups as one instruction, which JAX lowers to where its flag asks for it."""
    with lookup("jax._src.config", "jax_ragged_dot_use_ragged_dot_instruction")(True):
        return lookup("jax._src.lax.lax", "_ragged_dot_general_lower")(ctx, *operands, **parameters)


def ir_types(ctx: Any, avals: Iterable[Any]) -> list[Any]:
    """The MLIR types of abstract values, one each."""
    convert = lookup("jax._src.interpreters.mlir", "aval_to_ir_type")
    # 0.10.2 gave it the module context as its first parameter.
    prefix = (ctx.module_context,) if _takes(convert, "ctx") else ()
    return [convert(*prefix, aval) for aval in avals]


def token_type() -> Any:
    """The MLIR type of a token, in the current MLIR context."""
    return lookup("jax._src.lib.mlir.dialects", "hlo.TokenType").get()


def constant(value: Any) -> Any:
    """An MLIR constant of a NumPy array or scalar."""
    return lookup("jax._src.interpreters.mlir", "ir_constant")(value)


def custom_call(
    target: str,
    result_types: Sequence[Any],
    operands: Sequence[Any],
    backend_config: str,
    *,
    has_side_effect: bool = False,
    result_shapes: Sequence[Any] | None = None,
    attributes: dict[str, Any] | None = None,
    ranks: tuple[Sequence[int], Sequence[int]] | None = None,
) -> Any:
    """Emit a StableHLO custom call whose backend config is a string; gives the operation.

    ``ranks`` of operands and results constrain their layouts to row major, which XLA's batch partitioner insists on.
    """
    operand_ranks, result_ranks = ranks or (None, None)
    return lookup("jax._src.interpreters.mlir", "custom_call")(
        target,
        result_types=list(result_types),
        operands=list(operands),
        backend_config=backend_config,
        has_side_effect=has_side_effect,
        result_shapes=result_shapes,
        operand_layouts=None if operand_ranks is None else _row_major(operand_ranks),
        result_layouts=None if result_ranks is None else _row_major(result_ranks),
        extra_attributes=attributes,
    )


def _row_major(ranks: Sequence[int]) -> list[list[int]]:
    return [list(range(rank))[::-1] for rank in ranks]


def dynamic_result_shapes(ctx: Any, avals: Sequence[Any]) -> list[Any] | None:
    """The shapes of results as tensors where a dimension is symbolic (jax.export), else None."""
    is_constant = lookup("jax._src.core", "is_constant_shape")
    if all(is_constant(aval.shape) for aval in avals):
        return None
    evaluate = lookup("jax._src.interpreters.mlir", "eval_dynamic_shape_as_tensor")
    return [evaluate(ctx, aval.shape) for aval in avals]


def batch_partitioning_attributes(
    ctx: Any, num_batch_dims: int, avals_in: Sequence[Any], avals_out: Sequence[Any]
) -> dict[str, Any]:
    """The attributes that let both partitioners split a custom call along its leading dimensions.

    The target must have been given to register_batch_partitionable.
    """
    attribute = lookup("jax._src.interpreters.mlir", "ir_attribute")
    attributes = {"mhlo.frontend_attributes": attribute({"num_batch_dims": str(num_batch_dims)})}
    if lookup("jax._src.config", "use_shardy_partitioner").value:
        build = lookup("jax._src.lax.linalg", "_build_sdy_sharding_rule")
        prefix = (ctx.module_context,) if _takes(build, "module_context") else ()
        attributes["sdy.sharding_rule"] = build(*prefix, num_batch_dims, avals_in, avals_out)
    return attributes


def set_sharding(ctx: Any, operation: Any, sharding: Any) -> None:
    """Annotate an operation with a sharding that JAX computed."""
    function = lookup("jax._src.interpreters.mlir", "set_sharding")
    prefix = (ctx.module_context,) if _takes(function, "ctx") else ()
    function(*prefix, operation, sharding)


def sharding_with_token(sharding: Any) -> Any:
    """A callback's sharding with one more in front, for the token that is its first result.

    Shardy wants one annotation per result; GSPMD's single one covers all.
    """
    sdy_list = lookup("jax._src.sharding_impls", "SdyArrayList")
    if not isinstance(sharding, sdy_list):
        return sharding
    sdy_array = lookup("jax._src.sharding_impls", "SdyArray")
    first = sharding.shardings[0]
    token = sdy_array(mesh_shape=(), dim_shardings=(), logical_device_ids=first.logical_device_ids)
    return sdy_list((token, *sharding.shardings))


def num_devices(ctx: Any) -> int:
    """How many devices the program that is being lowered is for; 1 where JAX does not say."""
    axes = ctx.module_context.axis_context
    if hasattr(axes, "mesh"):
        return int(axes.mesh.size)
    return int(getattr(axes, "num_devices", 1))


def add_host_callback(ctx: Any, function: Any) -> None:
    """Tie a callback to the program that is being lowered.

    JAX then keeps it as long as the executable and its launches live, knows that the program has callbacks (runtime
    tokens, effects_barrier), and writes neither the executable nor an export of it to disk.
    """
    ctx.module_context.add_host_callback(function)


def canonicalize_value(value: Any) -> Any:
    """A callback's result as JAX would take it: 64-bit types become 32-bit ones unless x64 is on."""
    dtypes = importlib.import_module("jax._src.dtypes")
    function = getattr(dtypes, "canonicalize_value", None)
    return value if function is None else function(value)


def physical_aval(aval: Any) -> Any:
    """The abstract value of the array behind an extended dtype such as a key; others as they are."""
    return lookup("jax._src.core", "physical_aval")(aval)


def is_float0(dtype: Any) -> bool:
    """Whether a dtype is JAX's type of tangents that carry nothing."""
    return bool(dtype == lookup("jax._src.dtypes", "float0"))


# ---- Programs: jaxlib as converter ---------------------------------------------------------------------------------


def stablehlo_to_hlo(code: bytes) -> bytes:
    """A StableHLO artifact or text to a serialized HloModuleProto. Raises RuntimeError for what jaxlib refuses."""
    convert = lookup("jaxlib._jax", "mlir.mlir_module_to_xla_computation")
    computation = convert(code, use_tuple_args=False, return_tuple=False)
    proto: bytes = computation.as_serialized_hlo_module_proto()
    return proto


def hlo_to_stablehlo(proto: bytes) -> bytes:
    """A serialized HloModuleProto to StableHLO. Raises RuntimeError for what jaxlib refuses."""
    code: bytes = lookup("jaxlib._jax", "mlir.hlo_to_stablehlo")(proto)
    return code


def hlo_text_to_hlo(text: bytes) -> bytes:
    """HLO text to a serialized HloModuleProto. Raises RuntimeError for what XLA does not parse."""
    module = lookup("jaxlib._hlo", "hlo_module_from_text")(text.decode("utf-8", "replace"))
    proto: bytes = module.as_serialized_hlo_module_proto()
    return proto


def compile_hlo(proto: bytes, device: Any) -> Any:
    """A serialized HloModuleProto as a loaded executable for one device of JAX. Raises RuntimeError for what its
    compiler refuses."""
    options, devices = lookup("jaxlib._jax", "CompileOptions")(), lookup("jaxlib._jax", "DeviceList")((device,))
    return device.client.compile_and_load(hlo_to_stablehlo(proto), devices, options)


def check_hlo(proto: bytes) -> None:
    """Have XLA parse and verify a serialized HloModuleProto. Raises RuntimeError for what it refuses."""
    lookup("jaxlib._hlo", "HloModule.from_serialized_hlo_module_proto")(proto)


def parse_stablehlo(code: bytes) -> Any:
    """An MLIR module of a StableHLO artifact or text. Raises RuntimeError or ValueError for what cannot be parsed."""
    ir = lookup("jax._src.lib.mlir", "ir")
    context = lookup("jax._src.interpreters.mlir", "make_ir_context")()
    if not code.startswith(b"ML\xefR"):
        return ir.Module.parse(code, context)
    module = lookup("jaxlib._jax", "mlir.deserialize_portable_artifact")(code, context)
    return ir.Module.parse(module, context) if isinstance(module, str | bytes) else module


def bytecode_of(operation: Any) -> bytes:
    """MLIR bytecode of an operation and what is inside it."""
    stream = io.BytesIO()
    operation.operation.write_bytecode(stream)
    return stream.getvalue()


def constants_of(module: Any, min_elements: int) -> list[Any]:
    """The stablehlo.constant operations of an MLIR module with so many elements or more, in order."""
    ir = lookup("jax._src.lib.mlir", "ir")
    found = []

    def visit(operation: Any) -> Any:
        if operation.name == "stablehlo.constant":
            kind = operation.results[0].type
            if kind.has_static_shape and math.prod(kind.shape) >= min_elements:
                found.append(operation)
        return ir.WalkResult.ADVANCE

    module.operation.walk(visit)
    return found


def elements_of(constant: Any, dtype: np.dtype[Any]) -> memoryview | None:
    """The bytes of a stablehlo.constant's elements, of ``dtype``, row major; valid as long as the module is. None for
    a splat, and where this jaxlib does not show them."""
    ir = lookup("jax._src.lib.mlir", "ir")
    kind = constant.results[0].type
    size = math.prod(kind.shape) * dtype.itemsize
    value = constant.attributes["value"]
    if getattr(value, "is_splat", True):
        return None
    with suppress(BufferError, TypeError):  # not of every type
        return memoryview(value).cast("B")

    def written(value: Any) -> bytes:
        # An operation of its own: one inside a region cannot be written alone.
        alone = ir.Operation.create(constant.name, results=[kind], attributes={"value": value})
        return bytecode_of(alone)

    with kind.context, ir.Location.unknown():
        before = written(value)
        # Where they are, others show that take their place.
        sample = np.resize(np.arange(251, dtype=np.uint8), size)
        after = written(ir.DenseElementsAttr.get(sample.view(dtype), type=kind.element_type, shape=kind.shape))
    text = sample.tobytes()
    start = after.find(text)
    same = start >= 0 and len(after) == len(before)
    same = same and (after[:start], after[start + size :]) == (before[:start], before[start + size :])
    return memoryview(before)[start : start + size] if same else None


def replace_by_call(constant: Any, target: str, config: str) -> None:
    """Puts a stablehlo.custom_call without operands in an operation's place."""
    ir = lookup("jax._src.lib.mlir", "ir")
    with constant.context, constant.location, ir.InsertionPoint(constant):
        text = {"call_target_name": ir.StringAttr.get(target), "backend_config": ir.StringAttr.get(config)}
        call = ir.Operation.create("stablehlo.custom_call", results=[constant.results[0].type], attributes=text)
    constant.results[0].replace_all_uses_with(call.results[0])
    constant.erase()


def rename_module(module: Any, name: str) -> str:
    """Give an MLIR module another name; returns the one that it had."""
    ir = lookup("jax._src.lib.mlir", "ir")
    attributes = module.operation.attributes
    before = ir.StringAttr(attributes["sym_name"]).value if "sym_name" in attributes else ""
    with module.context:
        attributes["sym_name"] = ir.StringAttr.get(name)
    return str(before)


def main_attributes(module: Any) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """The string attributes of the arguments and of the results of an MLIR module's function main."""
    ir = lookup("jax._src.lib.mlir", "ir")
    main = next(op for op in module.body.operations if _symbol(ir, op) == "main")
    attributes = main.operation.attributes
    function = ir.FunctionType(ir.TypeAttr(attributes["function_type"]).value)
    return (
        _dictionaries(ir, attributes, "arg_attrs", len(function.inputs)),
        _dictionaries(ir, attributes, "res_attrs", len(function.results)),
    )


def _symbol(ir: Any, operation: Any) -> str:
    attributes = operation.operation.attributes
    return str(ir.StringAttr(attributes["sym_name"]).value) if "sym_name" in attributes else ""


def _dictionaries(ir: Any, attributes: Any, name: str, count: int) -> list[dict[str, str]]:
    """The string-valued entries of each of `count` dictionaries in an MLIR array attribute that may be absent."""
    if name not in attributes:
        return [{} for _ in range(count)]
    return [
        {item.name: item.attr.value for item in dictionary if isinstance(item.attr, ir.StringAttr)}
        for dictionary in map(ir.DictAttr, ir.ArrayAttr(attributes[name]))
    ]


# ---- Programs: jaxlib as partitioner -------------------------------------------------------------------------------


def new_compile_options() -> Any:
    """jaxlib's compile options with their defaults."""
    return lookup("jax._src.lib", "xla_client.CompileOptions")()


def parse_compile_options(data: bytes) -> Any:
    """Serialized CompileOptionsProto to jaxlib's compile options. Raises RuntimeError when malformed."""
    return lookup("jax._src.lib", "xla_client.CompileOptions").ParseFromString(data)


def new_device_assignment(ids: Any) -> Any:
    """jaxlib's device assignment of an int array [replicas, partitions]."""
    return lookup("jax._src.lib", "xla_client.DeviceAssignment").create(ids)


def new_cpu_client(num_devices: int) -> Any:
    """A CPU client of our own, beside those that JAX made and unknown to them."""
    return lookup("jax._src.lib", "xla_client.make_cpu_client")(asynchronous=False, num_devices=num_devices)


def compile_on_client(client: Any, module: Any, options: Any) -> Any:
    """Compile an MLIR module for all devices of a client. Raises RuntimeError with XLA's message."""
    devices = lookup("jax._src.lib", "xla_client.DeviceList")(tuple(client.devices()))
    return client.compile_and_load(module, devices, options)


def partitioned_module(executable: Any) -> bytes:
    """The serialized HloModuleProto of what compile_on_client returned, with the shardings of arguments and outputs."""
    schema = importlib.import_module("flagos_backend.importer.schema")
    proto = schema.HloModuleProto.FromString(executable.hlo_modules()[0].as_serialized_hlo_module_proto())
    if not proto.spmd_parameters_shardings:
        for sharding in executable.get_parameter_shardings() or ():
            proto.spmd_parameters_shardings.add().MergeFromString(sharding.SerializeToString())
    outputs = executable.get_output_shardings()
    if outputs and not proto.HasField("spmd_output_sharding"):
        proto.spmd_output_sharding.type = schema.OpSharding.TUPLE
        for sharding in outputs:
            proto.spmd_output_sharding.tuple_shardings.add().MergeFromString(sharding.SerializeToString())
    return bytes(proto.SerializeToString())


def can_transform_modules() -> bool:
    """Whether this jaxlib (0.10.2 or newer) lets us see a module between XLA's passes and its code generator."""
    return _has_primitive("jaxlib._xla", "register_xla_transform")


def numbers_transforms() -> bool:
    """Whether the pass that shows modules has another name in each compile: apply-xla-transforms-41 (jaxlib 0.11)."""
    return tuple(int(part) for part in JAXLIB_VERSION.split(".")[:2]) >= (0, 11)


#: The stage of register_transform that comes after the HLO passes and before scheduling.
PRE_SCHEDULER = 0


def register_transform(name: str, transform: Callable[[bytes], bytes | None]) -> None:
    """Have XLA's CPU compiler show every module of the process to ``transform`` after its HLO passes."""
    lookup("jaxlib._xla", "register_xla_transform")(name, PRE_SCHEDULER, transform)


def clear_transform(name: str) -> None:
    """End register_transform."""
    lookup("jaxlib._xla", "clear_xla_transform")(name, PRE_SCHEDULER)


def register_batch_partitionable(target: str) -> None:
    """Tell XLA's partitioner that a custom call may be split along its leading dimensions."""
    lookup("jax._src.lib", "xla_client.register_custom_call_as_batch_partitionable")(target)
