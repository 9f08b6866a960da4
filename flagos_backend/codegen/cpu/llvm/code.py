"""The text of one LLVM function: values, blocks, counted loops, and what its memory accesses may alias."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from flagos_backend.ir.types import ElementType

E = ElementType
# Of a memory access; the number of what it aliases in Function._accesses.
_TAG = re.compile(r"!tag(\d+)\b")


class NotCompilableError(Exception):
    """Something that is not written as LLVM IR; the message names it."""


# Elements that are only moved are integers of their width.
_MEMORY = {E.F32: "float", E.F64: "double"}


def memory_type(element_type: ElementType) -> str:
    """The type of an element in memory."""
    return _MEMORY.get(element_type, f"i{8 * element_type.bytes}")


def value_type(element_type: ElementType) -> str:
    """The type of an element as a value."""
    return "i1" if element_type is E.PRED else memory_type(element_type)


@dataclass(frozen=True, slots=True)
class Memory:
    """Where elements stand: ``pointer`` is that of the first byte; two of other ``scope`` do not overlap."""

    pointer: str
    scope: int


@dataclass(slots=True)
class Function:
    """``body`` grows as values are added. What it calls is declared by ``module_text``."""

    name: str
    entry: list[str] = field(default_factory=list)
    body: list[str] = field(default_factory=list)
    declarations: set[str] = field(default_factory=set)
    block: str = "start"
    stack: int = 0  # bytes of large cells
    _rows: dict[str, str] = field(default_factory=dict)
    _count: int = 0
    _accesses: list[tuple[int, tuple[int, ...]]] = field(default_factory=list)  # scope, those that it does not overlap
    _num_scopes: int = 0

    # ---- values ----

    def _fresh(self, prefix: str) -> str:
        self._count += 1
        return f"{prefix}{self._count}"

    def value(self, text: str) -> str:
        """The name of the value that an instruction has."""
        name = self._fresh("%v")
        self.body.append(f"  {name} = {text}")
        return name

    def effect(self, text: str) -> None:
        self.body.append(f"  {text}")

    def call(self, result: str, name: str, *operands: tuple[str, str]) -> str:
        """Calls a function without effects. ``operands``: type and value."""
        types = ", ".join(t for t, _ in operands)
        self.declarations.add(f"declare {result} @{name}({types}) #1")
        return self.value(f"call {result} @{name}({', '.join(f'{t} {v}' for t, v in operands)})")

    def cell(self, llvm_type: str, size: int = 0) -> str:
        """Memory of this call of the function alone; of ``size`` bytes, if they count."""
        self.stack += size
        name = self._fresh("%c")
        self.entry.append(f"  {name} = alloca {llvm_type}, align 64")
        return name

    def row(self, llvm_type: str) -> str:
        """A cell for one step, which others have before and after it."""
        if llvm_type not in self._rows:
            self._rows[llvm_type] = self.cell(llvm_type)
        return self._rows[llvm_type]

    def slot(self, number: int) -> str:
        """The address of buffer ``number`` of the program."""
        place, name = self._fresh("%p"), self._fresh("%s")
        self.entry.append(f"  {place} = getelementptr inbounds ptr, ptr %slots, i64 {number}")
        self.entry.append(f"  {name} = load ptr, ptr {place}, align 8")
        return name

    def offset(self, base: str, size: int) -> str:
        """The address ``size`` bytes behind one that is known from the beginning on."""
        name = self._fresh("%o")
        self.entry.append(f"  {name} = getelementptr inbounds i8, ptr {base}, i64 {size}")
        return name

    def index(self, terms: Sequence[tuple[str, int]], offset: int) -> str:
        """``offset + sum(value * factor)`` of i64 values."""
        total = None
        for value, factor in terms:
            if factor == 0 or value == "0":
                continue
            term = value if factor == 1 else self.value(f"mul nsw i64 {value}, {factor}")
            total = term if total is None else self.value(f"add nsw i64 {total}, {term}")
        if total is None:
            return str(offset)
        return total if offset == 0 else self.value(f"add nsw i64 {total}, {offset}")

    # ---- memory ----

    def scope(self) -> int:
        """A new scope: memory that nothing else has, as far as the accesses go that name it as disjoint."""
        self._num_scopes += 1
        return self._num_scopes - 1

    def _tags(self, memory: Memory, disjoint: Sequence[int]) -> str:
        self._accesses.append((memory.scope, tuple(s for s in disjoint if s != memory.scope)))
        return f", !tag{len(self._accesses) - 1}"

    def element(self, memory: Memory, llvm_type: str, index: str) -> str:
        if index == "0":
            return memory.pointer
        return self.value(f"getelementptr inbounds {llvm_type}, ptr {memory.pointer}, i64 {index}")

    def load(self, memory: Memory, element_type: ElementType, index: str, disjoint: Sequence[int]) -> str:
        """The element of ``memory`` at ``index``; ``disjoint``: the scopes of what it does not overlap."""
        held = memory_type(element_type)
        pointer = self.element(memory, held, index)
        tags = self._tags(memory, disjoint)
        value = self.value(f"load {held}, ptr {pointer}, align {element_type.bytes}{tags}")
        return self.value(f"icmp ne i8 {value}, 0") if element_type is E.PRED else value

    def store(self, memory: Memory, element_type: ElementType, index: str, value: str, disjoint: Sequence[int]) -> None:
        held = memory_type(element_type)
        if element_type is E.PRED:
            value = self.value(f"zext i1 {value} to i8")
        pointer = self.element(memory, held, index)
        tags = self._tags(memory, disjoint)
        self.effect(f"store {held} {value}, ptr {pointer}, align {element_type.bytes}{tags}")

    def copy(self, target: str, source: str, size: int) -> None:
        """Bytes of one place to another that does not overlap."""
        self.declarations.add("declare void @llvm.memcpy.p0.p0.i64(ptr, ptr, i64, i1)")
        self.effect(f"call void @llvm.memcpy.p0.p0.i64(ptr {target}, ptr {source}, i64 {size}, i1 false)")

    # ---- control flow ----

    @contextlib.contextmanager
    def loop(self, size: int) -> Iterator[str]:
        """Runs what is added inside ``size`` times, which is at least once; gives the index."""
        if size == 1:
            yield "0"
            return
        head, index, following, done = (self._fresh(p) for p in ("loop", "%i", "%n", "done"))
        before = self.block
        self.effect(f"br label %{head}")
        self._begin(head)
        place = len(self.body)
        self.body.append("")
        yield index
        self.body[place] = f"  {index} = phi i64 [0, %{before}], [{following}, %{self.block}]"
        self.effect(f"{following} = add nuw nsw i64 {index}, 1")
        again = self.value(f"icmp ult i64 {following}, {size}")
        self.effect(f"br i1 {again}, label %{head}, label %{done}")
        self._begin(done)

    @contextlib.contextmanager
    def while_loop(self) -> Iterator[Callable[[str], None]]:
        """Runs what is added inside again and again; what is given is called with the condition to go on."""
        head, done = self._fresh("while"), self._fresh("done")
        self.effect(f"br label %{head}")
        self._begin(head)

        def go_on(condition: str) -> None:
            body = self._fresh("iteration")
            self.effect(f"br i1 {condition}, label %{body}, label %{done}")
            self._begin(body)

        yield go_on
        self.effect(f"br label %{head}")
        self._begin(done)

    @contextlib.contextmanager
    def when(self, condition: str) -> Iterator[None]:
        """Runs what is added inside if ``condition`` holds."""
        inside, done = self._fresh("inside"), self._fresh("done")
        self.effect(f"br i1 {condition}, label %{inside}, label %{done}")
        self._begin(inside)
        yield
        self.effect(f"br label %{done}")
        self._begin(done)

    @contextlib.contextmanager
    def switch(self, number: str, count: int) -> Iterator[Callable[[int], contextlib.AbstractContextManager[None]]]:
        """Runs what is added inside case ``number``, an i32, or inside the last one where there is none."""
        labels = [self._fresh("case") for _ in range(count)]
        done = self._fresh("done")
        cases = " ".join(f"i32 {n}, label %{label}" for n, label in enumerate(labels))
        self.effect(f"switch i32 {number}, label %{labels[-1]} [ {cases} ]")

        @contextlib.contextmanager
        def case(position: int) -> Iterator[None]:
            self._begin(labels[position])
            yield
            self.effect(f"br label %{done}")

        yield case
        self._begin(done)

    def _begin(self, block: str) -> None:
        self.body.append(f"{block}:")
        self.block = block

    # ---- text ----

    def text(self, first_node: int) -> tuple[str, list[str]]:
        """The definition of ``void name(ptr slots)``, and the metadata nodes that it names, numbered from
        ``first_node``."""
        domain = f"!{first_node}"
        nodes = [f"{domain} = distinct !{{{domain}}}"]
        lists: dict[tuple[int, ...], str] = {}

        def node(content: str, *, distinct: bool = False) -> str:
            name = f"!{first_node + len(nodes)}"
            nodes.append(f"{name} = {'distinct ' if distinct else ''}!{{{name + ', ' if distinct else ''}{content}}}")
            return name

        scopes = [node(domain, distinct=True) for _ in range(self._num_scopes)]

        def listed(members: tuple[int, ...]) -> str:
            if members not in lists:
                lists[members] = node(", ".join(scopes[m] for m in members))
            return lists[members]

        def resolved(match: re.Match[str]) -> str:
            scope, others = self._accesses[int(match[1])]
            return f"!alias.scope {listed((scope,))}, !noalias {listed(others)}"

        lines = [f"define void @{self.name}(ptr noalias readonly %slots) #0 {{", "start:"]
        body = (_TAG.sub(resolved, line) for line in self.body)
        return "\n".join((*lines, *self.entry, *body, "  ret void", "}")), nodes
