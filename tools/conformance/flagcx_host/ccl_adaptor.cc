// A CCL adaptor of FlagCX's for host memory: every collective is one exchange of messages over FlagCX's bootstrap sockets,
// and each member reductions what came in the order of ranks. 16-bit floats are reduced in float32 and rounded once.

#include <cmath>
#include <cstdint>
#include <cstring>
#include <future>
#include <vector>

#include "adaptor.h"

struct flagcxInnerComm {
  bootstrapState* base;
};

namespace {

constexpr int kTag = 7001;

struct Part {
  const void* send;
  size_t send_size;
  void* receive;
  size_t receive_size;
};

size_t width(flagcxDataType_t type) { return getFlagcxDataTypeSize(type); }

// parts[r] goes to rank r and comes from there. Sends run beside receives, or large ones would wait for each other.
// Nothing goes where the size is 0.
flagcxResult_t exchange_parts(flagcxInnerComm_t comm, const std::vector<Part>& parts) {
  const int size = static_cast<int>(parts.size());
  const int rank = bootstrapGetRank(comm->base);
  auto sent = std::async(std::launch::async, [&] {
    for (int step = 1; step < size; ++step) {
      const int peer = (rank + step) % size;
      if (!parts[peer].send_size) continue;
      const auto result = bootstrapSend(comm->base, peer, kTag, const_cast<void*>(parts[peer].send),
                                        static_cast<int>(parts[peer].send_size));
      if (result != flagcxSuccess) return result;
    }
    return flagcxSuccess;
  });
  flagcxResult_t received = flagcxSuccess;
  for (int step = 1; step < size && received == flagcxSuccess; ++step) {
    const int peer = (rank - step + size) % size;
    if (!parts[peer].receive_size) continue;
    received = bootstrapRecv(comm->base, peer, kTag, parts[peer].receive, static_cast<int>(parts[peer].receive_size));
  }
  const Part& own = parts[rank];
  if (own.receive_size) std::memmove(own.receive, own.send, own.receive_size);
  const flagcxResult_t result = sent.get();
  return received != flagcxSuccess ? received : result;
}

struct Half {
  uint16_t bits;
};
struct Bfloat {
  uint16_t bits;
};

template <typename T>
T load(T value) {
  return value;
}
float load(Half value) {
  _Float16 half;
  std::memcpy(&half, &value, sizeof half);
  return static_cast<float>(half);
}
float load(Bfloat value) {
  const uint32_t bits = static_cast<uint32_t>(value.bits) << 16;
  float wide;
  std::memcpy(&wide, &bits, sizeof wide);
  return wide;
}

template <typename T, typename W>
void store(T& out, W value) {
  out = static_cast<T>(value);
}
void store(Half& out, float value) {
  const _Float16 half = static_cast<_Float16>(value);
  std::memcpy(&out, &half, sizeof out);
}
void store(Bfloat& out, float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  if (std::isnan(value)) {
    out.bits = static_cast<uint16_t>((bits >> 16) | 0x40);
    return;
  }
  out.bits = static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);  // to nearest, ties to even
}

template <typename T>
flagcxResult_t reduce(const char* all, void* out, size_t count, int size, flagcxRedOp_t op) {
  T* target = static_cast<T*>(out);
  for (size_t i = 0; i < count; ++i) {
    const auto at = [&](int rank) {
      T value;
      std::memcpy(&value, all + (static_cast<size_t>(rank) * count + i) * sizeof(T), sizeof(T));
      return load(value);
    };
    auto total = at(0);
    for (int rank = 1; rank < size; ++rank) {
      const auto value = at(rank);
      switch (op) {
        case flagcxSum:
        case flagcxAvg:
          total = total + value;
          break;
        case flagcxProd:
          total = total * value;
          break;
        case flagcxMax:
          total = value > total ? value : total;
          break;
        case flagcxMin:
          total = value < total ? value : total;
          break;
        default:
          return flagcxInvalidArgument;
      }
    }
    if (op == flagcxAvg) total = total / static_cast<decltype(total)>(size);
    store(target[i], total);
  }
  return flagcxSuccess;
}

flagcxResult_t reduce(const char* all, void* out, size_t count, int size, flagcxDataType_t type, flagcxRedOp_t op) {
  switch (type) {
    case flagcxInt8:
      return reduce<int8_t>(all, out, count, size, op);
    case flagcxUint8:
      return reduce<uint8_t>(all, out, count, size, op);
    case flagcxInt32:
      return reduce<int32_t>(all, out, count, size, op);
    case flagcxUint32:
      return reduce<uint32_t>(all, out, count, size, op);
    case flagcxInt64:
      return reduce<int64_t>(all, out, count, size, op);
    case flagcxUint64:
      return reduce<uint64_t>(all, out, count, size, op);
    case flagcxFloat16:
      return reduce<Half>(all, out, count, size, op);
    case flagcxFloat32:
      return reduce<float>(all, out, count, size, op);
    case flagcxFloat64:
      return reduce<double>(all, out, count, size, op);
    case flagcxBfloat16:
      return reduce<Bfloat>(all, out, count, size, op);
    default:
      return flagcxInvalidArgument;
  }
}

int members(flagcxInnerComm_t comm) { return bootstrapGetNranks(comm->base); }
int own(flagcxInnerComm_t comm) { return bootstrapGetRank(comm->base); }
char* at(void* base, size_t offset) { return static_cast<char*>(base) + offset; }
const char* at(const void* base, size_t offset) { return static_cast<const char*>(base) + offset; }

flagcxResult_t all_gather(const void* send, void* receive, size_t count, flagcxDataType_t type, flagcxInnerComm_t comm,
                          flagcxStream_t) {
  const size_t bytes = count * width(type);
  std::vector<Part> parts;
  for (int rank = 0; rank < members(comm); ++rank) parts.push_back({send, bytes, at(receive, rank * bytes), bytes});
  return exchange_parts(comm, parts);
}

flagcxResult_t all_reduce(const void* send, void* receive, size_t count, flagcxDataType_t type, flagcxRedOp_t op,
                          flagcxInnerComm_t comm, flagcxStream_t stream) {
  std::vector<char> all(members(comm) * count * width(type));
  const auto result = all_gather(send, all.data(), count, type, comm, stream);
  return result != flagcxSuccess ? result : reduce(all.data(), receive, count, members(comm), type, op);
}

flagcxResult_t gather(const void* send, void* receive, size_t count, flagcxDataType_t type, int root,
                      flagcxInnerComm_t comm, flagcxStream_t) {
  const size_t bytes = count * width(type);
  std::vector<Part> parts(members(comm));
  parts[root].send = send;
  parts[root].send_size = bytes;
  if (own(comm) == root) {
    for (int rank = 0; rank < members(comm); ++rank) {
      parts[rank].receive = at(receive, rank * bytes);
      parts[rank].receive_size = bytes;
    }
  }
  return exchange_parts(comm, parts);
}

flagcxResult_t reduce(const void* send, void* receive, size_t count, flagcxDataType_t type, flagcxRedOp_t op, int root,
                      flagcxInnerComm_t comm, flagcxStream_t stream) {
  std::vector<char> all(own(comm) == root ? members(comm) * count * width(type) : 0);
  const auto result = gather(send, all.data(), count, type, root, comm, stream);
  if (result != flagcxSuccess || own(comm) != root) return result;
  return reduce(all.data(), receive, count, members(comm), type, op);
}

flagcxResult_t scatter(const void* send, void* receive, size_t count, flagcxDataType_t type, int root,
                       flagcxInnerComm_t comm, flagcxStream_t) {
  const size_t bytes = count * width(type);
  std::vector<Part> parts(members(comm));
  if (own(comm) == root) {
    for (int rank = 0; rank < members(comm); ++rank) {
      parts[rank].send = at(send, rank * bytes);
      parts[rank].send_size = bytes;
    }
  }
  parts[root].receive = receive;
  parts[root].receive_size = bytes;
  return exchange_parts(comm, parts);
}

flagcxResult_t broadcast(const void* send, void* receive, size_t count, flagcxDataType_t type, int root,
                         flagcxInnerComm_t comm, flagcxStream_t) {
  const size_t bytes = count * width(type);
  std::vector<Part> parts(members(comm));
  if (own(comm) == root) {
    for (auto& part : parts) part = {send, bytes, nullptr, 0};
  }
  parts[root].receive = receive;
  parts[root].receive_size = bytes;
  return exchange_parts(comm, parts);
}

flagcxResult_t all_to_all_v(const void* send, size_t* counts, size_t* starts, void* receive, size_t* receive_counts,
                            size_t* receive_starts, flagcxDataType_t type, flagcxInnerComm_t comm, flagcxStream_t) {
  const size_t each = width(type);
  std::vector<Part> parts;
  for (int rank = 0; rank < members(comm); ++rank) {
    parts.push_back({at(send, starts[rank] * each), counts[rank] * each, at(receive, receive_starts[rank] * each),
                     receive_counts[rank] * each});
  }
  return exchange_parts(comm, parts);
}

flagcxResult_t all_to_all(const void* send, void* receive, size_t count, flagcxDataType_t type, flagcxInnerComm_t comm,
                          flagcxStream_t stream) {
  std::vector<size_t> counts(members(comm), count), starts;
  for (int rank = 0; rank < members(comm); ++rank) starts.push_back(rank * count);
  return all_to_all_v(send, counts.data(), starts.data(), receive, counts.data(), starts.data(), type, comm, stream);
}

flagcxResult_t reduce_scatter(const void* send, void* receive, size_t count, flagcxDataType_t type, flagcxRedOp_t op,
                              flagcxInnerComm_t comm, flagcxStream_t stream) {
  std::vector<char> all(members(comm) * count * width(type));
  const auto result = all_to_all(send, all.data(), count, type, comm, stream);
  return result != flagcxSuccess ? result : reduce(all.data(), receive, count, members(comm), type, op);
}

// What a group holds back until it ends: the sends then run beside the receives, in the order that they came in.
struct Held {
  flagcxInnerComm_t comm;
  void* buffer;
  size_t bytes;
  int peer;
};
thread_local int depth = 0;
thread_local std::vector<Held> sends, receives;

flagcxResult_t flush() {
  std::vector<Held> out, in;
  out.swap(sends);
  in.swap(receives);
  // What a member sends itself takes no socket.
  for (auto& to : out) {
    if (to.peer != own(to.comm)) continue;
    for (auto& from : in) {
      if (from.comm != to.comm || from.peer != to.peer) continue;
      if (from.bytes != to.bytes) return flagcxInvalidArgument;
      std::memmove(from.buffer, to.buffer, to.bytes);
      from.comm = nullptr;
      to.comm = nullptr;
      break;
    }
    if (to.comm) return flagcxInvalidUsage;
  }
  auto sent = std::async(std::launch::async, [&out] {
    for (const auto& one : out) {
      if (!one.comm) continue;
      const auto result = bootstrapSend(one.comm->base, one.peer, kTag, one.buffer, static_cast<int>(one.bytes));
      if (result != flagcxSuccess) return result;
    }
    return flagcxSuccess;
  });
  flagcxResult_t received = flagcxSuccess;
  for (const auto& one : in) {
    if (!one.comm || received != flagcxSuccess) continue;
    received = bootstrapRecv(one.comm->base, one.peer, kTag, one.buffer, static_cast<int>(one.bytes));
  }
  const flagcxResult_t result = sent.get();
  return received != flagcxSuccess ? received : result;
}

flagcxResult_t group_start() {
  ++depth;
  return flagcxSuccess;
}

flagcxResult_t group_end() { return --depth ? flagcxSuccess : flush(); }

flagcxResult_t send(const void* buffer, size_t count, flagcxDataType_t type, int peer, flagcxInnerComm_t comm,
                    flagcxStream_t) {
  sends.push_back({comm, const_cast<void*>(buffer), count * width(type), peer});
  return depth ? flagcxSuccess : flush();
}

flagcxResult_t receive(void* buffer, size_t count, flagcxDataType_t type, int peer, flagcxInnerComm_t comm,
                       flagcxStream_t) {
  receives.push_back({comm, buffer, count * width(type), peer});
  return depth ? flagcxSuccess : flush();
}

flagcxResult_t version(int* out) {
  *out = 1;
  return flagcxSuccess;
}

// The identifier is a bootstrap handle. Its root runs in the process that asked for it.
flagcxResult_t unique_id(flagcxInnerUniqueId_t* id) {
  static_assert(sizeof(flagcxBootstrapHandle) <= sizeof(flagcxInnerUniqueId), "a handle has to fit an identifier");
  const auto result = bootstrapNetInit();
  return result != flagcxSuccess ? result : bootstrapGetUniqueId(reinterpret_cast<flagcxBootstrapHandle*>(*id));
}

const char* error_string(flagcxResult_t) { return "see FlagCX's log"; }
const char* last_error(flagcxInnerComm_t) { return "see FlagCX's log"; }
flagcxResult_t staged_buffer(const flagcxInnerComm_t, void**, size_t, int) { return flagcxNotSupported; }

flagcxResult_t comm_init(flagcxInnerComm_t* comm, int size, flagcxInnerUniqueId* id, int rank, bootstrapState*) {
  static uint32_t never = 0;
  auto* handle = reinterpret_cast<flagcxBootstrapHandle*>(id);
  auto made = new flagcxInnerComm{};
  const auto result = bootstrapCollInit(handle, rank, size, handle->magic, &never, &made->base);
  if (result != flagcxSuccess) {
    delete made;
    return result;
  }
  *comm = made;
  return flagcxSuccess;
}

flagcxResult_t comm_nothing(flagcxInnerComm_t) { return flagcxSuccess; }

flagcxResult_t comm_destroy(flagcxInnerComm_t comm) {
  const auto result = bootstrapClose(comm->base);
  delete comm;
  return result;
}

flagcxResult_t comm_not(flagcxInnerComm_t) { return flagcxNotSupported; }

flagcxResult_t comm_count(const flagcxInnerComm_t comm, int* out) {
  *out = members(comm);
  return flagcxSuccess;
}

flagcxResult_t comm_device(const flagcxInnerComm_t, int* out) {
  *out = 0;
  return flagcxSuccess;
}

flagcxResult_t comm_rank(const flagcxInnerComm_t comm, int* out) {
  *out = own(comm);
  return flagcxSuccess;
}

flagcxResult_t async_error(flagcxInnerComm_t, flagcxResult_t* out) {
  *out = flagcxSuccess;
  return flagcxSuccess;
}

flagcxResult_t memory_allocate(void**, size_t) { return flagcxNotSupported; }
flagcxResult_t memory_free(void*) { return flagcxNotSupported; }
flagcxResult_t register_buffer(const flagcxInnerComm_t, void*, size_t, void**) { return flagcxNotSupported; }
flagcxResult_t deregister_buffer(const flagcxInnerComm_t, void*) { return flagcxNotSupported; }
flagcxResult_t register_window(flagcxInnerComm_t, void*, size_t, flagcxInnerWindow_t*, int) {
  return flagcxNotSupported;
}
flagcxResult_t deregister_window(flagcxInnerComm_t, flagcxInnerWindow_t) { return flagcxNotSupported; }

}  // namespace

extern "C" __attribute__((visibility("default"))) flagcxCCLAdaptor_v1 flagcxCCLAdaptorPlugin_v1 = {
    "FLAGOS_HOST",     version,      unique_id,       error_string, last_error,      staged_buffer,     comm_init,
    comm_nothing,      comm_destroy, comm_destroy,    comm_not,     comm_not,        comm_count,        comm_device,
    comm_rank,         async_error,  memory_allocate, memory_free,  register_buffer, deregister_buffer, register_window,
    deregister_window, reduce,       gather,          scatter,      broadcast,       all_reduce,        reduce_scatter,
    all_gather,        all_to_all,   all_to_all_v,    send,         receive,         group_start,       group_end,
};
