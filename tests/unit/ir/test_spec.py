"""SPEC.md and the tables of the IR name the same things."""

import re
from pathlib import Path

import flagos_backend.ir
from flagos_backend.importer.attribute_writer import _WRITERS
from flagos_backend.ir.attributes import ATTRIBUTES_OF
from flagos_backend.ir.inference import RULES
from flagos_backend.ir.opcode import Opcode

SPEC = (Path(flagos_backend.ir.__file__).parent / "SPEC.md").read_text()


def test_spec_lists_every_opcode_once():
    cells = [line.split("|")[1] for line in SPEC.splitlines() if line.startswith("| ")]
    listed = [name for cell in cells for name in re.split(r"[,\s]+", cell.strip()) if name != "opcode"]
    assert sorted(listed) == sorted(opcode.value for opcode in Opcode)


def test_every_opcode_has_attributes_and_a_rule():
    assert set(ATTRIBUTES_OF) == set(RULES) == set(Opcode)


def test_every_attribute_class_has_a_writer():
    assert set(_WRITERS) == set(ATTRIBUTES_OF.values())
