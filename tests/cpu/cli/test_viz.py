"""`flagos viz`: what is in the page, that nothing of a program is markup there, and the page in a real browser."""

from __future__ import annotations

import ast
import html
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from flagos_backend.cli import viz
from flagos_backend.cli.main import main
from flagos_backend.devices.target import NAMED_TARGETS
from flagos_backend.importer import schema
from programs import hlo_bytes

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
browser = pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium here")
HOSTILE = "</script><script>throw Error('hostile')</script><img src=x onerror=\"throw Error('hostile')\">&lt;@DATA@"


class Page(HTMLParser):
    """The tags of a page, its data, and the title."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.texts: dict[str, str] = {}
        self._inside = ""
        self.feed(text)
        self.close()
        self.data: dict[str, Any] = json.loads(self.texts["data"])

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self._inside = dict(attributes).get("id") or tag

    def handle_data(self, data: str) -> None:
        self.texts[self._inside] = self.texts.get(self._inside, "") + data

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""


def norm(x: Any, w: Any) -> Any:
    return jnp.sort(jnp.tanh(x @ w) * (jnp.zeros(8) + 1)) / jnp.sqrt((x * x).sum())


def hlo() -> bytes:
    return hlo_bytes(norm, np.ones((16, 32), np.float32), np.ones((32, 8), np.float32))


def page_of(program: bytes, folder: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    path, out = folder / "program.hlo", folder / "out.html"
    path.write_bytes(program)
    assert main(["viz", str(path), "-o", str(out)]) == 0
    assert capsys.readouterr().out.startswith(f"{out}: ")
    return out


def hostile() -> bytes:
    """The program with names, operations and lines that try to be markup."""
    module = schema.HloModuleProto.FromString(hlo())
    module.name = HOSTILE
    for computation in module.computations:
        for instruction in computation.instructions:
            instruction.name = f"{HOSTILE}.{instruction.id}"
            instruction.metadata.op_name = HOSTILE
            instruction.metadata.source_file = "</script><img src=x>"
            instruction.metadata.source_line = 3
    return bytes(module.SerializeToString())


def rendered(page: Path, place: str = "") -> tuple[str, str]:
    """At ``place`` of the page, its elements after its scripts ran, and what they wrote to the console."""
    assert CHROMIUM is not None
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--window-size=1400,800"]
    command += [f"--user-data-dir={page.parent / 'profile'}", "--enable-logging=stderr", "--dump-dom"]
    command.append(f"{page.as_uri()}#{place}")
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout, "\n".join(line for line in done.stderr.splitlines() if "CONSOLE" in line)


def test_the_page_has_each_stage_and_what_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = Page(page_of(hlo(), tmp_path, capsys).read_text())
    data = page.data
    assert data["stages"][0]["name"] == "input" and len(data["stages"]) > 1
    changed = [report["name"] for report in data["passes"] if report["changed"]]
    assert [stage["name"] for stage in data["stages"][1:]] == changed
    last = data["stages"][-1]["computations"][0]["instructions"]
    opcodes = {data["nodes"][number][1] for number, _, _ in last}
    assert {"dot", "tanh", "sort"} <= opcodes
    for place, (_, _, operands) in enumerate(last):
        assert all(operand < place for operand in operands)
    assert any(re.search(r"test_viz\.py:\d+$", source) for _, _, source in data["nodes"])
    assert any("tanh" in nest["text"] for nest in data["nests"])
    assert not any(nest["source"] for nest in data["nests"])
    assert [step["provider"] for step in data["steps"]].count("blas") == 1
    assert data["buffers"] and any(buffer["at_peak"] for buffer in data["buffers"])
    assert "native tiles" in data["code"] and data["summary"].startswith("jit_norm on the host CPU")


def test_measured_times_stand_beside_the_rooflines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, out = tmp_path / "program.hlo", tmp_path / "out.html"
    path.write_bytes(hlo())
    assert main(["viz", str(path), "-o", str(out), "--measure", "--rounds", "3"]) == 0
    data = Page(out.read_text()).data
    steps = {(step["number"], step["text"]): step for step in data["steps"]}
    assert any("sort" in time["text"] for time in data["times"])
    for time in data["times"]:
        step = steps[time["number"], time["text"]]
        assert time["seconds"] > 0 and time["source"] == step["source"]
        assert time["expected"] == pytest.approx(step["seconds"])
    if CHROMIUM is not None:
        elements, console = rendered(out, "tab=steps")
        assert console == "" and "of the roofline" in elements.partition('id="data"')[0]


def test_nothing_of_a_program_is_markup(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = page_of(hostile(), tmp_path, capsys).read_text()
    plain = page_of(hlo(), tmp_path, capsys).read_text()
    assert Page(text).tags == Page(plain).tags
    assert HOSTILE in Page(text).data["name"]
    assert any("</script><img src=x>:3" in source for _, _, source in Page(text).data["nodes"])
    names = [name for _, name, _ in Page(text).data["stages"][0]["computations"][0]["instructions"]]
    assert names and all(name.startswith(HOSTILE) for name in names)


def test_a_page_asks_for_nothing_from_elsewhere(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    template = viz._PAGE.read_text()
    assert set(re.findall(r"https?://[^\"' ]+", template)) == {"http://www.w3.org/2000/svg"}
    assert "default-src 'none'" in template and "src=" not in template and "innerHTML" not in template


@pytest.mark.parametrize("target", [name for name in NAMED_TARGETS if name != "cpu"])
def test_an_accelerators_nests_have_their_triton_source(target: str, tmp_path: Path) -> None:
    (tmp_path / "program").write_bytes(hlo())
    data = viz.data_of(tmp_path / "program", NAMED_TARGETS[target])
    assert data["nests"]
    for nest in data["nests"]:
        functions = [node for node in ast.parse(nest["source"]).body if isinstance(node, ast.FunctionDef)]
        assert any(ast.unparse(f.decorator_list[0]).startswith("triton.jit") for f in functions if f.decorator_list)
        assert nest["kernel"]
    assert any("tanh" in nest["source"] for nest in data["nests"])


@browser
def test_a_browser_shows_sources_as_text(tmp_path: Path) -> None:
    source = f"def kernel(): {HOSTILE}"
    nest = {"text": HOSTILE, "kernel": HOSTILE, "source": source}
    stages = [{"name": "input", "computations": [{"name": "main", "instructions": []}]}]
    data = {"name": "x", "target": "x", "nodes": [], "stages": stages, "passes": []}
    page = tmp_path / "page.html"
    page.write_text(viz.page_of(data | {"nests": [nest], "notes": []}))
    elements, console = rendered(page, "tab=nests")
    assert console == ""
    shown = Page(elements).tags
    assert shown.count("details") == 1 and "img" not in shown
    assert "generated source: " in elements and html.escape(source, quote=False) in elements


@browser
def test_a_browser_draws_it_and_nothing_hostile_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    elements, console = rendered(page_of(hostile(), tmp_path, capsys))
    assert console == ""
    assert elements.count('class="node') > 10 and "<img" not in elements.partition('id="data"')[0]


@browser
def test_twenty_thousand_instructions_are_drawn_as_far_as_they_are_seen(tmp_path: Path) -> None:
    rows = [[i % 500, f"add.{i}", [i - 1, max(0, i - 7)] if i else []] for i in range(20000)]
    nodes = [[f"add.{i} = f32[8] add", "add", "model.py:3"] for i in range(500)]
    stages = [{"name": name, "computations": [{"name": "main", "instructions": rows}]} for name in ("input", "dce")]
    data = {"name": "long", "target": "x", "nodes": nodes, "stages": stages, "passes": [], "nests": [], "notes": []}
    page = tmp_path / "page.html"
    page.write_text(viz.page_of(data))
    elements, console = rendered(page)
    assert console == ""
    assert 10 < elements.count('class="node') < 2500


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["TEXT", "-o", "OUT"], "holds no program"),
        (["PROGRAM", "-o", "FOLDER/none/out.html"], "cannot be written"),
        (["PROGRAM", "-o", "FOLDER"], "cannot be written"),
        (["PROGRAM", "--target", "toaster"], "there is no target 'toaster'"),
        (["PROGRAM", "--target", "ACCELERATOR", "--measure"], "leave out --target"),
        (["PROGRAM", "--measure", "--rounds", "0"], "at least one round is needed"),
    ],
    ids=["another kind of file", "no folder", "a folder", "no such target", "no device to measure", "no round"],
)
def test_one_line_and_status_2(
    arguments: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text").write_text("dear reader")
    (tmp_path / "program").write_bytes(hlo())
    paths = {"TEXT": "text", "PROGRAM": "program", "OUT": "out.html", "FOLDER": "."}
    named = [re.sub("^(TEXT|PROGRAM|OUT|FOLDER)", lambda m: str(tmp_path / paths[m[0]]), word) for word in arguments]
    accelerator = next(name for name in NAMED_TARGETS if name != "cpu")
    assert main(["viz", *(accelerator if word == "ACCELERATOR" else word for word in named)]) == 2
    err = capsys.readouterr().err
    assert said in err and err.count("\n") == 1
