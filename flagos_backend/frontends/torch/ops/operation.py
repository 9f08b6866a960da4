"""The classes that fusible operations derive from, and the rules that their methods obey.

A forward is split in two: a compute function, which a compiler traces whole, and a function that fills the context
of the backward.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch

if TYPE_CHECKING:
    from flagos_backend.frontends.torch.ops.fuser import OperationFuser

Tensors = tuple[torch.Tensor | None, ...]
"""Tensors of one operation in a fixed order; None where there is none."""


class OperationContext:
    """What the forward of one basic operation leaves to its backward. Other attributes must not hold tensors.

    `requires_grad`: the operation takes part in the backward; `input_requires_grad`: so does something before it.
    """

    def __init__(self, requires_grad: bool = True, input_requires_grad: bool = True) -> None:
        self.requires_grad = requires_grad
        self.input_requires_grad = input_requires_grad
        self.to_save: Tensors = ()
        self.saved_tensors: Tensors = ()

    def save_for_backward(self, *tensors: torch.Tensor | None) -> None:
        """Keep these tensors; the backward finds them in saved_tensors in this order."""
        self.to_save = tensors


def _defined(cls: type, name: str) -> bool:
    """Whether a class below the base classes of this module defines a method."""
    return any(name in base.__dict__ for base in cls.__mro__ if base.__module__ != __name__)


def _check_pair(cls: type, level: str) -> None:
    """Refuse a class whose own methods of one level (op or fuser) contradict each other."""
    legacy, compute, save = f"{level}_forward", f"{level}_forward_compute", f"{level}_forward_save_ctx"
    own = [name for name in (compute, save) if name in cls.__dict__]
    if legacy in cls.__dict__ and own:
        raise TypeError(
            f"{cls.__qualname__} defines {legacy} and {' and '.join(own)}: a forward is whole or split, not both. "
            f"Remove {legacy}, or remove {compute} and {save}."
        )
    for one, other in ((compute, save), (save, compute)):
        if one in cls.__dict__ and not _split_pair_complete(cls, other, legacy):
            raise TypeError(
                f"{cls.__qualname__} defines {one} without {other}: the two halves of a forward belong together. "
                f"Define {other} too, or define {legacy} instead."
            )


def _split_pair_complete(cls: type, other: str, legacy: str) -> bool:
    """Whether the other half is inherited, with no whole forward of a nearer class between."""
    for base in cls.__mro__:
        if base.__module__ == __name__:
            continue
        if other in base.__dict__:
            return True
        if legacy in base.__dict__:
            return False
    return False


def _forward_is_split(cls: type) -> bool:
    """Whether the nearest class that defines a forward splits it. The fuser's level goes before the operation's."""
    for base in cls.__mro__:
        if base.__module__ == __name__:
            continue
        for name, split in (
            ("fuser_forward", False),
            ("fuser_forward_compute", True),
            ("op_forward", False),
            ("op_forward_compute", True),
        ):
            if name in base.__dict__:
                return split
    return True


def _run_outside_graph(fuser: OperationFuser, *args: Any) -> Any:
    """Run a pipeline that a compiler does not trace."""
    return fuser.run(*args)


def outside_graph(reason: str) -> Callable[..., Any]:
    """What runs a pipeline and breaks the graph for this reason."""
    disabled: Callable[..., Any] = torch.compiler.disable(_run_outside_graph, reason=reason)  # type: ignore[no-untyped-call]
    return disabled


class FusibleOperation(torch.nn.Module, abc.ABC):
    """An operation that an OperationFuser can run, alone or as part of a fusion.

    Raises TypeError at the creation of a class that breaks a rule; the message names class, methods and cure.
    """

    splits_forward: ClassVar[bool] = True
    make_pipeline: ClassVar[Callable[..., OperationFuser]]
    """Makes a pipeline of operations. The module of OperationFuser, which stands above this one, sets it."""
    run_outside_graph: Callable[..., Any] = staticmethod(_run_outside_graph)
    """Runs a pipeline and breaks the graph, in the name of this class."""
    returns_input: ClassVar[bool] = False
    """Whether the main output may share memory with the input."""
    leaves_graph: bool = False
    """Whether a compiler does not trace this operation: it has a whole forward, or its backward changes memory."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if cls.__module__ == __name__:
            return
        _check_pair(cls, "op")
        _check_pair(cls, "fuser")
        cls.splits_forward = _forward_is_split(cls)
        cls.leaves_graph = not cls.splits_forward
        if not cls.splits_forward:
            cls.run_outside_graph = staticmethod(
                outside_graph(
                    f"{cls.__qualname__} has a whole forward. Define op_forward_compute and op_forward_save_ctx "
                    "(or fuser_forward_compute and fuser_forward_save_ctx) to compile it."
                )
            )

    @property
    @abc.abstractmethod
    def is_fused_op(self) -> bool:
        """Whether this operation stands for several basic ones."""

    def expand(self) -> tuple[BasicOperation, ...]:
        """The basic operations that this one stands for, in order."""
        raise NotImplementedError(f"{type(self).__name__} does not say which basic operations it stands for")

    def pre_first_fuser_forward(self) -> None:
        """Called by an OperationFuser once, before its first forward."""

    def pre_fuser_forward(self, *, requires_grad: bool) -> None:
        """Called before each eager forward."""

    def get_input_quantizer(self) -> Any:
        """The quantizer that the operation before may apply to its output, or None."""
        return None

    def get_grad_output_quantizer(self) -> Any:
        """The quantizer that the operation behind may apply to its input's gradient, or None."""
        return None

    def fuser_forward(
        self,
        basic_op_ctxs: list[OperationContext],
        input_: torch.Tensor,
        *,
        basic_op_extra_inputs: list[tuple[torch.Tensor, ...]],
        prev_op_grad_output_quantizer: Any,
        next_op_input_quantizer: Any,
        basic_op_kwargs: list[dict[str, Any]],
    ) -> tuple[torch.Tensor, Sequence[Sequence[torch.Tensor]]]:
        """Whole forward: output, and the extra outputs of each basic operation."""
        raise NotImplementedError(f"{type(self).__name__} has no forward fusion")

    def fuser_forward_compute(
        self,
        input_: torch.Tensor,
        *,
        requires_grad: list[bool],
        basic_op_extra_inputs: list[tuple[torch.Tensor, ...]],
        prev_op_grad_output_quantizer: Any,
        next_op_input_quantizer: Any,
        basic_op_kwargs: list[dict[str, Any]],
    ) -> tuple[torch.Tensor, Sequence[Sequence[torch.Tensor]], Sequence[Tensors | None]]:
        """First half: output, extra outputs and tensors to save of each basic operation. Changes none of its inputs."""
        raise NotImplementedError(f"{type(self).__name__} has no forward fusion")

    def fuser_forward_save_ctx(
        self,
        basic_op_ctxs: list[OperationContext],
        input_: torch.Tensor,
        tensors_to_save: Sequence[Tensors | None],
        *,
        requires_grad: list[bool],
        basic_op_extra_inputs: list[tuple[torch.Tensor, ...]],
        prev_op_grad_output_quantizer: Any,
        next_op_input_quantizer: Any,
        basic_op_kwargs: list[dict[str, Any]],
    ) -> None:
        """Second half: fills the contexts. Sees only arguments and what compute returned."""
        raise NotImplementedError(f"{type(self).__name__} has no forward fusion")

    def fuser_backward(
        self,
        basic_op_ctxs: list[OperationContext],
        grad_output: torch.Tensor,
        *,
        basic_op_grad_extra_outputs: list[tuple[torch.Tensor, ...]],
    ) -> tuple[torch.Tensor, Sequence[Sequence[torch.Tensor | None]], Sequence[Sequence[torch.Tensor | None]]]:
        """Gradients of the input, of each basic operation's parameters, and of its extra inputs."""
        raise NotImplementedError(f"{type(self).__name__} has no backward fusion")


class BasicOperation(FusibleOperation):
    """One operation with its parameters. A subclass defines op_backward, and a split forward or op_forward."""

    num_extra_inputs: int = 0
    num_extra_outputs: int = 0

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        fused = ("fuser_forward", "fuser_forward_compute")
        forwards = [name for name in ("op_forward", "op_forward_compute") if _defined(cls, name)]
        has_extra = (isinstance(cls.num_extra_inputs, int) and cls.num_extra_inputs > 0) or (
            isinstance(cls.num_extra_outputs, int) and cls.num_extra_outputs > 0
        )
        if has_extra and forwards and not any(_defined(cls, name) for name in fused):
            raise TypeError(
                f"{cls.__qualname__} has extra inputs or outputs but defines only {forwards[0]}, which passes none. "
                "Define fuser_forward_compute, fuser_forward_save_ctx and fuser_backward instead."
            )
        if forwards and not (_defined(cls, "op_backward") or _defined(cls, "fuser_backward")):
            raise TypeError(
                f"{cls.__qualname__} defines {forwards[0]} without op_backward. Define op_backward(ctx, grad_output)."
            )

    def __init__(self) -> None:
        super().__init__()
        self._input_channels: dict[int, str] = {}
        self._output_channels: dict[int, tuple[str, bool]] = {}
        self._extra_tensor_channels_locked = False
        self._own_fuser: OperationFuser | None = None

    @property
    def is_fused_op(self) -> bool:
        return False

    def expand(self) -> tuple[BasicOperation, ...]:
        return (self,)

    def set_extra_input_channel(self, index: int, name: str | None) -> None:
        """Feed an extra input from the extra output of an earlier operation that has this name; None: from the caller.

        Raises RuntimeError after a pipeline was made of this operation, IndexError and ValueError for bad arguments.
        """
        self._check_channel(index, self.num_extra_inputs, "input", name)
        self._input_channels.pop(index, None)
        if name is not None:
            self._input_channels[index] = name

    def set_extra_output_channel(self, index: int, name: str | None, *, output_to_caller: bool = True) -> None:
        """Name an extra output, for later operations; output_to_caller says whether the caller gets it too.

        Raises RuntimeError after a pipeline was made of this operation, IndexError, ValueError and TypeError for bad
        arguments.
        """
        self._check_channel(index, self.num_extra_outputs, "output", name)
        if not isinstance(output_to_caller, bool):
            raise TypeError(f"output_to_caller must be a bool, got {type(output_to_caller).__name__}")
        self._output_channels.pop(index, None)
        if name is not None:
            self._output_channels[index] = (name, output_to_caller)

    def _check_channel(self, index: int, count: int, kind: str, name: str | None) -> None:
        if self._extra_tensor_channels_locked:
            raise RuntimeError(
                f"channels of {type(self).__name__} cannot change: an OperationFuser already captured its channel "
                "routing. Set them before the first call."
            )
        if not 0 <= index < count:
            raise IndexError(f"index {index} is out of range: {type(self).__name__} has {count} extra {kind}s")
        if name is not None and (not isinstance(name, str) or not name):
            raise ValueError(f"the name of a channel must be a non-empty string or None, got {name!r}")

    def op_forward(
        self,
        ctx: OperationContext,
        input_: torch.Tensor,
        *,
        prev_op_grad_output_quantizer: Any,
        next_op_input_quantizer: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Whole forward. Under torch.compile it breaks the graph around this operation."""
        raise NotImplementedError(f"{type(self).__name__} defines no forward")

    def op_forward_compute(
        self,
        input_: torch.Tensor,
        *,
        requires_grad: bool,
        prev_op_grad_output_quantizer: Any,
        next_op_input_quantizer: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, Tensors | None]:
        """First half: the output and the tensors to save. Changes none of its inputs."""
        raise NotImplementedError(f"{type(self).__name__} defines no forward")

    def op_forward_save_ctx(
        self,
        ctx: OperationContext,
        input_: torch.Tensor,
        tensors_to_save: Tensors | None,
        *,
        requires_grad: bool,
        prev_op_grad_output_quantizer: Any,
        next_op_input_quantizer: Any,
        **kwargs: Any,
    ) -> None:
        """Second half: fills the context."""
        raise NotImplementedError(f"{type(self).__name__} defines no forward")

    def op_backward(
        self, ctx: OperationContext, grad_output: torch.Tensor
    ) -> tuple[torch.Tensor, Iterable[torch.Tensor | None]]:
        """Gradients of the input and of each parameter."""
        raise NotImplementedError(f"{type(self).__name__} defines no backward")

    def fuser_forward(
        self,
        basic_op_ctxs: list[OperationContext],
        input_: torch.Tensor,
        *,
        basic_op_extra_inputs: list[tuple[torch.Tensor, ...]],
        prev_op_grad_output_quantizer: Any,
        next_op_input_quantizer: Any,
        basic_op_kwargs: list[dict[str, Any]],
    ) -> tuple[torch.Tensor, Sequence[Sequence[torch.Tensor]]]:
        output = self.op_forward(
            basic_op_ctxs[0],
            input_,
            prev_op_grad_output_quantizer=prev_op_grad_output_quantizer,
            next_op_input_quantizer=next_op_input_quantizer,
            **basic_op_kwargs[0],
        )
        return output, [()]

    def fuser_forward_compute(
        self,
        input_: torch.Tensor,
        *,
        requires_grad: list[bool],
        basic_op_extra_inputs: list[tuple[torch.Tensor, ...]],
        prev_op_grad_output_quantizer: Any,
        next_op_input_quantizer: Any,
        basic_op_kwargs: list[dict[str, Any]],
    ) -> tuple[torch.Tensor, Sequence[Sequence[torch.Tensor]], Sequence[Tensors | None]]:
        output, saved = self.op_forward_compute(
            input_,
            requires_grad=requires_grad[0],
            prev_op_grad_output_quantizer=prev_op_grad_output_quantizer,
            next_op_input_quantizer=next_op_input_quantizer,
            **basic_op_kwargs[0],
        )
        return output, [()], [saved]

    def fuser_forward_save_ctx(
        self,
        basic_op_ctxs: list[OperationContext],
        input_: torch.Tensor,
        tensors_to_save: Sequence[Tensors | None],
        *,
        requires_grad: list[bool],
        basic_op_extra_inputs: list[tuple[torch.Tensor, ...]],
        prev_op_grad_output_quantizer: Any,
        next_op_input_quantizer: Any,
        basic_op_kwargs: list[dict[str, Any]],
    ) -> None:
        self.op_forward_save_ctx(
            basic_op_ctxs[0],
            input_,
            tensors_to_save[0],
            requires_grad=requires_grad[0],
            prev_op_grad_output_quantizer=prev_op_grad_output_quantizer,
            next_op_input_quantizer=next_op_input_quantizer,
            **basic_op_kwargs[0],
        )

    def fuser_backward(
        self,
        basic_op_ctxs: list[OperationContext],
        grad_output: torch.Tensor,
        *,
        basic_op_grad_extra_outputs: list[tuple[torch.Tensor, ...]],
    ) -> tuple[torch.Tensor, Sequence[Sequence[torch.Tensor | None]], Sequence[Sequence[torch.Tensor | None]]]:
        grad_input, grad_params = self.op_backward(basic_op_ctxs[0], grad_output)
        return grad_input, [tuple(grad_params)], [()]

    @torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
    def _make_fuser(self) -> None:
        """Keep the pipeline of this operation alone."""
        if self._own_fuser is None:
            self._own_fuser = self.make_pipeline([self])

    def forward(self, input_: torch.Tensor, *extra_inputs: torch.Tensor, **kwargs: Any) -> Any:
        """Run this operation alone."""
        self._make_fuser()
        assert self._own_fuser is not None
        return self._own_fuser(input_, *extra_inputs, basic_op_kwargs=[kwargs])


class FusedOperation(FusibleOperation):
    """Stands for several basic operations in a forward, a backward, or both; has no parameters of its own."""

    def __init__(self, basic_ops: Iterable[BasicOperation]) -> None:
        super().__init__()
        self.basic_ops = torch.nn.ModuleList(basic_ops)
        if not self.basic_ops:
            raise ValueError(f"{type(self).__name__} needs at least one basic operation")
        for op in self.basic_ops:
            if not isinstance(op, BasicOperation):
                raise TypeError(
                    f"{type(self).__name__} stands for basic operations, got {type(op).__name__}. "
                    "Derive it from BasicOperation, or pass the basic operations that it stands for."
                )
        self._own_fuser: OperationFuser | None = None

    @property
    def is_fused_op(self) -> bool:
        return True

    def expand(self) -> tuple[BasicOperation, ...]:
        return tuple(op for op in self.basic_ops if isinstance(op, BasicOperation))

    @torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
    def _make_fuser(self) -> None:
        """Keep the pipeline of this operation alone."""
        if self._own_fuser is None:
            self._own_fuser = self.make_pipeline([self])

    def forward(
        self, input_: torch.Tensor, *extra_inputs: torch.Tensor, basic_op_kwargs: list[dict[str, Any]] | None = None
    ) -> Any:
        """Run this operation alone."""
        self._make_fuser()
        assert self._own_fuser is not None
        return self._own_fuser(input_, *extra_inputs, basic_op_kwargs=basic_op_kwargs)
