"""The opcodes that the IR knows. Values are HLO's own names, but for functions that HLO lacks (functions.py); any other
opcode is refused by the importer."""

from __future__ import annotations

import enum
from typing import Final


class Opcode(enum.StrEnum):
    # Leaves
    PARAMETER = "parameter"
    CONSTANT = "constant"
    IOTA = "iota"
    PARTITION_ID = "partition-id"
    REPLICA_ID = "replica-id"
    # Elementwise, one operand
    ABS = "abs"
    ACOS = "acos"
    ACOSH = "acosh"
    ASIN = "asin"
    ASINH = "asinh"
    ATANH = "atanh"
    CBRT = "cbrt"
    CEIL = "ceil"
    CLZ = "count-leading-zeros"
    COPY = "copy"
    COS = "cosine"
    COSH = "cosh"
    ERF = "erf"
    ERFC = "erfc"
    EXP = "exponential"
    EXPM1 = "exponential-minus-one"
    FLOOR = "floor"
    IMAG = "imag"
    IS_FINITE = "is-finite"
    LOG = "log"
    LOG1P = "log-plus-one"
    LOGISTIC = "logistic"
    NEGATE = "negate"
    NOT = "not"
    POPCNT = "popcnt"
    REAL = "real"
    ROUND_AFZ = "round-nearest-afz"
    ROUND_EVEN = "round-nearest-even"
    RSQRT = "rsqrt"
    SIGN = "sign"
    SIN = "sine"
    SINH = "sinh"
    SQRT = "sqrt"
    TAN = "tan"
    TANH = "tanh"
    # Elementwise, several operands
    ADD = "add"
    AND = "and"
    ATAN2 = "atan2"
    CLAMP = "clamp"
    COMPARE = "compare"
    COMPLEX = "complex"
    COPYSIGN = "copysign"
    DIVIDE = "divide"
    MAXIMUM = "maximum"
    MINIMUM = "minimum"
    MULHI = "mulhi"
    MULTIPLY = "multiply"
    OR = "or"
    POWER = "power"
    REMAINDER = "remainder"
    SELECT = "select"
    SHIFT_LEFT = "shift-left"
    SHIFT_RIGHT_ARITHMETIC = "shift-right-arithmetic"
    SHIFT_RIGHT_LOGICAL = "shift-right-logical"
    STOCHASTIC_CONVERT = "stochastic-convert"
    SUBTRACT = "subtract"
    XOR = "xor"
    # Type changes
    BITCAST_CONVERT = "bitcast-convert"
    CONVERT = "convert"
    REDUCE_PRECISION = "reduce-precision"
    # Shape and data movement
    BROADCAST = "broadcast"
    CONCATENATE = "concatenate"
    DYNAMIC_SLICE = "dynamic-slice"
    DYNAMIC_UPDATE_SLICE = "dynamic-update-slice"
    GATHER = "gather"
    GET_DIMENSION_SIZE = "get-dimension-size"
    PAD = "pad"
    RESHAPE = "reshape"
    REVERSE = "reverse"
    SCATTER = "scatter"
    SLICE = "slice"
    TRANSPOSE = "transpose"
    # Contractions, reductions, windows
    CONVOLUTION = "convolution"
    DOT = "dot"
    MAP = "map"
    RAGGED_DOT = "ragged-dot"
    REDUCE = "reduce"
    REDUCE_WINDOW = "reduce-window"
    SELECT_AND_SCATTER = "select-and-scatter"
    SORT = "sort"
    TOP_K = "topk"
    # Library shaped
    BATCH_NORM_GRAD = "batch-norm-grad"
    BATCH_NORM_INFERENCE = "batch-norm-inference"
    BATCH_NORM_TRAINING = "batch-norm-training"
    CHOLESKY = "cholesky"
    CUSTOM_CALL = "custom-call"
    FFT = "fft"
    RNG = "rng"
    RNG_BIT_GENERATOR = "rng-bit-generator"
    TRIANGULAR_SOLVE = "triangular-solve"
    # Structure
    ADD_DEPENDENCY = "add-dependency"
    AFTER_ALL = "after-all"
    CALL = "call"
    CONDITIONAL = "conditional"
    GET_TUPLE_ELEMENT = "get-tuple-element"
    OPTIMIZATION_BARRIER = "opt-barrier"
    TUPLE = "tuple"
    WHILE = "while"
    # Collectives
    ALL_GATHER = "all-gather"
    ALL_REDUCE = "all-reduce"
    ALL_TO_ALL = "all-to-all"
    COLLECTIVE_BROADCAST = "collective-broadcast"
    COLLECTIVE_PERMUTE = "collective-permute"
    RAGGED_ALL_TO_ALL = "ragged-all-to-all"
    REDUCE_SCATTER = "reduce-scatter"


class Comparison(enum.StrEnum):
    EQ = "EQ"
    NE = "NE"
    GE = "GE"
    GT = "GT"
    LE = "LE"
    LT = "LT"


#: The same comparison with its operands exchanged.
MIRRORED: Final = {
    Comparison.EQ: Comparison.EQ,
    Comparison.NE: Comparison.NE,
    Comparison.GE: Comparison.LE,
    Comparison.GT: Comparison.LT,
    Comparison.LE: Comparison.GE,
    Comparison.LT: Comparison.GT,
}


class ComparisonOrder(enum.StrEnum):
    """TOTAL orders floats as -NaN < -inf < ... < -0 < +0 < ... < inf < NaN; PARTIAL is IEEE."""

    PARTIAL = "PARTIAL"
    TOTAL = "TOTAL"


class FftType(enum.IntEnum):
    FFT = 0
    IFFT = 1
    RFFT = 2
    IRFFT = 3


class RngAlgorithm(enum.IntEnum):
    DEFAULT = 0
    THREE_FRY = 1
    PHILOX = 2


class RngDistribution(enum.IntEnum):
    UNIFORM = 1
    NORMAL = 2


class TransposeA(enum.IntEnum):
    """How triangular-solve takes its matrix."""

    NO_TRANSPOSE = 1
    TRANSPOSE = 2
    ADJOINT = 3


class Precision(enum.IntEnum):
    DEFAULT = 0
    HIGH = 1
    HIGHEST = 2


class DotAlgorithm(enum.IntEnum):
    """The arithmetic that a dot asks for: operands, then the accumulator. UNSET leaves it to ``Precision``."""

    UNSET = 0
    ANY_F8_ANY_F8_F32 = 1
    ANY_F8_ANY_F8_F32_FAST_ACCUM = 2
    F16_F16_F16 = 3
    F16_F16_F32 = 4
    BF16_BF16_BF16 = 5
    BF16_BF16_F32 = 6
    BF16_BF16_F32_X3 = 7
    BF16_BF16_F32_X6 = 8
    TF32_TF32_F32 = 9
    TF32_TF32_F32_X3 = 10
    F32_F32_F32 = 11
    F64_F64_F64 = 12
    BF16_BF16_F32_X9 = 13
