"""Files of compiled pieces: PyTorch's bundled artifact behind a head that says who made it, and its digest. No vLLM."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Final

import torch
import torch._functorch.config
from torch._inductor.standalone_compile import AOTCompiledArtifact

from flagos_backend import __version__
from flagos_backend.frontends.torch.compile.errors import ArtifactRefused
from flagos_backend.frontends.torch.compile.options import CompileOptions
from flagos_backend.process.cache import replace

logger = logging.getLogger("flagos.vllm")

_MAGIC: Final = b"flagos piece 1\n"


class Single:
    """A piece of one result, which is no tuple."""

    def __init__(self, piece: Any) -> None:
        self._piece = piece

    def __call__(self, *arguments: Any) -> Any:
        return self._piece(*arguments)[0]

    def serialize(self) -> bytes:
        data: bytes = self._piece.serialize()
        return data


def versions() -> tuple[str, str]:
    return f"flagos {__version__}", f"torch {torch.__version__}"


def saving() -> AbstractContextManager[None]:
    """Within it a compiled graph can be saved."""
    wanted = {"bundled_autograd_cache": True, "force_autograd_cache": True}
    context: AbstractContextManager[None] = torch._functorch.config.patch(wanted)
    return context


def bundled(run: Callable[..., Any]) -> Callable[..., Any]:
    """A compiled graph with a way to save it, where PyTorch can: an operator without a stable name cannot be saved."""
    return AOTCompiledArtifact(run) if callable(getattr(run, "serialize", None)) else run


def write(path: Path, piece: Any, options: CompileOptions) -> bool:
    """Keeps a piece in a file, whole or not at all. False, with one line in the log, where it cannot be kept."""
    if not hasattr(piece, "serialize"):
        logger.warning("%s: PyTorch cannot save this piece of the model; it is compiled at each start", path.name)
        return False
    data = piece.serialize()
    head = json.dumps([*versions(), repr(options), hashlib.sha256(data).hexdigest()]).encode()
    replace(path, _MAGIC + head + b"\n" + data)
    return True


def read(path: Path, options: CompileOptions) -> Callable[..., Any]:
    """The piece in a file. Raises ArtifactRefused for a file that is not there, of other versions or options, or that
    holds other bytes than were kept: nothing of such a file is unpickled."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ArtifactRefused(fact=f"cannot be read: {error.strerror}") from error
    head, line, data = content.removeprefix(_MAGIC).partition(b"\n")
    if not content.startswith(_MAGIC) or not line:
        raise ArtifactRefused(fact="does not begin as one of flagos does")
    try:
        *made, digest = json.loads(head)
    except ValueError as error:
        raise ArtifactRefused(fact="does not begin as one of flagos does") from error
    here = [*versions(), repr(options)]
    if made != here:
        raise ArtifactRefused(fact=f"was made by {' and '.join(map(str, made))}, and this is {' and '.join(here)}")
    if hashlib.sha256(data).hexdigest() != digest:
        raise ArtifactRefused(fact="holds other bytes than were saved")
    return AOTCompiledArtifact.deserialize(data)
