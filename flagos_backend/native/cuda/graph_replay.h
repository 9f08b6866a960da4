// Replay of CUDA graphs: only the kernel parameters that hold an array's address are changed, and only when it moved.
#ifndef FLAGOS_NATIVE_CUDA_GRAPH_REPLAY_H_
#define FLAGOS_NATIVE_CUDA_GRAPH_REPLAY_H_

#include <memory>
#include <vector>

#include "cuda/graph_nodes.h"
#include "cuda/streams.h"
#include "cuda/verification.h"
#include "replay.h"

namespace flagos::cuda {

struct PatchedNode {
  std::unique_ptr<GraphNode> node;
  std::vector<Patch> patches;
};

// `graph` is the driver's, of `nodes` nodes, of which those in `patched` hold addresses; it outlives the replay, and its
// arrays lay at their first places. Throws Failure that says what the driver refuses.
std::unique_ptr<Replay> MakeGraphReplay(const CudaStreams& streams, uint64_t graph, size_t nodes,
                                        std::vector<PatchedNode> patched, const std::vector<Captures::Array>& arrays);

}  // namespace flagos::cuda

#endif  // FLAGOS_NATIVE_CUDA_GRAPH_REPLAY_H_
