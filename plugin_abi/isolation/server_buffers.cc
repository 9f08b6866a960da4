// What the child does for calls about contexts, devices, buffers and their contents.
#include <sys/socket.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "named_values.h"
#include "server.h"

namespace flagos_isolation {
namespace {

template <typename Args>
Args New() {
  Args args{};
  args.struct_size = sizeof(Args);
  return args;
}

std::string Text(const char* text) { return text == nullptr ? "" : text; }

// -1 where it is none of them.
template <typename T>
int64_t IndexOf(T* wanted, const std::vector<T*>& all) {
  for (size_t i = 0; i < all.size(); ++i) {
    if (all[i] == wanted) return static_cast<int64_t>(i);
  }
  return -1;
}

template <typename T>
std::vector<int64_t> IndicesOf(T* const* wanted, size_t count, const std::vector<T*>& all) {
  std::vector<int64_t> indices;
  for (size_t i = 0; i < count; ++i) indices.push_back(IndexOf(wanted[i], all));
  return indices;
}

Status NoSuch(const char* what) {
  return MakeStatus(FLAGOS_INVALID_ARGUMENT, std::string("the backend's process has no such ") + what);
}

// Processes that compute together talk over sockets, which the rights of this one may not allow.
Status CanOpenSockets() {
  const Descriptor tried(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (tried.valid()) return nullptr;
  return MakeStatus(FLAGOS_PERMISSION_DENIED,
                    std::string("a context of several processes needs sockets, which the rights of the backend's "
                                "process do not allow (") +
                        std::strerror(errno) + "). Set FLAGOS_ISOLATION_NEEDS=network to allow them.");
}

}  // namespace

// ---- Context --------------------------------------------------------------------------------------------------------

Status Server::ContextCreate(const Call& call, Reply* reply) {
  if (context_ != nullptr) return MakeStatus(FLAGOS_FAILED_PRECONDITION, "the backend's process has a context already");
  const std::vector<FlagosNamedValue> options = ToAbi(call.options);
  auto args = New<FlagosContextCreateArgs>();
  args.options = options.data();
  args.num_options = options.size();
  args.process_index = static_cast<int32_t>(call.process_index);
  args.num_processes = static_cast<int32_t>(call.num_processes);
  if (args.num_processes > 1) {
    if (Status status = CanOpenSockets(); status != nullptr) return status;
  }
  if ((call.number & kGivesCallback) != 0) {
    args.host_callback = HostCallback;
    args.host_callback_user_data = this;
  }
  if ((call.number & kGivesStore) != 0) {
    args.key_value_get = KeyValueGet;
    args.key_value_put = KeyValuePut;
    args.key_value_user_data = this;
  }
  if (Status status = Take(api_.context_create(&args)); status != nullptr) return status;
  context_ = args.context;
  Status status = DescribeContext(&reply->context);
  if (status != nullptr) ContextDestroy();
  return status;
}

Status Server::DescribeContext(Context* described) {
  auto args = New<FlagosContextDescribeArgs>();
  args.context = context_;
  if (Status status = Take(api_.context_describe(&args)); status != nullptr) return status;
  devices_.assign(args.devices, args.devices + args.num_devices);
  memories_.assign(args.memories, args.memories + args.num_memories);
  described->platform_name = Text(args.platform_name);
  described->platform_version = Text(args.platform_version);
  described->addressable_devices = IndicesOf(args.addressable_devices, args.num_addressable_devices, devices_);
  for (FlagosDevice* handle : devices_) {
    auto device = New<FlagosDeviceDescribeArgs>();
    device.device = handle;
    if (Status status = Take(api_.device_describe(&device)); status != nullptr) return status;
    described->devices.push_back({device.id, device.process_index, device.local_hardware_id, device.is_addressable,
                                  Text(device.kind), Text(device.debug_string), Text(device.to_string),
                                  FromAbi(device.attributes, device.num_attributes),
                                  IndicesOf(device.memories, device.num_memories, memories_),
                                  1 + IndexOf(device.default_memory, memories_), device.is_host_memory != 0});
  }
  for (FlagosMemory* handle : memories_) {
    auto memory = New<FlagosMemoryDescribeArgs>();
    memory.memory = handle;
    if (Status status = Take(api_.memory_describe(&memory)); status != nullptr) return status;
    described->memories.push_back({memory.id, memory.kind_id, Text(memory.kind), Text(memory.debug_string),
                                   Text(memory.to_string), IndicesOf(memory.devices, memory.num_devices, devices_)});
  }
  return nullptr;
}

// Also of what the host has left: the next context of this process begins with nothing.
void Server::ContextDestroy() {
  if (context_ == nullptr) return;
  std::unordered_map<uint64_t, FlagosBuffer*> buffers;
  std::unordered_map<uint64_t, Program> programs;
  std::unordered_map<uint64_t, std::shared_ptr<Event>> own;
  std::unordered_map<uint64_t, std::shared_ptr<Event>> pending;
  std::unordered_map<uint64_t, std::shared_ptr<Pin>> pins;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    buffers.swap(buffers_);
    programs.swap(programs_);
    own.swap(own_events_);
    pending.swap(pending_events_);
    pins.swap(pins_);
  }
  for (const auto& [id, buffer] : buffers) api_.buffer_destroy(buffer);
  for (const auto& [id, program] : programs) api_.executable_destroy(program.handle);
  own.clear();
  pending.clear();
  pins.clear();
  api_.context_destroy(context_);
  context_ = nullptr;
  devices_.clear();
  memories_.clear();
}

FlagosDevice* Server::FindDevice(int64_t index) const {
  return index > 0 && static_cast<uint64_t>(index) <= devices_.size() ? devices_[static_cast<size_t>(index - 1)]
                                                                      : nullptr;
}

FlagosMemory* Server::FindMemory(int64_t index) const {
  return index > 0 && static_cast<uint64_t>(index) <= memories_.size() ? memories_[static_cast<size_t>(index - 1)]
                                                                       : nullptr;
}

Status Server::DeviceCall(const Call& call, Reply* reply) {
  FlagosDevice* device = FindDevice(call.device);
  if (device == nullptr) return NoSuch("device");
  if (call.method == Method::kDeviceSynchronize) {
    auto args = New<FlagosDeviceSynchronizeArgs>();
    args.device = device;
    Status status = Take(api_.device_synchronize(&args));
    reply->numbers = {static_cast<int64_t>(NumTold())};
    return status;
  }
  auto args = New<FlagosDeviceMemoryStatsArgs>();
  args.device = device;
  args.clear_peaks = static_cast<int32_t>(call.number);
  if (Status status = Take(api_.device_memory_stats(&args)); status != nullptr) return status;
  reply->numbers = {args.bytes_in_use, args.peak_bytes_in_use, args.num_allocations, args.largest_allocation,
                    args.bytes_limit};
  return nullptr;
}

// ---- Buffers --------------------------------------------------------------------------------------------------------

FlagosBuffer* Server::FindBuffer(uint64_t id) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = buffers_.find(id);
  return found == buffers_.end() ? nullptr : found->second;
}

void Server::DestroyBuffer(uint64_t id) {
  FlagosBuffer* buffer = nullptr;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = buffers_.find(id);
    if (found == buffers_.end()) return;
    buffer = found->second;
    buffers_.erase(found);
  }
  api_.buffer_destroy(buffer);
}

// Describes a new buffer to the host under the id that the host gave it: the `index`-th from the first.
Status Server::AddBuffer(FlagosBuffer* buffer, const Call& call, size_t index, Reply* reply) {
  auto args = New<FlagosBufferDescribeArgs>();
  args.buffer = buffer;
  Status status = call.made.size() == 1 ? Take(api_.buffer_describe(&args)) : NoSuch("id for what is made");
  if (status != nullptr) {
    api_.buffer_destroy(buffer);
    return status;
  }
  Buffer& described = reply->buffers.emplace_back();
  described.element_type = args.element_type;
  described.size_bytes = static_cast<int64_t>(args.size_bytes);
  described.device = 1 + IndexOf(args.device, devices_);
  described.memory = 1 + IndexOf(args.memory, memories_);
  described.dims.assign(args.dims, args.dims + args.rank);
  auto ready = New<FlagosBufferReadyEventArgs>();
  ready.buffer = buffer;
  if (FlagosError* error = api_.buffer_ready_event(&ready); error == nullptr) {
    described.is_ready = HasCompletedWell(ready.event);
    api_.event_destroy(ready.event);
  } else {
    api_.error_destroy(error);  // who asks for the event is told
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  buffers_[static_cast<uint64_t>(call.made[0]) + index] = buffer;
  return nullptr;
}

Status Server::MakeBuffer(const Call& call, Reply* reply) {
  FlagosMemory* memory = FindMemory(call.memory);
  FlagosBuffer* source = FindBuffer(call.object);
  const bool needs_source = call.method == Method::kBufferCopy || call.method == Method::kBufferBitcast;
  if (memory == nullptr) return NoSuch("memory");
  if (needs_source && source == nullptr) return NoSuch("buffer");
  FlagosBuffer* made = nullptr;
  Status status;
  const auto type = static_cast<int32_t>(call.element_type);
  if (call.method == Method::kBufferAllocate) {
    auto args = New<FlagosBufferAllocateArgs>();
    args.context = context_;
    args.memory = memory;
    args.dims = call.dims.data();
    args.rank = call.dims.size();
    args.element_type = type;
    status = Take(api_.buffer_allocate(&args));
    made = args.buffer;
  } else if (call.method == Method::kBufferPromise) {
    auto args = New<FlagosBufferPromiseArgs>();
    args.context = context_;
    args.memory = memory;
    args.dims = call.dims.data();
    args.rank = call.dims.size();
    args.element_type = type;
    args.error = Make(call.error);
    status = Take(api_.buffer_promise(&args));
    made = args.buffer;
  } else if (call.method == Method::kBufferCopy) {
    auto args = New<FlagosBufferCopyArgs>();
    args.buffer = source;
    args.memory = memory;
    status = Take(api_.buffer_copy(&args));
    made = args.copy;
  } else {
    auto args = New<FlagosBufferBitcastArgs>();
    args.buffer = source;
    args.dims = call.dims.data();
    args.rank = call.dims.size();
    args.element_type = type;
    status = Take(api_.buffer_bitcast(&args));
    made = args.view;
  }
  if (status == nullptr) status = AddBuffer(made, call, 0, reply);
  const bool is_written_by_host = call.method == Method::kBufferAllocate && call.number != 0;
  if (status != nullptr || !is_written_by_host) return status;
  status = Address(made, 0, &reply->address);
  if (status != nullptr) {  // the host knows of no buffer
    DestroyBuffer(static_cast<uint64_t>(call.made[0]));
  }
  return status;
}

// Where its contents are, once they are there.
Status Server::Address(FlagosBuffer* buffer, int64_t offset, uint64_t* address) {
  auto args = New<FlagosBufferPointerArgs>();
  args.buffer = buffer;
  Status status = Take(api_.buffer_pointer(&args));
  if (status == nullptr) *address = reinterpret_cast<uintptr_t>(args.pointer) + static_cast<uint64_t>(offset);
  return status;
}

Status Server::BufferCall(const Call& call, Reply* reply) {
  FlagosBuffer* buffer = FindBuffer(call.object);
  if (buffer == nullptr) return NoSuch("buffer");
  switch (call.method) {
    case Method::kBufferFulfill: {
      auto args = New<FlagosBufferFulfillArgs>();
      args.promise = buffer;
      args.source = FindBuffer(call.other);
      args.error = Make(call.error);
      return Take(api_.buffer_fulfill(&args));
    }
    case Method::kBufferReadyEvent: {
      auto args = New<FlagosBufferReadyEventArgs>();
      args.buffer = buffer;
      if (Status status = Take(api_.buffer_ready_event(&args)); status != nullptr) return status;
      Tell(args.event, call.event, nullptr, reply);
      return nullptr;
    }
    case Method::kBufferHold: {
      auto args = New<FlagosBufferHoldArgs>();
      args.buffer = buffer;
      args.delta = static_cast<int32_t>(call.number);
      return Take(api_.buffer_hold(&args));
    }
    default: {
      auto args = New<FlagosBufferDeleteArgs>();
      args.buffer = buffer;
      return Take(api_.buffer_delete(&args));
    }
  }
}

Status Server::Donate(const Call& call, Reply* reply) {
  auto args = New<FlagosBufferDonateArgs>();
  args.buffer = FindBuffer(call.object);
  if (args.buffer == nullptr) return NoSuch("buffer");
  std::shared_ptr<Event> dependency = call.other != 0 ? FindEvent(call.other) : nullptr;
  if (call.other != 0 && dependency == nullptr) return MakeStatus(FLAGOS_NOT_FOUND, "the dependency has completed");
  if (dependency == nullptr) {  // it has, and the host knows how
    auto made = New<FlagosEventCreateArgs>();
    made.context = context_;
    if (Status status = Take(api_.event_create(&made)); status != nullptr) return status;
    dependency = std::make_shared<Event>(api_, made.event);
    auto set = New<FlagosEventSetArgs>();
    set.event = made.event;
    set.error = Make(call.error);
    if (Status status = Take(api_.event_set(&set)); status != nullptr) return status;
  }
  args.dependency = dependency->handle;
  if (Status status = Take(api_.buffer_donate(&args)); status != nullptr) return status;
  return AddBuffer(args.donated, call, 0, reply);
}

// ---- Contents -------------------------------------------------------------------------------------------------------

// Where a call's contents are, at least `call.size` bytes.
Status Server::FindContents(const Call& call, std::shared_ptr<Contents>* contents) {
  auto found = std::make_shared<Contents>();
  if (call.segment != 0) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto segment = segments_.find(call.segment);
    if (segment != segments_.end()) found->segment = segment->second;
  } else {
    found->bytes = call.data;
  }
  const size_t size = found->segment != nullptr ? found->segment->size() : found->bytes.size();
  if (call.size < 0 || size < static_cast<uint64_t>(call.size)) return NoSuch("contents");
  *contents = std::move(found);
  return nullptr;
}

Status Server::FromHost(const Call& call, Reply* reply) {
  std::shared_ptr<Contents> contents;
  if (Status status = FindContents(call, &contents); status != nullptr) return status;
  auto args = New<FlagosBufferFromHostArgs>();
  args.context = context_;
  args.memory = FindMemory(call.memory);
  if (args.memory == nullptr) return NoSuch("memory");
  args.data = contents->data();
  args.dims = call.dims.data();
  args.rank = call.dims.size();
  args.element_type = static_cast<int32_t>(call.element_type);
  // A segment is this array's alone until it is given back.
  const bool is_shared = contents->segment != nullptr;
  args.semantics = is_shared ? FLAGOS_HOST_MUTABLE_ZERO_COPY : FLAGOS_HOST_IMMUTABLE_ONLY_DURING_CALL;
  if (Status status = Take(api_.buffer_from_host(&args)); status != nullptr) return status;
  if (is_shared) {
    Tell(args.done_with_host, call.released, std::move(contents), reply);
  } else {
    api_.event_destroy(args.done_with_host);
  }
  return AddBuffer(args.buffer, call, 0, reply);
}

Status Server::PinBuffer(const Call& call, FlagosBuffer* buffer, Reply* reply) {
  auto described = New<FlagosBufferDescribeArgs>();
  described.buffer = buffer;
  if (Status status = Take(api_.buffer_describe(&described)); status != nullptr) return status;
  const auto all = static_cast<int64_t>(described.size_bytes);
  if (call.offset < 0 || call.size < 0 || call.offset > all || call.size > all - call.offset) return NoSuch("contents");
  // A view keeps the memory also after the buffer is gone, and from programs to which it is donated.
  auto viewed = New<FlagosBufferBitcastArgs>();
  viewed.buffer = buffer;
  viewed.dims = described.dims;
  viewed.rank = described.rank;
  viewed.element_type = described.element_type;
  if (Status status = Take(api_.buffer_bitcast(&viewed)); status != nullptr) return status;
  auto pin = std::make_shared<Pin>(api_, viewed.view, static_cast<uint64_t>(call.made[0]), call.offset);
  auto ready = New<FlagosBufferReadyEventArgs>();
  ready.buffer = viewed.view;
  if (Status status = Take(api_.buffer_ready_event(&ready)); status != nullptr) return status;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    pins_[pin->id] = pin;
  }
  Tell(ready.event, call.event, nullptr, reply, std::move(pin));
  return nullptr;
}

void Server::Unpin(uint64_t id) {
  std::shared_ptr<Pin> pin;  // let go without the lock
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = pins_.find(id);
  if (found == pins_.end()) return;
  pin = std::move(found->second);
  pins_.erase(found);
}

Status Server::ToHost(const Call& call, Reply* reply) {
  FlagosBuffer* buffer = FindBuffer(call.object);
  if (buffer == nullptr) return NoSuch("buffer");
  if (call.made.size() == 1) return PinBuffer(call, buffer, reply);
  std::shared_ptr<Contents> contents;
  if (call.segment != 0) {
    if (Status status = FindContents(call, &contents); status != nullptr) return status;
  } else {
    constexpr int64_t kMaxInline = int64_t{1} << 20;
    if (call.size < 0 || call.size > kMaxInline) return NoSuch("contents");
    contents = std::make_shared<Contents>();
    contents->bytes.resize(static_cast<size_t>(call.size));
    contents->is_for_host = true;
  }
  FlagosEvent* done = nullptr;
  Status status;
  if (call.method == Method::kBufferToHost) {
    auto args = New<FlagosBufferToHostArgs>();
    args.buffer = buffer;
    args.data = contents->data();
    args.size = static_cast<size_t>(call.size);
    status = Take(api_.buffer_to_host(&args));
    done = args.done;
  } else {
    auto args = New<FlagosBufferReadRawArgs>();
    args.buffer = buffer;
    args.data = contents->data();
    args.offset = call.offset;
    args.size = call.size;
    status = Take(api_.buffer_read_raw(&args));
    done = args.done;
  }
  if (status == nullptr) Tell(done, call.event, std::move(contents), reply);
  return status;
}

Status Server::WriteRaw(const Call& call, Reply* reply) {
  std::shared_ptr<Contents> contents;
  if (Status status = FindContents(call, &contents); status != nullptr) return status;
  auto args = New<FlagosBufferWriteRawArgs>();
  args.buffer = FindBuffer(call.object);
  if (args.buffer == nullptr) return NoSuch("buffer");
  args.data = contents->data();
  args.offset = call.offset;
  args.size = call.size;
  if (Status status = Take(api_.buffer_write_raw(&args)); status != nullptr) return status;
  Tell(args.done, call.event, std::move(contents), reply);
  return nullptr;
}

}  // namespace flagos_isolation
