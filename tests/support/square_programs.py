"""Programs on square matrices of F32 with collectives among two devices, and a communicator for one of them alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from flagos_backend.collectives.communicator import Combine, Communicator, Places, Rendezvous
from flagos_backend.importer import import_module
from flagos_backend.ir.hlo import Module
from support.against_xla import hlo_of_text
from support.passes import simplified

DEVICES = 2
_SUM = "sum { a = f32[] parameter(0)\n b = f32[] parameter(1)\n ROOT r = f32[] add(a, b) }\n"
_GROUP = "replica_groups={{0,1}}, use_global_device_ids=true"


class Alike(Communicator):
    """The other devices have what this one has."""

    no_recording = ""

    def recorded(self, places: Places) -> Alike:
        return self

    def exchange(self, rendezvous: Rendezvous, contribution: Any, combine: Combine) -> Any:
        return combine([contribution] * rendezvous.size)[rendezvous.rank]


@dataclass(frozen=True)
class Square:
    """What HLO's text says of matrices of ``size`` rows and columns."""

    size: int

    @property
    def shape(self) -> str:
        return f"f32[{self.size},{self.size}]"

    def module(self, body: str, parameters: Sequence[str]) -> Module:
        declared = "".join(f"{name} = {self.shape} parameter({n})\n  " for n, name in enumerate(parameters))
        text = f"{_SUM}ENTRY main {{\n  {declared}{body}\n}}"
        return simplified(import_module(hlo_of_text(text), num_partitions=DEVICES))

    def product(self, left: str, right: str) -> str:
        return f"{self.shape} dot({left}, {right}), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}"

    def total(self, operand: str, channel: int) -> str:
        return f"{self.shape} all-reduce({operand}), channel_id={channel}, {_GROUP}, to_apply=sum"

    def gather(self, operand: str, channel: int) -> str:
        """[2 * size, size]."""
        shape = f"f32[{2 * self.size},{self.size}]"
        return f"{shape} all-gather({operand}), channel_id={channel}, {_GROUP}, dimensions={{0}}"

    def scatter(self, operand: str, channel: int) -> str:
        """[size / 2, size]."""
        shape = f"f32[{self.size // 2},{self.size}]"
        return f"{shape} reduce-scatter({operand}), channel_id={channel}, {_GROUP}, dimensions={{0}}, to_apply=sum"

    def two_sums(self) -> Module:
        """Of products of ``x`` and ``y`` that do not wait for one another."""
        body = f"""d = {self.product("x", "y")}
        s = {self.total("d", 1)}
        e = {self.product("y", "x")}
        t = {self.total("e", 2)}
        ROOT r = ({self.shape}, {self.shape}) tuple(s, t)"""
        return self.module(body, "xy")

    def module_of_chance(self, rng: np.random.Generator, length: int = 40) -> Module:
        """Of ``x`` and ``y``. Values are computed from some before: products, updates, and collectives of each kind."""
        values, lines = ["x", "y"], ["z = s32[] constant(0)"]
        columns = f"[0:{self.size}]"

        def value() -> str:
            return str(rng.choice(values[-6:]))

        def some(n: int) -> list[str]:
            """Lines the last of which makes ``vn``, no larger than one."""
            match rng.integers(6):
                case 0:
                    return [f"s{n}_ = {self.total(value(), n + 1)}", f"v{n} = {self.shape} tanh(s{n}_)"]
                case 1:
                    half = self.size // 2
                    whole = f"slice={{[{half}:{half + self.size}], {columns}}}"
                    return [f"g{n} = {self.gather(value(), n + 1)}", f"v{n} = {self.shape} slice(g{n}), {whole}"]
                case 2:
                    both = f"v{n} = {self.shape} concatenate(q{n}, t{n}_), dimensions={{0}}"
                    half_shape = f"f32[{self.size // 2},{self.size}]"
                    return [f"q{n} = {self.scatter(value(), n + 1)}", f"t{n}_ = {half_shape} tanh(q{n})", both]
                case 3:
                    return [f"p{n} = {self.product(value(), value())}", f"v{n} = {self.shape} tanh(p{n})"]
                case 4:
                    rows = f"part{n} = f32[2,{self.size}] slice({value()}), slice={{[1:3], {columns}}}"
                    return [rows, f"v{n} = {self.shape} dynamic-update-slice({value()}, part{n}, z, z)"]
                case _:
                    return [f"v{n} = {self.shape} {rng.choice(['add', 'maximum'])}({value()}, {value()})"]

        for n in range(length):
            lines += some(n)
            values.append(f"v{n}")
        lines += [f"out{n} = {self.shape} tanh({value()})" for n in range(4)]
        result = f"ROOT r = ({', '.join([self.shape] * 4)}) tuple(out0, out1, out2, out3)"
        return self.module("\n  ".join([*lines, result]), "xy")
