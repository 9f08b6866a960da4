#include "trace.h"

#include <cstdlib>
#include <map>

#include "proto.h"

namespace flagos_pjrt {
namespace {

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

  bool AtArray() {
    SkipSpace();
    return !text_.empty() && text_.front() == '[';
  }

 private:
  static constexpr int kMaxDepth = 64;

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

bool ReadEvent(JsonReader& reader, std::vector<TraceEvent>* events) {
  TraceEvent event;
  std::string phase;
  double process = 0, thread = 0;
  const bool valid = reader.Object([&](const std::string& key) {
    if (key == "name") return reader.String(&event.name);
    if (key == "ph") return reader.String(&phase);
    if (key == "ts") return reader.Number(&event.begin_us);
    if (key == "dur") return reader.Number(&event.duration_us);
    if (key == "pid") return reader.Number(&process);
    if (key == "tid") return reader.Number(&thread);
    return reader.Skip();
  });
  if (!valid) return false;
  event.process = static_cast<int64_t>(process);
  event.thread = static_cast<int64_t>(thread);
  if (phase == "X") events->push_back(std::move(event));
  return true;
}

// Field numbers, by message.
constexpr uint32_t kSpacePlanes = 1;
constexpr uint32_t kPlaneId = 1, kPlaneName = 2, kPlaneLines = 3, kPlaneEventMetadata = 4;
constexpr uint32_t kLineId = 1, kLineName = 2, kLineTimestampNs = 3, kLineEvents = 4;
constexpr uint32_t kEventMetadataId = 1, kEventOffsetPs = 2, kEventDurationPs = 3;
constexpr uint32_t kMetadataId = 1, kMetadataName = 2;
constexpr uint32_t kMapKey = 1, kMapValue = 2;

}  // namespace

bool ParseTrace(std::string_view json, std::vector<TraceEvent>* events) {
  JsonReader reader(json);
  const auto read_events = [&] { return reader.Array([&] { return ReadEvent(reader, events); }); };
  // Both forms of the format: a bare array, or an object that holds it.
  if (reader.AtArray()) return read_events();
  return reader.Object([&](const std::string& key) { return key == "traceEvents" ? read_events() : reader.Skip(); });
}

std::string SerializeXSpace(std::string_view plane_name, int64_t offset_ns, const std::vector<TraceEvent>& events) {
  std::map<std::string_view, uint64_t> names;
  std::map<int64_t, std::vector<const TraceEvent*>> threads;
  for (const TraceEvent& event : events) {
    names.emplace(event.name, names.size() + 1);
    threads[event.thread].push_back(&event);
  }
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
      written.Varint(kEventMetadataId, names[event->name]);
      written.Varint(kEventOffsetPs, static_cast<uint64_t>((event->begin_us - begin_us) * 1e6));
      written.Varint(kEventDurationPs, static_cast<uint64_t>(event->duration_us > 0 ? event->duration_us * 1e6 : 0));
      line.Bytes(kLineEvents, written.Take());
    }
    plane.Bytes(kPlaneLines, line.Take());
  }
  for (const auto& [name, id] : names) {
    ProtoWriter metadata;
    metadata.Varint(kMetadataId, id);
    metadata.Bytes(kMetadataName, name);
    ProtoWriter entry;
    entry.Varint(kMapKey, id);
    entry.Bytes(kMapValue, metadata.Take());
    plane.Bytes(kPlaneEventMetadata, entry.Take());
  }
  ProtoWriter space;
  space.Bytes(kSpacePlanes, plane.Take());
  return space.Take();
}

}  // namespace flagos_pjrt
