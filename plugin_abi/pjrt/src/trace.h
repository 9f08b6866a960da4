// Backend traces (Chrome trace-event JSON), and the profile format of XLA's tools (XSpace) that they are turned into.
#ifndef FLAGOS_PJRT_TRACE_H_
#define FLAGOS_PJRT_TRACE_H_

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace flagos_pjrt {

// One complete ("X") event.
struct TraceEvent {
  std::string name;
  int64_t process = 0;
  int64_t thread = 0;
  double begin_us = 0;
  double duration_us = 0;
};

// False when json is no trace. Events of other kinds are passed over.
bool ParseTrace(std::string_view json, std::vector<TraceEvent>* events);

// A serialized XSpace with one plane called plane_name and one line for each thread. offset_ns is added to the events'
// times to make them Unix time.
std::string SerializeXSpace(std::string_view plane_name, int64_t offset_ns, const std::vector<TraceEvent>& events);

}  // namespace flagos_pjrt

#endif  // FLAGOS_PJRT_TRACE_H_
