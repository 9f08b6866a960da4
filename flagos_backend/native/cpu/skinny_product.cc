// Products of matrices of which one has few rows, or few columns: of a few vectors with a matrix, whose elements are used
// as often as there are vectors. A BLAS copies blocks of it first, or leaves a processor of another vendor waiting.
#include <algorithm>
#include <vector>

#include "cpu/kernels.h"
#include "cpu/matrix_product.h"
#include "cpu/skinny_kernels.h"
#include "cpu/tiles.h"

namespace flagos::cpu {
namespace {

// Rows that are summed up at once, and columns: their sums stay in the first-level cache.
constexpr int64_t kDepth = 512, kColumnBytes = 16384;
// Tasks are of so many elements, or multiples: rows that are multiplied side by side, and columns that are whole lines.
constexpr int64_t kRowsAtOnce = 8, kColumnsAtOnce = 64;
// Where rows are summed up, fewer columns are too few to share out the rows of a matrix that is alone, and of many more
// rows than columns each share's are short: blocks are faster for several vectors.
constexpr int64_t kMinColumns = 256, kMaxRowsForEach = 8;
// Shorter sums are a BLAS's: of the products of a row, and of rows.
constexpr int64_t kMinDots = 32, kMinRows = 4;

// C = A B with few rows, or C' = B' A' with few.
bool IsTransposed(const MatrixProduct& p) { return p.n < p.m; }

// Whether the matrix's rows are what the vectors are multiplied with; else its rows are summed up.
bool HasRowsOfDepth(const MatrixProduct& p) { return IsTransposed(p) ? !p.a.transposed : p.b.transposed; }

// T: what is computed in, and the type of the result.
template <class T>
class Job {
 public:
  Job(const MatrixProduct& product, char* const* slots, const SkinnyKernelsOf& kernels)
      : product_(product),
        slots_(slots),
        transposed_(IsTransposed(product)),
        rows_of_depth_(HasRowsOfDepth(product)),
        width_(TypeBytes(product.a_type)),
        vectors_(transposed_ ? product.n : product.m),
        count_(transposed_ ? product.m : product.n),
        widen_(product.a_type == product.type
                   ? nullptr
                   : SelectKernels().convert[static_cast<int>(product.a_type)][static_cast<int>(product.type)]),
        dots_(kernels.dots[vectors_ - 1]),
        sums_(kernels.sums[vectors_ - 1]) {
    const int threads = ThreadPool::Shared().num_threads();
    const int64_t wanted = threads == 1 ? 1 : (kTasksPerThread * threads - 1) / product.num_matrices + 1;
    const int64_t at_once = rows_of_depth_ ? kRowsAtOnce : kColumnsAtOnce;
    const int64_t sensible = std::min(count_ / at_once, vectors_ * count_ * product.k / kTaskWork);
    const int64_t shares = std::clamp<int64_t>(sensible, 1, wanted);
    share_ = ((count_ + shares - 1) / shares + at_once - 1) / at_once * at_once;
    shares_ = (count_ + share_ - 1) / share_;
  }

  int64_t tasks() const { return product_.num_matrices * shares_; }
  int64_t grain() const {
    return std::max<int64_t>(1, kTaskWork / std::max<int64_t>(vectors_ * share_ * product_.k, 1));
  }

  void Run(int64_t task) const {
    const MatrixProduct& p = product_;
    const MatrixProduct::Operand &few = transposed_ ? p.b : p.a, &many = transposed_ ? p.a : p.b;
    const int64_t batch = task / shares_, begin = task % shares_ * share_, end = std::min(begin + share_, count_);
    SkinnyOperands operands = Vectors(few, batch);
    operands.matrix = At(many, batch, width_) + begin * (rows_of_depth_ ? many.leading : 1) * width_;
    operands.leading = many.leading;
    const int64_t vector_step = transposed_ ? 1 : p.c.leading, element_step = transposed_ ? p.c.leading : 1;
    T* const c = reinterpret_cast<T*>(At(p.c, batch, sizeof(T))) + begin * element_step;
    if (rows_of_depth_) return dots_({c, vector_step, element_step}, operands, end - begin, p.k);
    const int64_t fit = kColumnBytes / static_cast<int64_t>(sizeof(T)) / vectors_;
    const int64_t most = fit / kColumnsAtOnce * kColumnsAtOnce;
    for (int64_t column = 0; column < end - begin; column += most) {
      SumUp({c + column * element_step, vector_step, element_step}, operands, std::min(most, end - begin - column));
      operands.matrix = static_cast<const char*>(operands.matrix) + most * width_;
    }
  }

 private:
  char* At(const MatrixProduct::Operand& operand, int64_t batch, int64_t width) const {
    return slots_[operand.slot] + BatchOffset(product_, operand, batch) * width;
  }

  // One after the other, in T.
  SkinnyOperands Vectors(const MatrixProduct::Operand& few, int64_t batch) const {
    thread_local std::vector<char> lined_up;
    thread_local std::vector<T> widened;
    const int64_t depth = product_.k;
    const char* vectors = At(few, batch, width_);
    int64_t step = few.leading;
    if (few.transposed != transposed_) {  // an element of each stands beside those of the others
      lined_up.resize(static_cast<size_t>(vectors_ * depth * width_));
      MoveElements(lined_up.data(), vectors, {vectors_, depth, depth, 1, 1, step}, width_);
      vectors = lined_up.data(), step = depth;
    }
    if (widen_ == nullptr) return {vectors, step, nullptr, 0};
    widened.resize(static_cast<size_t>(vectors_ * depth));
    for (int64_t v = 0; v < vectors_; ++v) {
      widen_(widened.data() + v * depth, vectors + v * step * width_, nullptr, nullptr, depth);
    }
    return {widened.data(), depth, nullptr, 0};
  }

  void SumUp(const SkinnyResult& result, const SkinnyOperands& operands, int64_t columns) const {
    thread_local std::vector<T> sums(kColumnBytes / sizeof(T));
    T* const c = static_cast<T*>(result.c);
    for (int64_t row = 0; row < product_.k; row += kDepth) {
      std::fill_n(sums.begin(), vectors_ * columns, T(0));
      const SkinnyOperands from = {static_cast<const T*>(operands.vectors) + row, operands.step,
                                   static_cast<const char*>(operands.matrix) + row * operands.leading * width_,
                                   operands.leading};
      sums_(sums.data(), from, std::min(kDepth, product_.k - row), columns);
      for (int64_t v = 0; v < vectors_; ++v) {
        T* to = c + v * result.vector_step;
        const T* const part = sums.data() + v * columns;
        for (int64_t i = 0; i < columns; ++i, to += result.row_step) *to = row == 0 ? part[i] : *to + part[i];
      }
    }
  }

  const MatrixProduct& product_;
  char* const* const slots_;
  const bool transposed_, rows_of_depth_;
  const int64_t width_;            // of an operand's element, in bytes
  const int64_t vectors_, count_;  // and elements of a result that each vector has
  const TileFunction widen_;       // nullptr: the operands are of type T
  const DotsFunction dots_;
  const SumsFunction sums_;
  int64_t share_, shares_;  // elements of a task, and tasks of a matrix
};

}  // namespace

bool IsSkinny(const MatrixProduct& p) {
  const int64_t vectors = std::min(p.m, p.n), count = std::max(p.m, p.n);
  if (p.type == Type::kS32 || vectors < 1 || vectors > kMaxVectors) return false;
  if (p.a_type != p.type) return true;  // nothing else multiplies 16-bit floats
  if (HasRowsOfDepth(p)) return p.k >= kMinDots;
  const bool can_be_shared = count >= (p.num_matrices == 1 ? kMinColumns : kColumnsAtOnce);
  return p.k >= kMinRows && can_be_shared && (vectors == 1 || p.k <= kMaxRowsForEach * count);
}

bool IsOfHalfFloats(const MatrixProduct& p) {
  return p.type == Type::kF32 && p.a_type == p.b_type && (p.a_type == Type::kF16 || p.a_type == Type::kBF16);
}

void MultiplySkinny(const MatrixProduct& product, char* const* slots) {
  const SkinnyKernels& kernels = SelectSkinnyKernels();
  if (product.type == Type::kF64) return RunJob(Job<double>(product, slots, kernels.f64));
  const bool is_f16 = product.a_type == Type::kF16, is_bf16 = product.a_type == Type::kBF16;
  RunJob(Job<float>(product, slots, is_f16 ? kernels.f16 : is_bf16 ? kernels.bf16 : kernels.f32));
}

}  // namespace flagos::cpu
