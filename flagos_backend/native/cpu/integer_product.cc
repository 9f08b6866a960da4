// Products of integer matrices, modulo 2^32: cut for the caches, and packed into the words that integer_kernels.h tells of.
#include <algorithm>
#include <utility>
#include <vector>

#include "cpu/integer_kernels.h"
#include "cpu/matrix_product.h"

namespace flagos::cpu {
namespace {

constexpr int64_t kPanel = ProductBlocks::kPanel;
constexpr int64_t kGroups = 256;  // summed at once: a block of a, and a panel of b, fit the caches
// What a byte changes by when its sign is flipped: 128 more where that makes it unsigned, 128 less where signed.
constexpr int64_t kOffset = 128;
constexpr uint32_t kOffsets = 0x80808080;  // four of them, as unsigned numbers; as signed ones they are -128

class Scratch {
 public:
  uint32_t* a() { return a_.data()->words; }
  uint32_t* b() { return b_.data()->words; }
  const uint32_t* offsets() const { return offsets_.data()->words; }

 private:
  struct alignas(64) Line {
    uint32_t words[16];
  };
  static std::vector<Line> Lines(int64_t words, uint32_t word = 0) {
    Line line;
    std::fill(line.words, line.words + 16, word);
    return std::vector<Line>(static_cast<size_t>(words / 16), line);
  }

  std::vector<Line> a_ = Lines(kGroups * ProductBlocks::kRows), b_ = Lines(kGroups * kPanel + kReadBeyond),
                    offsets_ = Lines(kGroups, kOffsets);
};

struct Choice {
  const GroupKernels* kernels = nullptr;
  int64_t elements = 0;  // of a group
};

Choice Choose(Type a, Type b) {
  const IntegerKernels& all = SelectIntegerKernels();
  for (const Choice& choice : {Choice{&all.bytes, 4}, Choice{&all.halves, 2}, Choice{&all.words, 1}}) {
    const PackFunction* const pack = choice.kernels->pack;
    if (pack[static_cast<int>(a)] != nullptr && pack[static_cast<int>(b)] != nullptr) return choice;
  }
  return {};
}

class Job {
 public:
  Job(const MatrixProduct& product, char* const* slots)
      : product_(product),
        slots_(slots),
        a_{product.a, product.a_type, product.a.transposed},
        b_{product.b, product.b_type, !product.b.transposed},
        transposed_(product.n == 1) {
    const auto [kernels, elements] = Choose(product.a_type, product.b_type);
    kernels_ = kernels;
    elements_ = elements;
    if (transposed_) std::swap(a_, b_);
    // Of bytes one is multiplied as a signed number, the other one as an unsigned one.
    a_.flipped = elements == 4 && a_.type == Type::kU8;
    b_.flipped = elements == 4 && b_.type == Type::kS8;
    blocks_ = ProductBlocks(product.num_matrices, transposed_ ? product.n : product.m,
                            transposed_ ? product.m : product.n, Groups(product.k));
  }

  int64_t tasks() const { return blocks_.tasks(); }
  int64_t grain() const { return blocks_.grain(); }

  void Run(int64_t task) const {
    thread_local Scratch scratch;
    const ProductBlocks::Block block = blocks_.At(task);
    const int64_t leading = transposed_ ? product_.m : product_.c.leading;
    int32_t* const c = reinterpret_cast<int32_t*>(slots_[product_.c.slot]) +
                       BatchOffset(product_, product_.c, block.batch) + block.row * leading + block.column;
    for (int64_t from = 0; from < product_.k; from += kGroups * elements_) {
      const int64_t depth = std::min(kGroups * elements_, product_.k - from);
      MultiplyDepth(block, from, depth, c, leading, &scratch);
    }
  }

 private:
  struct Side {
    MatrixProduct::Operand operand;
    Type type;
    bool depth_is_outer;  // elements that are summed stand `leading` apart
    bool flipped = false;
  };

  int64_t Groups(int64_t depth) const { return (depth + elements_ - 1) / elements_; }

  // Of (x + p)(y - q) all but xy is the same in a whole row, or a whole column: x and y are what is multiplied, p and q
  // what was taken from a's elements and added to b's.
  void MultiplyDepth(const ProductBlocks::Block& block, int64_t from, int64_t depth, int32_t* c, int64_t leading,
                     Scratch* scratch) const {
    const int64_t groups = Groups(depth);
    const Words a = Rows(At(a_, block.batch, from, block.row), depth, block.rows, scratch->a());
    static constexpr int32_t kNone[std::max(ProductBlocks::kRows, kPanel + kReadBeyond)] = {};
    int32_t row_terms[ProductBlocks::kRows] = {}, column_terms[kPanel + kReadBeyond] = {};
    if (b_.flipped) {
      const int32_t both[1 + kReadBeyond] = {a_.flipped ? static_cast<int32_t>(-kOffset * kOffset * depth) : 0};
      kernels_->multiply(row_terms, 1, a, {scratch->offsets(), 0, 4}, groups, block.rows, 1, {kNone, both}, false);
    }
    const Words offsets{scratch->offsets(), 0, 0};
    for (int64_t column = 0; column < block.columns; column += kPanel) {
      const int64_t columns = std::min(kPanel, block.columns - column);
      const Elements panel = At(b_, block.batch, from, block.column + column);
      const Terms terms{row_terms, column_terms};
      if (block.rows == 1 && AreGroups(b_, panel, depth)) {
        const int64_t step = panel.step * TypeBytes(b_.type);
        const auto multiply = [&](int32_t* to, const void* row, const Terms& less, bool adds) {
          kernels_->multiply_row(to, row, panel.at, step, groups, columns, b_.flipped, less, adds);
        };
        if (a_.flipped) multiply(column_terms, scratch->offsets(), {kNone, kNone}, false);
        multiply(c + column, a.at, terms, from > 0);
        continue;
      }
      const Words b = Columns(panel, depth, block.rows, columns, scratch->b());
      if (a_.flipped) {
        kernels_->multiply(column_terms, kPanel, offsets, b, groups, 1, columns, {kNone, kNone}, false);
      }
      kernels_->multiply(c + column, leading, a, b, groups, block.rows, columns, terms, from > 0);
    }
  }

  Elements At(const Side& side, int64_t batch, int64_t depth, int64_t position) const {
    const int64_t leading = side.operand.leading;
    const int64_t depth_step = side.depth_is_outer ? leading : 1, step = side.depth_is_outer ? 1 : leading;
    const int64_t element = BatchOffset(product_, side.operand, batch) + depth * depth_step + position * step;
    return {slots_[side.operand.slot] + element * TypeBytes(side.type), depth_step, step};
  }

  // Whether elements are groups where they stand.
  bool AreGroups(const Side& side, const Elements& from, int64_t depth) const {
    return from.depth_step == 1 && TypeBytes(side.type) * elements_ == 4 && depth % elements_ == 0;
  }

  void Pack(const Side& side, const Elements& from, int64_t depth, int64_t count, uint32_t* to) const {
    const int64_t step = from.step * TypeBytes(side.type);
    const bool aligned = (reinterpret_cast<uintptr_t>(from.at) | static_cast<uintptr_t>(step)) % 4 == 0;
    if (!AreGroups(side, from, depth) || !aligned) {
      return kernels_->pack[static_cast<int>(side.type)](to, from, depth, count, side.flipped);
    }
    const int64_t groups = Groups(depth);
    const Plane plane{groups, count, count, 1, 1, step / 4};
    SelectKernels().move[2](reinterpret_cast<char*>(to), static_cast<const char*>(from.at), plane);
    for (int64_t i = 0; side.flipped && i < groups * count; ++i) to[i] ^= kOffsets;
  }

  Words Rows(const Elements& from, int64_t depth, int64_t rows, uint32_t* packed) const {
    if (AreGroups(a_, from, depth) && !a_.flipped) return {from.at, 4, from.step * TypeBytes(a_.type)};
    Pack(a_, from, depth, rows, packed);
    return {packed, rows * 4, 4};
  }

  // Packed, unless few rows are multiplied by words that stand side by side already.
  Words Columns(const Elements& from, int64_t depth, int64_t rows, int64_t columns, uint32_t* packed) const {
    constexpr int64_t kRowsToPack = 32;
    const bool are_words = elements_ == 1 && TypeBytes(b_.type) == 4 && from.step == 1;
    if (are_words && rows < kRowsToPack && columns == kPanel) return {from.at, from.depth_step * 4, 4};
    Pack(b_, from, depth, columns, packed);
    return {packed, columns * 4, 4};
  }

  const MatrixProduct& product_;
  char* const* const slots_;
  const GroupKernels* kernels_;
  int64_t elements_;
  Side a_, b_;
  bool transposed_;       // C' = B' A': a vector is a row of one
  ProductBlocks blocks_;  // of the product as it is computed
};

}  // namespace

bool IsOfIntegers(const MatrixProduct& product) {
  return product.type == Type::kS32 && Choose(product.a_type, product.b_type).kernels != nullptr;
}

void MultiplyIntegers(const MatrixProduct& product, char* const* slots) { RunJob(Job(product, slots)); }

}  // namespace flagos::cpu
