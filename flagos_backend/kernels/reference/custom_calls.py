"""The table of custom-call targets (CUSTOM_CALLS.md documents each) and the kernel that dispatches to them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from flagos_backend.errors import HostCallbackMissing, MalformedProgram, UnknownCustomCall, UnsupportedAttribute
from flagos_backend.ir.attributes import CustomCallAttributes, SortAttributes
from flagos_backend.ir.config import is_integer, parse_config
from flagos_backend.ir.hlo import Instruction
from flagos_backend.ir.opcode import Opcode
from flagos_backend.ir.types import ArrayShape, ElementType, Shape, TupleShape, leaves
from flagos_backend.kernels.reference import registry
from flagos_backend.kernels.reference.registry import Kernel, Run, Storage, Value, identity, kernel
from flagos_backend.kernels.reference.sorting import top_k
from flagos_backend.process.torch_loading import Tensor

Config = Mapping[str, Any]
TargetPreparer = Callable[[Instruction, Config], Kernel]


@dataclass(frozen=True, slots=True)
class _Target:
    preparer: TargetPreparer
    defaults: Mapping[str, Any] | None
    storage: Storage = Storage.SHARED


_TARGETS: dict[str, _Target] = {}
_NAMESPACES: dict[str, _Target] = {}
REQUIRED = object()


@dataclass(frozen=True)
class Typed:
    """A default, which may be REQUIRED, of a key whose values are of these types alone: those of JSON in Python."""

    default: Any
    types: tuple[type, ...]


def custom_call(
    *targets: str, reads_config: bool = True, storage: Storage = Storage.SHARED, **defaults: Any
) -> Callable[[TargetPreparer], TargetPreparer]:
    """Registers what prepares the kernel of ``targets``, whose results lie as ``storage`` says.

    ``defaults`` are the keys of its JSON backend config (REQUIRED: the program must give it); the preparer gets all.
    With ``reads_config=False`` the backend config is left alone and the preparer gets an empty one.
    """

    def register(preparer: TargetPreparer) -> TargetPreparer:
        for target in targets:
            if target in _TARGETS:
                raise ValueError(f"{target} has two kernels")
            _TARGETS[target] = _Target(preparer, defaults if reads_config else None, storage)
        return preparer

    return register


def custom_call_namespace(name: str, storage: Storage, **defaults: Any) -> Callable[[TargetPreparer], TargetPreparer]:
    """Registers what prepares the kernels of all targets ``<name>::...``, whose results lie as ``storage`` says;
    ``defaults`` as for ``custom_call``."""

    def register(preparer: TargetPreparer) -> TargetPreparer:
        if name in _NAMESPACES:
            raise ValueError(f"{name}:: has two kernels")
        _NAMESPACES[name] = _Target(preparer, defaults, storage)
        return preparer

    return register


def known_targets() -> tuple[str, ...]:
    """Every target that compiles, sorted; ``name::*`` is a whole namespace."""
    return tuple(sorted([*_TARGETS, *(f"{name}::*" for name in _NAMESPACES)]))


def malformed(instruction: Instruction, fact: str) -> MalformedProgram:
    """The error for a custom call that breaks its target's convention."""
    target = instruction.attributes_as(CustomCallAttributes).target
    return MalformedProgram.at(instruction, fact=f"the custom call {target} breaks its convention: {fact}")


def read_config(instruction: Instruction, defaults: Mapping[str, Any]) -> Config:
    """The JSON backend config over ``defaults``. Raises MalformedProgram or UnsupportedAttribute, naming the key."""
    text = instruction.attributes_as(CustomCallAttributes).backend_config
    try:
        given = parse_config(text) if text else {}
    except ValueError as error:
        raise malformed(instruction, f"its backend config is not JSON ({error})") from error
    if not isinstance(given, dict):
        raise malformed(instruction, "its backend config is not a JSON object")
    for key, value in given.items():
        if key not in defaults:
            raise UnsupportedAttribute.at(instruction, attribute=f"backend_config.{key}", value=value)
        expected = defaults[key]
        if isinstance(expected, bool) and not isinstance(value, bool):
            raise malformed(instruction, f"backend_config.{key} is {value!r}, not true or false")
        if isinstance(expected, Typed) and not isinstance(value, expected.types):
            names = " or ".join(kind.__name__ for kind in expected.types)
            raise malformed(instruction, f"backend_config.{key} is {value!r}, not of the type {names}")
    config = {key: value.default if isinstance(value, Typed) else value for key, value in defaults.items()} | given
    missing = [key for key, value in config.items() if value is REQUIRED]
    if missing:
        raise malformed(instruction, f"its backend config lacks {', '.join(missing)}")
    return config


def _target_of(instruction: Instruction) -> _Target | None:
    name = instruction.attributes_as(CustomCallAttributes).target
    namespace, separator, _ = name.partition("::")
    return _NAMESPACES.get(namespace) if separator else _TARGETS.get(name)


def _storage_of(instruction: Instruction) -> Storage:
    target = _target_of(instruction)
    return target.storage if target else Storage.SHARED


@kernel(Opcode.CUSTOM_CALL, storage=_storage_of)
def prepare_custom_call(instruction: Instruction) -> Kernel:
    name = instruction.attributes_as(CustomCallAttributes).target
    target = _target_of(instruction)
    if target is None:
        raise UnknownCustomCall.at(instruction, target=name, known=", ".join(known_targets()))
    config = {} if target.defaults is None else read_config(instruction, target.defaults)
    run = target.preparer(instruction, config)
    shape = instruction.shape
    if isinstance(shape, TupleShape) and len(shape.elements) == 1:
        return lambda launch, *operands: _in_tuple(run(launch, *operands))
    return run


def _in_tuple(value: Value) -> Value:
    return value if isinstance(value, tuple) else (value,)


@custom_call(
    "Sharding",
    "SPMDFullToShardShape",
    "SPMDShardToFullShape",
    "LayoutConstraint",
    "annotate_device_placement",
    reads_config=False,
)
def _marker(instruction: Instruction, config: Config) -> Kernel:
    """Says where a value lies; on one device it is the value."""
    operand = instruction.operands[0]
    if operand.shape != instruction.shape:
        raise malformed(instruction, "it changes a shape, so the program is not partitioned")
    return identity


@custom_call("dce_sink", reads_config=False)
def _sink(instruction: Instruction, config: Config) -> Kernel:
    """Its side effect, which is none, keeps its operands from being removed as unused."""
    return lambda run, *operands: ()


@custom_call("flagos.host_callback", id=REQUIRED)
def _host_callback(instruction: Instruction, config: Config) -> Kernel:
    """Calls the host with the arrays among the operands; tokens only order calls."""
    identifier = config["id"]
    if not is_integer(identifier):
        raise malformed(instruction, f"backend_config.id is {identifier!r}, not an integer")
    shapes = [leaf for operand in instruction.operands for leaf in leaves(operand.shape) if not _is_token(leaf)]
    results = [leaf for leaf in leaves(instruction.shape) if not _is_token(leaf)]
    shape = instruction.shape

    def run(launch: Run, *operands: Value) -> Value:
        if launch.host_callback is None:
            raise HostCallbackMissing.at(instruction)
        arguments = [operand.contiguous().cpu() for operand in operands if isinstance(operand, Tensor)]
        values = iter(launch.host_callback(identifier, arguments, shapes, results))
        return _fill(shape, values, launch)

    return run


def _is_token(shape: Shape) -> bool:
    return isinstance(shape, ArrayShape) and shape.element_type is ElementType.TOKEN


def _fill(shape: Shape, values: Any, launch: Run) -> Value:
    if isinstance(shape, TupleShape):
        return tuple(_fill(element, values, launch) for element in shape.elements)
    return () if _is_token(shape) else next(values).to(launch.device)


@custom_call("TopK", "mhlo.topk", reads_config=False)
def _top_k(instruction: Instruction, config: Config) -> Kernel:
    """operand [..., n] -> the k greatest [..., k] and their s32 indices; called[0], if any, may ask for the least."""
    operand, result = instruction.operands[0].shape, instruction.shape
    assert isinstance(operand, ArrayShape)
    assert isinstance(result, TupleShape)
    values = result.elements[0]
    assert isinstance(values, ArrayShape)
    element_type, k = operand.element_type, values.dims[-1]
    return lambda run, array: top_k(run, array, element_type, k)


@custom_call("PartialReduce", reads_config=False)
def _partial_reduce(instruction: Instruction, config: Config) -> Kernel:
    """Approximate top-k: n arrays and n initial values -> arrays shorter along one dimension that keep what the
    comparator puts first. Here exact: the first elements of the whole sort."""
    count = len(instruction.operands) // 2
    arrays = instruction.operands[:count]
    before, after = arrays[0].shape, next(leaves(instruction.shape))
    assert isinstance(before, ArrayShape)
    shorter = [d for d, (old, new) in enumerate(zip(before.dims, after.dims, strict=True)) if old != new]
    if not shorter:
        return lambda run, *operands: operands[:count] if count > 1 else operands[0]
    dimension, length = shorter[0], after.dims[shorter[0]]
    shape: Shape = before if count == 1 else TupleShape(tuple(a.shape for a in arrays))
    sort = Instruction(
        Opcode.SORT, shape, arrays, SortAttributes(dimension, True), instruction.called, f"{instruction.name}.sort"
    )
    run_sort = registry.prepare(sort)

    def run(launch: Run, *operands: Tensor) -> Value:
        ordered = _in_tuple(run_sort(launch, *operands[:count]))
        cut = tuple(array.narrow(dimension, 0, length) for array in ordered if isinstance(array, Tensor))
        return cut[0] if count == 1 else cut

    return run


def _elementwise(opcode: Opcode) -> TargetPreparer:
    def prepare(instruction: Instruction, config: Config) -> Kernel:
        plain = Instruction(opcode, instruction.shape, instruction.operands, name=instruction.name)
        return registry.prepare(plain)

    return prepare


for _name, _opcode in {
    "mhlo.acos": Opcode.ACOS,
    "mhlo.acosh": Opcode.ACOSH,
    "mhlo.asin": Opcode.ASIN,
    "mhlo.asinh": Opcode.ASINH,
    "mhlo.atanh": Opcode.ATANH,
    "mhlo.cosh": Opcode.COSH,
    "mhlo.erf": Opcode.ERF,
    "mhlo.sinh": Opcode.SINH,
    "mhlo.tan": Opcode.TAN,
}.items():
    custom_call(_name, reads_config=False)(_elementwise(_opcode))
