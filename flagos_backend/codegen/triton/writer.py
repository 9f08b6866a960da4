"""Writes one kernel: a region with its tiling in, Triton source out. Between tiling.py and kernel.py.

A kernel's arguments are its buffers alone. Where its elements are is positions.py's to say.
"""

from __future__ import annotations

import contextlib
from collections import ChainMap
from collections.abc import Iterable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass

from flagos_backend.codegen.transforms.excess_precision import rounds
from flagos_backend.codegen.triton import elements, scalars
from flagos_backend.codegen.triton.elements import Dialect
from flagos_backend.codegen.triton.loop_transforms.running import GROUP, exponential, running_sums
from flagos_backend.codegen.triton.positions import Positions
from flagos_backend.codegen.triton.tiling import Axis, Loop, Tiling
from flagos_backend.ir.hlo import Instruction
from flagos_backend.ir.opcode import Comparison, Opcode
from flagos_backend.ir.types import ElementType, leaves
from flagos_backend.loop_ir.literals import starts_neutral
from flagos_backend.loop_ir.region import Affine, Apply, Expression, Index, Literal, Load, Reduce, Region, Store, below

_EQUAL = {Comparison.EQ: "==", Comparison.NE: "!="}


@dataclass(frozen=True, slots=True)
class Written:
    """``source`` of a kernel. ``walks``: how many times a program goes over points of its, loading them each time; the
    ends of a row, which many threads load, count as well."""

    source: str
    walks: int


@dataclass(frozen=True, slots=True)
class Partial:
    """Where the parts of a split reduction go: buffer ``name``, ``size`` elements of each part."""

    name: str
    size: int


def write_kernel(
    name: str,
    region: Region,
    tiling: Tiling,
    dialect: Dialect,
    names: dict[Instruction, str],
    partials: dict[Reduce, Partial] | None = None,
    first: Sequence[str] = (),
) -> Written:
    """The function ``name``. ``names``: the argument of each buffer that the region reads or stores. ``first``: lines
    that come before all others.

    With ``partials`` reductions go there part by part, and stores whose values need such a reduction are left out.
    """
    return _Writer(name, region, tiling, dialect, names, partials or {}).write(first)


class _Writer:
    def __init__(
        self,
        name: str,
        region: Region,
        tiling: Tiling,
        dialect: Dialect,
        names: dict[Instruction, str],
        partials: dict[Reduce, Partial],
    ) -> None:
        self.name, self.region, self.dialect = name, region, dialect
        self.names, self.partials = names, partials
        self.expressions = region.expressions()
        self.depends: dict[Expression, frozenset[str]] = {}
        self.level: dict[Expression, int] = {}
        self.rounded: set[Expression] = set()
        self.values: MutableMapping[Expression, str] = {}
        # At the ends of a row that are apart: a block that is held from pass to pass.
        self.ends: dict[Expression, str] = {}
        self.lines: list[str] = []
        self.indent = "    "
        self.count = 0
        looped = tiling.looped
        self.accumulated = frozenset(
            f for f in region.reductions if looped is not None and set(f.dims) & set(looped.dims)
        )
        self.walks_row = tiling.loop is Loop.SECOND and tiling.parts == 1 and tiling.axes[0].block == 1
        # Sums that go along with the maximum that they wait for.
        self.running = running_sums(region) if self.walks_row and tiling.axes[1].block > GROUP else {}
        self.maxima = {running.most for running in self.running.values()}
        self.positions = Positions.of_region(region, tiling, [partial.size for partial in self.partials.values()])
        # Of a row that is walked several times, the walk that is written, and the last one that loads each part of it.
        self.walk = 0
        self.last_walk: dict[Load, int] = {}

    @property
    def tiling(self) -> Tiling:
        return self.positions.tiling

    def write(self, first: Sequence[str]) -> Written:
        self._lines(first)
        self._analyse()
        read = {operand for e in self.expressions for operand in e.operands}
        self.rounded = {e for e in read if rounds(e)}  # others are stored alone, which rounds them
        arguments = [*dict.fromkeys(self.names.values()), *(partial.name for partial in self.partials.values())]
        self._lines(self.positions.grid())
        self._lines(self.positions.alignment(self.values))
        loaded = [(load, n) for n in range(self._passes()) for load in self._loaded_in(n)] if self.walks_row else []
        if len(dict(loaded)) < len(loaded):
            self.last_walk.update(loaded)
        if self.walks_row:
            # Before the first walk, after which it is there: no walk waits for it.
            row = self.tiling.axes[1].name
            self._compute([e for e in self.expressions if self._is_at_hand(e) and row not in self.depends[e]])
        for number in range(self._passes()):
            self.walk = number
            self._write_pass(number)
        head = ["@triton.jit", f"def {self.name}({', '.join(arguments)}):"]
        walks = self._passes() + (self.tiling.alignment is not None)
        return Written("\n".join([*head, *self.lines]) + "\n", walks)

    # ---- What depends on what

    def _analyse(self) -> None:
        """For each expression, the axes it varies along, and how many loops must be over before it is known."""
        for expression in self.expressions:
            axes = frozenset[str]().union(*(self.depends[o] for o in expression.operands))
            level = max((self.level[o] for o in expression.operands), default=0)
            if isinstance(expression, Load | Index):
                index = expression.index if isinstance(expression, Load) else expression.value
                axes |= frozenset(self.positions.axes_of(index))
            if isinstance(expression, Reduce):
                axes -= {self.positions.reduced_axis(expression).name}
                level += expression in self.accumulated
                level -= expression in self.running
            self.depends[expression] = axes
            self.level[expression] = level

    def _passes(self) -> int:
        if self.partials:
            return 1
        reductions = [self.level[reduction] - 1 for reduction in self.accumulated]
        return 1 + max([*reductions, *(self.level[store.value] for store in self.region.stores)], default=0)

    # ---- Lines

    def _line(self, text: str) -> None:
        self.lines.append(self.indent + text)

    def _lines(self, texts: Iterable[str]) -> None:
        for text in texts:
            self._line(text)

    def _let(self, text: str) -> str:
        """A name for what ``text`` computes: itself if it is a name."""
        if text.isidentifier():
            return text
        name = f"v{self.count}"
        self.count += 1
        self._line(f"{name} = {text}")
        return name

    @contextlib.contextmanager
    def _at_ends(self) -> Iterator[None]:
        """What is written in here is of the ends of a row."""
        positions, values = self.positions, self.values
        self.positions, self.values = positions.at_ends(), ChainMap(self.ends, dict(values))
        yield
        self.positions, self.values = positions, values

    # ---- Passes

    def _made_in(self, number: int) -> tuple[list[Store], list[Reduce], list[Expression]]:
        """Stores and reductions of pass ``number``, and what they are made of directly."""
        stores = [s for s in self.region.stores if self.level[s.value] == number]
        reductions = [f for f in self.expressions if isinstance(f, Reduce) and f in self.accumulated]
        reductions = [f for f in reductions if self.level[f] == number + 1]
        return stores, reductions, [*self._roots_of(stores), *self._roots_of_reductions(reductions)]

    def _roots_of(self, stores: Sequence[Store]) -> Iterable[Expression]:
        return Region(self.region.dims, tuple(stores)).roots()

    def _roots_of_reductions(self, reductions: Sequence[Reduce]) -> list[Expression]:
        starts = [initial for reduction in reductions for initial in self._start_of(reduction)]
        return [*(self._reduced(f) for f in reductions), *starts]

    def _loaded_in(self, number: int) -> list[Load]:
        """What walk ``number`` loads that each row has for itself."""
        x, r = (axis.name for axis in self.tiling.axes)
        _, _, roots = self._made_in(number)
        known = {e for e in self.expressions if r not in self.depends[e]}
        return [e for e in below(roots, known) if isinstance(e, Load) and self.depends[e] == {x, r}]

    @staticmethod
    def _is_at_hand(expression: Expression) -> bool:
        """Whether it can be loaded without waiting for anything."""
        return isinstance(expression, Load) and not expression.operands

    def _kept(self, load: Load) -> str:
        """How the cache keeps what is loaded: until the last walk, and no longer."""
        last = None if self.positions.is_at_ends else self.last_walk.get(load)
        if last is None:
            return ""
        return f', eviction_policy="{"evict_last" if self.walk < last else "evict_first"}"'

    def _write_pass(self, number: int) -> None:
        """Everything known before or in loop ``number``: what the loop needs and does not vary along it, the loop, and
        then what it does not need, for which it need not wait either."""
        looped = self.tiling.looped
        stores, reductions, roots = self._made_in(number)
        if looped is None:
            self._compute_and_store(self._early_first(self._needed(roots)), stores)
            return
        varying = [s for s in stores if looped.name in self.positions.axes_of(s.index)]
        if varying or reductions:
            self._write_loop(looped, varying, reductions)
        others = [store for store in stores if store not in varying]
        self._compute_and_store(self._needed(self._roots_of(others)), others)

    def _write_loop(self, looped: Axis, stores: Sequence[Store], reductions: Sequence[Reduce]) -> None:
        needed = self._needed([*self._roots_of(stores), *self._roots_of_reductions(reductions)])
        self._compute([e for e in needed if looped.name not in self.depends[e]])
        inside = [e for e in needed if looped.name in self.depends[e]]
        if self.tiling.alignment is not None:
            with self._at_ends():  # they come while the loop runs
                self._compute([e for e in inside if self._is_at_hand(e)])
        accumulators = {reduction: self._start(reduction) for reduction in reductions}
        before = dict(self.values)
        self._open_loop(looped)
        self._compute(inside if reductions else self._early_first(inside))
        self._store_all(stores)
        self._accumulate(accumulators)
        self.indent = "    "
        self.values = before
        ends = self._write_ends(inside, stores, reductions) if self.tiling.alignment is not None else {}
        for reduction in reductions:
            self._finish(reduction, accumulators, ends.get(reduction))

    def _write_ends(
        self, inside: Sequence[Expression], stores: Sequence[Store], reductions: Sequence[Reduce]
    ) -> dict[Reduce, str]:
        """At the ends of a row what its loop did between them. What of them goes into each reduction."""
        with self._at_ends():
            self._compute(inside)
            self._store_all(stores)
            return {f: self._block(self.running[f].most if f in self.running else f) for f in reductions}

    def _early_first(self, needed: Sequence[Expression]) -> list[Expression]:
        """``needed``, operands first, with what a row shares as early as it can be: what has a value for each element
        then comes after it, and need not be held meanwhile. But what it loads is not waited for before the first
        reduction, which waits for the row."""
        row, missing = self.tiling.axes[-1].name, set(needed)
        order: list[Expression] = []

        def add(expression: Expression) -> None:
            stack = [expression]
            while stack:
                if operands := [o for o in self._operands(stack[-1]) if o in missing]:
                    stack += reversed(operands)
                elif (known := stack.pop()) in missing:
                    missing.remove(known)
                    order.append(known)

        shared = [e for e in needed if row not in self.depends[e] and not isinstance(e, Literal)]
        reductions = [e for e in shared if isinstance(e, Reduce)]
        for reduction in (*reductions, None):
            for expression in shared:
                waits = any(o in missing and not isinstance(o, Literal) for o in self._operands(expression))
                has_time = reduction in reductions[:1] and not self._is_at_hand(expression)
                if not waits and not has_time and not isinstance(expression, Reduce):
                    add(expression)
            if reduction is not None:
                add(reduction)
        for remaining in needed:
            add(remaining)
        return order

    def _needed(self, roots: Iterable[Expression]) -> list[Expression]:
        """What the roots are made of and is not known yet, operands first."""
        found: set[Expression] = set()
        stack = list(roots)
        while stack:
            expression = stack.pop()
            if expression in found or expression in self.values:
                continue
            found.add(expression)
            stack.extend(self._operands(expression))
        return [e for e in self.expressions if e in found]

    def _operands(self, expression: Expression) -> tuple[Expression, ...]:
        """What of the operands this kernel computes."""
        if isinstance(expression, Reduce):
            return self._reduced(expression), *self._start_of(expression)
        return expression.operands

    def _reduced(self, reduction: Reduce) -> Expression:
        """What a loop has to know to go on with ``reduction``."""
        return self.running[reduction].most.value if reduction in self.running else reduction.value

    def _start_of(self, reduction: Reduce) -> tuple[Expression, ...]:
        """The reduction's initial value, where it matters to this kernel."""
        return () if reduction in self.partials or starts_neutral(reduction) else (reduction.initial,)

    def _open_loop(self, axis: Axis) -> None:
        self._line(self.positions.loop(axis))
        self.indent = "        "
        self._lines(self.positions.iteration(axis))

    # ---- Values

    def _compute(self, expressions: Sequence[Expression]) -> None:
        for expression in expressions:
            if expression not in self.values:
                self.values[expression] = self._value(expression)

    def _compute_and_store(self, expressions: Sequence[Expression], stores: Sequence[Store]) -> None:
        """Stores what a row shares as soon as it is known, the rest at the end.

        Triton 3.6 may compute again, where it is stored, a value that a row shares, and then use that further up, where
        it is not known yet: it refuses the kernel. What is loaded later does not lie there: only an array that has each
        point's element for itself is written over another (RegionKernel.may_overwrite).
        """
        row = self.tiling.axes[-1]
        shared = [s for s in stores if row.size > 1 and row.name not in self.positions.axes_of(s.index)]
        waiting = self._store_known(shared)
        for expression in expressions:
            self._compute([expression])
            waiting = self._store_known(waiting)
        self._store_all(store for store in stores if store not in shared)

    def _store_known(self, stores: Sequence[Store]) -> list[Store]:
        """Writes those whose value and place are known; returns the others."""
        waiting = [s for s in stores if any(e not in self.values for e in (s.value, *s.index.starts))]
        self._store_all(store for store in stores if store not in waiting)
        return waiting

    def _value(self, expression: Expression) -> str:
        if isinstance(expression, Literal):
            return self._let(scalars.literal(expression, self.positions.shape([])))
        if isinstance(expression, Index):
            text = f"({self.positions.position(expression.value, self.values)})"
            held = ElementType.S64 if self.positions.are_wide else ElementType.S32
            return self._let(scalars.convert(text, held, expression.element_type, self.dialect))
        if isinstance(expression, Load):
            # An array without elements is read at no position of an axis that has none.
            is_empty = any(0 in shape.dims for shape in leaves(expression.source.shape))
            empty = [axis.name for axis in self.tiling.axes if is_empty and axis.size == 0]
            axes = [*self.positions.axes_of(expression.index), *empty]
            position = self.positions.address(expression.index, self.values)
            if expression.guard is not None and not self.depends[expression].issubset(axes):
                varying = [axis for axis in self.tiling.axes if axis.name in self.depends[expression]]
                position = f"tl.broadcast_to({position}, {self.positions.shape(varying)})"
            masks = [self.positions.mask(axes), *([] if expression.guard is None else [self.values[expression.guard]])]
            mask = " & ".join(filter(None, masks))
            address = f"{self.names[expression.source]} + ({position})"
            text = f"tl.load({address}{', ' + mask if mask else ''}{self._kept(expression)})"
            return self._let(elements.from_memory(text, expression.element_type, self.dialect))
        if isinstance(expression, Reduce):
            return self._whole_reduction(expression)
        if (term := scalars.fused_term(expression, self.dialect)) is not None:
            return self._let(f"tl.fma({', '.join(self.values[factor] for factor in term)})")
        if (comparison := self._comparison_along_row(expression)) is not None:
            return self._let(comparison)
        operands = [self.values[operand] for operand in expression.operands]
        text = scalars.apply(expression, operands, self.dialect)
        if expression in self.rounded:
            text = elements.rounded(self._let(text), expression.element_type, self.dialect)
        return self._let(text)

    def _comparison_along_row(self, expression: Apply) -> str | None:
        """A position along a row compared with what the row shares. In a loop as an offset in the block, which is the
        same in all iterations: compilers widen a position that moves to 64 bits, and the comparison with it."""
        row, looped = self.tiling.axes[-1], self.tiling.looped
        is_row = len(self.tiling.axes) == 2 and (looped is row or self.dialect is Dialect.LIBDEVICE)
        if not is_row or self.positions.are_wide or expression.opcode is not Opcode.COMPARE:
            return None
        equal = _EQUAL.get(Comparison(expression.detail))
        if equal is None:
            return None
        for position, other in (expression.operands, expression.operands[::-1]):
            if (
                isinstance(position, Index)
                and position.element_type is ElementType.S32
                and self.positions.position(position.value, self.values) == row.name
                and row.name not in self.depends[other]
            ):
                at, offsets = self.values[other], row.name
                if looped is row:
                    start = "start" if self.tiling.alignment is None else "head - start"
                    at, offsets = f"({at} - {start})", self.positions.offsets(row)
                if self.dialect is not Dialect.LIBDEVICE:
                    return f"{at} {equal} {offsets}"
                return f"fm.is_at({offsets}, {at})" + ("" if equal == "==" else " == 0")
        return None

    def _store_all(self, stores: Iterable[Store]) -> None:
        for store in stores:
            self._store(store.target, store.value, store.index)

    def _store(self, target: Instruction, value: Expression, index: Affine) -> None:
        axes = self.positions.axes_of(index)
        mask = self.positions.mask(axes)
        text = elements.to_memory(self.values[value], value.element_type, self.dialect)
        varying = [axis for axis in self.tiling.axes if axis.name in axes]
        if len(varying) > len(self.depends[value]):
            text = f"tl.broadcast_to({text}, {self.positions.shape(varying)})"
        # What is written leaves the cache to rows that are walked again.
        leaves_cache = self.last_walk and len(axes) > 1 and not self.positions.is_at_ends
        kept = ', eviction_policy="evict_first"' if leaves_cache else ""
        address = f"{self.names[target]} + ({self.positions.address(index, self.values)})"
        self._line(f"tl.store({address}, {text}{', ' + mask if mask else ''}{kept})")

    # ---- Reductions

    def _accumulate(self, accumulators: dict[Reduce, str]) -> None:
        """What an iteration of the loop adds to ``accumulators``."""
        for total, running in self.running.items():
            if total in accumulators:
                self._accumulate_running(total, accumulators[total], running.most, accumulators[running.most])
        for reduction, accumulator in accumulators.items():
            if reduction not in self.running and reduction not in self.maxima:
                self._line(f"{accumulator} = {self._accumulated(reduction, accumulator)}")

    def _accumulate_running(self, total: Reduce, sums: str, most: Reduce, maxima: str) -> None:
        axis = self.positions.reduced_axis(most)
        x = self._let(f"tl.reshape({self._block(most)}, [1, {axis.block // GROUP}, {GROUP}])")
        largest = self._let(scalars.combine(most, maxima, scalars.reduce(most, x, 2, self.dialect), self.dialect))
        below = self._let(f"fm.shift({largest})")
        scale, added = (self._exponential(total, f"{text} - {below}") for text in (maxima, x))
        self._line(f"{sums} = {sums} * {scale} + {scalars.reduce(total, added, 2, self.dialect)}")
        self._line(f"{maxima} = {largest}")

    def _exponential(self, total: Reduce, text: str) -> str:
        """That of ``text``, as the terms of the running sum ``total`` are computed."""
        return self._let(scalars.apply(exponential(total), [self._let(text)], self.dialect))

    def _accumulated(self, reduction: Reduce, accumulator: str) -> str:
        """``accumulator`` with what one iteration of the loop adds."""
        factors = scalars.exact_product(reduction.value, self.dialect) if reduction.combine is Opcode.ADD else None
        if factors is None or self.positions.reduced_axis(reduction).name not in self.depends[reduction.value]:
            return scalars.combine(reduction, accumulator, self._block(reduction), self.dialect)
        exact, other = factors
        return f"tl.fma({self.values[exact]}, {self._block(reduction, other)}, {accumulator})"

    def _block(self, reduction: Reduce, value: Expression | None = None) -> str:
        """What goes into ``reduction``, or a ``value`` that takes part in it, as a block along every axis that it may
        vary along, identities past the end."""
        value = value or reduction.value
        element_type = reduction.element_type
        axis = self.positions.reduced_axis(reduction)
        varying = [a for a in self.tiling.axes if a is axis or a.name in self.depends[reduction.value]]
        text = self.values[value]
        if element_type is ElementType.PRED:
            text = f"{text}.to(tl.int32)"
        if axis.name not in self.depends[value]:
            text = f"tl.broadcast_to({text}, {self.positions.shape(varying)})"
        if self.positions.is_ragged(axis):
            text = f"tl.where({self.positions.name(axis)}_in, {text}, {scalars.identity(reduction)})"
        return self._let(text) if text != self.values[value] else text

    def _accumulator_shape(self, reduction: Reduce) -> str:
        axis = self.positions.reduced_axis(reduction)
        return self.positions.shape(
            [a for a in self.tiling.axes if a is axis or a.name in self.depends[reduction.value]]
        )

    def _start(self, reduction: Reduce) -> str:
        shape, kind = self._accumulator_shape(reduction), scalars.accumulated(reduction.element_type)
        if reduction in self.running or reduction in self.maxima:
            shape = f"[1, {self.positions.reduced_axis(reduction).block // GROUP}, 1]"
        return self._let(f"tl.full({shape}, {scalars.identity(reduction)}, {kind})")

    def _whole_reduction(self, reduction: Reduce) -> str:
        """A reduction over an axis that a block holds whole."""
        axis = self.tiling.axes.index(self.positions.reduced_axis(reduction))
        return self._with_initial(
            reduction, self._let(scalars.reduce(reduction, self._block(reduction), axis, self.dialect))
        )

    def _finish(self, reduction: Reduce, accumulators: dict[Reduce, str], ends: str | None) -> None:
        """The accumulator of ``reduction`` after the loop, with what the ``ends`` of the row add, as the reduction's
        value."""
        axis = self.tiling.axes.index(self.positions.reduced_axis(reduction))
        accumulator = accumulators[reduction]
        if reduction in self.running:
            most = self.running[reduction].most
            below = self._let(f"fm.shift({self.values[most]})")
            scale = self._exponential(reduction, f"{self._flat(accumulators[most])} - {below}")
            accumulator = self._let(f"{self._flat(accumulator)} * {scale}")
            ends = None if ends is None else self._exponential(reduction, f"{ends} - {below}")
        elif reduction in self.maxima:
            accumulator = self._flat(accumulator)
        result = self._let(scalars.reduce(reduction, accumulator, axis, self.dialect))
        if ends is not None:
            added = self._let(scalars.reduce(reduction, ends, axis, self.dialect))
            result = self._let(scalars.combine(reduction, result, added, self.dialect))
        if reduction in self.running:
            result = self._let(self.running[reduction].total(self.values[most], result))
        partial = self.partials.get(reduction)
        if partial is None:
            self.values[reduction] = self._with_initial(reduction, result)
            return
        (other,) = [a for a in self.tiling.axes if a is not self.positions.reduced_axis(reduction)]
        part = f"part * {partial.size} + " if self.tiling.parts > 1 else ""
        mask = self.positions.mask([other.name])
        if other.name not in self.depends[reduction]:
            result = f"tl.broadcast_to({result}, {self.positions.shape([other])})"
        self._line(f"tl.store({partial.name} + ({part}{other.name}), {result}{', ' + mask if mask else ''})")

    def _flat(self, accumulator: str) -> str:
        """That of a running sum or its maximum, as one block along the row."""
        return self._let(f"tl.reshape({accumulator}, [1, {self.tiling.axes[1].block // GROUP}])")

    def _with_initial(self, reduction: Reduce, result: str) -> str:
        """``result`` with the initial value, unless that changes nothing, as the reduction's type is held."""
        element_type = reduction.element_type
        for initial in self._start_of(reduction):
            start = self.values[initial]
            start = f"{start}.to(tl.int32)" if element_type is ElementType.PRED else start
            result = self._let(scalars.combine(reduction, start, result, self.dialect))
        if element_type is ElementType.PRED:
            return self._let(f"{result} != 0")
        rounded = elements.rounded(result, element_type, self.dialect)
        return result if rounded == result else self._let(rounded)
