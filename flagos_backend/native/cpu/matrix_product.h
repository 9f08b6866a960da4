// What the ways to multiply matrices share: BLAS' calls (matrix_product.cc), blocks (blocked_product.cc), a few vectors
// with a matrix (skinny_product.cc), and integers (integer_product.cc).
#ifndef FLAGOS_NATIVE_CPU_MATRIX_PRODUCT_H_
#define FLAGOS_NATIVE_CPU_MATRIX_PRODUCT_H_

#include "cpu/native_program.h"
#include "cpu/thread_pool.h"

namespace flagos::cpu {

inline constexpr int64_t kTaskWork =
    1 << 18;  // multiplications below which a task of its own costs more than it brings
inline constexpr int64_t kTasksPerThread = 2;  // enough to even out; more and every block packs the other operand again

// The batch's matrix at an index: how many elements it stands behind the first.
int64_t BatchOffset(const MatrixProduct& product, const MatrixProduct::Operand& operand, int64_t index);

// A batch of products cut into blocks of their results that fit the caches: enough for all threads, and none too small.
class ProductBlocks {
 public:
  static constexpr int64_t kRows = 256, kColumns = 512;  // of a block, at most
  static constexpr int64_t kPanel = 64;                  // columns at once

  struct Block {
    int64_t batch, row, column, rows, columns;
  };

  ProductBlocks() = default;
  // depth: operations for each element of a result.
  ProductBlocks(int64_t num_matrices, int64_t m, int64_t n, int64_t depth);

  int64_t tasks() const { return num_matrices_ * row_blocks_ * column_blocks_; }
  int64_t grain() const;  // tasks that are worth a thread
  Block At(int64_t task) const;

 private:
  int64_t work() const { return rows_ * columns_ * depth_; }

  int64_t num_matrices_, m_, n_, depth_;
  int64_t rows_, columns_;              // of a block
  int64_t row_blocks_, column_blocks_;  // of a matrix
};

// All tasks of a product, shared out among the threads: job.grain() of them are worth a thread.
template <class Job>
void RunJob(const Job& job) {
  const auto body = [](void* user, int64_t begin, int64_t end) {
    for (int64_t task = begin; task < end; ++task) static_cast<const Job*>(user)->Run(task);
  };
  ThreadPool::Shared().ParallelFor(job.tasks(), job.grain(), body, const_cast<Job*>(&job));
}

// Whether a product is one for MultiplyByBlocks, which then needs no BLAS.
bool IsForBlocks(const MatrixProduct& product);
void MultiplyByBlocks(const MatrixProduct& product, char* const* slots);

// Of F32 and F64, with at most kMaxVectors rows or columns, and of 16-bit floats, computed in F32, which nothing else
// multiplies. They need no BLAS.
bool IsSkinny(const MatrixProduct& product);
bool IsOfHalfFloats(const MatrixProduct& product);
void MultiplySkinny(const MatrixProduct& product, char* const* slots);

// Products of integers of at most 32 bits, modulo 2^32. They need no BLAS.
bool IsOfIntegers(const MatrixProduct& product);
void MultiplyIntegers(const MatrixProduct& product, char* const* slots);

}  // namespace flagos::cpu

#endif  // FLAGOS_NATIVE_CPU_MATRIX_PRODUCT_H_
