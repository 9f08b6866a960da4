// Reads what loops compute: the kernels of their operations and reductions.
#include <algorithm>
#include <cstring>

#include "cpu/pairs.h"
#include "cpu/parse.h"

namespace flagos::cpu {
namespace {

template <int kBytes>
void CopyTile(void* result, const void* a, const void*, const void*, int64_t n) {
  std::memmove(result, a, static_cast<size_t>(n * kBytes));
}

TileFunction BitcastFunction(int64_t bytes) {
  switch (bytes) {
    case 1:
      return &CopyTile<1>;
    case 2:
      return &CopyTile<2>;
    case 4:
      return &CopyTile<4>;
    default:
      return &CopyTile<8>;
  }
}

// The widths must agree, or a kernel would read or write past a tile.
void CheckStepTypes(const LoopBase& loop, const LoopBase::Step& step, bool is_convert, int64_t what, Type type) {
  const Op op = static_cast<Op>(what);
  const bool to_pred = !is_convert && (op == Op::kIsFinite || (op >= Op::kEq && op <= Op::kLtTotal));
  Require(TypeOf(loop, step.result) == (to_pred ? Type::kPred : type), "a result register has the wrong type");
  const Type operand = is_convert ? static_cast<Type>(what) : type;
  Require(TypeOf(loop, step.a) == (!is_convert && op == Op::kSelect ? Type::kPred : operand),
          "an operand has the wrong type");
  if (is_convert || op < Op::kAdd) return;
  Require(TypeOf(loop, step.b) == type, "an operand has the wrong type");
  if (op >= Op::kSelect) Require(TypeOf(loop, step.c) == type, "an operand has the wrong type");
}

void CheckPartTypes(const LoopBase& loop, const LoopBase::Step& step, int64_t what) {
  const bool joins = static_cast<PartOp>(what) == PartOp::kComplex;
  const Type operand = joins ? Type::kF32 : Type::kC64, result = joins ? Type::kC64 : Type::kF32;
  Require(TypeOf(loop, step.result) == result && TypeOf(loop, step.a) == operand && TypeOf(loop, step.b) == operand,
          "a part of a complex number has the wrong type");
}

// An element of an array at an index, which is clamped to the last one: nothing else is read, whatever the index.
void CheckTake(const LoopBase& loop, const LoopBase::Step& step, int64_t what, Type type, int64_t elements) {
  Require(TypeOf(loop, step.result) == type && TypeOf(loop, step.b) == type, "an element has the wrong type");
  Require(TypeOf(loop, step.a) == static_cast<Type>(what), "an index has the wrong type");
  Require(!IsArray(loop, step.a) && IsArray(loop, step.b) && TypeOf(loop, step.c) == Type::kS64,
          "an index of no array");
  const auto is_last = [&](const LoopBase::Constant& constant) {
    return constant.reg == step.c && constant.bits >= 0 && constant.bits < elements;
  };
  const auto is_reg = [&](const auto& source) { return source.reg == step.c; };
  Require(std::count_if(loop.constants.begin(), loop.constants.end(), is_reg) == 1 &&
              std::any_of(loop.constants.begin(), loop.constants.end(), is_last) &&
              std::none_of(loop.inputs.begin(), loop.inputs.end(), is_reg) &&
              std::none_of(loop.iotas.begin(), loop.iotas.end(), is_reg),
          "the last element of an array is no constant, or outside");
}

}  // namespace

bool IsArray(const LoopBase& loop, int64_t reg) {
  return std::any_of(loop.arrays.begin(), loop.arrays.end(),
                     [&](const LoopBase::Array& array) { return array.reg == reg; });
}

bool IsSource(const LoopBase& loop, int64_t reg) {
  const auto is_reg = [&](const auto& source) { return source.reg == reg; };
  return std::any_of(loop.inputs.begin(), loop.inputs.end(), is_reg) ||
         std::any_of(loop.constants.begin(), loop.constants.end(), is_reg) ||
         std::any_of(loop.iotas.begin(), loop.iotas.end(), is_reg) || IsArray(loop, reg);
}

namespace {

// What divides: not all quotients and remainders take a division.
TileFunction QuotientFunction(const LoopBase& loop, const LoopBase::Step& step, Op op, Type type) {
  const Kernels& kernels = SelectKernels();
  const int t = static_cast<int>(type);
  const TileFunction by_one = op == Op::kDivide ? kernels.divide_by_one[t] : kernels.remainder_by_one[t];
  if (by_one != nullptr && loop.uniform[static_cast<size_t>(step.b)]) return by_one;
  if (op != Op::kDivide) return step.function;
  const auto is_one = [&](const LoopBase::Constant& constant) {
    return constant.reg == step.a && type == Type::kF32 && static_cast<uint32_t>(constant.bits) == 0x3f800000;
  };
  const bool of_one = std::any_of(loop.constants.begin(), loop.constants.end(), is_one);
  return of_one && kernels.one_by[t] != nullptr ? kernels.one_by[t] : step.function;
}

// Takes the kernel that reads only the first elements of operands that are the same everywhere, if there is one.
void ReadNumbers(const LoopBase& loop, StepKind kind, int64_t what, Type type, LoopBase::Step& step) {
  const Kernels& kernels = SelectKernels();
  const auto bit = [&](int64_t reg, int value) { return loop.uniform[static_cast<size_t>(reg)] ? value : 0; };
  int numbers = bit(step.a, 1) | bit(step.b, 2) | bit(step.c, 4);
  TileFunction function = nullptr;
  if (kind == StepKind::kPair) {
    function = PairFunction(*kernels.pairs, what, type, numbers);
  } else if (static_cast<Op>(what) == Op::kSelect) {
    numbers &= 6;
    if (numbers == 6) function = kernels.select_numbers[static_cast<int>(type)];
  } else {
    numbers &= 3;
    function = kernels.with_numbers[what][static_cast<int>(type)][numbers];
    numbers |= 4;
  }
  if (function == nullptr) return;
  step.function = function;
  step.numbers = numbers;
}

}  // namespace

std::vector<Loop::Step> Parser::ParseSteps(const LoopBase& loop) {
  const Kernels& kernels = SelectKernels();
  std::vector<Loop::Step> steps;
  for (int64_t i = Count(); i > 0; --i) {
    const auto kind = static_cast<StepKind>(Word());
    const int64_t what = Word();
    const Type type = ParseType();
    Loop::Step step;
    if (kind == StepKind::kApply) {
      Require(what >= 0 && what < kNumOps, "unknown operation");
      step.function = kernels.apply[what][static_cast<int>(type)];
    } else if (kind == StepKind::kPair) {
      step.function = PairFunction(*kernels.pairs, what, type, 0);
    } else if (kind == StepKind::kPart) {
      Require(what >= 0 && what < kNumPartOps, "unknown part of a complex number");
      step.function = kernels.part[what];
    } else if (kind == StepKind::kTake) {
      Require(what == static_cast<int64_t>(Type::kS32) || what == static_cast<int64_t>(Type::kS64),
              "indices of this type do not exist");
      const int width = __builtin_ctzll(static_cast<uint64_t>(TypeBytes(type)));
      step.function = kernels.take_at[width][what == static_cast<int64_t>(Type::kS64)];
      step.numbers = 6;
    } else {
      Require(kind == StepKind::kConvert || kind == StepKind::kBitcast, "unknown kind of operation");
      Require(what > 0 && what < kNumTypes, "unknown element type");
      const bool same_width = TypeBytes(static_cast<Type>(what)) == TypeBytes(type);
      Require(kind == StepKind::kConvert || same_width, "a bitcast changes width");
      step.function =
          kind == StepKind::kBitcast ? BitcastFunction(TypeBytes(type)) : kernels.convert[what][static_cast<int>(type)];
    }
    Require(step.function != nullptr, "an operation does not exist for its element type");
    step.result = Register(loop);
    step.a = Register(loop);
    step.b = Register(loop);
    step.c = Register(loop);
    if (kind == StepKind::kPair) {
      for (const int64_t reg : {step.result, step.a, step.b, step.c}) {
        Require(TypeOf(loop, reg) == type, "a register of a pair has the wrong type");
      }
    } else if (kind == StepKind::kPart) {
      CheckPartTypes(loop, step, what);
    } else if (kind == StepKind::kTake) {
      const auto is_array = [&](const LoopBase::Array& array) { return array.reg == step.b; };
      const auto array = std::find_if(loop.arrays.begin(), loop.arrays.end(), is_array);
      CheckTake(loop, step, what, type, array == loop.arrays.end() ? 0 : SlotBytes(array->slot) / TypeBytes(type));
    } else {
      CheckStepTypes(loop, step, kind != StepKind::kApply, what, type);
    }
    Require(kind == StepKind::kTake || !(IsArray(loop, step.a) || IsArray(loop, step.b) || IsArray(loop, step.c)),
            "an operand is an array");
    // A source's register may stand for the source's own memory.
    Require(!IsSource(loop, step.result), "a step writes the register of a source");
    const Op op = static_cast<Op>(what);
    if (kind == StepKind::kApply && (op == Op::kDivide || op == Op::kRemainder)) {
      step.function = QuotientFunction(loop, step, op, type);
    }
    step.point = step.function;
    if (kind == StepKind::kApply) step.point = kernels.point[what][static_cast<int>(type)];
    if (kind == StepKind::kPair) step.point = FindPair(*kernels.pairs, what, type, kPoint);
    if (step.point == nullptr) step.point = step.function;
    if (kind == StepKind::kApply || kind == StepKind::kPair) ReadNumbers(loop, kind, what, type, step);
    steps.push_back(step);
  }
  return steps;
}

std::vector<Loop::Reduction> Parser::ParseReductions(const LoopBase& loop) {
  const Kernels& kernels = SelectKernels();
  std::vector<Loop::Reduction> reductions;
  for (int64_t i = Count(); i > 0; --i) {
    Loop::Reduction reduction;
    const int64_t combine = Word();
    Require(combine >= 0 && combine < kNumCombines, "unknown reduction");
    reduction.combine = static_cast<Combine>(combine);
    reduction.reg = Register(loop);
    reduction.result = Register(loop);
    reduction.initial = Register(loop);
    reduction.type = TypeOf(loop, reduction.reg);
    Require(reduction.type == TypeOf(loop, reduction.result) && reduction.type == TypeOf(loop, reduction.initial),
            "a reduction changes type");
    Require(!IsSource(loop, reduction.result), "a reduction writes the register of a source");
    Require(!IsArray(loop, reduction.reg) && !IsArray(loop, reduction.initial), "a reduction of an array");
    const int type = static_cast<int>(reduction.type);
    const int wide = static_cast<int>(AccumulatorType(reduction.combine, reduction.type));
    static constexpr Op kOps[] = {Op::kAdd, Op::kMultiply, Op::kMaximum, Op::kMinimum, Op::kAnd, Op::kOr, Op::kXor};
    static_assert(sizeof kOps / sizeof *kOps == kNumCombines);
    reduction.compensated = reduction.combine == Combine::kAdd && reduction.type == Type::kF64;
    reduction.reduce = kernels.reduce[combine][type];
    reduction.reduce_each = kernels.reduce_each[combine][type];
    reduction.reduce_rows = kernels.reduce_rows[combine][type];
    reduction.combine_wide = kernels.apply[static_cast<int>(kOps[combine])][wide];
    reduction.widen = wide == type ? nullptr : kernels.convert[type][wide];
    // Double to a 16-bit float has no single rounding in the table; reductions into those types stay unsupported here.
    reduction.narrow = wide == type ? nullptr : kernels.convert[wide][type];
    Require(reduction.reduce != nullptr && reduction.combine_wide != nullptr,
            "a reduction does not exist for its type");
    Require(wide == type || reduction.narrow != nullptr, "a reduction does not exist for its type");
    reductions.push_back(reduction);
  }
  return reductions;
}

}  // namespace flagos::cpu
