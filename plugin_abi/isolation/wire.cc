// Each message's fields are listed once, in Visit(): a writer and a reader walk the same list, so that they agree.
#include "wire.h"

#include <cstring>
#include <type_traits>

#include "../pjrt/src/proto.h"

namespace flagos_isolation {
namespace {

using flagos_pjrt::ProtoReader;
using flagos_pjrt::ProtoWriter;

class Writer {
 public:
  void Field(uint32_t number, const std::string& value) {
    if (!value.empty()) writer_.Bytes(number, value);
  }
  void Field(uint32_t number, double value) {
    uint64_t bits = 0;
    std::memcpy(&bits, &value, sizeof(bits));
    Field(number, bits);
  }
  template <typename T, std::enable_if_t<std::is_integral_v<T> || std::is_enum_v<T>, int> = 0>
  void Field(uint32_t number, T value) {
    const auto wide = static_cast<uint64_t>(static_cast<int64_t>(value));
    if (wide != 0) writer_.Varint(number, wide);
  }
  void Field(uint32_t number, const std::vector<int64_t>& values) {
    if (!values.empty()) writer_.PackedInt64(number, values.data(), values.size());
  }
  void Field(uint32_t number, const std::vector<std::string>& values) {
    for (const std::string& value : values) writer_.Bytes(number, value);
  }
  template <typename T>
  void Messages(uint32_t number, const std::vector<T>& values) {
    for (const T& value : values) Message(number, value);
  }
  template <typename T>
  void Message(uint32_t number, const T& value);
  void Error(uint32_t number, const Status& status) {
    if (status != nullptr) Message(number, *status);
  }
  std::string Take() { return writer_.Take(); }

 private:
  ProtoWriter writer_;
};

// Takes one field of the wire into the field of the struct that has its number.
class Reader {
 public:
  explicit Reader(const ProtoReader& field) : field_(field) {}
  bool ok() const { return ok_; }

  void Field(uint32_t number, std::string& value) {
    if (Is(number, field_.is_bytes())) value.assign(field_.bytes());
  }
  void Field(uint32_t number, double& value) {
    uint64_t bits = 0;
    if (field_.field() != number) return;
    Field(number, bits);
    std::memcpy(&value, &bits, sizeof(value));
  }
  template <typename T, std::enable_if_t<std::is_integral_v<T> || std::is_enum_v<T>, int> = 0>
  void Field(uint32_t number, T& value) {
    if (!Is(number, field_.is_varint())) return;
    if constexpr (std::is_enum_v<T> || (std::is_unsigned_v<T> && sizeof(T) == 4 && !std::is_same_v<T, bool>)) {
      if (field_.varint() > UINT32_MAX) ok_ = false;
    }
    value = static_cast<T>(field_.varint());
  }
  void Field(uint32_t number, std::vector<int64_t>& values) {
    if (field_.field() == number && !flagos_pjrt::ReadInt64List(field_, &values)) ok_ = false;
  }
  void Field(uint32_t number, std::vector<std::string>& values) {
    if (Is(number, field_.is_bytes())) values.emplace_back(field_.bytes());
  }
  template <typename T>
  void Messages(uint32_t number, std::vector<T>& values) {
    if (field_.field() == number) Message(number, values.emplace_back());
  }
  template <typename T>
  void Message(uint32_t number, T& value);
  void Error(uint32_t number, Status& status) {
    if (field_.field() != number) return;
    ErrorData data;
    Message(number, data);
    if (data.code == FLAGOS_OK) ok_ = false;  // an error that is none
    status = std::make_shared<ErrorData>(std::move(data));
  }

 private:
  bool Is(uint32_t number, bool right_type) {
    if (field_.field() != number) return false;
    if (!right_type) ok_ = false;
    return right_type;
  }

  const ProtoReader& field_;
  bool ok_ = true;
};

struct Payload {
  std::string name, value;
};

template <typename V, typename T>
void VisitError(V& v, T& error) {
  v.Field(1, error.code);
  v.Field(2, error.message);
}
void Visit(Writer& v, const Payload& payload) {
  v.Field(1, payload.name);
  v.Field(2, payload.value);
}
void Visit(Reader& v, Payload& payload) {
  v.Field(1, payload.name);
  v.Field(2, payload.value);
}
void Visit(Writer& v, const ErrorData& error) {
  VisitError(v, error);
  for (const auto& [name, value] : error.payloads) v.Message(3, Payload{name, value});
}
void Visit(Reader& v, ErrorData& error) {
  VisitError(v, error);
  std::vector<Payload> payloads;
  v.Messages(3, payloads);
  for (Payload& payload : payloads) error.payloads.emplace_back(std::move(payload.name), std::move(payload.value));
}

// `Is<T>`: T or const T.
template <typename T, typename U>
using If = std::enable_if_t<std::is_same_v<std::remove_const_t<T>, U>, int>;

template <typename V, typename T, If<T, NamedValue> = 0>
void Visit(V& v, T& value) {
  v.Field(1, value.name);
  v.Field(2, value.kind);
  v.Field(3, value.string_value);
  v.Field(4, value.int64_list);
  v.Field(5, value.int64_value);
  v.Field(6, value.double_value);
}

template <typename V, typename T, If<T, Hello> = 0>
void Visit(V& v, T& hello) {
  v.Field(1, hello.wire_version);
  v.Field(2, hello.version_min);
  v.Field(3, hello.version_max);
  v.Field(4, hello.version);
  v.Field(5, hello.name);
  v.Field(6, hello.platform);
  v.Field(7, hello.backend_version);
  v.Field(8, hello.git_revision);
  v.Field(9, hello.compiler);
  v.Field(10, hello.glibc);
  v.Field(11, hello.build_id);
  v.Field(12, hello.cxx11_abi);
  v.Field(13, hello.python_abi);
  v.Field(14, hello.refusal);
  v.Field(15, hello.probe);
  v.Field(16, hello.denied);
}

template <typename V, typename T, If<T, Device> = 0>
void Visit(V& v, T& device) {
  v.Field(1, device.id);
  v.Field(2, device.process_index);
  v.Field(3, device.local_hardware_id);
  v.Field(4, device.is_addressable);
  v.Field(5, device.kind);
  v.Field(6, device.debug_string);
  v.Field(7, device.to_string);
  v.Messages(8, device.attributes);
  v.Field(9, device.memories);
  v.Field(10, device.default_memory);
  v.Field(11, device.is_host_memory);
}

template <typename V, typename T, If<T, Memory> = 0>
void Visit(V& v, T& memory) {
  v.Field(1, memory.id);
  v.Field(2, memory.kind_id);
  v.Field(3, memory.kind);
  v.Field(4, memory.debug_string);
  v.Field(5, memory.to_string);
  v.Field(6, memory.devices);
}

template <typename V, typename T, If<T, Context> = 0>
void Visit(V& v, T& context) {
  v.Field(1, context.platform_name);
  v.Field(2, context.platform_version);
  v.Messages(3, context.devices);
  v.Field(4, context.addressable_devices);
  v.Messages(5, context.memories);
}

template <typename V, typename T, If<T, Buffer> = 0>
void Visit(V& v, T& buffer) {
  v.Field(1, buffer.element_type);
  v.Field(2, buffer.size_bytes);
  v.Field(3, buffer.device);
  v.Field(4, buffer.memory);
  v.Field(5, buffer.dims);
  v.Field(6, buffer.is_ready);
}

template <typename V, typename T, If<T, Executable> = 0>
void Visit(V& v, T& executable) {
  v.Field(1, executable.name);
  v.Field(2, executable.fingerprint);
  v.Field(3, executable.num_replicas);
  v.Field(4, executable.num_partitions);
  v.Field(5, executable.devices);
  v.Field(6, executable.device_assignment);
  v.Field(7, executable.output_types);
  v.Field(8, executable.output_dims);
  v.Field(9, executable.output_ranks);
  v.Field(10, executable.argument_aliases);
  v.Field(11, executable.output_memory_kinds);
  v.Field(12, executable.argument_memory_kinds);
  v.Field(13, executable.output_shardings);
  v.Field(14, executable.argument_shardings);
  v.Field(15, executable.sizes);
  v.Messages(16, executable.cost_analysis);
}

template <typename V, typename T, If<T, Call> = 0>
void Visit(V& v, T& call) {
  v.Field(1, call.method);
  v.Field(2, call.object);
  v.Field(3, call.other);
  v.Field(4, call.event);
  v.Field(5, call.released);
  v.Field(6, call.made);
  v.Field(7, call.memory);
  v.Field(8, call.device);
  v.Field(9, call.element_type);
  v.Field(10, call.number);
  v.Field(11, call.offset);
  v.Field(12, call.size);
  v.Field(13, call.launch_id);
  v.Field(14, call.num_devices);
  v.Field(15, call.dims);
  v.Field(16, call.arguments);
  v.Field(17, call.non_donatable);
  v.Field(18, call.data);
  v.Field(19, call.segment);
  v.Field(20, call.forgotten);
  v.Messages(21, call.options);
  v.Error(22, call.error);
  v.Field(23, call.destroyed);
  v.Field(24, call.contents);
  v.Field(25, call.process_index);
  v.Field(26, call.num_processes);
}

template <typename V, typename T, If<T, Reply> = 0>
void Visit(V& v, T& reply) {
  v.Error(1, reply.error);
  v.Message(2, reply.context);
  v.Messages(3, reply.buffers);
  v.Message(4, reply.executable);
  v.Field(5, reply.ready);
  v.Field(6, reply.deleted);
  v.Field(7, reply.numbers);
  v.Field(8, reply.data);
  v.Field(9, reply.address);
}

template <typename V, typename T, If<T, HostArray> = 0>
void Visit(V& v, T& array) {
  v.Field(1, array.element_type);
  v.Field(2, array.dims);
  v.Field(3, array.data);
}

template <typename V, typename T, If<T, Ask> = 0>
void Visit(V& v, T& ask) {
  v.Field(1, ask.id);
  v.Field(2, ask.question);
  v.Field(3, ask.number);
  v.Messages(4, ask.arguments);
  v.Messages(5, ask.results);
  v.Field(6, ask.key);
  v.Field(7, ask.value);
}

template <typename V, typename T, If<T, Done> = 0>
void Visit(V& v, T& done) {
  v.Field(1, done.event);
  v.Error(2, done.error);
  v.Field(3, done.data);
  v.Field(4, done.address);
  v.Message(5, done.ask);
}

template <typename T>
std::string EncodeMessage(const T& message) {
  Writer writer;
  Visit(writer, message);
  return writer.Take();
}

// Fields that are absent are zero, and those that nobody knows are left out.
template <typename T>
bool DecodeMessage(std::string_view bytes, T* message) {
  ProtoReader fields(bytes);
  while (fields.Next()) {
    Reader reader(fields);
    Visit(reader, *message);
    if (!reader.ok()) return false;
  }
  return fields.ok();
}

template <typename T>
void Writer::Message(uint32_t number, const T& value) {
  std::string bytes = EncodeMessage(value);
  // An element of a list counts also when all its fields are zero; a message that stands alone does not.
  constexpr bool stands_alone = std::is_same_v<T, Context> || std::is_same_v<T, Executable> || std::is_same_v<T, Ask>;
  if (!bytes.empty() || !stands_alone) writer_.Bytes(number, bytes);
}

template <typename T>
void Reader::Message(uint32_t number, T& value) {
  if (Is(number, field_.is_bytes()) && !DecodeMessage(field_.bytes(), &value)) ok_ = false;
}

}  // namespace

std::string Encode(const Hello& hello) { return EncodeMessage(hello); }
std::string Encode(const Call& call) { return EncodeMessage(call); }
std::string Encode(const Reply& reply) { return EncodeMessage(reply); }
std::string Encode(const Done& done) { return EncodeMessage(done); }
bool Decode(std::string_view bytes, Hello* hello) { return DecodeMessage(bytes, hello); }
bool Decode(std::string_view bytes, Call* call) { return DecodeMessage(bytes, call); }
bool Decode(std::string_view bytes, Reply* reply) { return DecodeMessage(bytes, reply); }
bool Decode(std::string_view bytes, Done* done) { return DecodeMessage(bytes, done); }

}  // namespace flagos_isolation
