"""Fusible operations with a split forward, for torch.compile and eager code."""

from __future__ import annotations

from flagos_backend.frontends.torch.ops.basic.activations import (
    GEGLU,
    GELU,
    GLU,
    QGEGLU,
    QGELU,
    ClampedSwiGLU,
    ReGLU,
    ReLU,
    ScaledClampedQGeGLU,
    ScaledSiTUGLU,
    ScaledSReLU,
    ScaledSwiGLU,
    SiLU,
    SiTUGLU,
    SReGLU,
    SReLU,
    SwiGLU,
)
from flagos_backend.frontends.torch.ops.basic.collectives import AllGather, AllReduce, ReduceScatter
from flagos_backend.frontends.torch.ops.basic.elementary import Bias, ConstantScale, Dropout, Identity, Reshape
from flagos_backend.frontends.torch.ops.basic.extra import AddExtraInput, MakeExtraOutput
from flagos_backend.frontends.torch.ops.basic.grouped import GroupedLinear
from flagos_backend.frontends.torch.ops.basic.linear import BasicLinear
from flagos_backend.frontends.torch.ops.basic.norms import L2Normalization, LayerNorm, RMSNorm
from flagos_backend.frontends.torch.ops.basic.quantize import Quantize
from flagos_backend.frontends.torch.ops.fused.backward import (
    BackwardActivationBias,
    BackwardAddRMSNorm,
    BackwardLinearAdd,
    BackwardLinearScale,
    fuse_activation_bias,
    fuse_backward,
)
from flagos_backend.frontends.torch.ops.fused.linear import (
    ForwardLinearBiasActivation,
    ForwardLinearBiasAdd,
    ForwardLinearScaleAdd,
    fuse_forward_linear,
)
from flagos_backend.frontends.torch.ops.fuser import (
    OperationFuser,
    register_backward_fusion,
    register_forward_backward_fusion,
    register_forward_fusion,
)
from flagos_backend.frontends.torch.ops.linear import Linear
from flagos_backend.frontends.torch.ops.operation import (
    BasicOperation,
    FusedOperation,
    FusibleOperation,
    OperationContext,
)
from flagos_backend.frontends.torch.ops.sequential import Sequential

__all__ = [
    "GEGLU",
    "GELU",
    "GLU",
    "QGEGLU",
    "QGELU",
    "AddExtraInput",
    "AllGather",
    "AllReduce",
    "BackwardActivationBias",
    "BackwardAddRMSNorm",
    "BackwardLinearAdd",
    "BackwardLinearScale",
    "BasicLinear",
    "BasicOperation",
    "Bias",
    "ClampedSwiGLU",
    "ConstantScale",
    "Dropout",
    "ForwardLinearBiasActivation",
    "ForwardLinearBiasAdd",
    "ForwardLinearScaleAdd",
    "FusedOperation",
    "FusibleOperation",
    "GroupedLinear",
    "Identity",
    "L2Normalization",
    "LayerNorm",
    "Linear",
    "MakeExtraOutput",
    "OperationContext",
    "OperationFuser",
    "Quantize",
    "RMSNorm",
    "ReGLU",
    "ReLU",
    "ReduceScatter",
    "Reshape",
    "SReGLU",
    "SReLU",
    "ScaledClampedQGeGLU",
    "ScaledSReLU",
    "ScaledSiTUGLU",
    "ScaledSwiGLU",
    "Sequential",
    "SiLU",
    "SiTUGLU",
    "SwiGLU",
    "register_backward_fusion",
    "register_forward_backward_fusion",
    "register_forward_fusion",
]

register_forward_fusion(fuse_forward_linear)
register_backward_fusion(fuse_backward)
register_backward_fusion(fuse_activation_bias)
