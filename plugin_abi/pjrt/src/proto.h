// The protobuf wire format, as little of it as the adapter needs: it reads a few fields out of messages that pass
// through and writes small ones.
#ifndef FLAGOS_PJRT_PROTO_H_
#define FLAGOS_PJRT_PROTO_H_

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace flagos_pjrt {

// Walks the fields of one message. Malformed input ends the walk with ok() false.
class ProtoReader {
 public:
  explicit ProtoReader(std::string_view message) : rest_(message) {}

  bool Next();  // false at the end and on malformed input
  bool ok() const { return ok_; }

  uint32_t field() const { return field_; }
  bool is_varint() const { return wire_type_ == 0; }
  bool is_bytes() const { return wire_type_ == 2; }
  uint64_t varint() const { return varint_; }
  std::string_view bytes() const { return bytes_; }  // of a string, a message or a packed list

 private:
  bool ReadVarint(uint64_t* value);
  bool Fail();

  std::string_view rest_;
  bool ok_ = true;
  uint32_t field_ = 0;
  uint32_t wire_type_ = 0;
  uint64_t varint_ = 0;
  std::string_view bytes_;
};

// Whether message consists of whole fields.
bool IsWellFormedProto(std::string_view message);
// The last occurrence of a length-delimited field; data() is null when it is absent.
std::string_view FindBytes(std::string_view message, uint32_t field);
// Appends the elements of a repeated int64 field, packed or not. False on malformed input.
bool ReadInt64List(const ProtoReader& field, std::vector<int64_t>* values);

class ProtoWriter {
 public:
  void Varint(uint32_t field, uint64_t value);
  void Bytes(uint32_t field, std::string_view value);
  void Double(uint32_t field, double value);
  void PackedInt64(uint32_t field, const int64_t* values, size_t count);
  std::string Take() { return std::move(bytes_); }

 private:
  void Raw(uint64_t value);
  std::string bytes_;
};

// xla.DeviceAssignmentProto, as ids [num_replicas][num_partitions].
struct DeviceAssignment {
  int64_t num_replicas = 0;
  int64_t num_partitions = 0;
  std::vector<int64_t> ids;
};
std::string SerializeDeviceAssignment(const DeviceAssignment& assignment);
bool ParseDeviceAssignment(std::string_view message, DeviceAssignment* assignment);
// Finds the assignment in an xla.CompileOptionsProto; num_replicas stays 0 when it has none. False on malformed input.
bool FindDeviceAssignment(std::string_view compile_options, DeviceAssignment* assignment);

// xla.HloModuleProtoWithConfig around the module of a serialized flagos.Program; empty when there is none.
std::string ModuleWithConfig(std::string_view program, int64_t num_replicas, int64_t num_partitions);

// xla.ShapeProto of a dense row-major array; type is an xla.PrimitiveType.
std::string SerializeShape(int32_t type, const int64_t* dims, size_t rank, const int64_t* minor_to_major);

}  // namespace flagos_pjrt

#endif  // FLAGOS_PJRT_PROTO_H_
