"""Device groups of collectives: HLO's three notations for lists of participants, spelled out. Used by the importer."""

from __future__ import annotations

from itertools import pairwise
from math import prod
from typing import Any

import numpy as np

from flagos_backend.errors import MalformedProgram

MAX_PARTICIPANTS = 1 << 20
Groups = tuple[tuple[int, ...], ...]


def read_replica_groups(proto: Any, place: object) -> Groups:
    """The groups of a collective's HloInstructionProto; () when it names none, which means everybody together."""
    if proto.HasField("iota_collective_device_list"):
        iota = proto.iota_collective_device_list
        shape = (iota.num_replica_groups, iota.num_devices_per_group)
        return _rows(_iota(iota.iota_reshape_dims, iota.iota_transpose_perm, place), shape, place)
    if proto.HasField("mesh_axes_replica_group_list"):
        return _mesh_groups(proto.mesh_axes_replica_group_list, place)
    groups = proto.collective_device_list.replica_groups or proto.replica_groups
    return tuple(tuple(group.replica_ids) for group in groups)


def _rows(ids: np.ndarray[Any, Any], shape: tuple[int, int], place: object) -> Groups:
    if prod(shape) != ids.size or min(shape) < 1:
        raise MalformedProgram(fact=f"{ids.size} participants do not make {shape[0]} groups of {shape[1]}", place=place)
    return tuple(tuple(row) for row in ids.reshape(shape).tolist())


def _iota(sizes: Any, permutation: Any, place: object) -> np.ndarray[Any, Any]:
    sizes, permutation = list(sizes), list(permutation) or list(range(len(sizes)))
    if min(sizes, default=1) < 1 or prod(sizes) > MAX_PARTICIPANTS or sorted(permutation) != list(range(len(sizes))):
        raise MalformedProgram(fact=f"the device list is reshaped to {sizes}, transposed {permutation}", place=place)
    return np.arange(prod(sizes)).reshape(sizes).transpose(permutation)


def _mesh_groups(proto: Any, place: object) -> Groups:
    """Devices that differ only along the named axes (or parts of axes) of the mesh make one group."""
    sizes = [axis.size for axis in proto.mesh.axes]
    if proto.mesh.HasField("iota_transform"):
        transform = proto.mesh.iota_transform
        ids = _iota(transform.reshape_dims, transform.transpose_perm, place).reshape(-1)
    elif proto.mesh.device_ids:
        ids = np.array(proto.mesh.device_ids)
    else:
        ids = _iota(sizes, [], place).reshape(-1)
    if prod(sizes) != ids.size:
        raise MalformedProgram(fact=f"a mesh of sizes {sizes} names {ids.size} devices", place=place)
    cuts: dict[int, set[int]] = {number: {1, size} for number, size in enumerate(sizes)}
    spans = []
    for axis in proto.axes:
        number = axis.mesh_axis_index
        if number not in cuts:
            raise MalformedProgram(fact=f"the mesh has no axis {number}", place=place)
        start, length = 1, sizes[number]
        if axis.HasField("sub_axis_info"):
            start, length = axis.sub_axis_info.pre_size, axis.sub_axis_info.size
        spans.append((number, start, start * length))
        cuts[number] |= {start, start * length}
    return _group_along(ids, sizes, cuts, spans, place)


def _group_along(
    ids: np.ndarray[Any, Any],
    sizes: list[int],
    cuts: dict[int, set[int]],
    spans: list[tuple[int, int, int]],
    place: object,
) -> Groups:
    """Splits each axis at its cuts (products of the sizes before, major first), then moves the spans last."""
    parts: list[tuple[int, int]] = []
    shape: list[int] = []
    for number in range(len(sizes)):
        points = sorted(cuts[number])
        for start, end in pairwise(points):
            if start < 1 or end % start or sizes[number] % end:
                raise MalformedProgram(fact=f"axis {number} of the mesh cannot be split at {points}", place=place)
            parts.append((number, start))
            shape.append(end // start)
    chosen = [
        index
        for number, start, end in spans
        for index, part in enumerate(parts)
        if part[0] == number and start <= part[1] < end
    ]
    if len(set(chosen)) != len(chosen):
        raise MalformedProgram(fact="a mesh axis is named twice", place=place)
    others = [index for index in range(len(parts)) if index not in chosen]
    size = prod(shape[index] for index in chosen)
    return _rows(ids.reshape(shape).transpose(others + chosen), (ids.size // size, size), place)
