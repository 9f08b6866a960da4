// Backend traces (Chrome trace-event JSON), and the profile format of XLA's tools (XSpace) that they are turned into.
#ifndef FLAGOS_PJRT_TRACE_H_
#define FLAGOS_PJRT_TRACE_H_

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace flagos_pjrt {

// One complete ("X") event. What is -1 was not said.
struct TraceEvent {
  std::string name;
  std::string category;
  int64_t process = 0;
  int64_t thread = 0;
  double begin_us = 0;
  double duration_us = 0;
  int64_t program = -1;  // described by an event of its own
  int64_t step = -1;     // of the program
  int64_t bytes = -1;    // that a transfer moves
};

// What is known of a program or of a step of one; "" and 0 where nothing is.
struct WorkFacts {
  std::string kind, provider, operation, source;
  double flops = 0;
  double bytes = 0;
  double expected_seconds = 0;  // at least, by the device's roofline
};

struct ProgramFacts : WorkFacts {
  std::string name;
  std::map<int64_t, WorkFacts> steps;
};

struct Trace {
  std::vector<TraceEvent> events;
  std::map<std::pair<int64_t, int64_t>, ProgramFacts> programs;  // by process and number
};

// False when json is no trace. Beside complete events it reads metadata events called "flagos_program", whose args are
// the number of a program and its facts; others are passed over.
bool ParseTrace(std::string_view json, Trace* trace);

// A serialized XSpace with one plane called plane_name and one line for each thread. offset_ns is added to the events'
// times to make them Unix time. Events have the statistics that XLA's tools show: flops, bytes_accessed, source and more.
std::string SerializeXSpace(std::string_view plane_name, int64_t offset_ns, const Trace& trace);

}  // namespace flagos_pjrt

#endif  // FLAGOS_PJRT_TRACE_H_
