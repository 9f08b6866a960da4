#include "context.h"

#include <sys/sysinfo.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <limits>
#include <thread>

#include "api.h"
#include "block_cache.h"
#include "bridge.h"
#include "call.h"
#include "flagos/build_facts.h"
#include "log.h"

namespace flagos {
namespace {

constexpr int64_t kMaxDevices = 1024;
constexpr int64_t kStoreTimeoutMs = 120000;
constexpr const char* kMemoryKinds[] = {"device", "pinned_host", "unpinned_host"};
constexpr int64_t kNumMemoryKinds = sizeof(kMemoryKinds) / sizeof(kMemoryKinds[0]);
// A host's launch takes longer than its dispatch, so that few suffice. The work of an accelerator may be shorter, and what
// a launch there writes is free for the next one, which comes after it on the stream.
constexpr int64_t kHostRunAheadLaunches = 32, kHostRunAheadBytes = int64_t{64} << 20;
constexpr int64_t kAcceleratorRunAheadLaunches = 256;
constexpr int32_t kDeviceKind = 0, kPinnedKind = 1;

int64_t HostMemoryBytes() {
  return static_cast<int64_t>(sysconf(_SC_PHYS_PAGES)) * static_cast<int64_t>(sysconf(_SC_PAGESIZE));
}

// Contexts that live, for the exit hook.
struct Registry {
  std::mutex mutex;
  std::vector<Context*> contexts;
};
Registry& TheRegistry() {
  static auto* const registry = new Registry;
  return *registry;
}

void DrainAll() {
  std::vector<Ref<Context>> contexts;
  {
    std::lock_guard<std::mutex> lock(TheRegistry().mutex);
    for (Context* context : TheRegistry().contexts) contexts.push_back(Ref<Context>::Share(context));
  }
  for (const Ref<Context>& context : contexts) context->Drain();
}

}  // namespace

Ref<Context> RecordingContext() {
  std::lock_guard<std::mutex> lock(TheRegistry().mutex);
  for (Context* context : TheRegistry().contexts) {
    if (context->profiler.active()) return Ref<Context>::Share(context);
  }
  return {};
}

namespace {

void SinkString(void* data, const void* bytes, size_t size) {
  static_cast<std::string*>(data)->assign(static_cast<const char*>(bytes), size);
}

// How many devices each process has, learnt through the host's store.
std::vector<int64_t> ExchangeCounts(const FlagosContextCreateArgs& args, int64_t mine) {
  const int32_t processes = std::max(args.num_processes, 1);
  if (args.process_index < 0 || args.process_index >= processes) {
    Fail(FLAGOS_INVALID_ARGUMENT, "context_create: process_index %d is not below num_processes %d", args.process_index,
         processes);
  }
  std::vector<int64_t> counts(static_cast<size_t>(processes), mine);
  if (processes == 1) return counts;
  if (args.key_value_get == nullptr || args.key_value_put == nullptr) {
    Fail(FLAGOS_INVALID_ARGUMENT,
         "context_create: num_processes is %d but the key-value store is missing; give "
         "key_value_get and key_value_put",
         processes);
  }
  const std::string key = Format("flagos/devices/%d", args.process_index);
  const std::string value = std::to_string(mine);
  const int32_t put = args.key_value_put(args.key_value_user_data, key.data(), key.size(), value.data(), value.size());
  if (put != FLAGOS_OK)
    Fail(put, "context_create: the key-value store refused to put '%s' (code %d)", key.c_str(), put);
  for (int32_t process = 0; process < processes; ++process) {
    if (process == args.process_index) continue;
    const std::string name = Format("flagos/devices/%d", process);
    std::string text;
    const int32_t got =
        args.key_value_get(args.key_value_user_data, name.data(), name.size(), kStoreTimeoutMs, SinkString, &text);
    if (got != FLAGOS_OK) {
      Fail(got, "context_create: process %d did not say how many devices it has (code %d); is it running?", process,
           got);
    }
    char* end = nullptr;
    const long long count = std::strtoll(text.c_str(), &end, 10);
    if (text.empty() || *end != '\0' || count < 0 || count > kMaxDevices) {
      Fail(FLAGOS_DATA_LOSS, "context_create: the key-value store holds '%s' under '%s' instead of a number of devices",
           text.c_str(), name.c_str());
    }
    counts[static_cast<size_t>(process)] = count;
  }
  return counts;
}

// Names and texts live as long as the device.
FlagosNamedValue Attribute(const char* name) {
  FlagosNamedValue value{};
  value.struct_size = sizeof(value);
  value.name = name;
  value.name_size = std::strlen(name);
  return value;
}

FlagosNamedValue IntegerAttribute(const char* name, int64_t number) {
  FlagosNamedValue value = Attribute(name);
  value.kind = FLAGOS_VALUE_INT64;
  value.int64_value = number;
  value.value_size = 1;
  return value;
}

FlagosNamedValue TextAttribute(const char* name, const std::string& text) {
  FlagosNamedValue value = Attribute(name);
  value.kind = FLAGOS_VALUE_STRING;
  value.string_value = text.c_str();
  value.value_size = text.size();
  return value;
}

// What FLAGOS_DEVICE, or a look at the machine, leads to. Nothing: the host CPU.
std::vector<AcceleratorFacts> ChooseAccelerators(const Options& options, const python::Settings& settings) {
  std::string name = options.Text("device");
  const char* variable = std::getenv("FLAGOS_DEVICE");
  if (name.empty() && variable != nullptr) name = variable;
  if (name == "cpu" || (name.empty() && !MayHaveAccelerators())) return {};
  // A simulated accelerator is the host again, as many times as the host is asked to be.
  const int64_t count = options.Integer("num_cpu_devices", "FLAGOS_NUM_CPU_DEVICES", 1, 1, kMaxDevices);
  return FindAccelerators(settings, name, count);
}

}  // namespace
}  // namespace flagos

using flagos::Fail;
using flagos::Format;
using flagos::Ref;

void FlagosDevice::Track(Ref<flagos::Event> done) {
  if (done->ready()) return;
  std::list<Ref<flagos::Event>>::iterator place;
  {
    std::lock_guard<std::mutex> lock(pending_->mutex);
    pending_->events.push_front(done);
    place = pending_->events.begin();
  }
  done->OnReady([pending = pending_, place](const flagos::Status&) {
    Ref<flagos::Event> dropped;
    std::lock_guard<std::mutex> lock(pending->mutex);
    dropped = std::move(*place);
    pending->events.erase(place);
  });
}

Ref<flagos::Event> FlagosDevice::InOrder(Ref<flagos::Event> done) {
  Ref<flagos::Event> result;
  {
    std::lock_guard<std::mutex> lock(order_->mutex);
    if (order_->waiting.empty() && done->ready()) return done;
    result = flagos::Make<flagos::Event>();
    order_->waiting.emplace_back(done, result);
  }
  // Who waits for the device has waited for what the host sees of the launch, too.
  Track(result);
  done->OnReady([order = order_](const flagos::Status&) { order->Advance(); });
  return result;
}

void FlagosDevice::Order::Advance() {
  for (;;) {
    std::pair<Ref<flagos::Event>, Ref<flagos::Event>> first;
    {
      std::lock_guard<std::mutex> lock(mutex);
      if (waiting.empty() || !waiting.front().first->ready()) return;
      first = std::move(waiting.front());
      waiting.pop_front();
    }
    first.second->Complete(first.first->status());
  }
}

void FlagosDevice::Synchronize() {
  std::vector<Ref<flagos::Event>> events;
  {
    std::lock_guard<std::mutex> lock(pending_->mutex);
    events.assign(pending_->events.begin(), pending_->events.end());
  }
  for (const Ref<flagos::Event>& event : events) event->Wait();
  if (accelerator) accelerator->Synchronize();
}

FlagosContext::FlagosContext(const FlagosContextCreateArgs& args)
    : options(args.options, args.num_options),
      process_index(args.process_index),
      num_processes(std::max(args.num_processes, 1)),
      key_value_get(args.key_value_get),
      key_value_put(args.key_value_put),
      key_value_user_data(args.key_value_user_data),
      host_callback(args.host_callback),
      host_callback_user_data(args.host_callback_user_data) {
  python.libpython = options.Text("libpython");
  python.site = options.Text("python_site");
  // As for every variable that names a path, not in a process with elevated rights.
  if (const char* folder = secure_getenv("FLAGOS_TRACE"); folder != nullptr && folder[0] != '\0') {
    profiler.Follow(folder);
  }
  inline_launches = options.Integer("inline_launches", nullptr, 0, 0, 1) != 0;
  const int64_t count = options.Integer("num_cpu_devices", "FLAGOS_NUM_CPU_DEVICES", 1, 1, flagos::kMaxDevices);
  const int64_t cache = options.Integer("memory_cache_bytes", nullptr,
                                        std::min<int64_t>(int64_t{1} << 30, flagos::HostMemoryBytes() / 16), 0,
                                        std::numeric_limits<int64_t>::max());
  flagos::SetCacheLimit(static_cast<size_t>(cache));
  std::vector<flagos::AcceleratorFacts> accelerators = flagos::ChooseAccelerators(options, python);
  const auto found = static_cast<int64_t>(accelerators.size());
  AddDevices(flagos::ExchangeCounts(args, found > 0 ? found : count), std::move(accelerators));
  const int threads = std::clamp(static_cast<int>(std::thread::hardware_concurrency()), 2, 8);
  transfers = std::make_unique<flagos::ThreadPool>("flagos-copy", threads);
  const std::string hardware = found > 0 ? devices.front()->kind : "host CPU";
  platform_version =
      Format("flagos %s, ABI %d.%d, %s", FLAGOS_BUILD_VERSION, FLAGOS_ABI_MAJOR, FLAGOS_ABI_MINOR, hardware.c_str());
  std::lock_guard<std::mutex> lock(flagos::TheRegistry().mutex);
  flagos::TheRegistry().contexts.push_back(this);
}

void FlagosContext::AddHostFacts(FlagosDevice& device) const {
  device.kind = "cpu";
  device.debug_string =
      Format("flagos:%lld (host CPU, process %d)", static_cast<long long>(device.id), device.process_index);
  device.attributes = {flagos::IntegerAttribute("core_count", std::thread::hardware_concurrency()),
                       flagos::IntegerAttribute("memory_bytes", flagos::HostMemoryBytes()),
                       flagos::IntegerAttribute("dlpack_device_type", 1 /* kDLCPU */),
                       flagos::IntegerAttribute("dlpack_device_id", 0)};
}

void FlagosContext::AddDevices(const std::vector<int64_t>& counts, std::vector<flagos::AcceleratorFacts> accelerators) {
  int64_t id = 0;
  for (size_t process = 0; process < counts.size(); ++process) {
    for (int64_t local = 0; local < counts[process]; ++local, ++id) {
      auto device = std::make_unique<FlagosDevice>();
      device->id = id;
      device->process_index = static_cast<int32_t>(process);
      device->to_string = Format("FlagosDevice(id=%lld)", static_cast<long long>(id));
      device->context = this;
      const bool mine = static_cast<int32_t>(process) == process_index;
      if (accelerators.empty()) {
        AddHostFacts(*device);
      } else {
        device->is_host = false;
        // Other processes have the same kind of device: programs are compiled once for all.
        device->kind = accelerators[mine ? static_cast<size_t>(local) : 0].kind;
        device->debug_string =
            Format("flagos:%lld (%s, process %zu)", static_cast<long long>(id), device->kind.c_str(), process);
      }
      if (static_cast<int32_t>(process) == process_index) {
        device->local_hardware_id = static_cast<int32_t>(local);
        device->queue = std::make_unique<flagos::DeviceQueue>(Format("flagos-dev%lld", static_cast<long long>(id)));
        queues.push_back(device->queue.get());
        if (!accelerators.empty()) {
          auto& facts = accelerators[static_cast<size_t>(local)];
          device->accelerator = std::make_unique<flagos::Accelerator>(facts, local);
          for (const auto& [name, text] : device->accelerator->facts().texts) {
            device->attributes.push_back(flagos::TextAttribute(name.c_str(), text));
          }
          for (const auto& [name, number] : device->accelerator->facts().integers) {
            device->attributes.push_back(flagos::IntegerAttribute(name.c_str(), number));
          }
        }
        AddMemories(*device);
        device->run_ahead = std::make_unique<flagos::RunAhead>(RunAheadLimits(*device));
        addressable_devices.push_back(device.get());
      }
      devices.push_back(device.get());
      owned_devices.push_back(std::move(device));
    }
  }
}

flagos::RunAhead::Limits FlagosContext::RunAheadLimits(const FlagosDevice& device) const {
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
  const bool on_host = device.accelerator == nullptr;
  const int64_t bytes = on_host ? flagos::kHostRunAheadBytes : device.accelerator->facts().memory_bytes / 16;
  return {static_cast<size_t>(options.Integer(
              "run_ahead_launches", "FLAGOS_RUN_AHEAD_LAUNCHES",
              on_host ? flagos::kHostRunAheadLaunches : flagos::kAcceleratorRunAheadLaunches, 1, kMost)),
          static_cast<size_t>(options.Integer("run_ahead_bytes", "FLAGOS_RUN_AHEAD_BYTES", bytes, 0, kMost))};
}

void FlagosContext::AddMemories(FlagosDevice& device) {
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
  const int64_t host_limit = options.Integer("memory_limit_bytes", nullptr, flagos::HostMemoryBytes(), 1, kMost);
  flagos::Accelerator* const accelerator = device.accelerator.get();
  const int64_t device_limit =
      accelerator ? options.Integer("memory_limit_bytes", nullptr, accelerator->facts().memory_bytes, 1, kMost)
                  : host_limit;
  for (int32_t kind = 0; kind < flagos::kNumMemoryKinds; ++kind) {
    auto memory = std::make_unique<FlagosMemory>();
    memory->id = device.id * flagos::kNumMemoryKinds + kind;
    memory->kind = flagos::kMemoryKinds[kind];
    memory->kind_id = kind;
    memory->debug_string =
        Format("%s memory of flagos:%lld", flagos::kMemoryKinds[kind], static_cast<long long>(device.id));
    memory->to_string =
        Format("FlagosMemory(id=%lld, kind=%s)", static_cast<long long>(memory->id), flagos::kMemoryKinds[kind]);
    memory->context = this;
    memory->device = &device;
    memory->devices = {&device};
    memory->limit = kind == flagos::kDeviceKind ? device_limit : host_limit;
    if (kind == flagos::kDeviceKind) memory->accelerator = accelerator;
    if (kind == flagos::kPinnedKind) memory->pinned_by = accelerator;
    device.memories.push_back(memory.get());
    memories.push_back(memory.get());
    device.owned_memories.push_back(std::move(memory));
  }
}

FlagosDevice* FlagosContext::FindDevice(int64_t id) const noexcept {
  return id >= 0 && id < static_cast<int64_t>(devices.size()) ? devices[static_cast<size_t>(id)] : nullptr;
}

void FlagosContext::Close() {
  {
    auto& registry = flagos::TheRegistry();
    std::lock_guard<std::mutex> lock(registry.mutex);
    auto& contexts = registry.contexts;
    contexts.erase(std::remove(contexts.begin(), contexts.end(), this), contexts.end());
  }
  Drain();
  flagos::ClosePeers(this);
}

void FlagosContext::Drain() noexcept {
  for (FlagosDevice* device : addressable_devices) {
    try {
      device->Synchronize();
    } catch (...) {
      const flagos::Status status = flagos::StatusOfException("waiting for a device");
      flagos::Log(FLAGOS_LOG_ERROR, "waiting for %s: %s", device->debug_string.c_str(), status.data()->message.c_str());
    }
  }
}

namespace flagos::api {

FlagosError* context_create(FlagosContextCreateArgs* host) {
  return Enter("context_create", host, [](FlagosContextCreateArgs& args) {
    FLAGOS_REQUIRE_FIELD(args, context);
    auto context = Make<Context>(args);
    python::SetDrain(DrainAll);
    python::Notice();
    args.context = context.Detach();
  });
}

void context_destroy(FlagosContext* context) {
  if (context == nullptr) return;
  auto reference = Ref<Context>::Adopt(context);
  try {
    context->Close();
  } catch (...) {
    Log(FLAGOS_LOG_ERROR, "%s", StatusOfException("context_destroy").data()->message.c_str());
  }
}

FlagosError* context_describe(FlagosContextDescribeArgs* host) {
  return Enter("context_describe", host, [](FlagosContextDescribeArgs& args) {
    FLAGOS_REQUIRE(args, context);
    const Context& context = *args.context;
    args.platform_name = "flagos";
    args.platform_version = context.platform_version.c_str();
    args.devices = context.devices.data();
    args.num_devices = context.devices.size();
    args.addressable_devices = context.addressable_devices.data();
    args.num_addressable_devices = context.addressable_devices.size();
    args.memories = context.memories.data();
    args.num_memories = context.memories.size();
  });
}

FlagosError* device_describe(FlagosDeviceDescribeArgs* host) {
  return Enter("device_describe", host, [](FlagosDeviceDescribeArgs& args) {
    FLAGOS_REQUIRE(args, device);
    const Device& device = *args.device;
    args.id = device.id;
    args.process_index = device.process_index;
    args.local_hardware_id = device.local_hardware_id;
    args.is_addressable = device.addressable() ? 1 : 0;
    args.is_host_memory = device.is_host ? 1 : 0;
    args.kind = device.kind.c_str();
    args.debug_string = device.debug_string.c_str();
    args.to_string = device.to_string.c_str();
    args.attributes = device.attributes.data();
    args.num_attributes = device.attributes.size();
    args.memories = device.memories.data();
    args.num_memories = device.memories.size();
    args.default_memory = device.default_memory();
  });
}

FlagosError* device_memory_stats(FlagosDeviceMemoryStatsArgs* host) {
  return Enter("device_memory_stats", host, [](FlagosDeviceMemoryStatsArgs& args) {
    FLAGOS_REQUIRE(args, device);
    if (!args.device->addressable()) {
      Fail(FLAGOS_FAILED_PRECONDITION, "device_memory_stats: %s belongs to another process; ask there",
           args.device->debug_string.c_str());
    }
    args.device->default_memory()->ReadStats(args);
    if (args.device->accelerator) args.device->accelerator->ReadStats(args);
  });
}

FlagosError* device_synchronize(FlagosDeviceSynchronizeArgs* host) {
  return Enter("device_synchronize", host, [](FlagosDeviceSynchronizeArgs& args) {
    FLAGOS_REQUIRE(args, device);
    if (!args.device->addressable()) {
      Fail(FLAGOS_FAILED_PRECONDITION, "device_synchronize: %s belongs to another process; synchronize it there",
           args.device->debug_string.c_str());
    }
    ScopedSpan span(args.device->context->profiler, SpanCategory::kWait, "device_synchronize", {args.device->id});
    args.device->Synchronize();
  });
}

FlagosError* memory_describe(FlagosMemoryDescribeArgs* host) {
  return Enter("memory_describe", host, [](FlagosMemoryDescribeArgs& args) {
    FLAGOS_REQUIRE(args, memory);
    const Memory& memory = *args.memory;
    args.id = memory.id;
    args.kind = memory.kind.c_str();
    args.kind_id = memory.kind_id;
    args.debug_string = memory.debug_string.c_str();
    args.to_string = memory.to_string.c_str();
    args.devices = memory.devices.data();
    args.num_devices = memory.devices.size();
  });
}

}  // namespace flagos::api
