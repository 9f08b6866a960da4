// Replay of CUDA graphs: only the kernel parameters that hold an array's address are changed, and only when it moved.
#ifndef FLAGOS_NATIVE_CUDA_GRAPH_REPLAY_H_
#define FLAGOS_NATIVE_CUDA_GRAPH_REPLAY_H_

#include <memory>

#include "cuda/streams.h"
#include "replay.h"

namespace flagos::cuda {

// Which parameters hold which address is proven by comparing the captures word by word. Throws Failure that names the
// first word that differs without being explained. The first graph must outlive the replay.
std::unique_ptr<Replay> MakeGraphReplay(const CudaStreams& streams, const Captures& captures);

}  // namespace flagos::cuda

#endif  // FLAGOS_NATIVE_CUDA_GRAPH_REPLAY_H_
