// Runs products and quotients of arrays of two doubles each, and computes single quotients that overflow, vanish or are infinite.
#include "cpu/complex.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "cpu/run_loop.h"
#include "cpu/tiles.h"

namespace flagos::cpu {
namespace {

// Holds the product of two doubles, of any exponents.
#if defined(__SIZEOF_FLOAT128__)
__extension__ using Wide = __float128;
#else
using Wide = long double;
static_assert(std::numeric_limits<Wide>::digits >= 106, "a type that holds products of doubles");
#endif

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// 1 for infinity and 0 for the rest, with the number's sign.
double UnitBox(double x) { return std::copysign(std::isinf(x) ? 1.0 : 0.0, x); }

struct Job {
  const ComplexArithmetic* step;
  char* const* slots;
};

void RunRange(void* user, int64_t begin, int64_t end) {
  const Job& job = *static_cast<Job*>(user);
  const ComplexArithmetic& step = *job.step;
  constexpr int64_t bytes = ComplexArithmetic::kElementBytes;
  char* const target = job.slots[step.target];
  const char *const lhs = job.slots[step.lhs], *const rhs = job.slots[step.rhs];
  if (!step.lhs_repeats && !step.rhs_repeats) {
    const int64_t at = begin * bytes;
    return step.function(target + at, lhs + at, rhs + at, nullptr, end - begin);
  }
  constexpr int64_t kBlock = 256;
  char same_lhs[kBlock * bytes], same_rhs[kBlock * bytes];
  for (int64_t i = 0; i < kBlock; ++i) {
    std::memcpy(same_lhs + i * bytes, lhs, static_cast<size_t>(bytes));
    std::memcpy(same_rhs + i * bytes, rhs, static_cast<size_t>(bytes));
  }
  for (int64_t i = begin; i < end; i += kBlock) {
    const int64_t at = i * bytes;
    step.function(target + at, step.lhs_repeats ? same_lhs : lhs + at, step.rhs_repeats ? same_rhs : rhs + at, nullptr,
                  std::min(kBlock, end - i));
  }
}

}  // namespace

void DivideAny(double* quotient, const double* divided, const double* divisor) {
  const double a = divided[0], b = divided[1], c = divisor[0], d = divisor[1];
  if (c == 0 && d == 0) {
    const double huge = std::copysign(kInfinity, c);
    quotient[0] = huge * a;
    quotient[1] = huge * b;
    return;
  }
  const Wide wide_c = c, wide_d = d, size = wide_c * wide_c + wide_d * wide_d;
  double real = static_cast<double>((a * wide_c + b * wide_d) / size);
  double imaginary = static_cast<double>((b * wide_c - a * wide_d) / size);
  if (std::isnan(real) && std::isnan(imaginary)) {
    if ((std::isinf(a) || std::isinf(b)) && std::isfinite(c) && std::isfinite(d)) {
      real = kInfinity * (UnitBox(a) * c + UnitBox(b) * d);
      imaginary = kInfinity * (UnitBox(b) * c - UnitBox(a) * d);
    } else if ((std::isinf(c) || std::isinf(d)) && std::isfinite(a) && std::isfinite(b)) {
      real = 0.0 * (a * UnitBox(c) + b * UnitBox(d));
      imaginary = 0.0 * (b * UnitBox(c) - a * UnitBox(d));
    }
  }
  quotient[0] = real;
  quotient[1] = imaginary;
}

void RunComplexArithmetic(const ComplexArithmetic& step, char* const* slots) {
  Job job{&step, slots};
  RunTasks(step.elements, step.elements * kComplexWork, &RunRange, &job);
}

}  // namespace flagos::cpu
