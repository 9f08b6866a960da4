"""A prepared kernel: what it says of itself, where its source lies, how it fails."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from cpu.triton.harness import regions_of
from flagos_backend.codegen.triton import RegionKernel, prepare, sources
from flagos_backend.errors import KernelBuildFailed, KernelLaunchFailed
from flagos_backend.ir.attributes import DimensionsAttributes
from flagos_backend.ir.builder import Builder
from flagos_backend.ir.opcode import Opcode
from flagos_backend.ir.types import ArrayShape, ElementType
from support import kernels


def sum_of_two(count: int = 100) -> RegionKernel:
    builder = Builder("entry")
    a, b = (builder.parameter(ArrayShape(ElementType.F32, (count,))) for _ in range(2))
    (region,) = regions_of(builder.build(builder.add(Opcode.ADD, [a, b])))
    return prepare(region, kernels.target())


def test_the_source_is_the_same_each_time_and_lies_in_a_private_folder() -> None:
    first, second = sum_of_two(), sum_of_two()
    assert first.source == second.source
    assert first.text.startswith("triton add.1 over 100 in blocks of")
    x = torch.arange(100.0, device=kernels.target().device_type)
    out = torch.empty_like(x)
    first([x, x], [out])
    assert torch.equal(out, x + x)
    path = sources.path_of(first.source)
    assert path.read_text() == first.source
    assert path.parent.stat().st_mode & 0o777 == 0o700


def test_equal_layers_share_one_compiled_kernel() -> None:
    builder = Builder("entry")
    inputs = [builder.parameter(ArrayShape(ElementType.F32, (64, 64))) for _ in range(2)]
    outputs = builder.tuple([builder.add(Opcode.TANH, [x]) for x in inputs])
    first, second = (prepare(region, kernels.target()) for region in regions_of(builder.build(outputs)))
    assert first.text != second.text
    assert first.source == second.source
    tensor = torch.randn(64, 64, device=kernels.target().device_type)
    for kernel in (first, second):
        kernel([tensor], [torch.empty_like(tensor)])
    assert first._functions[0] is second._functions[0]


def test_a_file_that_was_changed_is_written_anew() -> None:
    kernel = sum_of_two(101)
    path = sources.path_of(kernel.source)
    path.write_text("raise RuntimeError('not ours')\n")
    x = torch.ones(101, device=kernels.target().device_type)
    out = torch.empty_like(x)
    kernel([x, x], [out])
    assert path.read_text() == kernel.source


def test_a_source_that_does_not_load_names_kernel_and_file() -> None:
    kernel = dataclasses.replace(sum_of_two(), source="raise ValueError('broken')\n")
    with pytest.raises(KernelBuildFailed, match=r"add\.1 over 100.*broken.*\.py") as found:
        kernel([], [])
    assert found.value.facts["source"] == str(sources.path_of(kernel.source))


def test_a_kernel_that_does_not_compile_names_kernel_and_file() -> None:
    kernel = sum_of_two()
    broken = dataclasses.replace(kernel, source=kernel.source.replace("tl.load", "tl.no_such_thing"))
    x = torch.ones(100, device=kernels.target().device_type)
    with pytest.raises(KernelLaunchFailed, match=r"(?s)add\.1 over 100.*no_such_thing"):
        broken([x, x], [torch.empty_like(x)])


def test_results_may_lie_over_operands_that_are_read_at_the_same_points(rng: np.random.Generator) -> None:
    builder = Builder("entry")
    a, b = (builder.parameter(ArrayShape(ElementType.F32, (64, 64))) for _ in range(2))
    turned = builder.add(Opcode.REVERSE, [b], DimensionsAttributes((0,)))
    (region,) = regions_of(builder.build(builder.add(Opcode.ADD, [a, turned])))
    kernel = prepare(region, kernels.target())
    (output,) = kernel.outputs
    assert kernel.may_overwrite(output, a)
    assert not kernel.may_overwrite(output, b)
    x, y = (torch.randn(64, 64, device=kernels.target().device_type) for _ in range(2))
    expected = x + y.flip(0)
    inputs = [x if source is a else y for source in kernel.inputs]
    kernel(inputs, [x])
    assert torch.equal(x, expected)


def test_a_scalar_that_each_program_computes_lies_over_nothing() -> None:
    builder = Builder("entry")
    a, scalar = builder.parameter(ArrayShape(ElementType.F32, (3000,))), builder.parameter(ArrayShape(ElementType.F32))
    wide = builder.add(Opcode.BROADCAST, [scalar], DimensionsAttributes(()), shape=a.shape)
    next_scalar = builder.add(Opcode.ADD, [scalar, scalar])
    root = builder.tuple([builder.add(Opcode.MULTIPLY, [a, wide]), next_scalar])
    (region,) = regions_of(builder.build(root))
    kernel = prepare(region, kernels.target())
    product, doubled = sorted(kernel.outputs, key=lambda output: -output.shape.num_elements)
    assert kernel.may_overwrite(product, a)
    assert not kernel.may_overwrite(doubled, scalar)
