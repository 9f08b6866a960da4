"""A program of PyTorch on flagos beside Inductor, in turns, with results compared with eager's, and the steps that lose
most against the roofline. The part of ``flagos bench --vs inductor``."""

from __future__ import annotations

import copy
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, TypeVar

import ml_dtypes
import numpy as np

from flagos_backend.cli import trace_file
from flagos_backend.cli.agreement import differences
from flagos_backend.cli.explain import read_explanation
from flagos_backend.cli.failure import CommandFailed, WrongUsage
from flagos_backend.cli.step_times import medians
from flagos_backend.cli.versus import Comparison, losers_of
from plugin_abi.errors import FlagosStatusError
from plugin_abi.host import Executable, made_meanwhile

_PEER: Final = "Inductor"
_BACKEND: Final = "inductor"
_REFERENCE: Final = "eager PyTorch"
# On an accelerator the third launch records what the others replay.
_WARM_UP: Final = 4

_T = TypeVar("_T")
_Inputs = tuple[tuple[Any, ...], dict[str, Any]]


def compare_with_inductor(path: Path, rounds: int, seed: int) -> Comparison:
    """Runs the program of a file of ``torch.export.save``, on the inputs that it was exported with, and no gradients.

    ``seed``: of the random numbers that it draws. Each side has a copy of the program and of the inputs, so that what
    one writes the other does not see. Raises WrongUsage for another kind of file, CommandFailed for a program that one
    of them cannot run, and FlagosStatusError.
    """
    module, inputs = _read(path)
    import torch

    with torch.no_grad():
        torch.manual_seed(seed)
        expected = _arrays(_call(_copy(module), _copy(inputs)))
        with made_meanwhile() as made:
            results, run = _compiled(module, inputs, "flagos", seed)
        if not made:
            raise CommandFailed(f"{path}: nothing of it was compiled for flagos; it calls no operator on a tensor")
        _, run_peer = _compiled(module, inputs, _BACKEND, seed)
        try:
            found = differences(results, expected)
        except ValueError as error:
            raise CommandFailed(f"{path}: eager's results are others than ours: {error}") from error
        for _ in range(_WARM_UP):
            run()
            run_peer()
        taken = [(run(), run_peer()) for _ in range(rounds)]
        ours, theirs = (statistics.median(times) for times in zip(*taken, strict=True))
        explanations = [explanation for executable in made if (explanation := read_explanation(executable))]
        target = explanations[0].target if explanations else "an unknown target"
        on_host = target == "the host CPU"
        return Comparison(
            program=path.name,
            target=target,
            peer=_PEER,
            rounds=rounds,
            seconds=ours,
            peer_seconds=theirs,
            ratio=theirs / ours,
            expected=sum(explanation.seconds for explanation in explanations),
            losers=losers_of(medians(_recorded(made, run, rounds))) if on_host else (),
            losers_note="" if on_host else "steps are timed where the host computes",
            differences=found,
            reference=_REFERENCE,
            inputs="the inputs of its export",
        )


def _read(path: Path) -> tuple[Any, _Inputs]:
    """The program as a module, and the inputs that stand beside it."""
    try:
        import torch
    except ImportError as error:
        raise WrongUsage(f"--vs inductor needs PyTorch ({error}); pip install torch") from error
    cure = "torch.export.save(torch.export.export(model, inputs), FILE) writes one"
    try:
        with path.open("rb") as stream, _quiet():
            exported = torch.export.load(stream)
    except OSError as error:
        raise WrongUsage(f"{path} cannot be read ({error.strerror}); {cure}") from error
    except Exception as error:  # whatever unpacking a file of another kind raises
        reason = str(error).partition("\n")[0]
        raise WrongUsage(f"{path} holds no program of torch.export ({reason}); {cure}") from error
    if exported.example_inputs is None:
        raise WrongUsage(f"{path} has no inputs beside the program; {cure}")
    arguments, keywords = exported.example_inputs
    return exported.module(), (tuple(arguments), dict(keywords))


@contextmanager
def _quiet() -> Iterator[None]:
    """Without what PyTorch's own code warns of itself."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        yield


def _copy(value: _T) -> _T:
    with _quiet():
        return copy.deepcopy(value)


def _call(module: Any, inputs: _Inputs) -> Any:
    arguments, keywords = inputs
    return module(*arguments, **keywords)


def _compiled(module: Any, inputs: _Inputs, backend: str, seed: int) -> tuple[list[np.ndarray], Callable[[], float]]:
    """The results of a first call, and what runs the program once more and takes the time."""
    import torch

    compiled = torch.compile(_copy(module), backend=backend)
    mine = _copy(inputs)
    torch.manual_seed(seed)
    try:
        results = _arrays(_call(compiled, mine))
    except FlagosStatusError:
        raise
    except Exception as error:  # of the compiler or of the program, which ran in eager before
        reason = str(error).strip().partition("\n")[0]
        raise CommandFailed(
            f"backend {backend!r} does not run the program: {type(error).__name__}: {reason}"
        ) from error

    def run() -> float:
        began = time.perf_counter()
        _wait(_call(compiled, mine))
        return time.perf_counter() - began

    return results, run


def _wait(results: Any) -> None:
    """Until a device has them."""
    import torch

    for device in {leaf.device for leaf in _tensors(results) if leaf.device.type != "cpu"}:
        torch.get_device_module(device).synchronize(device)


def _tensors(results: Any) -> list[Any]:
    import torch
    from torch.utils import _pytree

    return [leaf for leaf in _pytree.tree_leaves(results) if isinstance(leaf, torch.Tensor)]


def _arrays(results: Any) -> list[np.ndarray]:
    import torch

    arrays = []
    for tensor in _tensors(results):
        flat = tensor.detach().cpu().contiguous()
        name = str(flat.dtype).removeprefix("torch.")
        if name == "bfloat16" or name.startswith("float8"):  # which NumPy has from ml_dtypes
            plain = flat.view(torch.uint8 if flat.element_size() == 1 else torch.int16)
            arrays.append(plain.numpy().view(getattr(ml_dtypes, name)))
        else:
            arrays.append(flat.resolve_conj().resolve_neg().numpy())
    return arrays


def _recorded(made: Sequence[Executable], run: Callable[[], float], rounds: int) -> list[trace_file.Event]:
    """What ran in some more rounds."""
    contexts = list({id(executable.context): executable.context for executable in made}.values())
    for context in contexts:
        context.profiler_start()
    try:
        for _ in range(rounds):
            run()
    finally:
        traces = [context.profiler_stop() for context in contexts]
    return [event for trace in traces for event in trace_file.events_of_session(trace)]
