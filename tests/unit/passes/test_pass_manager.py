"""The pass manager: what it runs, skips, verifies and writes; and that nothing else runs a pass."""

import ast
import re
from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import flagos_backend
from flagos_backend.codegen.cpu.pipelines import native_pipeline
from flagos_backend.devices.target import NAMED_TARGETS
from flagos_backend.errors import PassFailed, PassOptionInvalid
from flagos_backend.importer import import_module
from flagos_backend.ir.hlo import Computation, Module
from flagos_backend.ir.opcode import Opcode
from flagos_backend.ir.types import ArrayShape
from flagos_backend.passes import pass_manager
from flagos_backend.passes.pass_manager import (
    Pass,
    PassContext,
    PassOptions,
    check_names,
    in_order,
    names,
    run_pipeline,
)
from flagos_backend.passes.pipelines import pipeline_for
from programs import hlo_bytes

EVERY_PASS = [(target, name) for target, where in NAMED_TARGETS.items() for name in names(pipeline_for(where))]


@pytest.fixture(scope="module")
def module() -> Module:
    x = np.ones((4, 6), np.float32)
    return import_module(hlo_bytes(lambda x, y: jnp.tanh(x @ y.T + 1).sum(0), x, x))


def renamed(name: str) -> Pass:
    """A pass that only changes the module's name, and so can be seen to have run."""
    return Pass(name, lambda module, _: replace(module, name=f"{module.name}.{name}"))


def unchanged(name: str, **options: object) -> Pass:
    return replace(Pass(name, lambda module, _: module), **options)


def ran(*steps: Pass, module: Module, **options: object) -> str:
    """The names of the passes whose changes are in the result."""
    result = run_pipeline(steps, replace(module, name="m"), options=PassOptions(**options))
    return result.module.name


def test_second_passes_of_a_name_are_numbered() -> None:
    steps = (renamed("a"), renamed("b"), replace(renamed("c"), before=(renamed("a"),), after=(renamed("b"),)))
    assert names(steps) == ("a", "b", "a.2", "c", "b.2")
    assert [step.name for step in in_order(steps)] == ["a", "b", "a", "c", "b"]


def test_options_choose_what_runs(module: Module) -> None:
    steps = renamed("a"), renamed("b"), renamed("a")
    assert ran(*steps, module=module) == "m.a.b.a"
    assert ran(*steps, module=module, stop_after="b") == "m.a.b"
    assert ran(*steps, module=module, stop_before="b") == "m.a"
    assert ran(*steps, module=module, disabled=frozenset({"a"})) == "m.b"
    assert ran(*steps, module=module, disabled=frozenset({"a.2"})) == "m.a.b"


def test_preparation_stands_only_with_what_it_prepares(module: Module) -> None:
    prepare, clean = (renamed("prepare"),), (renamed("clean"),)
    useful = replace(renamed("pass"), before=prepare, after=clean)
    useless = unchanged("pass", before=prepare, after=clean)
    assert ran(useful, module=module) == "m.prepare.pass.clean"
    assert ran(useless, renamed("next"), module=module) == "m.next"
    assert ran(useful, renamed("next"), module=module, disabled=frozenset({"pass"})) == "m.next"
    assert ran(useful, renamed("next"), module=module, stop_after="prepare") == "m.prepare"
    assert ran(useful, renamed("next"), module=module, stop_after="pass") == "m.prepare.pass"


def test_names_that_do_not_exist_are_refused_with_those_that_do() -> None:
    with pytest.raises(PassOptionInvalid, match=r"--disable holds 'dse', which is not the name of a pass; known.*dce"):
        check_names(names(pipeline_for(NAMED_TARGETS["cpu"])), ["dce", "dse"], "--disable")


def test_environment(tmp_path: Path) -> None:
    options = PassOptions.from_environment(
        {"FLAGOS_DEBUG": "3", "FLAGOS_DISABLE_PASSES": "dce, cse.2", "FLAGOS_DUMP_TO": str(tmp_path)}
    )
    assert options == PassOptions(verify=True, disabled=frozenset({"dce", "cse.2"}), dump_to=tmp_path)
    assert PassOptions.from_environment({}) == PassOptions()


def test_dump_holds_the_input_and_every_change(module: Module, tmp_path: Path) -> None:
    steps = renamed("a"), unchanged("b"), renamed("c")
    run_pipeline(steps, replace(module, name="../evil name"), options=PassOptions(dump_to=tmp_path))
    (folder,) = tmp_path.iterdir()
    assert sorted(path.name for path in folder.iterdir()) == ["00.input.txt", "01.a.txt", "02.c.txt"]
    assert "dot(" in (folder / "00.input.txt").read_text()


def test_a_folder_that_cannot_be_written_is_named(module: Module, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(PassOptionInvalid, match=r"FLAGOS_DUMP_TO holds '.*file', which is not a writable folder"):
        run_pipeline((renamed("a"),), module, options=PassOptions(dump_to=tmp_path / "file"))


def with_wrong_shape(module: Module) -> Module:
    """The root computes one element more than its operands make."""
    entry = module.entry
    shape = entry.root.shape
    assert isinstance(shape, ArrayShape)
    root = replace(entry.root, shape=ArrayShape(shape.element_type, (*shape.dims, 7)))
    return replace(module, entry=Computation(entry.name, (*entry.instructions[:-1], root), root))


@pytest.mark.parametrize(("target", "broken"), EVERY_PASS)
def test_a_fault_in_the_result_of_any_pass_is_caught(target: str, broken: str, module: Module) -> None:
    numbered = iter(names(pipeline_for(NAMED_TARGETS[target])))

    def inject(step: Pass) -> Pass:
        before = tuple(map(inject, step.before))
        name = next(numbered)
        after = tuple(map(inject, step.after))
        if name != broken:
            # Each changes something: what prepares or cleans up runs, too.
            run = step.run
            return replace(step, run=lambda m, c: replace(run(m, c), name=m.name), before=before, after=after)
        return replace(step, run=lambda m, _: with_wrong_shape(m), before=before, after=after)

    steps = tuple(map(inject, pipeline_for(NAMED_TARGETS[target])))
    with pytest.raises(PassFailed) as caught:
        run_pipeline(steps, module, PassContext(NAMED_TARGETS[target]), PassOptions(verify=True))
    assert caught.value.facts["name"] == broken
    assert "makes f32" in caught.value.facts["reason"]
    shown = kept(caught.value)
    assert f"// before {broken}\n" in shown and f"// after {broken}\n" in shown and shown.count("\nentry ") == 2


def kept(error: PassFailed) -> str:
    """What the file holds that the error names."""
    (path,) = re.findall(r"are in (\S+\.txt)", str(error))
    return Path(path).read_text()


def test_a_broken_normal_form_is_caught(module: Module, tmp_path: Path) -> None:
    def add_dead_code(module: Module, _: PassContext) -> Module:
        entry = module.entry
        dead = replace(next(i for i in entry.instructions if i.opcode is Opcode.DOT))
        return replace(module, entry=Computation(entry.name, (*entry.instructions[:-1], dead, entry.root), entry.root))

    (dce, *_) = (step for step in pipeline_for(NAMED_TARGETS["cpu"]) if step.name == "dce")
    options = PassOptions(verify=True, dump_to=tmp_path)
    with pytest.raises(PassFailed, match=r"establishes the normal form 'no dead code'.*The modules are in"):
        run_pipeline((replace(dce, run=add_dead_code),), module, options=options)
    with pytest.raises(
        PassFailed, match=r"needs the normal form 'no dead code'.*What it was given and what it made are"
    ):
        steps = Pass("careless", add_dead_code), unchanged("careful", needs=dce.establishes)
        run_pipeline(steps, module, options=PassOptions(verify=True))


def test_native_programs_are_verified(module: Module) -> None:
    broken = [replace(step, run=lambda m, _: with_wrong_shape(m)) for step in native_pipeline()]
    for step in broken:
        with pytest.raises(PassFailed, match=f"The pass {step.name} made an invalid graph"):
            run_pipeline((step,), module, options=PassOptions(verify=True))


def test_nothing_but_the_pipelines_runs_a_pass() -> None:
    """A function of a module that is named in pipelines.py is imported nowhere else in the product."""
    root = Path(flagos_backend.__file__).parent
    declared = ast.parse((root / "passes" / "pipelines.py").read_text())
    passes = {
        (node.module, alias.name)
        for node in ast.walk(declared)
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("flagos_backend.")
        for alias in node.names
        if alias.name.islower() and node.module != pass_manager.__name__
    }
    assert len(passes) > 20
    offenders = [
        f"{path.relative_to(root)} imports {alias.name}"
        for path in root.rglob("*.py")
        if path.name != "pipelines.py"
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if (node.module, alias.name) in passes
    ]
    assert not offenders
