"""dot through ATen's matrix products: the vendor's BLAS for floats, exact sums of float products for integers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

from flagos_backend.devices import tensor_float
from flagos_backend.devices.target import Target
from flagos_backend.ir.attributes import DotAttributes
from flagos_backend.ir.hlo import Instruction
from flagos_backend.ir.types import ElementType
from flagos_backend.kernels.contraction import Contraction, contraction_of, element_types
from flagos_backend.kernels.implementation import Variant
from flagos_backend.kernels.reference.contractions import in_whole_blocks
from flagos_backend.kernels.reference.conversion import converter
from flagos_backend.kernels.reference.registry import Kernel, Run
from flagos_backend.kernels.reference.storage import dtype_of
from flagos_backend.kernels.vendor import byte_products
from flagos_backend.process.torch_loading import Tensor, torch

E = ElementType
_HALF_FLOATS = frozenset({E.F16, E.BF16})
_NATIVE = frozenset({E.F16, E.BF16, E.F32, E.F64, E.C64, E.C128})
# Integers are multiplied as digits of this many bits in f64, whose sums are exact below 2**53.
_DIGIT_BITS = 16
#: More products than this of two integers have sums that f64 may round.
MAX_CONTRACTED_INTEGERS = 1 << (53 - 2 * _DIGIT_BITS)
# Of two matrices, or two batches of them; into ``out`` when it is given.
_Product = Callable[..., Tensor]


def unsupported(instruction: Instruction, target: Target) -> str:
    if target.is_host:
        return "the host has no vendor"
    lhs, rhs, result = element_types(instruction)
    if all(t.is_integer or t is E.PRED for t in (lhs, rhs, result)):
        size = contraction_of(instruction).contracted
        return "" if size <= MAX_CONTRACTED_INTEGERS else f"sums of {size} integer products are not exact in f64"
    if lhs is rhs and ((lhs is result and lhs in _NATIVE) or (lhs in _HALF_FLOATS and result is E.F32)):
        return ""
    return f"there is no product {lhs.name.lower()} x {rhs.name.lower()} -> {result.name.lower()}"


def variants(instruction: Instruction, target: Target) -> tuple[Variant, ...]:
    lhs, rhs, result = element_types(instruction)
    contraction = contraction_of(instruction)
    if not lhs.is_float and not lhs.is_complex:
        floats = _kernel(contraction, integer_product(lhs, rhs, result, contraction.contracted))
        if byte_products.unsupported(instruction, contraction, target):
            return (Variant("", floats),)
        kernel_of = functools.partial(_kernel, contraction)
        sizes = (contraction.batch, contraction.contracted, contraction.columns)
        return (*byte_products.variants(kernel_of, *sizes, result, target), Variant("floats", floats))
    if lhs is not result and target.device_type == "cpu":
        return (Variant("", _kernel(contraction, _widened(torch.float32))),)
    out_dtype = dtype_of(result) if lhs is not result else None
    product = _float_product(instruction, lhs, out_dtype)
    warm_up = functools.partial(load_library, target.device_type, dtype_of(lhs))
    return (Variant("", _kernel(contraction, product), _kernel_into(contraction, product), warm_up),)


@functools.cache
def load_library(device_type: str, dtype: torch.dtype) -> None:
    """A process's first product makes the library's handle and loads its kernels, which takes a tenth of a second."""
    matrix = torch.zeros((16, 16), dtype=dtype, device=device_type)
    torch.mm(matrix, matrix)


def _kernel(contraction: Contraction, product: _Product) -> Kernel:
    def run(_: Run, lhs: Tensor, rhs: Tensor) -> Tensor:
        return contraction.finish(product(*contraction.arrange(lhs, rhs)))

    return run


def _kernel_into(contraction: Contraction, product: _Product) -> Kernel:
    def run(_: Run, outputs: Sequence[Tensor | None], lhs: Tensor, rhs: Tensor) -> Tensor:
        (output,) = outputs
        operands = contraction.arrange(lhs, rhs)
        if output is None:
            return contraction.finish(product(*operands))
        product(*operands, out=contraction.unfinished(output))
        return output

    return run


def _widened(dtype: torch.dtype) -> _Product:
    return lambda a, b: torch.matmul(a.to(dtype), b.to(dtype))


def _float_product(instruction: Instruction, element: ElementType, out_dtype: torch.dtype | None) -> _Product:
    if out_dtype is not None:
        wider = out_dtype

        def product(a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
            multiply = torch.bmm if a.dim() == 3 else torch.mm
            # Their overloads with a dtype take no absent output.
            given = {} if out is None else {"out": out}
            return multiply(a, b, out_dtype=wider, **given)

        return product
    if element is E.F32:
        return _rounding(instruction.attributes_as(DotAttributes).allows_tensor_float)
    if element is E.BF16:
        return in_whole_blocks(torch.matmul)
    return _rounding(False) if element is E.C64 else torch.matmul


def _rounding(to_tensor_float: bool) -> _Product:
    def product(a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
        with tensor_float.products(to_tensor_float):
            return torch.matmul(a, b, out=out)

    return product


def integer_product(lhs: ElementType, rhs: ElementType, result: ElementType, contracted: int | None = None) -> _Product:
    """Products modulo 2**bits of the result. Where all sums of ``contracted`` are exact in floats they are one product;
    else digit by digit: digits above those bits cannot be seen in it."""
    if contracted is not None:
        greatest = contracted << (_magnitude_bits(lhs) + _magnitude_bits(rhs))
        for element, exact in ((E.F32, 1 << 24), (E.F64, 1 << 53)):
            if greatest <= exact:
                return _exact_product(lhs, rhs, result, element)
    return _product_of_digits(lhs, rhs, result)


def _magnitude_bits(element: ElementType) -> int:
    """No number of the type is farther from zero than two to this."""
    return 0 if element is E.PRED else element.bits - element.is_signed


def _exact_product(lhs: ElementType, rhs: ElementType, result: ElementType, computed: ElementType) -> _Product:
    take_lhs, take_rhs = converter(lhs, computed) or _same, converter(rhs, computed) or _same
    give, multiply = converter(E.S64, result) or _same, _rounding(False)
    return lambda a, b: give(multiply(take_lhs(a), take_rhs(b)).to(torch.int64))


def _product_of_digits(lhs: ElementType, rhs: ElementType, result: ElementType) -> _Product:
    digits = max(1, -(-min(result.bits, 64) // _DIGIT_BITS))
    take_lhs, take_rhs = converter(lhs, E.S64) or _same, converter(rhs, E.S64) or _same
    give = converter(E.S64, result) or _same

    def product(a: Tensor, b: Tensor) -> Tensor:
        total = None
        left, right = _digits(take_lhs(a), digits), _digits(take_rhs(b), digits)
        for i, x in enumerate(left):
            for j, y in enumerate(right[: digits - i]):
                part = torch.matmul(x, y).to(torch.int64) << (_DIGIT_BITS * (i + j))
                total = part if total is None else total + part
        assert total is not None
        return give(total)

    return product


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _digits(tensor: Tensor, count: int) -> list[Tensor]:
    """Unsigned digits of a number's two's complement, the least first, as f64."""
    return [(tensor >> (_DIGIT_BITS * i) & ((1 << _DIGIT_BITS) - 1)).to(torch.float64) for i in range(count)]
