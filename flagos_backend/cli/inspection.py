"""``flagos_backend.explain``: what a function of JAX or PyTorch became on the device flagos, from inside Python.

JAX's functions are lowered for flagos and compiled again for looking at; of PyTorch's, the programs are explained that
one call compiles.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from flagos_backend.cli import explanation_text
from flagos_backend.cli.explain import read_explanation
from flagos_backend.cli.measuring import Measured, measure
from flagos_backend.cli.program_file import Form, program_of
from flagos_backend.cli.session import open_context
from flagos_backend.compile.explanation import Explanation
from plugin_abi.host import Artifact, Executable, made_meanwhile


@dataclass(frozen=True, slots=True)
class Explained:
    """One program: ``explanation`` as data, ``text`` as the backend's own words, ``measured`` where that was asked for.

    ``explanation`` is None for a backend that explains programs as text only. ``str()`` gives half a page.
    """

    explanation: Explanation | None
    text: str
    measured: Measured | None = None

    def __str__(self) -> str:
        return self.text if self.explanation is None else explanation_text.summary(self.explanation, self.measured)

    def kernels(self) -> str:
        """A line for each step."""
        return self.text if self.explanation is None else explanation_text.kernels(self.explanation)

    def memory(self) -> str:
        """What lives at the peak, and every temporary."""
        return "" if self.explanation is None else explanation_text.memory(self.explanation)

    def matches(self) -> str:
        """What was matched and measured while compiling."""
        return "" if self.explanation is None else explanation_text.matches(self.explanation)


@dataclass(frozen=True, slots=True)
class Report:
    """The programs that a function became, in the order in which they were compiled, and ``notes`` of the front end.
    ``print(report)`` shows half a page of each."""

    programs: tuple[Explained, ...]
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        return "\n\n".join(map(str, (*self.notes, *self.programs)))

    def __iter__(self) -> Iterator[Explained]:
        return iter(self.programs)

    def to_json(self) -> str:
        """The explanations as a JSON list."""
        return f"[{', '.join(p.explanation.to_json() for p in self.programs if p.explanation is not None)}]"


def explain(function: Callable[..., Any], *arguments: Any, measured: bool = False, **keywords: Any) -> Report:
    """What ``function``, of ``jax.jit`` or ``torch.compile(..., backend="flagos")``, is on flagos for these arguments.

    JAX's is not run. PyTorch's is called once; what Dynamo had compiled is forgotten (``torch._dynamo.reset()``), as by
    ``torch._dynamo.explain``. ``measured``: each program runs some twenty times more, on random arguments, and is
    timed.

    Raises TypeError for any other function, ValueError where nothing was compiled for flagos, and what compiling and
    running it raise.
    """
    if hasattr(function, "_torchdynamo_orig_callable") or hasattr(function, "_orig_mod"):
        return _explain_torch(function, arguments, keywords, measured)
    if hasattr(function, "trace") and hasattr(function, "lower"):
        return _explain_jax(function, arguments, keywords, measured)
    raise TypeError(
        f"explain takes jax.jit(f) or torch.compile(f, backend='flagos'), not {function!r}; wrap the function in one"
    )


def _explain_jax(function: Any, arguments: tuple[Any, ...], keywords: dict[str, Any], measured: bool) -> Report:
    import jax

    jax.devices("flagos")  # says why there is none
    lowered = function.trace(*arguments, **keywords).lower(lowering_platforms=("flagos",))
    source = program_of(lowered.as_text(debug_info=True).encode(), Form.MLIR, "the lowered function")
    with open_context() as context, Executable.compile(context, source) as executable:
        return Report((_explained(executable, measured),))


def _explain_torch(function: Any, arguments: tuple[Any, ...], keywords: dict[str, Any], measured: bool) -> Report:
    import torch._dynamo

    from flagos_backend.frontends.torch.compile import report

    torch._dynamo.reset()
    before = report.reports()
    with made_meanwhile() as made:
        function(*arguments, **keywords)
    if not made:
        raise ValueError("nothing was compiled for flagos: say torch.compile(..., backend='flagos')")
    graphs = tuple(str(graph) for graph in report.reports() if not any(graph is old for old in before))
    return Report(tuple(_explained(executable, measured) for executable in made), graphs)


def _explained(executable: Executable, measured: bool) -> Explained:
    text = executable.artifact(Artifact.EXPLANATION).decode("utf-8").rstrip()
    return Explained(read_explanation(executable), text, measure(executable) if measured else None)
