// Products of F32 matrices by oneDNN's kernel for blocks: cut for the caches here, as that kernel leaves it to its caller.
// Each element of a result is summed in one order, however it is cut.
#include <algorithm>
#include <utility>
#include <vector>

#include "cpu/blas.h"
#include "cpu/kernels.h"
#include "cpu/matrix_product.h"
#include "cpu/thread_pool.h"

namespace flagos::cpu {
namespace {

constexpr int64_t kRows = 256, kColumns = 512;  // of the result that a task makes, at most
constexpr int64_t kDepth = 512;                 // of what is summed at once: a block of either operand fits the caches
constexpr int64_t kPanel = 64;                  // columns at once
constexpr int64_t kMinRows = 32;                // fewer, and loading a panel takes longer than multiplying by it
constexpr int64_t kMinTurned = 16;              // rows, or columns, of a product by a transposed matrix: a vector
constexpr int64_t kRowsToPack = 128;            // from here on a panel is read often enough to stand in rows of its own

// Element (r, c) is at[r * row + c * column].
struct Matrix {
  const float* at;
  int64_t row, column;

  Matrix Transposed() const { return {at, column, row}; }
  Matrix From(int64_t r, int64_t c) const { return {at + r * row + c * column, row, column}; }
};

Matrix MatrixOf(const MatrixProduct::Operand& operand) {
  return operand.transposed ? Matrix{nullptr, 1, operand.leading} : Matrix{nullptr, operand.leading, 1};
}

int64_t Ceil(int64_t a, int64_t b) { return (a + b - 1) / b; }

// What a thread copies into: blocks whose rows are not rows in memory.
struct Scratch {
  std::vector<float> a = std::vector<float>(kRows * kDepth), b = std::vector<float>(kDepth * kPanel),
                     c = std::vector<float>(kRows * kColumns);
};

Matrix Pack(const Matrix& from, int64_t rows, int64_t columns, float* to) {
  const Plane plane{rows, columns, columns, 1, from.row, from.column};
  SelectKernels().move[2](reinterpret_cast<char*>(to), reinterpret_cast<const char*>(from.at), plane);
  return {to, columns, 1};
}

class Job {
 public:
  Job(const MatrixProduct& product, char* const* slots) : product_(product), slots_(slots) {
    m_ = product.m, n_ = product.n;
    // C = A B or C' = B' A', whichever copies less.
    const Matrix a = MatrixOf(product.a), b = MatrixOf(product.b);
    const int64_t m = product.m, n = product.n, k = product.k;
    const int64_t straight = (a.column == 1 ? 0 : m * k) + (b.column == 1 ? 0 : n * k);
    const int64_t turned = (a.row == 1 ? 0 : m * k) + (b.row == 1 ? 0 : n * k) + m * n;
    turned_ = turned < straight;
    if (turned_) std::swap(m_, n_);
    Cut();
  }

  int64_t tasks() const { return product_.num_matrices * row_blocks_ * column_blocks_; }
  int64_t work() const { return rows_ * columns_ * product_.k; }

  void Run(int64_t task) const {
    thread_local Scratch scratch;
    const int64_t column = task % column_blocks_ * columns_, row = task / column_blocks_ % row_blocks_ * rows_;
    const int64_t batch = task / column_blocks_ / row_blocks_;
    const int64_t rows = std::min(rows_, m_ - row), columns = std::min(columns_, n_ - column);
    Matrix a = Find(product_.a, batch), b = Find(product_.b, batch);
    if (turned_) a = std::exchange(b, a.Transposed()).Transposed();
    const int64_t leading = product_.c.leading;
    float* const c = const_cast<float*>(Find(product_.c, batch).at);
    if (!turned_)
      return Multiply(a.From(row, 0), b.From(0, column), rows, columns, c + row * leading + column, leading, &scratch);
    Multiply(a.From(row, 0), b.From(0, column), rows, columns, scratch.c.data(), columns, &scratch);
    const Plane plane{columns, rows, leading, 1, 1, columns};
    SelectKernels().move[2](reinterpret_cast<char*>(c + column * leading + row),
                            reinterpret_cast<const char*>(scratch.c.data()), plane);
  }

 private:
  // Enough tasks for all threads, and none too small.
  void Cut() {
    const int threads = ThreadPool::Shared().num_threads();
    const int64_t wanted = threads == 1 ? 1 : kTasksPerThread * threads;
    row_blocks_ = Ceil(m_, kRows), column_blocks_ = Ceil(n_, kColumns);
    while (true) {
      rows_ = Ceil(Ceil(m_, row_blocks_), 8) * 8, columns_ = Ceil(Ceil(n_, column_blocks_), kPanel) * kPanel;
      row_blocks_ = Ceil(m_, rows_), column_blocks_ = Ceil(n_, columns_);
      if (tasks() >= wanted || work() < 2 * kTaskWork) return;
      // Few panels are hard to share out evenly.
      const bool cuts_rows = rows_ >= 2 * kMinRows, cuts_columns = columns_ >= 2 * kPanel;
      if (!cuts_rows && !cuts_columns) return;
      const bool by_columns = cuts_columns && (!cuts_rows || columns_ >= std::max(4 * kPanel, rows_));
      (by_columns ? column_blocks_ : row_blocks_) *= 2;
    }
  }

  Matrix Find(const MatrixProduct::Operand& operand, int64_t batch) const {
    Matrix matrix = MatrixOf(operand);
    matrix.at = reinterpret_cast<float*>(slots_[operand.slot]) + BatchOffset(product_, operand, batch);
    return matrix;
  }

  void Multiply(const Matrix& a, const Matrix& b, int64_t rows, int64_t columns, float* c, int64_t leading,
                Scratch* scratch) const {
    const BlockKernel kernel = FindBlas().block;
    for (int64_t from = 0; from < product_.k; from += kDepth) {
      const int64_t depth = std::min(kDepth, product_.k - from);
      Matrix block = a.From(0, from);
      if (block.column != 1) block = Pack(block, rows, depth, scratch->a.data());
      for (int64_t column = 0; column < columns; column += kPanel) {
        const int64_t width = std::min(kPanel, columns - column);
        Matrix panel = b.From(from, column);
        if (panel.column != 1 || rows >= kRowsToPack) panel = Pack(panel, depth, width, scratch->b.data());
        kernel(rows, width, depth, block.row, panel.row, leading, from > 0, block.at, panel.at, c + column, false);
      }
    }
  }

  const MatrixProduct& product_;
  char* const* const slots_;
  bool turned_;
  int64_t m_, n_;                       // of the product as it is computed
  int64_t rows_, columns_;              // of a task
  int64_t row_blocks_, column_blocks_;  // how many
};

}  // namespace

// Few rows by a transposed matrix are dot products: packing that matrix takes longer, and turned they fill no vectors.
bool IsForBlocks(const MatrixProduct& p) {
  if (FindBlas().block == nullptr || p.type != Type::kF32 || p.m == 1 || p.n == 1) return false;
  return (p.m >= kMinTurned || !p.b.transposed) && (p.n >= kMinTurned || !p.a.transposed);
}

void MultiplyByBlocks(const MatrixProduct& product, char* const* slots) {
  const Job job(product, slots);
  const auto body = [](void* user, int64_t begin, int64_t end) {
    for (int64_t task = begin; task < end; ++task) static_cast<const Job*>(user)->Run(task);
  };
  ThreadPool::Shared().ParallelFor(job.tasks(), std::max<int64_t>(1, kTaskWork / job.work()), body,
                                   const_cast<Job*>(&job));
}

}  // namespace flagos::cpu
