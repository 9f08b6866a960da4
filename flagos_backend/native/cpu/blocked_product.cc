// Products of F32 matrices by oneDNN's kernel for blocks: cut for the caches here, as that kernel leaves it to its caller.
// Each element of a result is summed in one order, however it is cut.
#include <algorithm>
#include <utility>
#include <vector>

#include "cpu/blas.h"
#include "cpu/kernels.h"
#include "cpu/matrix_product.h"

namespace flagos::cpu {
namespace {

constexpr int64_t kRows = ProductBlocks::kRows, kColumns = ProductBlocks::kColumns, kPanel = ProductBlocks::kPanel;
constexpr int64_t kDepth = 512;       // of what is summed at once: a block of either operand fits the caches
constexpr int64_t kMinTurned = 16;    // rows, or columns, of a product by a transposed matrix: a vector
constexpr int64_t kRowsToPack = 128;  // from here on a panel is read often enough to stand in rows of its own

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
    // C = A B or C' = B' A', whichever copies less.
    const Matrix a = MatrixOf(product.a), b = MatrixOf(product.b);
    const int64_t m = product.m, n = product.n, k = product.k;
    const int64_t straight = (a.column == 1 ? 0 : m * k) + (b.column == 1 ? 0 : n * k);
    const int64_t transposed = (a.row == 1 ? 0 : m * k) + (b.row == 1 ? 0 : n * k) + m * n;
    transposed_ = transposed < straight;
    blocks_ = ProductBlocks(product.num_matrices, transposed_ ? n : m, transposed_ ? m : n, k);
  }

  int64_t tasks() const { return blocks_.tasks(); }
  int64_t grain() const { return blocks_.grain(); }

  void Run(int64_t task) const {
    thread_local Scratch scratch;
    const auto [batch, row, column, rows, columns] = blocks_.At(task);
    Matrix a = Find(product_.a, batch), b = Find(product_.b, batch);
    if (transposed_) a = std::exchange(b, a.Transposed()).Transposed();
    const int64_t leading = product_.c.leading;
    float* const c = const_cast<float*>(Find(product_.c, batch).at);
    if (!transposed_) {
      Multiply(a.From(row, 0), b.From(0, column), rows, columns, c + row * leading + column, leading, &scratch);
      return;
    }
    Multiply(a.From(row, 0), b.From(0, column), rows, columns, scratch.c.data(), columns, &scratch);
    const Plane plane{columns, rows, leading, 1, 1, columns};
    SelectKernels().move[2](reinterpret_cast<char*>(c + column * leading + row),
                            reinterpret_cast<const char*>(scratch.c.data()), plane);
  }

 private:
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
  bool transposed_;
  ProductBlocks blocks_;  // of the product as it is computed
};

}  // namespace

// Few rows by a transposed matrix are dot products: packing that matrix takes longer, and transposed they fill no
// vectors.
bool IsForBlocks(const MatrixProduct& p) {
  if (FindBlas().block == nullptr || p.type != Type::kF32 || p.m == 1 || p.n == 1) return false;
  return (p.m >= kMinTurned || !p.b.transposed) && (p.n >= kMinTurned || !p.a.transposed);
}

void MultiplyByBlocks(const MatrixProduct& product, char* const* slots) { RunJob(Job(product, slots)); }

}  // namespace flagos::cpu
