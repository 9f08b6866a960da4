// A context: the devices of this process, what runs on them, and what the host gave us to call.
#ifndef FLAGOS_NATIVE_CONTEXT_H_
#define FLAGOS_NATIVE_CONTEXT_H_

#include <deque>
#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "accelerator.h"
#include "event.h"
#include "launch_order.h"
#include "memory.h"
#include "options.h"
#include "profiler.h"
#include "python.h"
#include "run_ahead.h"
#include "threads.h"

struct FlagosDevice {
  int64_t id = 0;
  int32_t process_index = 0;
  int32_t local_hardware_id = -1;
  bool is_host = true;
  std::string kind;
  std::string debug_string;
  std::string to_string;
  FlagosContext* context = nullptr;
  std::vector<std::unique_ptr<FlagosMemory>> owned_memories;
  std::vector<FlagosMemory*> memories;
  std::vector<FlagosNamedValue> attributes;
  std::unique_ptr<flagos::DeviceQueue> queue;        // NULL: another process's
  std::unique_ptr<flagos::RunAhead> run_ahead;       // NULL: another process's
  std::unique_ptr<flagos::Accelerator> accelerator;  // NULL: the host, or another process's

  bool addressable() const noexcept { return queue != nullptr; }
  FlagosMemory* default_memory() const noexcept { return memories.empty() ? nullptr : memories.front(); }

  // Work in flight, so that synchronize and shutdown can wait for it.
  void Track(flagos::Ref<flagos::Event> done);
  // Completes as `done` does, but not before what was given here earlier: a host that waits for the last launch has
  // waited for all, also for one whose host callback takes longer.
  flagos::Ref<flagos::Event> InOrder(flagos::Ref<flagos::Event> done);
  void Synchronize();

 private:
  struct Pending {
    std::mutex mutex;
    std::list<flagos::Ref<flagos::Event>> events;
  };
  std::shared_ptr<Pending> pending_ = std::make_shared<Pending>();
  struct Order {
    std::mutex mutex;
    std::deque<std::pair<flagos::Ref<flagos::Event>, flagos::Ref<flagos::Event>>> waiting;  // done, and done in order
    void Advance();
  };
  std::shared_ptr<Order> order_ = std::make_shared<Order>();
};

struct FlagosContext : flagos::RefCounted<FlagosContext> {
  explicit FlagosContext(const FlagosContextCreateArgs& args);
  ~FlagosContext() = default;

  // Waits for what runs; then work that still comes runs in the thread that brings it.
  void Close();
  // Waits for what runs, on every device; the log says what one reports.
  void Drain() noexcept;

  flagos::Options options;
  std::string platform_version;
  int32_t process_index = 0;
  int32_t num_processes = 1;
  // The host's store; NULL where there is one process.
  FlagosKeyValueGet key_value_get = nullptr;
  FlagosKeyValuePut key_value_put = nullptr;
  void* key_value_user_data = nullptr;
  // What devices that do not share memory reach each other through, made with the first program; with the GIL.
  PyObject* peers = nullptr;
  // The option of this name: the host waits for every launch anyway, so none is handed to a device's idle thread.
  bool inline_launches = false;
  FlagosHostCallback host_callback = nullptr;
  void* host_callback_user_data = nullptr;
  flagos::python::Settings python;
  std::vector<std::unique_ptr<FlagosDevice>> owned_devices;
  std::vector<FlagosDevice*> devices;
  std::vector<FlagosDevice*> addressable_devices;
  std::vector<FlagosMemory*> memories;
  flagos::Profiler profiler;
  std::unique_ptr<flagos::ThreadPool> transfers;
  flagos::LaunchOrder launch_order;
  std::vector<flagos::DeviceQueue*> queues;  // of all devices of this process
  // Of the latest launch over several processes: complete when it is in the queues. With the mutex of launch_order.
  flagos::Ref<flagos::Event> last_spanning;

  FlagosDevice* FindDevice(int64_t id) const noexcept;

 private:
  // `accelerators`: this process's; none: its devices are host CPUs.
  void AddDevices(const std::vector<int64_t>& counts, std::vector<flagos::AcceleratorFacts> accelerators);
  void AddHostFacts(FlagosDevice& device) const;
  void AddMemories(FlagosDevice& device);
  flagos::RunAhead::Limits RunAheadLimits(const FlagosDevice& device) const;
};

namespace flagos {

using Context = ::FlagosContext;
using Device = ::FlagosDevice;

// A context whose profiler listens, for what belongs to none; NULL where there is none.
Ref<Context> RecordingContext();

}  // namespace flagos

#endif  // FLAGOS_NATIVE_CONTEXT_H_
