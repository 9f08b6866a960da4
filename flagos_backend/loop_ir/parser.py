"""Reads the text form of loop nests, which printer.py writes. What it returns has passed the verifier."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from flagos_backend.errors import LoopNestInvalid, LoopNestTextInvalid
from flagos_backend.ir.hlo import Instruction
from flagos_backend.ir.opcode import ComparisonOrder, Opcode
from flagos_backend.ir.types import ArrayShape, ElementType
from flagos_backend.loop_ir.literals import literal_of, number_of
from flagos_backend.loop_ir.printer import has_numbers
from flagos_backend.loop_ir.region import Affine, Apply, Expression, Index, Literal, Load, Reduce, Region, Shift, Store
from flagos_backend.loop_ir.verifier import verify_loop_nest

_TOKEN = re.compile(
    r"""
    (?P<space>\s+|//[^\n]*)
  | (?P<value>%\d+)
  | (?P<buffer>@(?:[A-Za-z0-9_.\-]+|"(?:[^"\\\n]|\\.)*"))
  | (?P<string>"(?:[^"\\\n]|\\.)*")
  | (?P<bytes>0x[0-9a-fA-F]*)
  | (?P<number>\d+(?:\.\d*)?(?:e[+-]?\d+)?)
  | (?P<dimension>d\d+\b)
  | (?P<word>[A-Za-z][A-Za-z0-9_]*(?:-[A-Za-z][A-Za-z0-9_]*)*)
  | (?P<sign>[\[\](){}:=,*+\-])
    """,
    re.VERBOSE,
)
_ELEMENT_TYPES = {element_type.name.lower(): element_type for element_type in ElementType}
_MAX_INT = 2**63 - 1


@dataclass(frozen=True, slots=True)
class _Token:
    kind: str  # "end" after the last one
    text: str
    position: int


def parse_nests(text: str) -> tuple[Region, ...]:
    """The nests of ``text``, in order; LoopNestTextInvalid, with line and column, for anything else.

    A buffer is a parameter of its own in each nest.
    """
    return tuple(_Parser(text).nests())


def parse_nest(text: str) -> Region:
    """The one nest of ``text``."""
    nests = parse_nests(text)
    if len(nests) != 1:
        raise LoopNestTextInvalid(reason=f"one nest is wanted, not {len(nests)}", line=1, column=1)
    return nests[0]


class _Parser:
    def __init__(self, text: str) -> None:
        self._text = text
        self._tokens = list(self._split())
        self._next = 0
        self._dims: tuple[int, ...] = ()
        self._buffers: dict[str, Instruction] = {}
        self._values: dict[str, Expression] = {}
        self._unused: dict[str, _Token] = {}

    def nests(self) -> Iterator[Region]:
        while self._peek().kind != "end":
            yield self._nest()

    # Tokens.

    def _split(self) -> Iterator[_Token]:
        position = 0
        while position < len(self._text):
            match = _TOKEN.match(self._text, position)
            if match is None:
                raise self._error(f"{self._text[position]!r} begins nothing", position)
            if match.lastgroup != "space":
                yield _Token(str(match.lastgroup), match.group(), position)
            position = match.end()
        yield _Token("end", "the end of the text", position)

    def _error(self, reason: str, position: int) -> LoopNestTextInvalid:
        line = self._text.count("\n", 0, position) + 1
        column = position - (self._text.rfind("\n", 0, position) + 1) + 1
        return LoopNestTextInvalid(reason=reason, line=line, column=column)

    def _peek(self) -> _Token:
        return self._tokens[self._next]

    def _take(self, kind: str, wanted: str) -> _Token:
        token = self._peek()
        if token.kind != kind:
            raise self._error(f"{wanted} is wanted, not {token.text}", token.position)
        self._next += 1
        return token

    def _accept(self, text: str) -> bool:
        token = self._peek()
        found = token.kind in ("sign", "word") and token.text == text
        self._next += found
        return found

    def _expect(self, text: str) -> _Token:
        token = self._peek()
        if not self._accept(text):
            raise self._error(f"'{text}' is wanted, not {token.text}", token.position)
        return token

    def _integer(self) -> int:
        token = self._take("number", "an integer")
        if not token.text.isdecimal() or int(token.text) > _MAX_INT:
            raise self._error(f"{token.text} is no integer of 64 bits", token.position)
        return int(token.text)

    def _integers(self, closing: str) -> tuple[int, ...]:
        found: list[int] = []
        while not self._accept(closing):
            if found:
                self._expect(",")
            found.append(self._integer())
        return tuple(found)

    def _unquoted(self, token: _Token) -> str:
        try:
            return token.text.strip("@")[1:-1].encode("latin-1", "backslashreplace").decode("unicode_escape")
        except UnicodeDecodeError as error:
            raise self._error("an escape in the string is wrong", token.position) from error

    # Nests.

    def _nest(self) -> Region:
        start = self._expect("nest")
        self._expect("[")
        self._dims = self._integers("]")
        self._buffers, self._values, self._unused = {}, {}, {}
        self._expect("(")
        while not self._accept(")"):
            if self._buffers:
                self._expect(",")
            self._buffer()
        self._expect("{")
        while self._peek().kind == "value":
            self._definition()
        stores = []
        while self._accept("store"):
            value = self._value()
            self._expect(",")
            target = self._known_buffer()
            stores.append(Store(target, value, self._affine()))
        self._expect("}")
        for name, token in self._unused.items():
            raise self._error(f"nothing uses {name}", token.position)
        region = Region(self._dims, tuple(stores))
        try:
            verify_loop_nest(region)
        except LoopNestInvalid as error:
            facts = error.facts
            raise self._error(f"{facts['place']} breaks a rule: {facts['rule']}", start.position) from error
        return region

    def _buffer_token(self) -> tuple[_Token, str]:
        token = self._take("buffer", "a buffer")
        return token, self._unquoted(token) if token.text[1] == '"' else token.text[1:]

    def _buffer(self) -> None:
        token, name = self._buffer_token()
        if name in self._buffers:
            raise self._error(f"there are two buffers {token.text}", token.position)
        self._expect(":")
        element_type = self._element_type()
        self._expect("[")
        shape = ArrayShape(element_type, self._integers("]"))
        self._buffers[name] = Instruction(Opcode.PARAMETER, shape, name=name)

    def _known_buffer(self) -> Instruction:
        token, name = self._buffer_token()
        if name not in self._buffers:
            raise self._error(f"the nest has no buffer {token.text}", token.position)
        return self._buffers[name]

    def _element_type(self) -> ElementType:
        token = self._take("word", "an element type")
        found = _ELEMENT_TYPES.get(token.text)
        if found is None:
            raise self._error(f"there is no element type {token.text}", token.position)
        return found

    def _value(self) -> Expression:
        token = self._take("value", "a value")
        if token.text not in self._values:
            raise self._error(f"{token.text} is not defined above", token.position)
        self._unused.pop(token.text, None)
        return self._values[token.text]

    def _definition(self) -> None:
        token = self._take("value", "a value")
        if token.text in self._values:
            raise self._error(f"{token.text} is defined twice", token.position)
        self._expect("=")
        self._values[token.text] = self._expression(self._element_type())
        self._unused[token.text] = token

    # Expressions.

    def _expression(self, element_type: ElementType) -> Expression:
        token = self._take("word", "an operation")
        if token.text == "constant":
            return self._constant(element_type)
        if token.text == "index":
            return Index(element_type, self._affine())
        if token.text == "load":
            source, index = self._known_buffer(), self._affine()
            guard = None
            if self._accept(","):
                self._expect("if")
                guard = self._value()
            return Load(element_type, source, index, guard)
        operands = self._operands()
        if token.text == "reduce":
            if len(operands) != 2:
                raise self._error("a reduction takes a value and an initial value", token.position)
            self._expect(",")
            self._attribute("dimensions")
            self._expect("{")
            dims = self._integers("}")
            self._expect(",")
            self._attribute("combine")
            return Reduce(element_type, self._opcode(self._take("word", "an operation")), *operands, dims)
        return self._apply(element_type, self._opcode(token), operands)

    def _apply(self, element_type: ElementType, opcode: Opcode, operands: tuple[Expression, ...]) -> Apply:
        detail, order = "", ComparisonOrder.PARTIAL
        names = ["direction", "order"] if opcode is Opcode.COMPARE else ["form"]
        while self._accept(","):
            name = self._take("word", "an attribute")
            if name.text not in names:
                raise self._error(f"{opcode} takes no attribute {name.text} here", name.position)
            names.remove(name.text)
            self._expect("=")
            if name.text == "form":
                detail = self._unquoted(self._take("string", "a string"))
            elif name.text == "direction":
                detail = self._take("word", "a direction").text
            else:
                token = self._take("word", "an order")
                if token.text not in ComparisonOrder.__members__:
                    raise self._error(f"there is no order {token.text}", token.position)
                order = ComparisonOrder[token.text]
        return Apply(element_type, opcode, operands, detail, order)

    def _attribute(self, name: str) -> None:
        self._expect(name)
        self._expect("=")

    def _opcode(self, token: _Token) -> Opcode:
        try:
            return Opcode(token.text)
        except ValueError as error:
            raise self._error(f"there is no operation {token.text}", token.position) from error

    def _operands(self) -> tuple[Expression, ...]:
        self._expect("(")
        found: list[Expression] = []
        while not self._accept(")"):
            if found:
                self._expect(",")
            found.append(self._value())
        return tuple(found)

    def _constant(self, element_type: ElementType) -> Literal:
        self._expect("(")
        negative = self._accept("-")
        token = self._peek()
        self._next += token.kind != "end"
        self._expect(")")
        literal = self._literal(element_type, token, negative)
        if literal is None:
            raise self._error(f"{'-' * negative}{token.text} is no {element_type.name.lower()}", token.position)
        return literal

    def _literal(self, element_type: ElementType, token: _Token, negative: bool) -> Literal | None:
        """None where ``token`` is no number of the type."""
        if token.kind == "bytes":
            digits = token.text[2:]
            whole = not negative and len(digits) == 2 * element_type.bytes
            return Literal(element_type, bytes.fromhex(digits)[::-1]) if whole else None
        if element_type is ElementType.PRED:
            known = not negative and token.text in ("true", "false")
            return Literal(element_type, bytes([token.text == "true"])) if known else None
        if not has_numbers(element_type) or (token.kind != "number" and token.text not in ("inf", "nan")):
            return None
        sign = "-" * negative
        try:
            number = (float if element_type.is_float else int)(sign + token.text)
            literal = literal_of(number, element_type)
        except (OverflowError, ValueError):
            return None
        # Elsewhere packing rounds; bfloat16 is cut off.
        exact = element_type is not ElementType.BF16 or number != number or number_of(literal) == number
        return literal if exact else None

    def _affine(self) -> Affine:
        self._expect("[")
        offset = 0
        coefficients = [0] * len(self._dims)
        shifts: list[Shift] = []
        first = True
        while not self._accept("]"):
            factor = -1 if self._accept("-") else 1
            if factor == 1 and not first:
                self._expect("+")
            first = False
            if self._peek().kind == "number":
                factor *= self._integer()
                if not self._accept("*"):
                    offset += factor
                    continue
            token = self._peek()
            if self._accept("start"):
                self._expect("(")
                start = self._value()
                self._expect(",")
                shifts.append(Shift(start, self._integer(), factor))
                self._expect(")")
                continue
            dimension = int(self._take("dimension", "a dimension or start(...)").text[1:])
            if dimension >= len(self._dims):
                raise self._error(f"the nest has no dimension {token.text}", token.position)
            coefficients[dimension] += factor
        return Affine(offset, tuple(coefficients), tuple(shifts))
