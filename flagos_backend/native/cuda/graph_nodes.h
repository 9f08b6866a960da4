// The nodes of a captured graph, with copies of what they are launched with: what is compared between captures, and what
// is patched.
#ifndef FLAGOS_NATIVE_CUDA_GRAPH_NODES_H_
#define FLAGOS_NATIVE_CUDA_GRAPH_NODES_H_

#include <cstddef>
#include <memory>
#include <vector>

#include "cuda/driver.h"
#include "replay.h"

namespace flagos::cuda {

class GraphNode {
 public:
  // Bytes that may hold addresses; behind them there is room for a whole word.
  struct Part {
    unsigned char* bytes;
    size_t size;
    const char* name;
  };

  explicit GraphNode(NodeType t) : type(t) {}
  virtual ~GraphNode() = default;
  GraphNode(const GraphNode&) = delete;
  GraphNode& operator=(const GraphNode&) = delete;

  // Whether `other`, of the same type, does the same but for what is in the parts.
  virtual bool IsLike(const GraphNode& other) const = 0;
  // Makes a graph that can be launched do what the parts say.
  virtual Result Set(const Driver& driver, Exec exec, ContextHandle context) = 0;

  const NodeType type;
  std::vector<Part> parts;
};

// Removes from a graph the nodes that wait for events and record them, but not what they order in it. Libraries of
// collectives put one of each around every call, to keep graphs and other calls in order: those of a device are launched
// on one stream. The driver would launch the graph in as many pieces, one by one. Throws Failure.
void RemoveEvents(const Driver& driver, uint64_t graph);

// Those of the graph and of the bodies in it, which follow their conditional node. Throws Failure.
std::vector<std::unique_ptr<GraphNode>> ReadNodes(const Driver& driver, const Captures::Graph& graph);

}  // namespace flagos::cuda

#endif  // FLAGOS_NATIVE_CUDA_GRAPH_NODES_H_
