// What three captures of a plan prove of every graph of it: which words of which nodes hold which address.
#ifndef FLAGOS_NATIVE_CUDA_PROOF_H_
#define FLAGOS_NATIVE_CUDA_PROOF_H_

#include <memory>
#include <vector>

#include "cuda/comparison.h"
#include "cuda/graph_nodes.h"
#include "cuda/graph_replay.h"
#include "cuda/streams.h"
#include "replay.h"

namespace flagos::cuda {

class GraphProof final : public Proof {
 public:
  // Throws Failure that names the first word that differs without being explained, or the array of which what stands in
  // for it is not found.
  GraphProof(const CudaStreams& streams, const Captures& captures);

  std::unique_ptr<Replay> MakeReplay(const Captures::Graph& kept) const override;

 private:
  bool IsFound(size_t array) const noexcept;
  // Of what stands in for an array: has the array's address there.
  void PutInPlace(Patch& patch) const noexcept;

  const CudaStreams& streams_;
  const std::vector<Captures::Array> arrays_;
  const size_t conditionals_;
  std::vector<std::unique_ptr<GraphNode>> nodes_;  // copies of the first capture's
  std::vector<std::vector<Known>> known_;          // of each node, the words of its parts
};

}  // namespace flagos::cuda

#endif  // FLAGOS_NATIVE_CUDA_PROOF_H_
