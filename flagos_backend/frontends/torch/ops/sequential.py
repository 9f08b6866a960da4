"""A container that runs neighbouring fusible operations as one pipeline, and other modules as they are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from flagos_backend.frontends.torch.ops.fuser import OperationFuser
from flagos_backend.frontends.torch.ops.operation import BasicOperation, FusibleOperation


class Sequential(torch.nn.Sequential):
    """Like torch.nn.Sequential. Extra inputs go to the pipelines in order; extra outputs follow the output."""

    def __init__(self, *modules: Any) -> None:
        self._module_groups: tuple[OperationFuser | torch.nn.Module, ...] | None = None
        self._members: tuple[torch.nn.Module, ...] = ()
        super().__init__(*modules)

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if isinstance(value, torch.nn.Module) or name == "_modules":
            self._forget_groups()

    def __delattr__(self, name: str) -> None:
        super().__delattr__(name)
        self._forget_groups()

    def add_module(self, name: str, module: torch.nn.Module | None) -> None:
        super().add_module(name, module)
        self._forget_groups()

    def insert(self, index: int, module: torch.nn.Module) -> Sequential:
        super().insert(index, module)
        self._forget_groups()
        return self

    def _forget_groups(self) -> None:
        """Group anew at the next call. A compiled call guards the groups, so it is compiled anew too."""
        self.__dict__["_module_groups"] = None

    @torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
    def _group(self) -> None:
        """Group the members where they changed, each run of fusible operations as one pipeline."""
        members = tuple(self._modules.values())
        known = self._module_groups is not None and len(members) == len(self._members)
        if not known or any(a is not b for a, b in zip(members, self._members, strict=True)):
            self._module_groups = tuple(self._grouping(list(members)))
            self._members = tuple(member for member in members if member is not None)

    @staticmethod
    def _grouping(members: list[Any]) -> Iterator[OperationFuser | torch.nn.Module]:
        run: list[FusibleOperation] = []
        for member in members:
            if isinstance(member, FusibleOperation):
                run.append(member)
                continue
            if run:
                yield OperationFuser(run)
                run = []
            yield member
        if run:
            yield OperationFuser(run)

    def forward(
        self,
        input: torch.Tensor,
        *extra_inputs: torch.Tensor,
        op_kwargs: Mapping[torch.nn.Module | int, dict[str, Any]] | None = None,
    ) -> Any:
        """The output, followed by extra outputs if there are any.

        `op_kwargs`: keyword arguments of a basic operation's forward, by the operation or its place in this container.
        Raises ValueError for a wrong number of extra inputs, and for keywords of what is no basic operation in here.
        """
        x = input
        used = 0
        extra_outputs: list[torch.Tensor] = []
        self._group()
        groups = self._module_groups
        assert groups is not None
        keywords = None if op_kwargs is None else self._keywords(op_kwargs)
        for group in groups:
            if not isinstance(group, OperationFuser):
                x = group(x)
                continue
            given = extra_inputs[used : used + group.num_extra_inputs]
            used += group.num_extra_inputs
            kwargs = None if keywords is None else [_of(op, keywords) for op in group.ops]
            result = group(x, *given, basic_op_kwargs=kwargs)
            if isinstance(result, tuple):
                x = result[0]
                extra_outputs.extend(result[1:])
            else:
                x = result
        if used != len(extra_inputs):
            raise ValueError(f"this container takes {used} extra inputs, got {len(extra_inputs)}")
        return (x, *extra_outputs) if extra_outputs else x

    def _keywords(
        self, op_kwargs: Mapping[torch.nn.Module | int, dict[str, Any]]
    ) -> list[tuple[torch.nn.Module, dict[str, Any]]]:
        found: list[tuple[torch.nn.Module, dict[str, Any]]] = []
        for key, kwargs in op_kwargs.items():
            op = self[key] if isinstance(key, int) else key
            if not isinstance(op, BasicOperation):
                raise ValueError(
                    f"op_kwargs names {type(op).__name__}, which is no basic operation: only these take keywords"
                )
            pipelines = [group for group in self._module_groups or () if isinstance(group, OperationFuser)]
            if not any(op is part for pipeline in pipelines for part in pipeline.ops):
                raise ValueError(f"op_kwargs names {type(op).__name__}, which is not in this container")
            found.append((op, kwargs))
        return found


def _of(op: BasicOperation, keywords: list[tuple[torch.nn.Module, dict[str, Any]]]) -> dict[str, Any]:
    for other, kwargs in keywords:
        if other is op:
            return kwargs
    return {}
