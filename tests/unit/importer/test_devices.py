"""The three notations for device groups."""

import pytest

from flagos_backend import errors
from flagos_backend.importer import schema
from flagos_backend.importer.devices import read_replica_groups


def instruction(**fields):
    return schema.HloInstructionProto(**fields)


def mesh(sizes, axes, **fields):
    message = schema.message_class("xla.MeshAxesReplicaGroupListProto")()
    for number, size in enumerate(sizes):
        message.mesh.axes.add(name=f"a{number}", size=size)
    for axis in axes:
        number, *part = axis if isinstance(axis, tuple) else (axis,)
        reference = message.axes.add(mesh_axis_index=number)
        if part:
            reference.sub_axis_info.pre_size, reference.sub_axis_info.size = part
    for name, value in fields.items():
        getattr(message.mesh, name).extend(value)
    return instruction(mesh_axes_replica_group_list=message)


def test_no_groups():
    assert read_replica_groups(instruction(), "here") == ()


def test_listed_groups():
    group = schema.message_class("xla.ReplicaGroup")
    listed = [group(replica_ids=[0, 3]), group(replica_ids=[1, 2])]
    assert read_replica_groups(instruction(replica_groups=listed), "here") == ((0, 3), (1, 2))
    newer = schema.message_class("xla.CollectiveDeviceListProto")(replica_groups=listed)
    assert read_replica_groups(instruction(collective_device_list=newer), "here") == ((0, 3), (1, 2))


@pytest.mark.parametrize(
    ("shape", "reshape", "permutation", "expected"),
    [
        ((2, 4), (8,), (), ((0, 1, 2, 3), (4, 5, 6, 7))),
        ((4, 2), (2, 4), (1, 0), ((0, 4), (1, 5), (2, 6), (3, 7))),
        ((2, 2), (2, 1, 2), (2, 1, 0), ((0, 2), (1, 3))),
    ],
)
def test_iota_groups(shape, reshape, permutation, expected):
    message = schema.message_class("xla.IotaReplicaGroupListProto")(
        num_replica_groups=shape[0],
        num_devices_per_group=shape[1],
        iota_reshape_dims=reshape,
        iota_transpose_perm=permutation,
    )
    assert read_replica_groups(instruction(iota_collective_device_list=message), "here") == expected


@pytest.mark.parametrize(
    ("sizes", "axes", "fields", "expected"),
    [
        ((2, 3), [1], {}, ((0, 1, 2), (3, 4, 5))),
        ((2, 3), [0], {}, ((0, 3), (1, 4), (2, 5))),
        ((2, 2), [1, 0], {}, ((0, 2, 1, 3),)),
        ((2, 2), [1], {"device_ids": [3, 1, 2, 0]}, ((3, 1), (2, 0))),
        ((8,), [(0, 1, 2)], {}, ((0, 4), (1, 5), (2, 6), (3, 7))),
        ((8,), [(0, 2, 2)], {}, ((0, 2), (1, 3), (4, 6), (5, 7))),
        ((8,), [(0, 4, 2)], {}, ((0, 1), (2, 3), (4, 5), (6, 7))),
    ],
)
def test_mesh_groups(sizes, axes, fields, expected):
    assert read_replica_groups(mesh(sizes, axes, **fields), "here") == expected


@pytest.mark.parametrize(
    "proto",
    [
        mesh((2, 3), [5]),
        mesh((2, 3), [0, 0]),
        mesh((2, 3), [(1, 2, 2)]),
        mesh((2, 3), [(1, 0, 2)]),
        mesh((2, 3), [(1, 1, 0)]),
        mesh((2,), [0], device_ids=[0, 1, 2]),
        mesh((0,), [0]),
        instruction(iota_collective_device_list={"num_replica_groups": 3, "iota_reshape_dims": [4]}),
        instruction(iota_collective_device_list={"num_replica_groups": 2**40, "iota_reshape_dims": [2**40]}),
        instruction(
            iota_collective_device_list={
                "num_replica_groups": 1,
                "num_devices_per_group": 4,
                "iota_reshape_dims": [4],
                "iota_transpose_perm": [1],
            }
        ),
    ],
)
def test_impossible_groups(proto):
    with pytest.raises(errors.MalformedProgram):
        read_replica_groups(proto, "here")
