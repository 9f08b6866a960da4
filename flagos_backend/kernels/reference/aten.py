"""Custom calls ``aten::<op>.<overload>``: the PyTorch operator of that name, run on the operands. CUSTOM_CALLS.md holds
the format of the backend config; frontends/torch/compile/lowering/aten_call.py writes it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from flagos_backend.errors import AtenCallFailed
from flagos_backend.ir.attributes import CustomCallAttributes
from flagos_backend.ir.config import is_permutation, is_size
from flagos_backend.ir.hlo import Instruction
from flagos_backend.ir.torch_dtypes import TORCH_DTYPE
from flagos_backend.ir.types import ArrayShape, ElementType, leaves
from flagos_backend.kernels.reference.custom_calls import (
    REQUIRED,
    Config,
    Typed,
    custom_call_namespace,
    malformed,
    read_config,
)
from flagos_backend.kernels.reference.registry import Kernel, Run, Storage, Value
from flagos_backend.kernels.reference.storage import dtype_of
from flagos_backend.process.torch_loading import torch

E = ElementType

# Dtypes of PyTorch that no element type stands for: an integer of the size carries the bits.
_BITS = {"complex32": torch.complex32}

_NAMED: dict[str, Callable[[str], Any]] = {
    "dtype": lambda name: getattr(torch, name),
    "layout": lambda name: getattr(torch, name),
    "memory_format": lambda name: getattr(torch, name),
    "float": float,
    "complex": complex,
}

# Builds one argument of the call from the operands, and the device as the last of them.
_Build = Callable[[Sequence[Any]], Any]


# What operators call the share of numbers that they leave out.
_DROPOUT = "dropout_p"
# They dereference, on the host, the seeds of the dropout that they repeat.
_READ_SEEDS = frozenset(
    {torch.ops.aten._scaled_dot_product_efficient_attention_backward, torch.ops.aten._efficient_attention_backward}
)

_CONFIG = {
    "arguments": Typed(REQUIRED, (list,)),
    "keywords": Typed(REQUIRED, (dict,)),
    "results": Typed(REQUIRED, (list, type(None))),
    "dtypes": Typed(None, (list, type(None))),
    "orders": Typed(None, (list, type(None))),
}


@custom_call_namespace("aten", Storage.FRESH, **_CONFIG)
def _prepare_aten(instruction: Instruction, config: Config) -> Kernel:
    operator = _operator(instruction)
    if operator.overloadpacket in _READ_SEEDS:
        operator = _with_seeds_on_host(operator)
    return _prepare(instruction, config, operator)


def prepare_operator(instruction: Instruction, operator: Callable[..., Any]) -> Kernel:
    """The kernel of a call of an ATen operator that ``operator``, a function of the same arguments, computes."""
    return _prepare(instruction, read_config(instruction, _CONFIG), operator)


# Operators whose form with an output computes there; that of most others computes elsewhere and copies.
_FILLS_OUTPUT = frozenset({"addmm", "baddbmm", "bmm", "mm"})


def prepare_into(instruction: Instruction) -> Kernel | None:
    """What makes the result of an ``aten::`` call in an array that it is given, if there is one: as ``into`` of
    kernels.implementation.Variant. None for operators that cannot, and for what is no such call."""
    attributes = instruction.attributes
    if not isinstance(attributes, CustomCallAttributes) or not attributes.target.startswith("aten::"):
        return None
    operator, config = _operator(instruction), read_config(instruction, _CONFIG)
    packet = operator.overloadpacket
    as_stored = isinstance(instruction.shape, ArrayShape) and _as_torch(instruction, instruction.shape) is None
    if packet.__name__ not in _FILLS_OUTPUT or operator._overloadname != "default" or not as_stored:
        return None
    if not _gives_row_major(config, None):
        return None
    elsewhere: Kernel = _prepare(instruction, config, operator)
    there = _caller(instruction, config, packet.out)

    def run(launch: Run, outputs: Sequence[torch.Tensor | None], *operands: Any) -> Value:
        (output,) = outputs
        if output is None:
            made: Value = elsewhere(launch, *operands)
            return made
        there(launch, operands, out=output)
        return output

    return run


def gives_row_major(instruction: Instruction, results: list[int] | None) -> bool:
    """Whether an ``aten::`` call's result is these of the operator's tensors, or its one tensor, their dimensions in
    order."""
    return _gives_row_major(read_config(instruction, _CONFIG), results)


def _gives_row_major(config: Config, results: list[int] | None) -> bool:
    return (config["results"], config["dtypes"], config["orders"]) == (results, None, None)


def argument_of(instruction: Instruction, name: str) -> Any:
    """An argument of an ``aten::`` call as its config has it, that of the schema where the call leaves it out; None
    where the operator has none of the name."""
    return _argument(instruction, read_config(instruction, _CONFIG), name)


def arguments_of(instruction: Instruction) -> list[str]:
    """The names of the arguments that the operator of an ``aten::`` call has."""
    return [argument.name for argument in _operator(instruction)._schema.arguments]


def draws(instruction: Instruction) -> bool:
    """Whether an ``aten::`` call draws random numbers."""
    return torch.Tag.nondeterministic_seeded in _operator(instruction).tags


def is_pointwise(instruction: Instruction) -> bool:
    """Whether an ``aten::`` call works on each element by itself, so that no integer of it says where another is."""
    return torch.Tag.pointwise in _operator(instruction).tags


def drops_out(instruction: Instruction) -> bool:
    """Whether an ``aten::`` call leaves out some of its numbers at random, beside what it computes."""
    return _dropout(instruction, read_config(instruction, _CONFIG)) not in (None, 0, {"float": "0.0"})


def _dropout(instruction: Instruction, config: Config) -> Any:
    """What the call says of the share to leave out; None for an operator that leaves nothing out ever."""
    return _argument(instruction, config, _DROPOUT)


def _argument(instruction: Instruction, config: Config, name: str) -> Any:
    arguments = _operator(instruction)._schema.arguments
    for number, argument in enumerate(arguments):
        if argument.name == name:
            given = config["arguments"][number : number + 1] or [config["keywords"].get(name, argument.default_value)]
            return given[0]
    return None


def _prepare(instruction: Instruction, config: Config, operator: Callable[..., Any]) -> Kernel:
    call = _caller(instruction, config, operator)
    unread_seeds = _dropout(instruction, config) is not None and not drops_out(instruction)
    moved = _zeros_for_seeds if unread_seeds else _moved
    finish = _results(instruction, config["results"], config["dtypes"], config["orders"], moved)

    def run(launch: Run, *operands: Any) -> Value:
        return finish(call(launch, operands), launch.device, operands)

    return run


def _caller(instruction: Instruction, config: Config, operator: Callable[..., Any]) -> Callable[..., Any]:
    """``call(run, operands, **more)`` is what ``operator`` returns of the call's arguments, and of ``more``."""
    casts = [_as_torch(instruction, operand.shape) for operand in instruction.operands]
    arguments = [_decode(instruction, value, casts) for value in config["arguments"]]
    keywords = {name: _decode(instruction, value, casts) for name, value in config["keywords"].items()}
    place = instruction.metadata or instruction.name
    # Numbers stand there once: a call of a small operator costs what is done around it.
    known = [None if _varies(value) else build(()) for value, build in zip(config["arguments"], arguments, strict=True)]
    built = [(n, arguments[n]) for n, value in enumerate(config["arguments"]) if _varies(value)]
    plain = getattr(operator, "_op", operator)  # of PyTorch's operators, without a function of Python around it

    def call(launch: Run, operands: Sequence[Any], **more: Any) -> Any:
        try:
            given = (*operands, launch.device)
            row = known.copy()
            for number, build in built:
                row[number] = build(given)
            if keywords:
                more = {**{name: build(given) for name, build in keywords.items()}, **more}
            return plain(*row, **more)
        except Exception as error:  # Whatever the operator refuses is the program's error, in its own words.
            raise AtenCallFailed(exception=type(error).__name__, message=error, place=place) from error

    return call


def _varies(value: Any) -> bool:
    """Whether an argument of a config is another object at each call."""
    return isinstance(value, list) or (isinstance(value, dict) and next(iter(value), "") not in _NAMED)


def _operator(instruction: Instruction) -> Any:
    name = instruction.attributes_as(CustomCallAttributes).target.removeprefix("aten::")
    packet, _, overload = name.partition(".")
    try:
        operator = getattr(getattr(torch.ops.aten, packet), overload)
    except AttributeError:
        raise malformed(instruction, f"PyTorch {torch.__version__} has no operator {name}") from None
    if operator._schema.is_mutable:
        raise malformed(instruction, f"{name} writes over its arguments")
    return operator


def _with_seeds_on_host(operator: Any) -> Callable[..., Any]:
    places = {argument.name: number for number, argument in enumerate(operator._schema.arguments)}
    seeds, dropout = (places["philox_seed"], places["philox_offset"]), places[_DROPOUT]

    def call(*arguments: Any, **keywords: Any) -> Any:
        if arguments[dropout] > 0:
            arguments = tuple(a.cpu() if n in seeds else a for n, a in enumerate(arguments))
        return operator(*arguments, **keywords)

    return call


def _as_torch(instruction: Instruction, shape: object) -> torch.dtype | None:
    """The dtype that an operand must be seen as, or None where it is stored as that."""
    if not isinstance(shape, ArrayShape) or shape.element_type not in TORCH_DTYPE:
        raise malformed(instruction, f"PyTorch has no tensor {shape}")
    dtype = TORCH_DTYPE[shape.element_type]
    return None if dtype is dtype_of(shape.element_type) else dtype


def _of_bits(instruction: Instruction, name: object, shape: object) -> torch.dtype:
    """The dtype of that name, whose bits an array of ``shape`` carries."""
    dtype = _BITS.get(name) if isinstance(name, str) else None
    if dtype is None or not isinstance(shape, ArrayShape) or dtype_of(shape.element_type).itemsize != dtype.itemsize:
        raise malformed(instruction, f"{shape} does not hold the bits of {name}")
    return dtype


def _decode(instruction: Instruction, value: Any, casts: Sequence[torch.dtype | None]) -> _Build:
    if isinstance(value, list):
        parts = [_decode(instruction, part, casts) for part in value]
        return lambda operands: [part(operands) for part in parts]
    if not isinstance(value, dict):
        return lambda operands: value
    kind = next(iter(value), "")
    if kind == "tensor":
        return _operand(instruction, value, casts)
    if value == {"device": "here"}:
        return lambda operands: operands[-1]
    if kind not in _NAMED or not isinstance(value[kind], str):
        raise malformed(instruction, f"{value} is no argument")
    try:
        constant = _NAMED[kind](value[kind])
    except (AttributeError, ValueError, RuntimeError):
        raise malformed(instruction, f"{value} is no {kind} of PyTorch {torch.__version__}") from None
    return lambda operands: constant


def _operand(instruction: Instruction, value: dict[str, Any], casts: Sequence[torch.dtype | None]) -> _Build:
    number, strides, order = value["tensor"], value.get("strides"), value.get("order")
    if not is_size(number) or number >= len(casts):
        raise malformed(instruction, f"it has no operand {number!r}")
    dtype = casts[number]
    if "dtype" in value:
        dtype = _of_bits(instruction, value["dtype"], instruction.operands[number].shape)
    if order is not None:
        shape = instruction.operands[number].shape
        if not isinstance(shape, ArrayShape) or not is_permutation(order, shape.rank) or dtype is not None:
            raise malformed(instruction, f"{order} does not order the dimensions of {shape}")
        return lambda operands: operands[number].contiguous().permute(order)
    if strides is None:
        if "strided" not in value:  # some operators do not look at strides
            return (lambda o: o[number].contiguous()) if dtype is None else lambda o: o[number].contiguous().view(dtype)
        return (lambda operands: operands[number]) if dtype is None else lambda o: o[number].view(dtype)

    shape = instruction.operands[number].shape
    rank = shape.rank if isinstance(shape, ArrayShape) else 0
    if not isinstance(strides, list) or len(strides) != rank or not all(map(is_size, strides)):
        raise malformed(instruction, f"{strides} are no strides of {shape}")

    def strided(operands: Sequence[Any]) -> Any:
        tensor = operands[number] if dtype is None else operands[number].view(dtype)
        if list(tensor.stride()) == strides and tensor.storage_offset() == 0:
            return tensor
        return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device).copy_(tensor)

    return strided


def _moved(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    return tensor if tensor.device == device else tensor.to(device)


def _zeros_for_seeds(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Some results are numbers of the host: the seeds that attention drew. Without dropout nobody reads them, and a
    graph that is recorded takes nothing from the host."""
    return tensor if tensor.device.type == device.type else torch.zeros(tensor.shape, dtype=tensor.dtype, device=device)


def _results(
    instruction: Instruction,
    kept: object,
    dtypes: object,
    orders: object,
    moved: Callable[[torch.Tensor, torch.device], torch.Tensor],
) -> Callable[[Any, torch.device, Sequence[torch.Tensor]], Value]:
    """What makes the instruction's value, on the device, of what the operator returned, in storage that is none of the
    operands'. ``moved``: brings a result to the device.

    ``kept``: null for the one tensor, else which of the returned values, lists spread, are tensors of the result.
    ``dtypes``: for each tensor of the result the name of the dtype whose bits it holds, or null; null where none does.
    ``orders``: for each tensor which dimension of what is returned each of its own is, or null where that is the same.
    """
    give = []
    shapes = list(leaves(instruction.shape))
    names, permutations = (
        _of_each(instruction, key, value, len(shapes)) for key, value in (("dtypes", dtypes), ("orders", orders))
    )
    for shape, name, order in zip(shapes, names, permutations, strict=True):
        seen = _as_torch(instruction, shape) if name is None else _of_bits(instruction, name, shape)
        if order is not None and not is_permutation(order, len(shape.dims)):
            raise malformed(instruction, f"{order} does not order the dimensions of {shape}")
        give.append(_in_storage(seen or dtype_of(shape.element_type), shape, order))
    if kept is None:
        if not isinstance(instruction.shape, ArrayShape):
            raise malformed(instruction, f"one tensor is no {instruction.shape}")
        store_one = give[0]
        return lambda outcome, device, operands: _owned(moved(store_one(outcome), device), operands)
    if not isinstance(kept, list) or len(kept) != len(give) or not all(map(is_size, kept)):
        raise malformed(instruction, f"results {kept} do not make {instruction.shape}")

    def finish(outcome: Any, device: torch.device, operands: Sequence[torch.Tensor]) -> Value:
        flat, taken = list(_spread(outcome)), list(operands)
        for index, store in zip(kept, give, strict=True):
            taken.append(_owned(moved(store(flat[index]), device), taken))
        return tuple(taken[len(operands) :])

    return finish


def _of_each(instruction: Instruction, key: str, values: object, count: int) -> list[Any]:
    """What the config says of each tensor of the result; null says nothing of any."""
    if values is None:
        return [None] * count
    if not isinstance(values, list) or len(values) != count:
        raise malformed(instruction, f"{key} {values} are not those of {instruction.shape}")
    return values


def _owned(tensor: torch.Tensor, taken: Sequence[torch.Tensor]) -> torch.Tensor:
    """The tensor, or a copy where it shares storage with one that is ``taken`` or its elements overlap.

    Python's objects of storages are not asked for: making one takes several times what a small operator does."""
    is_alias_of = torch._C._is_alias_of  # type: ignore[attr-defined]
    shared = False
    for other in taken:
        shared = shared or is_alias_of(tensor, other)
    if shared or (not tensor.is_contiguous() and torch._debug_has_internal_overlap(tensor) != 0):
        return tensor.clone(memory_format=torch.contiguous_format) if tensor.numel() else tensor
    return tensor


def _in_storage(dtype: torch.dtype, shape: ArrayShape, order: list[int] | None) -> Callable[[Any], Any]:
    """A returned tensor as it is stored. Operators may return another dtype than they do for tensors without data
    (statistics of norms of 16-bit floats), and the program says which one is meant; or nothing for what nobody reads
    (seeds of attention without dropout)."""
    storage = dtype_of(shape.element_type)

    def give(tensor: torch.Tensor | None) -> torch.Tensor:
        if tensor is None:
            return torch.zeros(shape.dims, dtype=storage)
        if tensor.dtype is not dtype:
            tensor = tensor.to(dtype)
        if tensor.is_complex() or tensor.is_neg():
            tensor = tensor.resolve_conj().resolve_neg()  # what is only marked would be lost with the tensor
        if order is not None:
            tensor = tensor.permute(order)
        return tensor if dtype is storage else tensor.view(storage)

    return give


def _spread(outcome: Any) -> Any:
    if isinstance(outcome, list | tuple):
        for part in outcome:
            yield from _spread(part)
    else:
        yield outcome
