#include "cuda/proof.h"

#include <algorithm>
#include <utility>

#include "cuda/verification.h"
#include "error.h"

namespace flagos::cuda {
namespace {

void CheckAlike(const GraphNode& one, const GraphNode& other, size_t number) {
  if (one.type != other.type) {
    Fail(FLAGOS_UNIMPLEMENTED, "node %zu is of another kind in each capture", number);
  }
  if (!one.IsLike(other)) {
    Fail(FLAGOS_UNIMPLEMENTED, "node %zu launches another kernel in each capture, or fills or copies another amount",
         number);
  }
  const bool same_sizes = std::equal(one.parts.begin(), one.parts.end(), other.parts.begin(), other.parts.end(),
                                     [](const auto& a, const auto& b) { return a.size == b.size; });
  if (!same_sizes) {
    Fail(FLAGOS_UNIMPLEMENTED, "node %zu has parameters of another size in each capture", number);
  }
}

size_t WordsOf(const GraphNode::Part& part) { return (part.size + sizeof(uint64_t) - 1) / sizeof(uint64_t); }

}  // namespace

GraphProof::GraphProof(const CudaStreams& streams, const Captures& captures)
    : streams_(streams), arrays_(captures.arrays), conditionals_(captures.first.conditionals.size()) {
  const Driver& driver = streams.driver();
  ContextScope current(driver, streams.context());
  if (conditionals_ != captures.second.conditionals.size() || conditionals_ != captures.third.conditionals.size()) {
    Fail(FLAGOS_UNIMPLEMENTED, "three captures have %zu, %zu and %zu conditional nodes", conditionals_,
         captures.second.conditionals.size(), captures.third.conditionals.size());
  }
  for (const Captures::Graph* graph : {&captures.first, &captures.second, &captures.third}) {
    RemoveEvents(driver, graph->handle);
  }
  nodes_ = ReadNodes(driver, captures.first);
  const auto second = ReadNodes(driver, captures.second), third = ReadNodes(driver, captures.third);
  if (nodes_.size() != second.size() || nodes_.size() != third.size()) {
    Fail(FLAGOS_UNIMPLEMENTED, "three captures have %zu, %zu and %zu nodes", nodes_.size(), second.size(),
         third.size());
  }
  const Comparison comparison(captures);
  known_.resize(nodes_.size());
  for (size_t i = 0; i < nodes_.size(); ++i) {
    CheckAlike(*nodes_[i], *second[i], i);
    CheckAlike(*nodes_[i], *third[i], i);
    for (size_t j = 0; j < nodes_[i]->parts.size(); ++j) {
      const GraphNode::Part& part = nodes_[i]->parts[j];
      comparison.Compare({part.bytes, second[i]->parts[j].bytes, third[i]->parts[j].bytes, part.size}, part.name, i,
                         known_[i]);
    }
  }
  for (size_t number = 0; number < arrays_.size(); ++number) {
    if (arrays_[number].stands_for != Captures::Array::kItself && !IsFound(number)) {
      Fail(FLAGOS_UNIMPLEMENTED, "a collective keeps the address of array %zu elsewhere than in the graph",
           arrays_[number].stands_for);
    }
  }
}

bool GraphProof::IsFound(size_t array) const noexcept {
  const auto is_it = [array](const Known& known) { return known.kind == Known::Kind::kArray && known.number == array; };
  return std::any_of(known_.begin(), known_.end(), [&is_it](const std::vector<Known>& words) {
    return std::any_of(words.begin(), words.end(), is_it);
  });
}

void GraphProof::PutInPlace(Patch& patch) const noexcept {
  const size_t number = arrays_[patch.array].stands_for;
  if (number == Captures::Array::kItself) return;
  patch.array = number;
  *patch.place = arrays_[number].first + patch.offset;
}

std::unique_ptr<Replay> GraphProof::MakeReplay(const Captures::Graph& kept) const {
  const Driver& driver = streams_.driver();
  ContextScope current(driver, streams_.context());
  RemoveEvents(driver, kept.handle);
  auto nodes = ReadNodes(driver, kept);
  if (nodes.size() != nodes_.size() || kept.conditionals.size() != conditionals_) {
    Fail(FLAGOS_UNIMPLEMENTED, "captures have %zu and %zu nodes, %zu and %zu of them conditional", nodes_.size(),
         nodes.size(), conditionals_, kept.conditionals.size());
  }
  const Verification verification(kept, arrays_);
  std::vector<PatchedNode> patched;
  for (size_t i = 0; i < nodes.size(); ++i) {
    CheckAlike(*nodes_[i], *nodes[i], i);
    std::vector<Patch> patches;
    const Known* known = known_[i].data();
    for (const GraphNode::Part& part : nodes[i]->parts) {
      verification.Check(part.bytes, part.size, known, part.name, i, patches);
      known += WordsOf(part);
    }
    for (Patch& patch : patches) PutInPlace(patch);
    if (!patches.empty()) patched.push_back({std::move(nodes[i]), std::move(patches)});
  }
  const auto is_itself = [](const Captures::Array& array) { return array.stands_for == Captures::Array::kItself; };
  const auto end = std::partition_point(arrays_.begin(), arrays_.end(), is_itself);
  return MakeGraphReplay(streams_, kept.handle, nodes.size(), std::move(patched), {arrays_.begin(), end});
}

}  // namespace flagos::cuda
