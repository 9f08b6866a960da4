"""Makes a failing program small: fewer instructions, simpler decisions, then operands replaced by parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TypeVar

from flagos_backend.ir.attributes import ParameterAttributes
from flagos_backend.ir.hlo import Computation, Instruction, Module
from flagos_backend.ir.opcode import Opcode
from flagos_backend.ir.types import ArrayShape, TupleShape
from flagos_backend.passes.dce import eliminate_dead_code
from flagos_backend.passes.inline_calls import inline_calls
from tools.fuzz.program import replayed_program
from tools.fuzz.session import Session
from tools.fuzz.tape import Blocks
from tools.fuzz.verdict import Kind

# Of each stage: programs to try; most take some tenths of a second.
_MAX_ATTEMPTS = 120

Candidate = TypeVar("Candidate")


class Shrinker:
    """Keeps what still fails in the same way: ``kind`` with arguments of ``seed``."""

    def __init__(self, session: Session, seed: int, kind: Kind) -> None:
        self._session = session
        self._seed = seed
        self._kind = kind

    def shrink(self, blocks: Blocks) -> Module:
        """The smallest module found that fails as the one of ``blocks`` does."""
        blocks = self._improve(blocks, _fewer_blocks, self._blocks_fail)
        blocks = self._improve(blocks, _simpler_blocks, self._blocks_fail)
        module = replayed_program(blocks, self._seed).module
        return self._improve(module, _smaller_modules, self._module_fails)

    def _improve(
        self,
        best: Candidate,
        candidates: Callable[[Candidate], Iterator[Candidate]],
        fails: Callable[[Candidate], bool],
    ) -> Candidate:
        """``best`` replaced by a candidate that fails, again and again, until none does or the attempts are used up."""
        attempts = 0
        improved = True
        while improved:
            improved = False
            for candidate in candidates(best):
                attempts += 1
                if attempts > _MAX_ATTEMPTS:
                    return best
                if fails(candidate):
                    best, improved = candidate, True
                    break
        return best

    def _blocks_fail(self, blocks: Blocks) -> bool:
        return self._session.judge_blocks(blocks, self._seed).kind is self._kind

    def _module_fails(self, module: Module) -> bool:
        return self._session.judge_module(module, self._seed).kind is self._kind


def _fewer_blocks(blocks: Blocks) -> Iterator[Blocks]:
    """Whole runs of instructions gone, long ones first."""
    size = len(blocks) // 2
    while size:
        for start in range(len(blocks) - size - 1, 0, -size):
            yield (*blocks[:start], *blocks[start + size :])
        size //= 2


def _simpler_blocks(blocks: Blocks) -> Iterator[Blocks]:
    """One decision simplified: smaller dims, operands that are leaves, plainer types."""
    for number, block in enumerate(blocks):
        for position, value in enumerate(block):
            for smaller in {0, value // 2} - {value}:
                changed = (*block[:position], smaller, *block[position + 1 :])
                yield (*blocks[:number], changed, *blocks[number + 1 :])


def _smaller_modules(module: Module) -> Iterator[Module]:
    """One output instead of several, calls inlined, and each instruction's value as a parameter of its own."""
    entry = module.entry
    if entry.root.opcode is Opcode.TUPLE and len(entry.root.operands) > 1:
        for operand in entry.root.operands:
            shape = TupleShape((operand.shape,))
            root = replace(entry.root, shape=shape, operands=(operand,))
            yield _cleaned(replace(module, entry=Computation(entry.name, (*entry.instructions, root), root)))
    inlined = inline_calls(module)
    if inlined is not module:
        yield _cleaned(inlined)
    for instruction in reversed(entry.instructions):
        if isinstance(instruction.shape, ArrayShape) and instruction.opcode not in (Opcode.PARAMETER, Opcode.CONSTANT):
            yield _cleaned(_with_parameter(module, instruction))


def _with_parameter(module: Module, removed: Instruction) -> Module:
    entry = module.entry
    number = ParameterAttributes(len(entry.parameters))
    parameter = Instruction(Opcode.PARAMETER, removed.shape, (), number, name=f"in_place_of_{removed.name}")
    values: dict[Instruction, Instruction] = {}
    instructions = [parameter]
    for instruction in entry.instructions:
        if instruction is removed:
            values[instruction] = parameter
            continue
        copy = replace(instruction, operands=tuple(values[operand] for operand in instruction.operands))
        values[instruction] = copy
        instructions.append(copy)
    return replace(module, entry=Computation(entry.name, tuple(instructions), values[entry.root]))


def _cleaned(module: Module) -> Module:
    """Without dead code and without parameters that nobody reads."""
    module = eliminate_dead_code(module)
    entry = module.entry
    read = {operand for instruction in entry.instructions for operand in instruction.operands}
    kept = [p for p in entry.parameters if p in read or p is entry.root]
    values: dict[Instruction, Instruction] = {
        p: replace(p, attributes=ParameterAttributes(number)) for number, p in enumerate(kept)
    }
    dropped = set(entry.parameters) - set(kept)
    instructions = []
    for instruction in entry.instructions:
        if instruction in dropped:
            continue
        if instruction not in values:
            values[instruction] = replace(
                instruction, operands=tuple(values[operand] for operand in instruction.operands)
            )
        instructions.append(values[instruction])
    return replace(module, entry=Computation(entry.name, tuple(instructions), values[entry.root]))
