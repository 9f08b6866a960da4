// Whether a capture holds what was proven of every capture of its plan.
#ifndef FLAGOS_NATIVE_CUDA_VERIFICATION_H_
#define FLAGOS_NATIVE_CUDA_VERIFICATION_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "cuda/comparison.h"
#include "replay.h"

namespace flagos::cuda {

// An address in a node that is `offset` bytes into an array.
struct Patch {
  size_t array;
  uint64_t offset;
  uint64_t* place;
};

class Verification {
 public:
  // Of a capture whose `arrays` lay where those of the first did. Both outlive this object.
  Verification(const Captures::Graph& kept, const std::vector<Captures::Array>& arrays)
      : kept_(kept), arrays_(arrays) {}

  // Notes a patch for each address of an array; patches point into `bytes`, behind which there is room for a whole word.
  // `known` has an entry for each word. Throws Failure(UNIMPLEMENTED) that names `what` of which node, and the word.
  void Check(unsigned char* bytes, size_t size, const Known* known, const char* what, size_t node,
             std::vector<Patch>& patches) const;

 private:
  bool Holds(const Known& known, uint64_t value) const noexcept;
  bool IsInArray(uint64_t value) const noexcept;

  const Captures::Graph& kept_;
  const std::vector<Captures::Array>& arrays_;
};

}  // namespace flagos::cuda

#endif  // FLAGOS_NATIVE_CUDA_VERIFICATION_H_
