#include "collective.h"

#include <algorithm>
#include <cstring>
#include <thread>
#include <type_traits>

#include "description.h"
#include "error.h"
#include "flagos/plugin_abi.h"
#include "spin.h"

namespace flagos {
namespace {

// Bytes of an array from which on each participant reduces its share of it, and copies the others'. Below, a third barrier
// costs more than reading all operands.
constexpr int64_t kShared = 1 << 16;
// Bytes of all operands up to which each participant copies its own, which saves the barrier at the end.
constexpr int64_t kCopied = 1 << 15;
constexpr int64_t kAlignment = 64;
// Elements that stay in the nearest cache while one operand after the other is added to them.
constexpr int64_t kBlock = 2048;
constexpr int kSpins = 500;

size_t SizeOf(int64_t type) {
  switch (type) {
    case FLAGOS_TYPE_PRED:
    case FLAGOS_TYPE_S8:
    case FLAGOS_TYPE_U8:
      return 1;
    case FLAGOS_TYPE_S16:
    case FLAGOS_TYPE_U16:
      return 2;
    case FLAGOS_TYPE_S32:
    case FLAGOS_TYPE_U32:
    case FLAGOS_TYPE_F32:
      return 4;
    case FLAGOS_TYPE_S64:
    case FLAGOS_TYPE_U64:
    case FLAGOS_TYPE_F64:
      return 8;
    default:
      return 0;
  }
}

// Sums and products of integers wrap around.
template <typename T>
using Wrapping =
    typename std::conditional_t<std::is_integral_v<T>, std::make_unsigned<T>, std::enable_if<true, T>>::type;

template <typename T>
struct Add {
  T operator()(T a, T b) const { return static_cast<T>(static_cast<Wrapping<T>>(a) + static_cast<Wrapping<T>>(b)); }
};

template <typename T>
struct Multiply {
  // Of 16 bits promotion would make signed products that overflow.
  using Wide = std::conditional_t<std::is_integral_v<T>, uint64_t, T>;
  T operator()(T a, T b) const { return static_cast<T>(static_cast<Wide>(a) * static_cast<Wide>(b)); }
};

template <typename T>
struct Maximum {
  T operator()(T a, T b) const { return a > b || a != a ? a : b; }
};

template <typename T>
struct Minimum {
  T operator()(T a, T b) const { return a < b || a != a ? a : b; }
};

template <typename T>
struct And {
  T operator()(T a, T b) const { return static_cast<T>(a & b); }
};

template <typename T>
struct Or {
  T operator()(T a, T b) const { return static_cast<T>(a | b); }
};

// The operands in the order of ranks, alike for every participant.
template <typename T, typename F>
void Reduce(const std::vector<const char*>& operands, void* result, int64_t count, F function) {
  T* const out = static_cast<T*>(result);
  for (int64_t begin = 0; begin < count; begin += kBlock) {
    const int64_t end = std::min(count, begin + kBlock);
    const T* const first = reinterpret_cast<const T*>(operands[0]);
    std::copy(first + begin, first + end, out + begin);
    for (size_t rank = 1; rank < operands.size(); ++rank) {
      const T* const other = reinterpret_cast<const T*>(operands[rank]);
      for (int64_t i = begin; i < end; ++i) out[i] = function(out[i], other[i]);
    }
  }
}

template <typename T>
void ReduceWith(int64_t function, const std::vector<const char*>& operands, void* result, int64_t count) {
  switch (function) {
    case Collective::kAdd:
      return Reduce<T>(operands, result, count, Add<T>());
    case Collective::kMultiply:
      return Reduce<T>(operands, result, count, Multiply<T>());
    case Collective::kMaximum:
      return Reduce<T>(operands, result, count, Maximum<T>());
    case Collective::kMinimum:
      return Reduce<T>(operands, result, count, Minimum<T>());
    default:
      break;
  }
  if constexpr (std::is_integral_v<T>) {
    if (function == Collective::kAnd) return Reduce<T>(operands, result, count, And<T>());
    return Reduce<T>(operands, result, count, Or<T>());
  }
}

// `bytes` of each operand at its address.
void Reduce(const Collective& collective, int64_t type, const std::vector<const char*>& operands, void* result,
            int64_t bytes) {
  const int64_t count = bytes / static_cast<int64_t>(SizeOf(type)), function = collective.function;
  switch (type) {
    case FLAGOS_TYPE_S8:
      return ReduceWith<int8_t>(function, operands, result, count);
    case FLAGOS_TYPE_PRED:
    case FLAGOS_TYPE_U8:
      return ReduceWith<uint8_t>(function, operands, result, count);
    case FLAGOS_TYPE_S16:
      return ReduceWith<int16_t>(function, operands, result, count);
    case FLAGOS_TYPE_U16:
      return ReduceWith<uint16_t>(function, operands, result, count);
    case FLAGOS_TYPE_S32:
      return ReduceWith<int32_t>(function, operands, result, count);
    case FLAGOS_TYPE_U32:
      return ReduceWith<uint32_t>(function, operands, result, count);
    case FLAGOS_TYPE_S64:
      return ReduceWith<int64_t>(function, operands, result, count);
    case FLAGOS_TYPE_U64:
      return ReduceWith<uint64_t>(function, operands, result, count);
    case FLAGOS_TYPE_F32:
      return ReduceWith<float>(function, operands, result, count);
    default:
      return ReduceWith<double>(function, operands, result, count);
  }
}

// Where all operands of a part begin, in the order of ranks.
template <typename Said>
std::vector<const char*> At(const std::vector<Said>& said, size_t part, int64_t offset) {
  std::vector<const char*> found;
  for (const Said& one : said) found.push_back(static_cast<const char*>(one.operands[part]) + offset);
  return found;
}

int64_t BytesOfOperand(const Collective& collective, size_t part, size_t size) {
  const bool is_split = collective.kind == Collective::kReduceScatter || collective.kind == Collective::kAllToAll;
  const Collective::Part& of = collective.parts[part];
  return of.outer * of.inner * (is_split ? static_cast<int64_t>(size) : 1);
}

// The share of rank `number` of `bytes`, in whole elements.
std::pair<int64_t, int64_t> ShareOf(int64_t bytes, int64_t element, size_t number, size_t size) {
  const int64_t count = bytes / element, ranks = static_cast<int64_t>(size), rank = static_cast<int64_t>(number);
  return {count * rank / ranks * element, count * (rank + 1) / ranks * element};
}

void Copy(void* to, const void* from, int64_t bytes) {
  if (bytes > 0) std::memcpy(to, from, static_cast<size_t>(bytes));
}

}  // namespace

Collective::Collective(python::Reader reader, int64_t devices) {
  kind = reader.Integer();
  function = reader.Integer();
  python::Reader list = reader.Tuple();
  while (!list.done()) {
    python::Reader part = list.Tuple();
    parts.push_back({});
    parts.back().type = part.Integer();
    parts.back().outer = part.Integer();
    parts.back().inner = part.Integer();
  }
  python::Reader groups = reader.Tuple();
  while (!groups.done()) participants.push_back(ReadIntegers(groups.Tuple()));
  sources = ReadIntegers(reader.Tuple());
  const bool reduces = kind == kAllReduce || kind == kReduceScatter;
  bool fits = kind >= kAllReduce && kind <= kPermute && static_cast<int64_t>(participants.size()) == devices;
  fits = fits && (reduces ? function >= kAdd && function <= kOr : function == -1);
  for (const Part& part : parts) {
    const bool bitwise = function == kAnd || function == kOr;
    const bool is_float = part.type == FLAGOS_TYPE_F32 || part.type == FLAGOS_TYPE_F64;
    fits =
        fits && part.outer >= 0 && part.inner >= 0 && (!reduces || (SizeOf(part.type) > 0 && !(bitwise && is_float)));
  }
  for (int64_t device = 0; fits && device < devices; ++device) {
    const std::vector<int64_t>& group = participants[static_cast<size_t>(device)];
    if (group.empty()) {
      fits = kind == kPermute;
      continue;
    }
    fits = std::count(group.begin(), group.end(), device) == 1 && (kind != kPermute || group.size() == sources.size());
    for (const int64_t number : group) fits = fits && number >= 0 && number < devices;
    for (const int64_t source : sources) fits = fits && source < static_cast<int64_t>(group.size());
  }
  if (!fits) {
    Fail(FLAGOS_INTERNAL,
         "compile: a collective contradicts itself; this is a defect of the backend, please report it");
  }
}

Rendezvous::Outcome Rendezvous::Perform(int64_t number, const Collective& collective, int64_t device,
                                        const void* const* operands, void* const* results,
                                        std::vector<int64_t>& missing) {
  const std::vector<int64_t>& participants = collective.participants[static_cast<size_t>(device)];
  const size_t count = collective.parts.size();
  if (participants.empty()) {
    for (size_t i = 0; i < count; ++i) {
      std::memset(results[i], 0, static_cast<size_t>(collective.parts[i].outer * collective.parts[i].inner));
    }
    return Outcome::kDone;
  }
  const size_t size = participants.size();
  const size_t rank =
      static_cast<size_t>(std::find(participants.begin(), participants.end(), device) - participants.begin());
  Group& group = Find(number, participants);
  std::vector<Group::Said>& said = group.said[group.round.load(std::memory_order_relaxed) & 1];
  Group::Said& mine = said[rank];
  mine.operands = operands;
  mine.results = results;
  int64_t bytes = 0;
  for (size_t i = 0; i < count; ++i) {
    bytes += (BytesOfOperand(collective, i, size) + kAlignment - 1) / kAlignment * kAlignment;
  }
  const bool copied = bytes <= kCopied;
  if (copied) {
    mine.copies.resize(static_cast<size_t>(bytes));
    mine.copied.clear();
    char* next = mine.copies.data();
    for (size_t i = 0; i < count; ++i) {
      const int64_t size_of = BytesOfOperand(collective, i, size);
      Copy(next, operands[i], size_of);
      mine.copied.push_back(next);
      next += (size_of + kAlignment - 1) / kAlignment * kAlignment;
    }
    mine.operands = mine.copied.data();
  }
  const Outcome entered = Enter(group, rank);
  if (entered != Outcome::kDone) {
    std::lock_guard<std::mutex> lock(mutex_);
    for (size_t i = 0; i < size; ++i) {
      if (!group.here[i] && i != rank) missing.push_back(participants[i]);
    }
    return entered;
  }
  if (collective.kind == Collective::kAllReduce) {
    AllReduce(collective, said, rank, true);
    const auto is_shared = [](const Collective::Part& part) { return part.inner >= kShared; };
    if (std::any_of(collective.parts.begin(), collective.parts.end(), is_shared)) {
      Wait(group);
      AllReduce(collective, said, rank, false);
    }
  }
  for (size_t i = 0; i < count && collective.kind != Collective::kAllReduce; ++i) {
    const Collective::Part& part = collective.parts[i];
    char* const out = static_cast<char*>(results[i]);
    const int64_t ranks = static_cast<int64_t>(size), me = static_cast<int64_t>(rank);
    for (int64_t row = 0; row < part.outer; ++row) {
      if (collective.kind == Collective::kReduceScatter) {
        Reduce(collective, part.type, At(said, i, (row * ranks + me) * part.inner), out + row * part.inner, part.inner);
        continue;
      }
      if (collective.kind == Collective::kPermute) {
        const int64_t source = collective.sources[rank];
        if (source < 0) {
          std::memset(out + row * part.inner, 0, static_cast<size_t>(part.inner));
          continue;
        }
        const char* const from = static_cast<const char*>(said[static_cast<size_t>(source)].operands[i]);
        Copy(out + row * part.inner, from + row * part.inner, part.inner);
        continue;
      }
      for (int64_t r = 0; r < ranks; ++r) {
        const char* const from = static_cast<const char*>(said[static_cast<size_t>(r)].operands[i]);
        const int64_t at = collective.kind == Collective::kAllGather ? row : row * ranks + me;
        Copy(out + (row * ranks + r) * part.inner, from + at * part.inner, part.inner);
      }
    }
  }
  if (!copied) Wait(group);
  return Outcome::kDone;
}

// Small arrays are reduced by everybody; of large ones everybody reduces a share into its own result, `own_share`, from
// where the others copy it after a barrier.
void Rendezvous::AllReduce(const Collective& collective, const std::vector<Group::Said>& said, size_t rank,
                           bool own_share) {
  const size_t size = said.size();
  for (size_t i = 0; i < collective.parts.size(); ++i) {
    const Collective::Part& part = collective.parts[i];
    char* const out = static_cast<char*>(said[rank].results[i]);
    if (part.inner < kShared) {
      if (own_share) Reduce(collective, part.type, At(said, i, 0), out, part.inner);
      continue;
    }
    const int64_t element = static_cast<int64_t>(SizeOf(part.type));
    for (size_t r = 0; r < size; ++r) {
      const auto [begin, end] = ShareOf(part.inner, element, r, size);
      if (own_share && r == rank) {
        Reduce(collective, part.type, At(said, i, begin), out + begin, end - begin);
      } else if (!own_share && r != rank) {
        Copy(out + begin, static_cast<const char*>(said[r].results[i]) + begin, end - begin);
      }
    }
  }
}

void Rendezvous::Abort() noexcept {
  std::lock_guard<std::mutex> lock(mutex_);
  aborted_ = true;
  changed_.notify_all();
}

Rendezvous::Group& Rendezvous::Find(int64_t number, const std::vector<int64_t>& participants) {
  std::lock_guard<std::mutex> lock(mutex_);
  std::unique_ptr<Group>& group = groups_[{number, participants.front()}];
  if (!group) {
    group = std::make_unique<Group>();
    for (std::vector<Group::Said>& said : group->said) said.resize(participants.size());
    group->here.resize(participants.size());
  }
  return *group;
}

// A few microseconds: most participants come at about the same time, and a thread that sleeps wakes late.
bool Rendezvous::Spin(const Group& group, uint64_t round) {
  static const unsigned cores = std::max(1U, std::thread::hardware_concurrency());
  if (group.here.size() > cores) return false;
  for (int i = 0; i < kSpins; ++i) {
    if (group.round.load(std::memory_order_acquire) != round) return true;
    Pause();
  }
  return false;
}

Rendezvous::Outcome Rendezvous::Enter(Group& group, size_t rank) {
  std::unique_lock<std::mutex> lock(mutex_);
  if (aborted_) return Outcome::kAborted;
  const uint64_t round = group.round.load(std::memory_order_relaxed);
  group.here[rank] = 1;
  if (++group.came == group.here.size()) {
    group.came = 0;
    std::fill(group.here.begin(), group.here.end(), 0);
    group.round.store(round + 1, std::memory_order_release);
    changed_.notify_all();
    return Outcome::kDone;
  }
  lock.unlock();
  if (Spin(group, round)) return Outcome::kDone;
  lock.lock();
  const auto ended = [this, &group, round] { return group.round.load(std::memory_order_relaxed) != round || aborted_; };
  const bool in_time = changed_.wait_for(lock, timeout_, ended);
  if (group.round.load(std::memory_order_relaxed) != round) return Outcome::kDone;
  // Whoever comes later finds the launch given up.
  aborted_ = true;
  changed_.notify_all();
  return in_time ? Outcome::kAborted : Outcome::kLate;
}

void Rendezvous::Wait(Group& group) {
  std::unique_lock<std::mutex> lock(mutex_);
  const uint64_t round = group.round.load(std::memory_order_relaxed);
  if (++group.came == group.here.size()) {
    group.came = 0;
    group.round.store(round + 1, std::memory_order_release);
    changed_.notify_all();
    return;
  }
  lock.unlock();
  if (Spin(group, round)) return;
  lock.lock();
  changed_.wait(lock, [&group, round] { return group.round.load(std::memory_order_relaxed) != round; });
}

}  // namespace flagos
