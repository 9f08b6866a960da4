// Collectives among devices that share this process's memory, without the interpreter.
#ifndef FLAGOS_NATIVE_COLLECTIVE_H_
#define FLAGOS_NATIVE_COLLECTIVE_H_

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "python.h"

namespace flagos {

// One collective of a program, as compile/native_collectives.py describes it.
struct Collective {
  enum Kind : int64_t { kAllReduce, kReduceScatter, kAllGather, kAllToAll, kPermute };
  enum Function : int64_t { kAdd, kMultiply, kMaximum, kMinimum, kAnd, kOr };
  struct Part {
    int64_t type;          // FLAGOS_TYPE_*
    int64_t outer, inner;  // rows, and the bytes of one participant's share of each
  };

  int64_t kind = 0, function = -1;
  std::vector<Part> parts;
  std::vector<std::vector<int64_t>> participants;  // by device of the launch
  std::vector<int64_t> sources;                    // by rank

  // Throws Failure(INTERNAL) for what contradicts itself, given the number of devices.
  explicit Collective(python::Reader reader, int64_t devices);
};

// Where the devices of one launch meet: each runs the same collectives in a thread of its own, and reads what it needs of
// the others' operands. All methods may be called from several threads.
class Rendezvous {
 public:
  enum class Outcome { kDone, kAborted, kLate };

  // `timeout`: how long a collective waits for its participants.
  explicit Rendezvous(std::chrono::nanoseconds timeout) : timeout_(timeout) {}

  // The collective `number` as `device` has it: one operand and one result for each part. Where it is late, `missing` gets
  // the devices that have not come. Until it returns others may read the operands, and nobody does afterwards.
  Outcome Perform(int64_t number, const Collective& collective, int64_t device, const void* const* operands,
                  void* const* results, std::vector<int64_t>& missing);

  // Whoever waits for a participant, or comes later, is told kAborted.
  void Abort() noexcept;

 private:
  // One group of one collective, in one round after the other. What a participant says of a round stays until it comes to
  // the second next: nobody comes to the next before all are done with this one.
  struct Group {
    struct Said {
      const void* const* operands = nullptr;
      void* const* results = nullptr;
      std::vector<char> copies;  // of small operands, so that nobody waits until they were read
      std::vector<const void*> copied;
    };
    std::vector<Said> said[2];  // by the round's parity, rank
    std::vector<char> here;
    size_t came = 0;
    std::atomic<uint64_t> round{0};
  };

  Group& Find(int64_t number, const std::vector<int64_t>& participants);
  // Returns when all have come; only the first of a collective's barriers may fail.
  Outcome Enter(Group& group, size_t rank);
  void Wait(Group& group);
  static bool Spin(const Group& group, uint64_t round);
  static void AllReduce(const Collective& collective, const std::vector<Group::Said>& said, size_t rank,
                        bool own_share);

  const std::chrono::nanoseconds timeout_;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool aborted_ = false;
  std::map<std::pair<int64_t, int64_t>, std::unique_ptr<Group>>
      groups_;  // by the collective's number, first participant
};

}  // namespace flagos

#endif  // FLAGOS_NATIVE_COLLECTIVE_H_
