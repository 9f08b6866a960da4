#include "trace.h"

#include <cmath>
#include <cstdlib>
#include <functional>
#include <map>

#include "proto.h"

namespace flagos_pjrt {
namespace {

constexpr std::string_view kDescription = "flagos_program";
// Doubles up to here are whole numbers that int64_t and uint64_t hold.
constexpr double kLargestInteger = 9007199254740992.0;

// As much of a JSON reader as traces need. The first mistake ends everything with false.
class JsonReader {
 public:
  explicit JsonReader(std::string_view text) : text_(text) {}

  // Calls on_member(key) for each member of an object; it must read the value.
  template <typename OnMember>
  bool Object(OnMember on_member) {
    if (!Take('{')) return false;
    if (Take('}')) return true;
    do {
      std::string key;
      if (!String(&key) || !Take(':') || !on_member(key)) return false;
    } while (Take(','));
    return Take('}');
  }

  template <typename OnElement>
  bool Array(OnElement on_element) {
    if (!Take('[')) return false;
    if (Take(']')) return true;
    do {
      if (!on_element()) return false;
    } while (Take(','));
    return Take(']');
  }

  bool String(std::string* value) {
    value->clear();
    if (!Take('"')) return false;
    while (!text_.empty()) {
      const char c = Pop();
      if (c == '"') return true;
      if (c != '\\') {
        value->push_back(c);
      } else if (!Escape(value)) {
        return false;
      }
    }
    return false;
  }

  bool Number(double* value) {
    SkipSpace();
    const size_t size = text_.find_first_not_of("+-0123456789.eE");
    const std::string digits(text_.substr(0, size));
    if (digits.empty()) return false;
    char* end = nullptr;
    *value = std::strtod(digits.c_str(), &end);
    text_.remove_prefix(digits.size());
    return end == digits.c_str() + digits.size();
  }

  bool Skip(int depth = 0) {
    SkipSpace();
    if (text_.empty() || depth > kMaxDepth) return false;
    std::string ignored;
    double number = 0;
    switch (text_.front()) {
      case '{':
        return Object([&](const std::string&) { return Skip(depth + 1); });
      case '[':
        return Array([&] { return Skip(depth + 1); });
      case '"':
        return String(&ignored);
      default:
        return Word("true") || Word("false") || Word("null") || Number(&number);
    }
  }

  bool AtArray() { return At("["); }
  bool AtObject() { return At("{"); }
  bool AtString() { return At("\""); }
  bool AtNumber() { return At("-0123456789"); }

 private:
  static constexpr int kMaxDepth = 64;

  bool At(std::string_view characters) {
    SkipSpace();
    return !text_.empty() && characters.find(text_.front()) != std::string_view::npos;
  }
  void SkipSpace() {
    const size_t size = text_.find_first_not_of(" \t\r\n");
    text_.remove_prefix(size == std::string_view::npos ? text_.size() : size);
  }
  char Pop() {
    const char c = text_.front();
    text_.remove_prefix(1);
    return c;
  }
  bool Take(char c) {
    SkipSpace();
    if (text_.empty() || text_.front() != c) return false;
    text_.remove_prefix(1);
    return true;
  }
  bool Word(std::string_view word) {
    if (text_.substr(0, word.size()) != word) return false;
    text_.remove_prefix(word.size());
    return true;
  }
  bool Escape(std::string* value) {
    if (text_.empty()) return false;
    static constexpr std::string_view kEscapes = "\"\\/bfnrt", kValues = "\"\\/\b\f\n\r\t";
    const char c = Pop();
    if (const size_t index = kEscapes.find(c); index != std::string_view::npos) {
      value->push_back(kValues[index]);
      return true;
    }
    if (c != 'u' || text_.size() < 4) return false;
    const std::string digits(text_.substr(0, 4));
    text_.remove_prefix(4);
    char* end = nullptr;
    const unsigned long code = std::strtoul(digits.c_str(), &end, 16);
    if (end != digits.c_str() + 4) return false;
    // Names are ASCII or raw UTF-8; what is escaped beyond ASCII is not worth a surrogate decoder.
    value->push_back(code < 0x80 ? static_cast<char>(code) : '?');
    return true;
  }

  std::string_view text_;
};

// Keeps `value` as it is where the member is of another type than a number.
bool ReadInteger(JsonReader& reader, int64_t* value) {
  double number = 0;
  if (!reader.AtNumber()) return reader.Skip();
  if (!reader.Number(&number)) return false;
  if (std::abs(number) < kLargestInteger) *value = static_cast<int64_t>(number);
  return true;
}

bool ReadQuantity(JsonReader& reader, double* value) {
  return reader.AtNumber() ? reader.Number(value) : reader.Skip();
}

bool ReadText(JsonReader& reader, std::string* value) {
  return reader.AtString() ? reader.String(value) : reader.Skip();
}

bool ReadWork(JsonReader& reader, const std::string& key, WorkFacts* facts) {
  if (key == "kind") return ReadText(reader, &facts->kind);
  if (key == "provider") return ReadText(reader, &facts->provider);
  if (key == "operation") return ReadText(reader, &facts->operation);
  if (key == "source") return ReadText(reader, &facts->source);
  if (key == "flops") return ReadQuantity(reader, &facts->flops);
  if (key == "bytes") return ReadQuantity(reader, &facts->bytes);
  if (key == "expected_seconds") return ReadQuantity(reader, &facts->expected_seconds);
  return reader.Skip();
}

bool ReadSteps(JsonReader& reader, std::map<int64_t, WorkFacts>* steps) {
  if (!reader.AtObject()) return reader.Skip();
  return reader.Object([&](const std::string& number) {
    if (!reader.AtObject()) return reader.Skip();
    WorkFacts& step = (*steps)[std::strtoll(number.c_str(), nullptr, 10)];
    return reader.Object([&](const std::string& key) { return ReadWork(reader, key, &step); });
  });
}

bool ReadProgram(JsonReader& reader, ProgramFacts* facts) {
  if (!reader.AtObject()) return reader.Skip();
  return reader.Object([&](const std::string& key) {
    if (key == "name") return ReadText(reader, &facts->name);
    if (key == "steps") return ReadSteps(reader, &facts->steps);
    return ReadWork(reader, key, facts);
  });
}

bool ReadEvent(JsonReader& reader, Trace* trace) {
  TraceEvent event;
  ProgramFacts facts;
  std::string phase;
  const auto on_argument = [&](const std::string& key) {
    if (key == "program") return ReadInteger(reader, &event.program);
    if (key == "step") return ReadInteger(reader, &event.step);
    if (key == "bytes") return ReadInteger(reader, &event.bytes);
    if (key == "facts") return ReadProgram(reader, &facts);
    return reader.Skip();
  };
  const bool valid = reader.Object([&](const std::string& key) {
    if (key == "name") return reader.String(&event.name);
    if (key == "cat") return ReadText(reader, &event.category);
    if (key == "ph") return reader.String(&phase);
    if (key == "ts") return reader.Number(&event.begin_us);
    if (key == "dur") return reader.Number(&event.duration_us);
    if (key == "pid") return ReadInteger(reader, &event.process);
    if (key == "tid") return ReadInteger(reader, &event.thread);
    if (key == "args" && reader.AtObject()) return reader.Object(on_argument);
    return reader.Skip();
  });
  if (!valid) return false;
  if (phase == "M" && event.name == kDescription) {
    trace->programs.emplace(std::pair(event.process, event.program), std::move(facts));
  } else if (phase == "X") {
    trace->events.push_back(std::move(event));
  }
  return true;
}

// Field numbers, by message.
constexpr uint32_t kSpacePlanes = 1;
constexpr uint32_t kPlaneId = 1, kPlaneName = 2, kPlaneLines = 3, kPlaneEventMetadata = 4, kPlaneStatMetadata = 5;
constexpr uint32_t kLineId = 1, kLineName = 2, kLineTimestampNs = 3, kLineEvents = 4;
constexpr uint32_t kEventMetadataId = 1, kEventOffsetPs = 2, kEventDurationPs = 3, kEventStats = 4;
constexpr uint32_t kStatMetadataId = 1, kStatDouble = 2, kStatUint64 = 3, kStatString = 5;
constexpr uint32_t kMetadataId = 1, kMetadataName = 2;
constexpr uint32_t kMapKey = 1, kMapValue = 2;

// The names of a plane and their numbers, from 1 on.
class Names {
 public:
  uint64_t NumberOf(std::string_view name) { return numbers_.emplace(name, numbers_.size() + 1).first->second; }

  void Write(uint32_t field, ProtoWriter* plane) const {
    for (const auto& [name, id] : numbers_) {
      ProtoWriter metadata;
      metadata.Varint(kMetadataId, id);
      metadata.Bytes(kMetadataName, name);
      ProtoWriter entry;
      entry.Varint(kMapKey, id);
      entry.Bytes(kMapValue, metadata.Take());
      plane->Bytes(field, entry.Take());
    }
  }

 private:
  std::map<std::string, uint64_t, std::less<>> numbers_;
};

// Writes the statistics of one event; what is not known is left out.
class StatWriter {
 public:
  StatWriter(Names* names, ProtoWriter* event) : names_(*names), event_(*event) {}

  void Text(std::string_view name, std::string_view value) {
    if (value.empty()) return;
    ProtoWriter stat = Begin(name);
    stat.Bytes(kStatString, value);
    event_.Bytes(kEventStats, stat.Take());
  }
  void Count(std::string_view name, double value) {
    if (!(value > 0 && value < kLargestInteger)) return;
    ProtoWriter stat = Begin(name);
    stat.Varint(kStatUint64, static_cast<uint64_t>(value));
    event_.Bytes(kEventStats, stat.Take());
  }
  void Real(std::string_view name, double value) {
    if (!(value > 0)) return;
    ProtoWriter stat = Begin(name);
    stat.Double(kStatDouble, value);
    event_.Bytes(kEventStats, stat.Take());
  }

 private:
  ProtoWriter Begin(std::string_view name) {
    ProtoWriter stat;
    stat.Varint(kStatMetadataId, names_.NumberOf(name));
    return stat;
  }

  Names& names_;
  ProtoWriter& event_;
};

// The names are those of XLA's tools where they have one.
void WriteStats(const Trace& trace, const TraceEvent& event, StatWriter stats) {
  if (event.bytes > 0) stats.Count("bytes", static_cast<double>(event.bytes));
  const auto program = trace.programs.find({event.process, event.program});
  if (program == trace.programs.end()) return;
  const WorkFacts* facts = &program->second;
  if (event.step >= 0) {
    const auto step = program->second.steps.find(event.step);
    if (step == program->second.steps.end()) return;
    facts = &step->second;
  }
  stats.Text("hlo_module", program->second.name);
  stats.Text("hlo_category", facts->kind);
  stats.Text("provider", facts->provider);
  stats.Text("tf_op", facts->operation);
  stats.Text("source", facts->source);
  stats.Count("flops", facts->flops);
  stats.Count("bytes_accessed", facts->bytes);
  stats.Real("expected_us", facts->expected_seconds * 1e6);
  if (event.duration_us > 0) stats.Real("roofline", facts->expected_seconds * 1e6 / event.duration_us);
}

}  // namespace

bool ParseTrace(std::string_view json, Trace* trace) {
  JsonReader reader(json);
  const auto read_events = [&] { return reader.Array([&] { return ReadEvent(reader, trace); }); };
  // Both forms of the format: a bare array, or an object that holds it.
  if (reader.AtArray()) return read_events();
  return reader.Object([&](const std::string& key) { return key == "traceEvents" ? read_events() : reader.Skip(); });
}

std::string SerializeXSpace(std::string_view plane_name, int64_t offset_ns, const Trace& trace) {
  Names names, stat_names;
  std::map<int64_t, std::vector<const TraceEvent*>> threads;
  for (const TraceEvent& event : trace.events) threads[event.thread].push_back(&event);
  ProtoWriter plane;
  plane.Varint(kPlaneId, 1);
  plane.Bytes(kPlaneName, plane_name);
  for (const auto& [thread, thread_events] : threads) {
    double begin_us = thread_events.front()->begin_us;
    for (const TraceEvent* event : thread_events) begin_us = event->begin_us < begin_us ? event->begin_us : begin_us;
    ProtoWriter line;
    line.Varint(kLineId, static_cast<uint64_t>(thread));
    line.Bytes(kLineName, "thread " + std::to_string(thread));
    line.Varint(kLineTimestampNs, static_cast<uint64_t>(static_cast<int64_t>(begin_us * 1e3) + offset_ns));
    for (const TraceEvent* event : thread_events) {
      ProtoWriter written;
      written.Varint(kEventMetadataId, names.NumberOf(event->name));
      written.Varint(kEventOffsetPs, static_cast<uint64_t>((event->begin_us - begin_us) * 1e6));
      written.Varint(kEventDurationPs, static_cast<uint64_t>(event->duration_us > 0 ? event->duration_us * 1e6 : 0));
      WriteStats(trace, *event, StatWriter(&stat_names, &written));
      line.Bytes(kLineEvents, written.Take());
    }
    plane.Bytes(kPlaneLines, line.Take());
  }
  names.Write(kPlaneEventMetadata, &plane);
  stat_names.Write(kPlaneStatMetadata, &plane);
  ProtoWriter space;
  space.Bytes(kSpacePlanes, plane.Take());
  return space.Take();
}

}  // namespace flagos_pjrt
