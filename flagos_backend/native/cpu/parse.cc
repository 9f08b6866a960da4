// Reads the bytecode of a native program and proves that running it stays inside its buffers.
#include "cpu/parse.h"

#include <algorithm>
#include <limits>

#include "cpu/matrix_product.h"
#include "cpu/run_loop.h"

namespace flagos::cpu {
namespace {

constexpr int kMaxDepth = 64;
constexpr int64_t kCalleeAllocated = -2;  // beside the argument that a result is written over, and -1 for none

void CheckProductTypes(const MatrixProduct& product) {
  if (IsOfIntegers(product) || IsOfHalfFloats(product)) return;
  const bool is_float = product.type == Type::kF32 || product.type == Type::kF64;
  Require(is_float && product.a_type == product.type && product.b_type == product.type,
          "a matrix product of these types does not exist");
}

}  // namespace

Parser::Parser(const int64_t* bytecode, size_t num_words, Constants constants,
               const std::vector<MachineFunction>& functions, int depth)
    : next_(bytecode),
      end_(bytecode + num_words),
      constants_(std::move(constants)),
      functions_(functions),
      depth_(depth) {
  Require(depth <= kMaxDepth, "programs are nested too deeply");
}

std::unique_ptr<NativeProgram> Parser::Parse() {
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
    program->callee_allocated_.push_back(argument == kCalleeAllocated);
    program->overwritten_.push_back(std::max<int64_t>(argument, -1));
    if (argument == kCalleeAllocated) {
      Require(depth_ == 0 && program->result_bytes_[static_cast<size_t>(i)] > 0, "no call brings this result");
      AllocationOf(num_arguments + i) = CalleeAllocated::kAwaited;
    }
    if (argument < 0) continue;
    Require(argument < num_arguments && !overwritten_[static_cast<size_t>(argument)] &&
                SlotBytes(argument) == program->result_bytes_[static_cast<size_t>(i)],
            "a result overwrites an argument that it may not");
    overwritten_[static_cast<size_t>(argument)] = true;
  }
  const int64_t constants_size = static_cast<int64_t>(constants_->size());
  for (int64_t i = 0; i < num_constants; ++i) program->constant_offsets_.push_back(AddPlanned(constants_size, false));
  for (int64_t i = 0; i < num_temporaries; ++i)
    program->temporary_offsets_.push_back(AddPlanned(program->arena_bytes_, true));
  first_result_ = num_arguments;
  first_constant_ = num_arguments + num_results;
  first_temporary_ = first_constant_ + num_constants;
  for (int64_t i = Count(); i > 0; --i) ParseStep(*program);
  Require(next_ == end_, "bytecode is left over");
  for (int64_t i = 0; i < num_results; ++i)
    Require(AllocationOf(first_result_ + i) != CalleeAllocated::kAwaited, "no call allocates a result");
  return program;
}

void Parser::ParseStep(NativeProgram& program) {
  switch (static_cast<ItemKind>(Word())) {
    case ItemKind::kLoop: {
      Loop loop = ParseLoop();
      program.work_ += loop.work;
      if (IsScalar(loop)) {
        program.steps_.emplace_back(MakeScalarLoop(loop));
      } else {
        program.steps_.emplace_back(std::move(loop));
      }
      return;
    }
    case ItemKind::kRowLoop: {
      RowLoop loop = ParseRowLoop();
      program.work_ += loop.work;
      program.steps_.emplace_back(std::move(loop));
      return;
    }
    case ItemKind::kProduct: {
      const MatrixProduct p = ParseProduct();
      program.work_ += Times(Times(p.num_matrices, p.m), Times(p.n, p.k));
      program.steps_.emplace_back(p);
      return;
    }
    case ItemKind::kMachineCode:
      program.steps_.emplace_back(ParseMachineCode(program));
      return;
    case ItemKind::kTopK: {
      const TopK top_k = ParseTopK();
      program.work_ += top_k.rows * top_k.columns;
      program.steps_.emplace_back(top_k);
      return;
    }
    case ItemKind::kArgMinMax: {
      const ArgMinMax step = ParseArgMinMax();
      program.work_ += step.outer * step.size * step.inner;
      program.steps_.emplace_back(step);
      return;
    }
    case ItemKind::kSort: {
      Sort sort = ParseSort();
      program.work_ += WorkOf(sort);
      program.steps_.emplace_back(std::move(sort));
      return;
    }
    case ItemKind::kComplex: {
      const ComplexArithmetic step = ParseComplexArithmetic();
      program.work_ += step.elements * kComplexWork;
      program.steps_.emplace_back(step);
      return;
    }
    case ItemKind::kGather: {
      GatherWindows gather = ParseGather();
      program.work_ += Times(gather.num_windows, gather.window_elements);
      program.steps_.emplace_back(std::move(gather));
      return;
    }
    case ItemKind::kScatter: {
      ScatterWindows scatter = ParseScatter();
      program.work_ += Times(scatter.num_windows, scatter.window_elements);
      program.steps_.emplace_back(std::move(scatter));
      return;
    }
    case ItemKind::kLinearAlgebra: {
      LinearAlgebra step = ParseLinearAlgebra();
      program.work_ += WorkOf(step);
      program.steps_.emplace_back(std::move(step));
      return;
    }
    case ItemKind::kFourier: {
      Fourier step = ParseFourier();
      program.work_ += WorkOf(step);
      program.steps_.emplace_back(std::move(step));
      return;
    }
    case ItemKind::kCall:
      program.has_calls_ = true;
      program.steps_.emplace_back(ParseCall());
      program.shares_out_ |= std::get<Call>(program.steps_.back()).shares_out;
      return;
    case ItemKind::kSlice:
      program.steps_.emplace_back(ParseBlockCopy(false));
      program.work_ += SlotBytes(std::get<BlockCopy>(program.steps_.back()).target);
      return;
    case ItemKind::kUpdate:
      program.steps_.emplace_back(ParseBlockCopy(true));
      program.work_ += SlotBytes(std::get<BlockCopy>(program.steps_.back()).target);
      return;
    case ItemKind::kWhile:
      program.steps_.emplace_back(ParseWhile(program));
      return;
    case ItemKind::kConditional:
      program.steps_.emplace_back(ParseConditional(program));
      return;
    default:
      throw Failure{"unknown kind of step"};
  }
}

Call Parser::ParseCall() {
  Call call;
  call.number = Word();
  call.shares_out = Word() != 0;
  call.sources = ReadableSlots();
  for (int64_t i = Count(); i > 0; --i) {
    const int64_t* const word = next_;
    const int64_t slot = Slot();
    if (AllocationOf(slot) == CalleeAllocated::kAwaited) {
      AllocationOf(slot) = CalleeAllocated::kThere;
    } else {
      next_ = word;
      WritableSlot();
    }
    call.targets.push_back(slot);
  }
  for (int64_t i = Count(); i > 0; --i) {
    const int64_t slot = call.released.emplace_back(Slot());
    Require(slot >= first_temporary_ && AllocationOf(slot) == CalleeAllocated::kThere,
            "a call releases what none has allocated");
    Require(std::find(call.sources.begin(), call.sources.end(), slot) == call.sources.end() &&
                std::find(call.targets.begin(), call.targets.end(), slot) == call.targets.end(),
            "a call releases what it uses");
    AllocationOf(slot) = CalleeAllocated::kReleased;
  }
  return call;
}

BlockCopy Parser::ParseBlockCopy(bool is_update) {
  BlockCopy copy;
  copy.is_update = is_update;
  const int64_t element_bytes = Word();
  Require(element_bytes > 0 && element_bytes <= 16, "bad element size");
  const size_t rank = static_cast<size_t>(Count());
  Require(rank <= static_cast<size_t>(kMaxRank), "too many dimensions");
  std::vector<int64_t> dims, sizes;
  std::vector<Type> start_types;
  int64_t elements = 1, block_elements = 1;
  for (size_t d = 0; d < rank; ++d) elements = Times(elements, dims.emplace_back(Word()));
  for (size_t d = 0; d < rank; ++d) {
    block_elements = Times(block_elements, sizes.emplace_back(Word()));
    Require(sizes.back() <= dims[d], "a block is larger than its array");
  }
  for (size_t d = 0; d < rank; ++d) start_types.push_back(ParseType());
  const std::vector<int64_t> sources = ReadableSlots();
  const std::vector<int64_t> targets = WritableSlots();
  Require(Count() == 0 && targets.size() == 1, "a block copy has one result and no scratch");
  copy.target = targets[0];
  const size_t arrays = is_update ? 2 : 1;
  Require(sources.size() == arrays + rank, "a block copy needs one start for each dimension");
  copy.array = sources[arrays - 1];
  copy.block = is_update ? sources[0] : copy.target;
  copy.array_bytes = Times(elements, element_bytes);
  Require(SlotBytes(copy.array) == copy.array_bytes, "an array has the wrong size");
  Require(SlotBytes(copy.block) == Times(block_elements, element_bytes), "a block has the wrong size");
  Require(!is_update || SlotBytes(copy.target) == copy.array_bytes, "a result has the wrong size");
  Require(copy.block != copy.target || !is_update, "a block is written over itself");
  // Trailing dimensions that the block spans whole are contiguous with the one before them.
  size_t inner = rank;
  copy.run = element_bytes;
  while (inner > 0) {
    --inner;
    copy.run = Times(copy.run, sizes[inner]);
    if (sizes[inner] != dims[inner]) break;
  }
  copy.rows = copy.run == 0 ? 0 : 1;
  int64_t stride = element_bytes;
  for (size_t d = rank; d-- > 0;) {
    CheckAccess(sources[arrays + d], start_types[d], 0, {}, {});
    if (sizes[d] < dims[d]) copy.starts.push_back({sources[arrays + d], dims[d] - sizes[d], stride, start_types[d]});
    if (d < inner) copy.rows = Times(copy.rows, sizes[d]);
    if (d < inner) copy.outer.insert(copy.outer.begin(), {sizes[d], stride});
    stride = Times(stride, dims[d]);
  }
  return copy;
}

// A nested program; the bytecode says how long it is.
std::unique_ptr<NativeProgram> Parser::ParseNested(NativeProgram& parent) {
  const int64_t length = Count();
  Parser nested(next_, static_cast<size_t>(length), constants_, functions_, depth_ + 1);
  next_ += length;
  std::unique_ptr<NativeProgram> program = nested.Parse();
  parent.has_calls_ |= program->has_calls_;
  return program;
}

// A nested program reads and fills buffers of exactly its sizes.
void Parser::CheckBuffers(const std::vector<int64_t>& slots, const std::vector<int64_t>& bytes) const {
  Require(slots.size() == bytes.size(), "a nested program has another number of buffers");
  for (size_t i = 0; i < slots.size(); ++i)
    Require(SlotBytes(slots[i]) == bytes[i], "a nested program's buffer has another size");
}

While Parser::ParseWhile(NativeProgram& parent) {
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
  loop.condition->PlanTrip();
  loop.body->PlanTrip();
  parent.shares_out_ |= loop.condition->shares_out_ || loop.body->shares_out_;
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

Conditional Parser::ParseConditional(NativeProgram& parent) {
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
    const std::vector<int64_t> operands(conditional.sources.begin() + first, conditional.sources.begin() + last);
    CheckBuffers(operands, branch.argument_bytes_);
    CheckBuffers(conditional.targets, branch.result_bytes_);
    for (size_t result = 0; result < conditional.targets.size(); ++result) {
      for (size_t operand = 0; operand < operands.size(); ++operand) {
        const bool overwrites = branch.overwritten_[result] == static_cast<int64_t>(operand);
        Require(overwrites == (conditional.targets[result] == operands[operand]),
                "a conditional and its branch disagree on what is overwritten");
      }
    }
    CheckScratch(conditional.scratch, branch);
    parent.work_ += branch.work_;
    first = last;
  }
  return conditional;
}

void Parser::CheckScratch(int64_t slot, const NativeProgram& nested) const {
  Require(SlotBytes(slot) >= nested.arena_bytes_, "a nested program has too little scratch memory");
}

TopK Parser::ParseTopK() {
  TopK top_k;
  const Type type = ParseType();
  top_k.rows = Word();
  top_k.columns = Word();
  top_k.k = Word();
  top_k.largest = Word() != 0;
  Require(top_k.k > 0 && top_k.k <= kMaxTopK && top_k.k <= top_k.columns &&
              top_k.columns <= std::numeric_limits<int32_t>::max(),
          "a top k of a size that does not exist");
  const std::vector<int64_t> sources = ReadableSlots(), targets = WritableSlots();
  Require(Count() == 0 && sources.size() == 1 && targets.size() == 2, "a top k has one operand and two results");
  top_k.source = sources[0];
  top_k.values = targets[0];
  top_k.indices = targets[1];
  const int64_t results = Times(top_k.rows, top_k.k);
  Require(SlotBytes(top_k.source) == Times(Times(top_k.rows, top_k.columns), TypeBytes(type)) &&
              SlotBytes(top_k.values) == Times(results, TypeBytes(type)) &&
              SlotBytes(top_k.indices) == Times(results, 4),
          "a top k has a buffer of another size");
  top_k.function = TopKFunctionOf(type);
  Require(top_k.function != nullptr, "a top k of a type that has no order");
  return top_k;
}

ArgMinMax Parser::ParseArgMinMax() {
  ArgMinMax step;
  step.type = ParseType();
  step.index_type = ParseType();
  step.outer = Word();
  step.size = Word();
  step.inner = Word();
  const int64_t largest = Word();
  Require((largest == 0 || largest == 1) && step.size > 0 && step.size <= std::numeric_limits<int32_t>::max(),
          "an argmin or argmax that does not exist");
  const std::vector<int64_t> sources = ReadableSlots(), targets = WritableSlots();
  Require(Count() == 0 && sources.size() == 1 && targets.size() == 2,
          "an argmin or argmax has one operand and two results");
  step.source = sources[0];
  step.values = targets[0];
  step.indices = targets[1];
  const int64_t results = Times(step.outer, step.inner), bytes = TypeBytes(step.type);
  Require(SlotBytes(step.source) == Times(Times(results, step.size), bytes) &&
              SlotBytes(step.values) == Times(results, bytes) &&
              SlotBytes(step.indices) == Times(results, TypeBytes(step.index_type)),
          "an argmin or argmax has a buffer of another size");
  step.in_row = SelectKernels().argminmax_in_row[largest][static_cast<int>(step.type)];
  Require(step.in_row != nullptr, "an argmin or argmax of a type that has no order");
  step.in_columns = SelectKernels().argminmax_in_columns[largest][static_cast<int>(step.type)];
  return step;
}

ComplexArithmetic Parser::ParseComplexArithmetic() {
  ComplexArithmetic step;
  const int64_t op = Word();
  Require(op >= 0 && op < static_cast<int64_t>(ComplexOp::kCount), "complex arithmetic that does not exist");
  step.elements = Word();
  Require(step.elements >= 0, "a negative number of elements");
  const int64_t lhs_repeats = Word(), rhs_repeats = Word();
  Require((lhs_repeats == 0 || lhs_repeats == 1) && (rhs_repeats == 0 || rhs_repeats == 1),
          "an operand repeats or does not");
  step.lhs_repeats = lhs_repeats != 0;
  step.rhs_repeats = rhs_repeats != 0;
  const std::vector<int64_t> sources = ReadableSlots(), targets = WritableSlots();
  Require(Count() == 0 && sources.size() == 2 && targets.size() == 1,
          "complex arithmetic has two operands and a result");
  step.lhs = sources[0];
  step.rhs = sources[1];
  step.target = targets[0];
  constexpr int64_t element = ComplexArithmetic::kElementBytes;
  const int64_t bytes = Times(step.elements, element);
  Require(SlotBytes(step.lhs) == (step.lhs_repeats ? element : bytes) &&
              SlotBytes(step.rhs) == (step.rhs_repeats ? element : bytes) && SlotBytes(step.target) == bytes,
          "complex arithmetic has a buffer of another size");
  step.function = SelectKernels().complex128[op];
  return step;
}

MachineCode Parser::ParseMachineCode(NativeProgram& program) {
  const int64_t number = Word();
  Require(number >= 0 && number < static_cast<int64_t>(functions_.size()) &&
              functions_[static_cast<size_t>(number)] != nullptr,
          "unknown machine code");
  const int64_t work = Word();
  Require(work >= 0, "negative work");
  program.work_ += work;
  ReadableSlots();
  WritableSlots();
  Require(Count() == 0, "machine code has no scratch");
  return {functions_[static_cast<size_t>(number)]};
}

MatrixProduct Parser::ParseProduct() {
  MatrixProduct product;
  product.type = ParseType();
  product.a_type = ParseType();
  product.b_type = ParseType();
  CheckProductTypes(product);
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
  Require(!IsOfHalfFloats(product) || IsSkinny(product), "a product of 16-bit floats is one of a few vectors");
  product.a = ParseOperand(product.a_type, product.batch, product.m, product.k, false);
  product.b = ParseOperand(product.b_type, product.batch, product.k, product.n, false);
  product.c = ParseOperand(product.type, product.batch, product.m, product.n, true);
  return product;
}

MatrixProduct::Operand Parser::ParseOperand(Type type, const std::vector<int64_t>& batch, int64_t rows, int64_t columns,
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

std::unique_ptr<NativeProgram> NativeProgram::Parse(const int64_t* bytecode, size_t num_words, const uint8_t* constants,
                                                    size_t constants_size,
                                                    const std::vector<MachineFunction>& functions, std::string* error) {
  try {
    auto data = std::make_shared<std::vector<uint8_t>>();
    data->reserve(constants_size + 1);  // constants without elements have an address too
    data->assign(constants, constants + constants_size);
    return Parser(bytecode, num_words, std::move(data), functions, 0).Parse();
  } catch (const Failure& failure) {
    *error = failure.message;
    return nullptr;
  }
}

}  // namespace flagos::cpu
