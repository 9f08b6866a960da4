#include "cuda/graph_nodes.h"

#include <algorithm>
#include <cstring>

#include "error.h"

namespace flagos::cuda {
namespace {

constexpr const char* kReading = "reading a node of a graph";
constexpr const char* kRemoving = "removing a node of a graph";

std::vector<Node> NodesOf(const Driver& driver, uint64_t handle) {
  auto* graph = reinterpret_cast<Graph>(handle);
  size_t count = 0;
  driver.Check(driver.GraphGetNodes(graph, nullptr, &count), "reading a graph");
  std::vector<Node> nodes(count);
  if (count > 0) driver.Check(driver.GraphGetNodes(graph, nodes.data(), &count), "reading a graph");
  return nodes;
}

// Those that a node follows, or that follow it.
std::vector<Node> Neighbours(const Driver& driver, Result (*get)(Node, Node*, size_t*), Node node) {
  size_t count = 0;
  driver.Check(get(node, nullptr, &count), kReading);
  std::vector<Node> nodes(count);
  if (count > 0) driver.Check(get(node, nodes.data(), &count), kReading);
  return nodes;
}

class KernelNode final : public GraphNode {
 public:
  KernelNode(const Driver& driver, Node node, size_t number) : GraphNode(NodeType::kKernel), node_(node) {
    driver.Check(driver.KernelGetParams(node, &params_), kReading);
    if (params_.extra != nullptr) {
      TakePacked(number);
    } else if (params_.values != nullptr) {
      TakeValues(driver);
    }
  }

  bool IsLike(const GraphNode& other) const override {
    const KernelParams &a = params_, &b = static_cast<const KernelNode&>(other).params_;
    return a.function == b.function && a.kernel == b.kernel && std::equal(a.grid, a.grid + 3, b.grid) &&
           std::equal(a.block, a.block + 3, b.block) && a.shared_bytes == b.shared_bytes &&
           (a.values == nullptr) == (b.values == nullptr) && (a.extra == nullptr) == (b.extra == nullptr);
  }

  Result Set(const Driver& driver, Exec exec, ContextHandle) override {
    return driver.ExecSetKernel(exec, node_, &params_);
  }

 private:
  // Whole words, so that an address is aligned in the copy.
  unsigned char* Keep(const void* bytes, size_t size, const char* name) {
    storage_.push_back(std::make_unique<uint64_t[]>((size + 7) / 8));
    auto* copy = reinterpret_cast<unsigned char*>(storage_.back().get());
    std::memcpy(copy, bytes, size);
    parts.push_back({copy, size, name});
    return copy;
  }

  // Parameters one by one.
  void TakeValues(const Driver& driver) {
    Function function = params_.function;
    if (function == nullptr) driver.Check(driver.KernelGetFunction(&function, params_.kernel), "reading a kernel");
    for (size_t i = 0, offset = 0, size = 0; driver.FunctionGetParamInfo(function, i, &offset, &size) == 0; ++i) {
      values_.push_back(Keep(params_.values[i], size, "a kernel parameter"));
    }
    params_.values = values_.data();
  }

  // All parameters as one piece of memory.
  void TakePacked(size_t number) {
    const void* bytes = nullptr;
    for (void** entry = params_.extra; *entry != kPackedEnd; entry += 2) {
      if (*entry == kPackedBytes) {
        bytes = entry[1];
      } else if (*entry == kPackedSize) {
        packed_size_ = *static_cast<const size_t*>(entry[1]);
      } else {
        Fail(FLAGOS_UNIMPLEMENTED, "node %zu packs its parameters in an unknown way", number);
      }
    }
    values_ = {kPackedBytes, Keep(bytes, packed_size_, "the parameters"), kPackedSize, &packed_size_, kPackedEnd};
    params_.extra = values_.data();
  }

  const Node node_;
  KernelParams params_{};
  std::vector<std::unique_ptr<uint64_t[]>> storage_;
  std::vector<void*> values_;
  size_t packed_size_ = 0;
};

class MemcpyNode final : public GraphNode {
 public:
  MemcpyNode(const Driver& driver, Node node, size_t number) : GraphNode(NodeType::kMemcpy), node_(node) {
    driver.Check(driver.MemcpyGetParams(node, &params_), kReading);
    for (MemcpySide* side : {&params_.source, &params_.target}) {
      // What the host held at the time of the capture is not there later.
      if (side->type != MemoryType::kDevice && side->type != MemoryType::kUnified) {
        Fail(FLAGOS_UNIMPLEMENTED, "node %zu copies from or to the host", number);
      }
      parts.push_back({reinterpret_cast<unsigned char*>(&side->device), sizeof(side->device), "a copy's address"});
    }
  }

  bool IsLike(const GraphNode& other) const override {
    const MemcpyParams &a = params_, &b = static_cast<const MemcpyNode&>(other).params_;
    return a.width == b.width && a.height == b.height && a.depth == b.depth;
  }

  Result Set(const Driver& driver, Exec exec, ContextHandle context) override {
    return driver.ExecSetMemcpy(exec, node_, &params_, context);
  }

 private:
  const Node node_;
  MemcpyParams params_{};
};

class MemsetNode final : public GraphNode {
 public:
  MemsetNode(const Driver& driver, Node node) : GraphNode(NodeType::kMemset), node_(node) {
    driver.Check(driver.MemsetGetParams(node, &params_), kReading);
    parts.push_back({reinterpret_cast<unsigned char*>(&params_.target), sizeof(params_.target), "a fill's address"});
  }

  bool IsLike(const GraphNode& other) const override {
    const MemsetParams &a = params_, &b = static_cast<const MemsetNode&>(other).params_;
    return a.width == b.width && a.height == b.height && a.value == b.value && a.element_bytes == b.element_bytes;
  }

  Result Set(const Driver& driver, Exec exec, ContextHandle context) override {
    return driver.ExecSetMemset(exec, node_, &params_, context);
  }

 private:
  const Node node_;
  MemsetParams params_{};
};

// One without parts: nothing in it is patched.
class OtherNode final : public GraphNode {
 public:
  // `which`: of the graph's conditional nodes. `count`: how many nodes its body has.
  explicit OtherNode(NodeType type, size_t which = 0, size_t count = 0)
      : GraphNode(type), which_(which), count_(count) {}

  bool IsLike(const GraphNode& other) const override {
    const auto& node = static_cast<const OtherNode&>(other);
    return which_ == node.which_ && count_ == node.count_;
  }

  Result Set(const Driver&, Exec, ContextHandle) override { return 0; }

 private:
  const size_t which_, count_;
};

class Reader {
 public:
  Reader(const Driver& driver, const Captures::Graph& graph) : driver_(driver), graph_(graph) {}

  std::vector<std::unique_ptr<GraphNode>> Read() {
    Take(NodesOf(driver_, graph_.handle));
    return std::move(made_);
  }

 private:
  void Take(const std::vector<Node>& nodes) {
    for (Node node : nodes) {
      NodeType type{};
      driver_.Check(driver_.NodeGetType(node, &type), kReading);
      if (type != NodeType::kConditional) {
        made_.push_back(Made(node, type));
        continue;
      }
      const size_t which = ConditionalOf(node);
      const std::vector<Node> body = NodesOf(driver_, graph_.conditionals[which].body);
      made_.push_back(std::make_unique<OtherNode>(type, which, body.size()));
      Take(body);
    }
  }

  std::unique_ptr<GraphNode> Made(Node node, NodeType type) const {
    const size_t number = made_.size();
    switch (type) {
      case NodeType::kKernel:
        return std::make_unique<KernelNode>(driver_, node, number);
      case NodeType::kMemcpy:
        return std::make_unique<MemcpyNode>(driver_, node, number);
      case NodeType::kMemset:
        return std::make_unique<MemsetNode>(driver_, node);
      case NodeType::kEmpty:
        return std::make_unique<OtherNode>(type);
      case NodeType::kWaitEvent:
      case NodeType::kRecordEvent:
      case NodeType::kConditional:
        break;
    }
    Fail(FLAGOS_UNIMPLEMENTED, "node %zu is of kind %d, which cannot be patched", number, static_cast<int>(type));
  }

  // The driver names no body of a node: who captured it knows.
  size_t ConditionalOf(Node node) const {
    for (size_t i = 0; i < graph_.conditionals.size(); ++i) {
      if (graph_.conditionals[i].node == reinterpret_cast<uint64_t>(node)) return i;
    }
    Fail(FLAGOS_UNIMPLEMENTED, "node %zu is a conditional node of which the captures do not tell", made_.size());
  }

  const Driver& driver_;
  const Captures::Graph& graph_;
  std::vector<std::unique_ptr<GraphNode>> made_;
};

}  // namespace

void RemoveEvents(const Driver& driver, uint64_t handle) {
  auto* graph = reinterpret_cast<Graph>(handle);
  for (Node node : NodesOf(driver, handle)) {
    NodeType type{};
    driver.Check(driver.NodeGetType(node, &type), kReading);
    if (type != NodeType::kWaitEvent && type != NodeType::kRecordEvent) continue;
    // What came before the node comes before what followed it.
    const std::vector<Node> following = Neighbours(driver, driver.NodeGetDependents, node);
    for (Node before : Neighbours(driver, driver.NodeGetDependencies, node)) {
      for (Node after : following) {
        const Result result = driver.GraphAddDependencies(graph, &before, &after, 1);
        if (result != kInvalidValue) driver.Check(result, kRemoving);  // which a second dependency is
      }
    }
    driver.Check(driver.GraphDestroyNode(node), kRemoving);
  }
}

std::vector<std::unique_ptr<GraphNode>> ReadNodes(const Driver& driver, const Captures::Graph& graph) {
  return Reader(driver, graph).Read();
}

}  // namespace flagos::cuda
