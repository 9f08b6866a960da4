#include "profiler.h"

#include <chrono>
#include <memory>
#include <new>
#include <string>
#include <vector>

#include "client.h"
#include "error.h"
#include "flagos_calls.h"
#include "trace.h"

// One profiling session over every client of the process: the extension names none.
struct PLUGIN_Profiler {
  std::vector<flagos_pjrt::Ref<PJRT_Client>> clients;  // that are being traced
  int64_t clock_offset_ns = 0;
  std::string space;  // serialized XSpace messages, which concatenate
};

namespace flagos_pjrt {
namespace {

// The extension has an error type of its own; behind it is ours.
PLUGIN_Profiler_Error* AsProfilerError(PJRT_Error* error) { return reinterpret_cast<PLUGIN_Profiler_Error*>(error); }
PJRT_Error* AsError(const PLUGIN_Profiler_Error* error) {
  return reinterpret_cast<PJRT_Error*>(const_cast<PLUGIN_Profiler_Error*>(error));
}

// From the monotonic clock, which traces are in, to Unix time, which XLA's tools expect.
int64_t ClockOffsetNs() {
  using std::chrono::duration_cast;
  using std::chrono::nanoseconds;
  const auto unix_time = std::chrono::system_clock::now().time_since_epoch();
  const auto monotonic = std::chrono::steady_clock::now().time_since_epoch();
  return duration_cast<nanoseconds>(unix_time).count() - duration_cast<nanoseconds>(monotonic).count();
}

void AppendTo(void* sink_data, const void* bytes, size_t size) {
  static_cast<std::string*>(sink_data)->append(static_cast<const char*>(bytes), size);
}

PJRT_Error* Start(PLUGIN_Profiler* profiler) {
  if (!profiler->clients.empty()) {
    return MakeError(FLAGOS_FAILED_PRECONDITION, "PLUGIN_Profiler_Start: the session runs already.");
  }
  profiler->clock_offset_ns = ClockOffsetNs();
  profiler->space.clear();
  for (Ref<PJRT_Client>& client : LiveClients()) {
    auto start = MakeArgs<FlagosProfilerStartArgs>();
    start.context = client->context;
    FLAGOS_RETURN_IF_ERROR(TakeError(*client->api, client->api->profiler_start(&start)));
    profiler->clients.push_back(std::move(client));
  }
  return nullptr;
}

PJRT_Error* StopClient(PLUGIN_Profiler* profiler, const PJRT_Client& client) {
  std::string json;
  auto stop = MakeArgs<FlagosProfilerStopArgs>();
  stop.context = client.context;
  stop.sink = &AppendTo;
  stop.sink_data = &json;
  FLAGOS_RETURN_IF_ERROR(TakeError(*client.api, client.api->profiler_stop(&stop)));
  Trace trace;
  if (!ParseTrace(json, &trace)) {
    return MakeError(FLAGOS_INTERNAL,
                     {"PLUGIN_Profiler_Stop: the backend's trace of ", json.size(), " bytes is no trace-event JSON."});
  }
  if (!trace.events.empty()) {
    profiler->space += SerializeXSpace("/device:" + client.platform_name, profiler->clock_offset_ns, trace);
  }
  return nullptr;
}

PJRT_Error* Stop(PLUGIN_Profiler* profiler) {
  PJRT_Error* first = nullptr;
  // One that fails must not leave the others tracing.
  for (const Ref<PJRT_Client>& client : profiler->clients) {
    PJRT_Error* error = StopClient(profiler, *client);
    if (error == nullptr) continue;
    if (first == nullptr) {
      first = error;
    } else {
      DestroyError(error);
    }
  }
  profiler->clients.clear();
  return first;
}

// jaxlib leaves struct_size of these arguments uninitialised, so it is not looked at.
template <typename Function>
PLUGIN_Profiler_Error* Enter(Function function) noexcept {
  try {
    return AsProfilerError(function());
  } catch (const std::bad_alloc&) {
    return AsProfilerError(OutOfMemory());
  } catch (const std::exception& exception) {
    return AsProfilerError(MakeError(FLAGOS_INTERNAL, {"The PJRT adapter's profiler: ", exception.what()}));
  }
}

void ErrorDestroy(PLUGIN_Profiler_Error_Destroy_Args* args) { DestroyError(AsError(args->error)); }

void GetMessage(PLUGIN_Profiler_Error_Message_Args* args) {
  const std::string_view message = ErrorMessage(AsError(args->error));
  args->message = message.data();
  args->message_size = message.size();
}

PLUGIN_Profiler_Error* GetCode(PLUGIN_Profiler_Error_GetCode_Args* args) {
  args->code = ErrorCode(AsError(args->error));
  return nullptr;
}

PLUGIN_Profiler_Error* Create(PLUGIN_Profiler_Create_Args* args) {
  return Enter([&]() -> PJRT_Error* {
    args->profiler = new PLUGIN_Profiler;
    return nullptr;
  });
}

PLUGIN_Profiler_Error* Destroy(PLUGIN_Profiler_Destroy_Args* args) {
  return Enter([&] {
    const std::unique_ptr<PLUGIN_Profiler> profiler(args->profiler);
    return profiler != nullptr ? Stop(profiler.get()) : nullptr;
  });
}

PLUGIN_Profiler_Error* StartSession(PLUGIN_Profiler_Start_Args* args) {
  return Enter([&] { return Start(args->profiler); });
}

PLUGIN_Profiler_Error* StopSession(PLUGIN_Profiler_Stop_Args* args) {
  return Enter([&] { return Stop(args->profiler); });
}

PLUGIN_Profiler_Error* CollectData(PLUGIN_Profiler_CollectData_Args* args) {
  // The caller parses this very memory, which is the session's.
  args->buffer = reinterpret_cast<uint8_t*>(args->profiler->space.data());
  args->buffer_size_in_bytes = args->profiler->space.size();
  return nullptr;
}

}  // namespace

const PLUGIN_Profiler_Api kProfilerApi = {PLUGIN_Profiler_Api_STRUCT_SIZE,
                                          nullptr,
                                          &ErrorDestroy,
                                          &GetMessage,
                                          &GetCode,
                                          &Create,
                                          &Destroy,
                                          &StartSession,
                                          &StopSession,
                                          &CollectData};

}  // namespace flagos_pjrt
