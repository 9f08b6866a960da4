// Reads the words of a native program and proves that running them stays inside its buffers.
#include <algorithm>
#include <cstring>
#include <limits>

#include "cpu/native_program.h"
#include "cpu/run_loop.h"

namespace flagos::cpu {
namespace {

constexpr int64_t kMagic = 0x31504f4f4c534f46;  // "FOSLOOP1"
constexpr int64_t kMaxRank = 16;
constexpr int64_t kMaxTile = 1024, kMinTile = 64;
constexpr int64_t kTileBytes = 24 << 10;  // registers of one lane together: they should stay in the first-level cache
constexpr int kMaxDepth = 64;
enum : int64_t { kLoopItem = 1, kProductItem, kCallItem, kSliceItem, kUpdateItem, kWhileItem, kConditionalItem };
enum : int64_t { kApply = 0, kConvert = 1, kBitcast = 2 };

struct Failure {
  std::string message;
};

void Require(bool condition, const char* message) {
  if (!condition) throw Failure{message};
}

// a * b for lengths; a program whose sizes overflow is malformed.
int64_t Times(int64_t a, int64_t b) {
  int64_t product = 0;
  Require(a >= 0 && b >= 0 && !__builtin_mul_overflow(a, b, &product), "a size is negative or too large");
  return product;
}

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

}  // namespace

class Parser {
 public:
  using Constants = std::shared_ptr<const std::vector<uint8_t>>;

  Parser(const int64_t* words, size_t num_words, Constants constants, int depth)
      : next_(words), end_(words + num_words), constants_(std::move(constants)), depth_(depth) {
    Require(depth <= kMaxDepth, "programs are nested too deeply");
  }

  std::unique_ptr<NativeProgram> Parse() {
    auto program = std::make_unique<NativeProgram>();
    Require(Word() == kMagic, "not a native program of this version");
    const int64_t num_arguments = Count(), num_results = Count(), num_constants = Count(), num_temporaries = Count();
    program->arena_bytes_ = Word();
    Require(program->arena_bytes_ >= 0, "negative arena size");
    program->constants_ = constants_;
    for (int64_t i = 0; i < num_arguments; ++i) program->argument_bytes_.push_back(AddSlot(Word()));
    for (int64_t i = 0; i < num_results; ++i) program->result_bytes_.push_back(AddSlot(Word()));
    overwritten_.assign(static_cast<size_t>(num_arguments), false);
    for (int64_t i = 0; i < num_results; ++i) {
      const int64_t argument = Word();
      program->overwritten_.push_back(argument);
      if (argument < 0) continue;
      Require(argument < num_arguments && !overwritten_[static_cast<size_t>(argument)] &&
                  SlotBytes(argument) == program->result_bytes_[static_cast<size_t>(i)],
              "a result overwrites an argument that it may not");
      overwritten_[static_cast<size_t>(argument)] = true;
    }
    const int64_t constants_size = static_cast<int64_t>(constants_->size());
    for (int64_t i = 0; i < num_constants; ++i) program->constant_offsets_.push_back(AddPlanned(constants_size));
    for (int64_t i = 0; i < num_temporaries; ++i)
      program->temporary_offsets_.push_back(AddPlanned(program->arena_bytes_));
    first_result_ = num_arguments;
    first_constant_ = num_arguments + num_results;
    first_temporary_ = first_constant_ + num_constants;
    for (int64_t i = Count(); i > 0; --i) ParseStep(*program);
    Require(next_ == end_, "words are left over");
    return program;
  }

 private:
  int64_t Word() {
    Require(next_ != end_, "the program ends early");
    return *next_++;
  }
  int64_t Count() {
    const int64_t count = Word();
    Require(count >= 0 && count <= end_ - next_, "a count is out of range");
    return count;
  }
  int64_t Register(const Loop& loop) {
    const int64_t reg = Word();
    Require(reg >= 0 && reg < static_cast<int64_t>(loop.registers.size()), "register out of range");
    return reg;
  }
  int64_t AddSlot(int64_t bytes) {
    Require(bytes >= 0, "negative buffer size");
    slot_bytes_.push_back(bytes);
    return bytes;
  }
  int64_t AddPlanned(int64_t total) {
    const int64_t offset = Word();
    const int64_t bytes = Word();
    Require(offset >= 0 && offset % 16 == 0 && bytes >= 0 && bytes <= total && offset <= total - bytes,
            "a planned buffer lies outside its arena");
    AddSlot(bytes);
    return offset;
  }
  int64_t ReadableSlot() {
    const int64_t slot = Word();
    Require(slot >= 0 && slot < static_cast<int64_t>(slot_bytes_.size()), "buffer out of range");
    return slot;
  }
  int64_t WritableSlot() {
    const int64_t slot = ReadableSlot();
    const bool is_overwritten = slot < first_result_ && overwritten_[static_cast<size_t>(slot)];
    Require(slot >= first_temporary_ || (slot >= first_result_ && slot < first_constant_) || is_overwritten,
            "a step writes an argument or a constant");
    return slot;
  }
  Type ParseType() {
    const int64_t number = Word();
    Require(number > 0 && number < kNumTypes && TypeBytes(static_cast<Type>(number)) > 0, "unknown element type");
    return static_cast<Type>(number);
  }

  int64_t SlotBytes(int64_t slot) const { return slot_bytes_[static_cast<size_t>(slot)]; }
  std::vector<int64_t> ReadableSlots() {
    std::vector<int64_t> slots(static_cast<size_t>(Count()));
    for (int64_t& slot : slots) slot = ReadableSlot();
    return slots;
  }
  std::vector<int64_t> WritableSlots() {
    std::vector<int64_t> slots(static_cast<size_t>(Count()));
    for (int64_t& slot : slots) slot = WritableSlot();
    return slots;
  }

  // Every element that strides reach from offset lies inside the slot.
  void CheckAccess(int64_t slot, Type type, int64_t offset, const std::vector<int64_t>& dims,
                   const std::vector<int64_t>& strides) const {
    int64_t low = offset, high = offset;
    for (size_t d = 0; d < dims.size(); ++d) {
      if (dims[d] == 0) return;
      int64_t reach;
      Require(!__builtin_mul_overflow(dims[d] - 1, strides[d], &reach), "a stride is too large");
      Require(!__builtin_add_overflow(reach < 0 ? low : high, reach, reach < 0 ? &low : &high),
              "a stride is too large");
    }
    Require(low >= 0 && high < SlotBytes(slot) / TypeBytes(type), "a loop reaches outside its buffer");
  }

  std::vector<int64_t> ParseStrides(size_t rank) {
    std::vector<int64_t> strides(rank);
    for (int64_t& stride : strides) stride = Word();
    return strides;
  }

  void ParseStep(NativeProgram& program) {
    switch (Word()) {
      case kLoopItem: {
        Loop loop = ParseLoop();
        program.work_ += loop.work;
        if (IsScalar(loop)) {
          program.steps_.emplace_back(MakeScalarLoop(loop));
        } else {
          program.steps_.emplace_back(std::move(loop));
        }
        return;
      }
      case kProductItem: {
        const MatrixProduct p = ParseProduct();
        program.work_ += Times(Times(p.num_matrices, p.m), Times(p.n, p.k));
        program.steps_.emplace_back(p);
        return;
      }
      case kCallItem:
        program.has_calls_ = true;
        program.steps_.emplace_back(ParseCall());
        return;
      case kSliceItem:
        program.steps_.emplace_back(ParseBlockCopy(false));
        program.work_ += SlotBytes(std::get<BlockCopy>(program.steps_.back()).target);
        return;
      case kUpdateItem:
        program.steps_.emplace_back(ParseBlockCopy(true));
        program.work_ += SlotBytes(std::get<BlockCopy>(program.steps_.back()).target);
        return;
      case kWhileItem:
        program.steps_.emplace_back(ParseWhile(program));
        return;
      case kConditionalItem:
        program.steps_.emplace_back(ParseConditional(program));
        return;
      default:
        throw Failure{"unknown kind of step"};
    }
  }

  Call ParseCall() {
    Call call;
    call.number = Word();
    call.sources = ReadableSlots();
    call.targets = WritableSlots();
    Require(Count() == 0, "a call has scratch");
    return call;
  }

  BlockCopy ParseBlockCopy(bool is_update) {
    BlockCopy copy;
    copy.is_update = is_update;
    copy.element_bytes = Word();
    Require(copy.element_bytes > 0 && copy.element_bytes <= 16, "bad element size");
    const int64_t rank = Count();
    Require(rank <= kMaxRank, "too many dimensions");
    int64_t elements = 1, block_elements = 1;
    for (int64_t d = 0; d < rank; ++d) elements = Times(elements, copy.dims.emplace_back(Word()));
    for (int64_t d = 0; d < rank; ++d) {
      block_elements = Times(block_elements, copy.block.emplace_back(Word()));
      Require(copy.block.back() <= copy.dims[static_cast<size_t>(d)], "a block is larger than its array");
    }
    for (int64_t d = 0; d < rank; ++d) copy.start_types.push_back(ParseType());
    copy.sources = ReadableSlots();
    const std::vector<int64_t> targets = WritableSlots();
    Require(Count() == 0 && targets.size() == 1, "a block copy has one result and no scratch");
    copy.target = targets[0];
    const size_t arrays = is_update ? 2 : 1;
    Require(copy.sources.size() == arrays + static_cast<size_t>(rank),
            "a block copy needs one start for each dimension");
    const int64_t array = copy.sources[arrays - 1], block = is_update ? copy.sources[0] : copy.target;
    Require(SlotBytes(array) == Times(elements, copy.element_bytes), "an array has the wrong size");
    Require(SlotBytes(block) == Times(block_elements, copy.element_bytes), "a block has the wrong size");
    Require(!is_update || SlotBytes(copy.target) == SlotBytes(array), "a result has the wrong size");
    Require(block != copy.target || !is_update, "a block is written over itself");
    for (size_t d = 0; d < copy.start_types.size(); ++d) {
      CheckAccess(copy.sources[arrays + d], copy.start_types[d], 0, {}, {});
    }
    return copy;
  }

  // A nested program; the words say how long it is.
  std::unique_ptr<NativeProgram> ParseNested(NativeProgram& parent) {
    const int64_t length = Count();
    Parser nested(next_, static_cast<size_t>(length), constants_, depth_ + 1);
    next_ += length;
    std::unique_ptr<NativeProgram> program = nested.Parse();
    parent.has_calls_ |= program->has_calls_;
    return program;
  }

  // A nested program reads and fills buffers of exactly its sizes.
  void CheckBuffers(const std::vector<int64_t>& slots, const std::vector<int64_t>& bytes) const {
    Require(slots.size() == bytes.size(), "a nested program has another number of buffers");
    for (size_t i = 0; i < slots.size(); ++i)
      Require(SlotBytes(slots[i]) == bytes[i], "a nested program's buffer has another size");
  }

  While ParseWhile(NativeProgram& parent) {
    While loop;
    loop.trip_count = Word();
    for (int64_t i = Count(); i > 0; --i) {
      const int64_t carry = Word();
      Require(carry >= 0 && carry <= 2, "unknown way to carry a value");
      loop.carries.push_back(static_cast<Carry>(carry));
    }
    loop.sources = ReadableSlots();
    loop.targets = WritableSlots();
    loop.seconds = WritableSlots();
    Require(!loop.seconds.empty(), "a loop has no scratch");
    loop.scratch = loop.seconds.back();
    loop.seconds.pop_back();
    loop.condition = ParseNested(parent);
    loop.body = ParseNested(parent);
    loop.bytes = loop.body->argument_bytes_;
    Require(loop.carries.size() == loop.bytes.size(), "a loop carries another number of values than its body");
    Require(loop.condition->result_bytes_ == std::vector<int64_t>{1}, "a loop's condition is no predicate");
    Require(loop.condition->argument_bytes_ == loop.bytes && loop.body->result_bytes_ == loop.bytes,
            "a loop's condition and body disagree");
    CheckBuffers(loop.sources, loop.bytes);
    std::vector<int64_t> target_bytes, second_bytes;
    for (size_t i = 0; i < loop.carries.size(); ++i) {
      const bool buffered = loop.carries[i] == Carry::kBuffered;
      Require(loop.body->overwritten_[i] == (buffered ? -1 : static_cast<int64_t>(i)),
              "a loop and its body disagree on how a value is carried");
      if (loop.carries[i] != Carry::kInvariant) target_bytes.push_back(loop.bytes[i]);
      if (buffered) second_bytes.push_back(loop.bytes[i]);
    }
    CheckBuffers(loop.targets, target_bytes);
    CheckBuffers(loop.seconds, second_bytes);
    CheckScratch(loop.scratch, *loop.condition);
    CheckScratch(loop.scratch, *loop.body);
    constexpr int64_t kManyTrips = 1 << 20;
    parent.work_ += Times(std::min(loop.body->work_, kManyTrips),
                          loop.trip_count < 0 ? kManyTrips : std::min(loop.trip_count, kManyTrips));
    return loop;
  }

  Conditional ParseConditional(NativeProgram& parent) {
    Conditional conditional;
    conditional.is_pred = Word() != 0;
    const int64_t num_branches = Count();
    Require(num_branches > 0, "a conditional without branches");
    std::vector<int64_t> counts;
    for (int64_t i = 0; i < num_branches; ++i) counts.push_back(Count());
    Word();  // the number of results, which the targets repeat
    conditional.sources = ReadableSlots();
    conditional.targets = WritableSlots();
    const std::vector<int64_t> scratch = WritableSlots();
    Require(scratch.size() == 1, "a conditional has one scratch buffer");
    conditional.scratch = scratch[0];
    Require(!conditional.sources.empty(), "a conditional has no index");
    CheckAccess(conditional.sources[0], conditional.is_pred ? Type::kPred : Type::kS32, 0, {}, {});
    int64_t first = 1;
    for (int64_t i = 0; i < num_branches; ++i) {
      conditional.first_source.push_back(first);
      const int64_t last = first + counts[static_cast<size_t>(i)];
      Require(last <= static_cast<int64_t>(conditional.sources.size()), "a branch has too few operands");
      conditional.branches.push_back(ParseNested(parent));
      const NativeProgram& branch = *conditional.branches.back();
      CheckBuffers({conditional.sources.begin() + first, conditional.sources.begin() + last}, branch.argument_bytes_);
      CheckBuffers(conditional.targets, branch.result_bytes_);
      for (int64_t overwritten : branch.overwritten_) Require(overwritten < 0, "a branch overwrites an operand");
      CheckScratch(conditional.scratch, branch);
      parent.work_ += branch.work_;
      first = last;
    }
    return conditional;
  }

  void CheckScratch(int64_t slot, const NativeProgram& nested) const {
    Require(SlotBytes(slot) >= nested.arena_bytes_, "a nested program has too little scratch memory");
  }

  Loop ParseLoop() {
    Loop loop;
    const int64_t mode = Word();
    Require(mode >= 0 && mode <= 2, "unknown loop mode");
    loop.mode = static_cast<LoopMode>(mode);
    const int64_t rank = Count();
    Require(rank <= kMaxRank, "too many loop dimensions");
    int64_t points = 1;
    for (int64_t d = 0; d < rank; ++d) {
      loop.dims.push_back(Word());
      points = Times(points, loop.dims.back());
    }
    loop.num_folded = Word();
    Require(loop.num_folded >= 0 && loop.num_folded <= rank - (loop.mode == LoopMode::kColumns ? 1 : 0) &&
                (loop.num_folded > 0) == (loop.mode != LoopMode::kMap),
            "wrong number of folded dimensions");
    const int64_t num_registers = Count();
    int64_t bytes = 0;
    for (int64_t i = 0; i < num_registers; ++i) {
      loop.registers.push_back(ParseType());
      bytes += TypeBytes(loop.registers.back());
    }
    Require(bytes > 0, "a loop without registers");
    loop.tile = std::clamp(kTileBytes / bytes / 64 * 64, kMinTile, kMaxTile);
    // A tile never crosses the last dimension, and what is longer than it is filled for nothing.
    loop.tile = std::min(loop.tile, loop.dims.empty() ? 1 : std::max<int64_t>(loop.dims.back(), 1));
    ParseSources(loop);
    ParseSteps(loop);
    ParseEnds(loop);
    loop.lane_bytes = 64 + loop.reductions.size() * static_cast<size_t>(2 * (loop.tile * 8 + 64));
    for (Type type : loop.registers) loop.lane_bytes += static_cast<size_t>(loop.tile * TypeBytes(type) + 64);
    loop.work = Times(points, static_cast<int64_t>(1 + loop.steps.size() + loop.reductions.size()));
    return loop;
  }

  void ParseSources(Loop& loop) {
    for (int64_t i = Count(); i > 0; --i) {
      Loop::Input input;
      input.slot = ReadableSlot();
      input.reg = Register(loop);
      input.offset = Word();
      input.strides = ParseStrides(loop.dims.size());
      input.invariant = std::all_of(input.strides.begin(), input.strides.end(), [](int64_t s) { return s == 0; });
      CheckAccess(input.slot, loop.registers[static_cast<size_t>(input.reg)], input.offset, loop.dims, input.strides);
      loop.inputs.push_back(std::move(input));
    }
    for (int64_t i = Count(); i > 0; --i) {
      const int64_t reg = Register(loop);
      loop.constants.push_back({reg, Word()});
    }
    for (int64_t i = Count(); i > 0; --i) {
      const int64_t reg = Register(loop);
      const int64_t offset = Word();
      loop.iotas.push_back({reg, offset, ParseStrides(loop.dims.size())});
    }
  }

  void ParseSteps(Loop& loop) {
    const Kernels& kernels = SelectKernels();
    for (int64_t i = Count(); i > 0; --i) {
      const int64_t kind = Word();
      const int64_t what = Word();
      const Type type = ParseType();
      Loop::Step step;
      if (kind == kApply) {
        Require(what >= 0 && what < kNumOps, "unknown operation");
        step.function = kernels.apply[what][static_cast<int>(type)];
      } else {
        Require(kind == kConvert || kind == kBitcast, "unknown kind of operation");
        Require(what > 0 && what < kNumTypes, "unknown element type");
        const bool same_width = TypeBytes(static_cast<Type>(what)) == TypeBytes(type);
        Require(kind == kConvert || same_width, "a bitcast changes width");
        step.function =
            kind == kBitcast ? BitcastFunction(TypeBytes(type)) : kernels.convert[what][static_cast<int>(type)];
      }
      Require(step.function != nullptr, "an operation does not exist for its element type");
      step.result = Register(loop);
      step.a = Register(loop);
      step.b = Register(loop);
      step.c = Register(loop);
      CheckStepTypes(loop, step, kind != kApply, what, type);
      // A source's register may stand for the source's own memory.
      const auto is_result = [&](const auto& source) { return source.reg == step.result; };
      Require(std::none_of(loop.inputs.begin(), loop.inputs.end(), is_result) &&
                  std::none_of(loop.constants.begin(), loop.constants.end(), is_result) &&
                  std::none_of(loop.iotas.begin(), loop.iotas.end(), is_result),
              "a step writes the register of a source");
      loop.steps.push_back(step);
    }
  }

  // The widths must agree, or a kernel would read or write past a tile.
  static void CheckStepTypes(const Loop& loop, const Loop::Step& step, bool is_convert, int64_t what, Type type) {
    const auto type_of = [&](int64_t reg) { return loop.registers[static_cast<size_t>(reg)]; };
    const Op op = static_cast<Op>(what);
    const bool to_pred = !is_convert && (op == Op::kIsFinite || (op >= Op::kEq && op <= Op::kLtTotal));
    Require(type_of(step.result) == (to_pred ? Type::kPred : type), "a result register has the wrong type");
    const Type operand = is_convert ? static_cast<Type>(what) : type;
    Require(type_of(step.a) == (!is_convert && op == Op::kSelect ? Type::kPred : operand),
            "an operand has the wrong type");
    if (is_convert || op < Op::kAdd) return;
    Require(type_of(step.b) == type, "an operand has the wrong type");
    if (op >= Op::kSelect) Require(type_of(step.c) == type, "an operand has the wrong type");
  }

  void ParseEnds(Loop& loop) {
    const Kernels& kernels = SelectKernels();
    for (int64_t i = Count(); i > 0; --i) {
      Loop::Reduction reduction;
      const int64_t combine = Word();
      Require(combine >= 0 && combine < kNumCombines, "unknown reduction");
      reduction.combine = static_cast<Combine>(combine);
      reduction.reg = Register(loop);
      reduction.result = Register(loop);
      reduction.initial_slot = ReadableSlot();
      reduction.type = loop.registers[static_cast<size_t>(reduction.reg)];
      Require(reduction.type == loop.registers[static_cast<size_t>(reduction.result)], "a reduction changes type");
      CheckAccess(reduction.initial_slot, reduction.type, 0, {}, {});
      const int type = static_cast<int>(reduction.type);
      const int wide = static_cast<int>(AccumulatorType(reduction.combine, reduction.type));
      static constexpr Op kOps[] = {Op::kAdd, Op::kMultiply, Op::kMaximum, Op::kMinimum, Op::kAnd, Op::kOr, Op::kXor};
      static_assert(sizeof kOps / sizeof *kOps == kNumCombines);
      reduction.compensated = reduction.combine == Combine::kAdd && reduction.type == Type::kF64;
      reduction.fold = kernels.fold[combine][type];
      reduction.combine_wide = kernels.apply[static_cast<int>(kOps[combine])][wide];
      reduction.widen = wide == type ? nullptr : kernels.convert[type][wide];
      reduction.narrow = wide == type ? nullptr : NarrowFunction(static_cast<Type>(wide), reduction.type);
      Require(reduction.fold != nullptr && reduction.combine_wide != nullptr,
              "a reduction does not exist for its type");
      Require(wide == type || reduction.narrow != nullptr, "a reduction does not exist for its type");
      loop.reductions.push_back(reduction);
    }
    Require(loop.reductions.empty() == (loop.mode == LoopMode::kMap), "reductions and loop mode disagree");
    std::vector<int64_t> kept(loop.dims.begin(), loop.dims.end() - loop.num_folded);
    if (loop.mode == LoopMode::kColumns) kept.back() = loop.dims.back();
    for (int64_t i = Count(); i > 0; --i) {
      Loop::Output output;
      output.slot = WritableSlot();
      output.reg = Register(loop);
      output.offset = Word();
      output.strides = ParseStrides(kept.size());
      CheckAccess(output.slot, loop.registers[static_cast<size_t>(output.reg)], output.offset, kept, output.strides);
      loop.outputs.push_back(std::move(output));
    }
    for (Loop::Output& output : loop.outputs) output.in_place = IsInPlace(loop, output);
  }

  // A step may write its result straight to memory when it alone computes the register, one output takes it, and that
  // output is contiguous along the tile.
  static bool IsInPlace(const Loop& loop, const Loop::Output& output) {
    if (loop.mode != LoopMode::kMap || output.strides.empty() || output.strides.back() != 1) return false;
    const auto computed = std::count_if(loop.steps.begin(), loop.steps.end(),
                                        [&](const Loop::Step& step) { return step.result == output.reg; });
    const auto stored = std::count_if(loop.outputs.begin(), loop.outputs.end(),
                                      [&](const Loop::Output& other) { return other.reg == output.reg; });
    return computed == 1 && stored == 1;
  }

  // Double to a 16-bit float has no single rounding in the table; reductions into those types stay unsupported here.
  static TileFunction NarrowFunction(Type wide, Type type) {
    return SelectKernels().convert[static_cast<int>(wide)][static_cast<int>(type)];
  }

  MatrixProduct ParseProduct() {
    MatrixProduct product;
    product.type = ParseType();
    Require(product.type == Type::kF32 || product.type == Type::kF64, "a matrix product of this type does not exist");
    Require(HaveMatrixProducts(), "no BLAS in this process");
    const int64_t rank = Count();
    Require(rank <= kMaxRank, "too many batch dimensions");
    product.num_matrices = 1;
    for (int64_t d = 0; d < rank; ++d) {
      product.batch.push_back(Word());
      product.num_matrices = Times(product.num_matrices, product.batch.back());
    }
    product.m = Word();
    product.n = Word();
    product.k = Word();
    for (int64_t size : {product.num_matrices, product.m, product.n, product.k}) {
      Require(size > 0 && size <= std::numeric_limits<int32_t>::max(), "a matrix dimension is out of range");
    }
    product.a = ParseOperand(product.type, product.batch, product.m, product.k, false);
    product.b = ParseOperand(product.type, product.batch, product.k, product.n, false);
    product.c = ParseOperand(product.type, product.batch, product.m, product.n, true);
    return product;
  }

  MatrixProduct::Operand ParseOperand(Type type, const std::vector<int64_t>& batch, int64_t rows, int64_t columns,
                                      bool is_result) {
    MatrixProduct::Operand operand;
    operand.slot = is_result ? WritableSlot() : ReadableSlot();
    operand.offset = Word();
    operand.batch_strides = ParseStrides(batch.size());
    operand.leading = Word();
    operand.transposed = Word() != 0;
    if (operand.transposed) std::swap(rows, columns);
    Require(operand.leading >= columns && operand.leading <= std::numeric_limits<int32_t>::max(),
            "bad leading dimension");
    Require(!(is_result && operand.transposed), "a result cannot be transposed");
    std::vector<int64_t> dims = batch, strides = operand.batch_strides;
    dims.insert(dims.end(), {rows, columns});
    strides.insert(strides.end(), {operand.leading, 1});
    CheckAccess(operand.slot, type, operand.offset, dims, strides);
    return operand;
  }

  const int64_t* next_;
  const int64_t* const end_;
  const Constants constants_;
  const int depth_;
  std::vector<int64_t> slot_bytes_;
  std::vector<bool> overwritten_;
  int64_t first_result_ = 0, first_constant_ = 0, first_temporary_ = 0;
};

std::unique_ptr<NativeProgram> NativeProgram::Parse(const int64_t* words, size_t num_words, const uint8_t* constants,
                                                    size_t constants_size, std::string* error) {
  try {
    auto data = std::make_shared<const std::vector<uint8_t>>(constants, constants + constants_size);
    return Parser(words, num_words, std::move(data), 0).Parse();
  } catch (const Failure& failure) {
    *error = failure.message;
    return nullptr;
  }
}

}  // namespace flagos::cpu
