"""The envelope flagos.Program: what is checked, what is filled in."""

import pytest

from flagos_backend import errors
from flagos_backend.importer import import_module, import_program, schema
from flagos_backend.importer.options import allows_excess_precision
from flagos_backend.ir.attributes import CompareAttributes
from flagos_backend.ir.opcode import ComparisonOrder
from programs import PROGRAMS
from support.against_xla import hlo_of_text


def envelope(**fields):
    module = schema.HloModuleProto.FromString(PROGRAMS["adam_update"].hlo())
    return schema.Program(**{"schema_version": 1, "producer": "test 1.0", "module": module} | fields)


def load(**fields):
    return import_program(envelope(**fields).SerializeToString())


def test_defaults():
    program = load()
    assert program.producer == "test 1.0"
    assert (program.num_replicas, program.num_partitions) == (1, 1)
    assert program.device_assignment == ((0,),)
    assert program.argument_shardings == program.output_shardings == ()
    assert (program.argument_memory_kinds, program.output_memory_kinds) == ((), ())
    assert program.module.name == "jit_adam_update"
    assert program.options == {}


def test_everything_filled_in():
    program = load(
        num_replicas=2,
        num_partitions=2,
        device_assignment=[3, 1, 0, 2],
        argument_memory_kinds=["device"] * 5,
        output_memory_kinds=["device"] * 4,
        argument_shardings=[schema.OpSharding(type=0).SerializeToString()] * 5,
        options={"explain": "1"},
        compile_options=b"opaque",
    )
    assert program.device_assignment == ((3, 1), (0, 2))
    assert (program.module.num_replicas, program.module.num_partitions) == (2, 2)
    assert len(program.argument_shardings) == 5
    assert program.options == {"explain": "1"}
    assert program.compile_options == b"opaque"


@pytest.mark.parametrize(
    ("options", "value", "allowed"),
    [
        ({}, "", False),
        ({}, "0", False),
        ({}, "1", True),
        ({"excess_precision": "0"}, "1", False),
        ({"excess_precision": "1"}, "0", True),
    ],
)
def test_excess_precision(options, value, allowed):
    """The program's option goes before the environment, and nothing means no."""
    assert allows_excess_precision(load(options=options).options, {"FLAGOS_EXCESS_PRECISION": value}) is allowed


def test_excess_precision_of_other_values_is_refused():
    with pytest.raises(errors.MalformedProgram, match="option excess_precision is 'yes', neither 1 nor 0"):
        allows_excess_precision({"excess_precision": "yes"}, {})
    with pytest.raises(errors.KernelPolicyInvalid, match="FLAGOS_EXCESS_PRECISION holds 'yes', which is not 1 or 0"):
        allows_excess_precision({}, {"FLAGOS_EXCESS_PRECISION": "yes"})


def test_process_groups():
    groups = load(process_groups={"rank": 1, "size": 3, "names": {7: "tp", 8: "dp"}}).process_groups
    assert (groups.rank, groups.size, groups.names) == (1, 3, {7: "tp", 8: "dp"})
    assert load().process_groups is None


@pytest.mark.parametrize(
    ("fields", "fact"),
    [
        ({"schema_version": 0}, "schema_version is 0"),
        ({"module": None}, "carries no module"),
        ({"num_replicas": -1}, "-1 replicas"),
        ({"num_partitions": 2**30}, f"{2**30} partitions"),
        ({"device_assignment": [0, 1]}, r"does not name 1 x 1 different devices"),
        ({"num_replicas": 2, "device_assignment": [1, 1]}, "different devices"),
        ({"num_replicas": 2, "device_assignment": [1, -1]}, "different devices"),
        ({"argument_memory_kinds": ["device"]}, "argument_memory_kinds has 1 entries for 5 values"),
        ({"output_memory_kinds": ["device"]}, "output_memory_kinds has 1 entries for 4 values"),
        ({"process_groups": {"rank": 2, "size": 2}}, "1 devices, and process 2 of 2, with process groups"),
        ({"process_groups": {"rank": -1, "size": 2}}, "process -1 of 2"),
        ({"process_groups": {}}, "process 0 of 0"),
        ({"num_replicas": 2, "process_groups": {"size": 2}}, "it is for 2 devices"),
        ({"output_shardings": [b"\xff"] * 4}, "OpSharding|sharding 0"),
    ],
)
def test_malformed_envelope(fields, fact):
    with pytest.raises(errors.MalformedProgram, match=fact):
        load(**fields)


def test_later_schema_version():
    with pytest.raises(
        errors.UnsupportedSchemaVersion, match=r"schema version 2; this backend reads up to 1.*test 1\.0"
    ):
        load(schema_version=2)


def test_bytes_that_are_no_envelope():
    with pytest.raises(errors.MalformedProgram, match=r"flagos\.Program does not parse"):
        import_program(b"\xff\xff")


@pytest.mark.parametrize(("type_name", "order"), [("s32", ComparisonOrder.PARTIAL), ("f32", ComparisonOrder.TOTAL)])
def test_comparisons_of_integers_have_one_order(type_name, order):
    """jaxlib 0.11 and later calls it total, as orders of floats are where NaN has a place."""
    text = f"ENTRY e {{ x = {type_name}[3] parameter(0) ROOT r = pred[3] compare(x, x), direction=LT }}"
    module = schema.HloModuleProto.FromString(hlo_of_text(text))
    (compare,) = (i for c in module.computations for i in c.instructions if i.opcode == "compare")
    compare.comparison_order = "TOTAL"
    attributes = import_module(module.SerializeToString()).entry.root.attributes
    assert isinstance(attributes, CompareAttributes)
    assert attributes.order is order
