// Conditional nodes of CUDA graphs, under capture: loops and branches that the device decides on.
#ifndef FLAGOS_NATIVE_CUDA_CONDITIONALS_H_
#define FLAGOS_NATIVE_CUDA_CONDITIONALS_H_

#include "cuda/driver.h"
#include "replay.h"

namespace flagos::cuda {

class CudaConditionals final : public Conditionals {
 public:
  // Loads the kernel that sets conditions, which no thread may do that captures. Throws Failure(UNIMPLEMENTED) where the
  // driver has no such nodes.
  CudaConditionals(const Driver& driver, ContextHandle context);

  Captures::Conditional Open(uint64_t stream, uint64_t flag, bool repeats, uint64_t inside) override;
  void Close(uint64_t inside, uint64_t handle, uint64_t flag) override;

 private:
  // What a stream captures into, and the last nodes of it.
  struct Capture {
    Graph graph = nullptr;
    const Node* last = nullptr;  // the driver's, until something is captured
    size_t count = 0;
  };
  Capture CaptureOf(StreamHandle stream) const;
  // The condition of `handle` becomes the byte at `flag`, when the stream comes there.
  Result SetCondition(StreamHandle stream, uint64_t handle, uint64_t flag) const;

  const Driver& driver_;
  const ContextHandle context_;
  Function set_condition_ = nullptr;
};

}  // namespace flagos::cuda

#endif  // FLAGOS_NATIVE_CUDA_CONDITIONALS_H_
