#include "cpu/matrix_product.h"

#include <algorithm>

#include "cpu/blas.h"
#include "cpu/kernels.h"
#include "cpu/packed_product.h"
#include "cpu/run_loop.h"
#include "cpu/thread_pool.h"

namespace flagos::cpu {
namespace {

// Two vectors, element after element: a product of matrices would add up in its own order, in a float for floats.
bool IsDot(const MatrixProduct& p) {
  const bool dense_a = !p.a.transposed || p.a.leading == 1;
  const bool dense_b = p.b.transposed || p.b.leading == 1;
  return p.m == 1 && p.n == 1 && dense_a && dense_b;
}

// A product cut into blocks of rows, or of columns, of each matrix of the batch. gemm: a BLAS's, or nullptr.
template <class T>
struct Job {
  typename Routines<T>::Gemm gemm;
  const MatrixProduct& product;
  char* const* slots;
  bool by_columns;
  int64_t block;    // rows or columns of one
  int64_t blocks;   // of one matrix
  DotFunction dot;  // of products of two vectors; else nullptr

  T* Base(const MatrixProduct::Operand& operand, int64_t batch, int64_t row, int64_t column) const {
    const int64_t offset = operand.transposed ? row + column * operand.leading : row * operand.leading + column;
    return reinterpret_cast<T*>(slots[operand.slot]) + BatchOffset(product, operand, batch) + offset;
  }

  // Row-major C[m, n] = A[m, k] B[k, n] is column-major C' = B' A', which is what BLAS computes.
  void Run(int64_t task) const {
    const MatrixProduct& p = product;
    const T one = 1, zero = 0;
    const int64_t batch = task / blocks, begin = task % blocks * block;
    if (dot != nullptr) return dot(Base(p.c, batch, 0, 0), Base(p.a, batch, 0, 0), Base(p.b, batch, 0, 0), p.k);
    const int64_t row = by_columns ? 0 : begin, column = by_columns ? begin : 0;
    if (gemm == nullptr) return RunPacked(batch, row, column);
    const int m = static_cast<int>(by_columns ? p.m : std::min(block, p.m - row));
    const int n = static_cast<int>(by_columns ? std::min(block, p.n - column) : p.n), k = static_cast<int>(p.k);
    const int lda = static_cast<int>(p.a.leading), ldb = static_cast<int>(p.b.leading);
    const int ldc = static_cast<int>(p.c.leading);
    gemm(p.b.transposed ? "T" : "N", p.a.transposed ? "T" : "N", &n, &m, &k, &one, Base(p.b, batch, 0, column), &ldb,
         Base(p.a, batch, row, 0), &lda, &zero, Base(p.c, batch, row, column), &ldc);
  }

  void RunPacked(int64_t batch, int64_t row, int64_t column) const {
    const MatrixProduct& p = product;
    const int64_t m = by_columns ? p.m : std::min(block, p.m - row),
                  n = by_columns ? std::min(block, p.n - column) : p.n;
    const auto matrix = [](T* at, const MatrixProduct::Operand& operand) {
      const int64_t leading = operand.leading;
      return operand.transposed ? StridedMatrix<T>{at, 1, leading} : StridedMatrix<T>{at, leading, 1};
    };
    MultiplyPacked<T>(m, n, p.k, matrix(Base(p.a, batch, row, 0), p.a), matrix(Base(p.b, batch, 0, column), p.b),
                      matrix(Base(p.c, batch, row, column), p.c), Store::kWrite);
  }
};

constexpr int64_t kMinBlock = 32;  // fewer rows or columns and a block is no longer a matrix product

template <class T>
void Multiply(const MatrixProduct& p, char* const* slots) {
  const auto gemm = FindBlas().Of(T{}).gemm;
  const bool shares = FindBlas().IsShared();
  ThreadPool& pool = ThreadPool::Shared();
  // The longer side is cut: the operand that every block reads whole is then the smaller one.
  const bool by_columns = p.n > p.m;
  const int64_t side = by_columns ? p.n : p.m;
  int64_t blocks = 1;
  if (shares) {
    const int64_t tasks = pool.num_threads() == 1 ? 1 : kTasksPerThread * pool.num_threads();
    const int64_t wanted = (tasks + p.num_matrices - 1) / p.num_matrices;
    const int64_t sensible = std::min(side / kMinBlock, p.m * p.n * p.k / kTaskWork);
    blocks = std::clamp<int64_t>(sensible, 1, wanted);
  }
  const int64_t block = (side + blocks - 1) / blocks;
  const DotFunction dot = IsDot(p) ? SelectKernels().dot[static_cast<int>(p.type)] : nullptr;
  const Job<T> job{gemm, p, slots, by_columns, block, (side + block - 1) / block, dot};
  const auto body = [](void* user, int64_t begin, int64_t end) {
    const OneThread one_thread;
    for (int64_t task = begin; task < end; ++task) static_cast<const Job<T>*>(user)->Run(task);
  };
  const int64_t tasks = p.num_matrices * job.blocks;
  const int64_t grain = std::max<int64_t>(1, kTaskWork * job.blocks / std::max<int64_t>(p.m * p.n * p.k, 1));
  pool.ParallelFor(tasks, shares ? grain : tasks, body, const_cast<Job<T>*>(&job));
}

int64_t Ceil(int64_t a, int64_t b) { return (a + b - 1) / b; }

}  // namespace

ProductBlocks::ProductBlocks(int64_t num_matrices, int64_t m, int64_t n, int64_t depth)
    : num_matrices_(num_matrices), m_(m), n_(n), depth_(depth) {
  constexpr int64_t kMinRows = 32;  // fewer, and loading a panel takes longer than multiplying by it
  const int threads = ThreadPool::Shared().num_threads();
  const int64_t wanted = threads == 1 ? 1 : kTasksPerThread * threads;
  row_blocks_ = Ceil(m, kRows), column_blocks_ = Ceil(n, kColumns);
  while (true) {
    rows_ = Ceil(Ceil(m, row_blocks_), 8) * 8, columns_ = Ceil(Ceil(n, column_blocks_), kPanel) * kPanel;
    row_blocks_ = Ceil(m, rows_), column_blocks_ = Ceil(n, columns_);
    if (tasks() >= wanted || work() < 2 * kTaskWork) return;
    // Few panels are hard to share out evenly.
    const bool cuts_rows = rows_ >= 2 * kMinRows, cuts_columns = columns_ >= 2 * kPanel;
    if (!cuts_rows && !cuts_columns) return;
    const bool by_columns = cuts_columns && (!cuts_rows || columns_ >= std::max(4 * kPanel, rows_));
    (by_columns ? column_blocks_ : row_blocks_) *= 2;
  }
}

int64_t ProductBlocks::grain() const { return std::max<int64_t>(1, kTaskWork / work()); }

ProductBlocks::Block ProductBlocks::At(int64_t task) const {
  const int64_t column = task % column_blocks_ * columns_, row = task / column_blocks_ % row_blocks_ * rows_;
  const int64_t batch = task / column_blocks_ / row_blocks_;
  return {batch, row, column, std::min(rows_, m_ - row), std::min(columns_, n_ - column)};
}

int64_t BatchOffset(const MatrixProduct& product, const MatrixProduct::Operand& operand, int64_t index) {
  int64_t offset = operand.offset;
  for (size_t d = product.batch.size(); d-- > 0;) {
    offset += index % product.batch[d] * operand.batch_strides[d];
    index /= product.batch[d];
  }
  return offset;
}

void RunMatrixProduct(const MatrixProduct& product, char* const* slots) {
  if (IsOfIntegers(product)) return MultiplyIntegers(product, slots);
  if (IsOfHalfFloats(product) || (!IsDot(product) && IsSkinny(product))) return MultiplySkinny(product, slots);
  if (IsForBlocks(product)) return MultiplyByBlocks(product, slots);
  if (product.type == Type::kF32) {
    Multiply<float>(product, slots);
  } else {
    Multiply<double>(product, slots);
  }
}

}  // namespace flagos::cpu
