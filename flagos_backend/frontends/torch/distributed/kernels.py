"""The kernels of torch.distributed's operators for the device: each calls the same operator with inner tensors, in a
group that has the inner device's backend, and answers with the device's.

    dist.all_reduce ─ c10d::allreduce_ ─ PrivateUse1: Collective ─ c10d::allreduce_ of inner tensors ─ gloo, NCCL, ...
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.distributed as dist
from torch._ops import OpOverload

from flagos_backend.devices.process_groups import backend_of
from flagos_backend.frontends.torch.device.memory import unwrap
from flagos_backend.frontends.torch.device.opening import DEVICE_TYPE
from flagos_backend.frontends.torch.device.runtime import runtime
from flagos_backend.frontends.torch.distributed import staging, work
from flagos_backend.frontends.torch.distributed.errors import NoBackendInGroup, SeveralDevices

_NAMESPACE: Final = "c10d"
_GROUP: Final = "process_group"
#: Nothing of theirs has to be done when they end: their works are the inner device's own.
_PLAIN: Final = frozenset({"send", "recv_", "recv_any_source_", "barrier", "monitored_barrier_"})


def registrations() -> Iterator[tuple[str, Callable[..., Any]]]:
    """Name and kernel of each operator that takes a process group."""
    for name in torch._C._dispatch_get_all_op_names():
        namespace, _, rest = name.partition("::")
        if namespace == _NAMESPACE and "." not in rest:
            op: OpOverload = getattr(torch.ops.c10d, rest).default
            if any(argument.name == _GROUP for argument in op._schema.arguments):
                yield rest, Collective(op)


@dataclass(frozen=True)
class Carrier:
    """What carries a group's tensors of the device: ``group`` has the inner device's backend for the inner device."""

    group: dist.ProcessGroup
    backend: str


_carriers: weakref.WeakKeyDictionary[dist.ProcessGroup, Carrier] = weakref.WeakKeyDictionary()


def carrier_of(group: dist.ProcessGroup, place: str) -> Carrier:
    """Raises NoBackendInGroup."""
    known = _carriers.get(group)
    if known is not None:
        return known
    inner = runtime().inner
    backend = backend_of(group, DEVICE_TYPE, inner.type)
    if backend is None:
        names = ", ".join(sorted(device.type for device in group._device_types)) or "no device"
        raise NoBackendInGroup(group=group.group_name, inner=inner.type, known=names, place=place)
    carrying = dist.ProcessGroup(group.rank(), group.size())  # type: ignore[call-arg]  # as in work.py
    carrying._register_backend(torch.device(inner.type), dist.ProcessGroup.BackendType.CUSTOM, backend)
    made = _carriers[group] = Carrier(carrying, str(backend.name()))
    return made


class Collective:
    """The kernel of one operator."""

    def __init__(self, op: OpOverload) -> None:
        self.op, self.name = op, op._schema.name.partition("::")[2]
        self.defaults = {argument.name: argument.default_value for argument in op._schema.arguments}
        self.has_results = len(op._schema.returns) > 1

    def __call__(self, *args: Any) -> Any:
        """As the operator's schema says; PyTorch leaves out what is at its default."""
        given = {**self.defaults, **dict(zip(self.defaults, args, strict=False))}
        group = dist.ProcessGroup.unbox(given[_GROUP])
        carrier = carrier_of(group, self.name)
        self._require_one_device(given)
        inner = {name: staging.each(value, unwrap) for name, value in given.items()}
        if self.name in _PLAIN:
            return self.op(*{**inner, _GROUP: carrier.group.boxed()}.values())
        staged = staging.stage(self.name, inner, carrier.group, carrier.backend)
        facts = work.Facts(self.name, group, carrier.backend)
        begun = self._begin(staged, carrier)
        results = given[staging.written(self.name, given)[0]]
        answer = work.answer(begun, work.value_of(results), staged.finish, facts, in_flight=given["async_op"])
        return (results, answer.boxed()) if self.has_results else answer.boxed()

    def _begin(self, staged: staging.Staged, carrier: Carrier) -> dist.Work | None:
        if staged.begin is not None:
            return staged.begin()
        answer = self.op(*{**staged.arguments, _GROUP: carrier.group.boxed()}.values())
        return dist.Work.unbox(answer[-1] if isinstance(answer, tuple) else answer)

    def _require_one_device(self, given: dict[str, Any]) -> None:
        found: dict[str, None] = {}
        for value in given.values():
            staging.each(value, lambda tensor: found.setdefault(str(tensor.device)))
        if len(found) > 1:
            raise SeveralDevices(devices=", ".join(found), place=self.name)
