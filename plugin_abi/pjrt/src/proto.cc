#include "proto.h"

#include <cstring>
#include <limits>
#include <utility>

namespace flagos_pjrt {
namespace {

enum WireType : uint32_t { kVarint = 0, kFixed64 = 1, kBytes = 2, kStartGroup = 3, kEndGroup = 4, kFixed32 = 5 };

// Field numbers, by message.
constexpr uint32_t kAssignmentReplicas = 1, kAssignmentComputations = 2, kAssignmentDevices = 3, kComputationIds = 1;
constexpr uint32_t kCompileOptionsBuildOptions = 3, kBuildOptionsAssignment = 9;
constexpr uint32_t kProgramModule = 3;
constexpr uint32_t kModuleHostProgramShape = 4;
constexpr uint32_t kWithConfigModule = 1, kWithConfigConfig = 2;
constexpr uint32_t kConfigEntryLayout = 1, kConfigReplicas = 4, kConfigPartitions = 5;
constexpr uint32_t kShapeElementType = 2, kShapeDimensions = 3, kShapeLayout = 5, kShapeIsDynamic = 6;
constexpr uint32_t kLayoutMinorToMajor = 1;

}  // namespace

bool ProtoReader::Fail() {
  ok_ = false;
  rest_ = {};
  return false;
}

bool ProtoReader::ReadVarint(uint64_t* value) {
  *value = 0;
  for (int shift = 0; shift < 64; shift += 7) {
    if (rest_.empty()) return false;
    const auto byte = static_cast<uint8_t>(rest_.front());
    rest_.remove_prefix(1);
    *value |= static_cast<uint64_t>(byte & 0x7f) << shift;
    if ((byte & 0x80) == 0) return true;
  }
  return false;
}

bool ProtoReader::Next() {
  if (rest_.empty()) return false;
  uint64_t tag = 0;
  if (!ReadVarint(&tag) || tag > std::numeric_limits<uint32_t>::max()) return Fail();
  field_ = static_cast<uint32_t>(tag >> 3);
  wire_type_ = static_cast<uint32_t>(tag & 7);
  if (field_ == 0) return Fail();
  uint64_t size = 0;
  switch (wire_type_) {
    case kVarint:
      return ReadVarint(&varint_) || Fail();
    case kFixed64:
      size = 8;
      break;
    case kFixed32:
      size = 4;
      break;
    case kBytes:
      if (!ReadVarint(&size)) return Fail();
      break;
    default:  // groups: none of the messages that pass here has them
      return Fail();
  }
  if (size > rest_.size()) return Fail();
  bytes_ = rest_.substr(0, size);
  rest_.remove_prefix(size);
  return true;
}

bool IsWellFormedProto(std::string_view message) {
  ProtoReader reader(message);
  while (reader.Next()) {
  }
  return reader.ok();
}

std::string_view FindBytes(std::string_view message, uint32_t field) {
  std::string_view found;
  ProtoReader reader(message);
  while (reader.Next()) {
    if (reader.field() == field && reader.is_bytes()) found = reader.bytes();
  }
  return reader.ok() ? found : std::string_view();
}

bool ReadInt64List(const ProtoReader& field, std::vector<int64_t>* values) {
  if (field.is_varint()) {
    values->push_back(static_cast<int64_t>(field.varint()));
    return true;
  }
  if (!field.is_bytes()) return false;
  uint64_t value = 0;
  int shift = 0;
  for (const char character : field.bytes()) {
    const auto byte = static_cast<uint8_t>(character);
    if (shift >= 64) return false;
    value |= static_cast<uint64_t>(byte & 0x7f) << shift;
    shift += 7;
    if ((byte & 0x80) == 0) {
      values->push_back(static_cast<int64_t>(value));
      value = 0;
      shift = 0;
    }
  }
  return shift == 0;
}

void ProtoWriter::Raw(uint64_t value) {
  while (value >= 0x80) {
    bytes_ += static_cast<char>(value | 0x80);
    value >>= 7;
  }
  bytes_ += static_cast<char>(value);
}

void ProtoWriter::Varint(uint32_t field, uint64_t value) {
  Raw(field << 3 | kVarint);
  Raw(value);
}

void ProtoWriter::Bytes(uint32_t field, std::string_view value) {
  Raw(field << 3 | kBytes);
  Raw(value.size());
  bytes_.append(value);
}

void ProtoWriter::Double(uint32_t field, double value) {
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof(bits));
  Raw(field << 3 | kFixed64);
  for (int shift = 0; shift < 64; shift += 8) bytes_ += static_cast<char>(bits >> shift);
}

void ProtoWriter::PackedInt64(uint32_t field, const int64_t* values, size_t count) {
  ProtoWriter packed;
  for (size_t i = 0; i < count; ++i) packed.Raw(static_cast<uint64_t>(values[i]));
  Bytes(field, packed.bytes_);
}

std::string SerializeDeviceAssignment(const DeviceAssignment& assignment) {
  ProtoWriter writer;
  writer.Varint(kAssignmentReplicas, static_cast<uint64_t>(assignment.num_replicas));
  writer.Varint(kAssignmentComputations, static_cast<uint64_t>(assignment.num_partitions));
  for (int64_t partition = 0; partition < assignment.num_partitions; ++partition) {
    std::vector<int64_t> replicas;
    for (int64_t replica = 0; replica < assignment.num_replicas; ++replica) {
      replicas.push_back(assignment.ids[static_cast<size_t>(replica * assignment.num_partitions + partition)]);
    }
    ProtoWriter computation;
    computation.PackedInt64(kComputationIds, replicas.data(), replicas.size());
    writer.Bytes(kAssignmentDevices, computation.Take());
  }
  return writer.Take();
}

bool ParseDeviceAssignment(std::string_view message, DeviceAssignment* assignment) {
  std::vector<std::vector<int64_t>> partitions;
  ProtoReader reader(message);
  while (reader.Next()) {
    if (reader.field() == kAssignmentReplicas && reader.is_varint()) {
      assignment->num_replicas = static_cast<int64_t>(reader.varint());
    } else if (reader.field() == kAssignmentComputations && reader.is_varint()) {
      assignment->num_partitions = static_cast<int64_t>(reader.varint());
    } else if (reader.field() == kAssignmentDevices && reader.is_bytes()) {
      std::vector<int64_t>& ids = partitions.emplace_back();
      ProtoReader computation(reader.bytes());
      while (computation.Next()) {
        if (computation.field() == kComputationIds && !ReadInt64List(computation, &ids)) return false;
      }
      if (!computation.ok()) return false;
    }
  }
  if (!reader.ok() || static_cast<int64_t>(partitions.size()) != assignment->num_partitions) return false;
  for (const auto& ids : partitions) {
    if (static_cast<int64_t>(ids.size()) != assignment->num_replicas) return false;
  }
  for (int64_t replica = 0; replica < assignment->num_replicas; ++replica) {
    for (const auto& ids : partitions) assignment->ids.push_back(ids[static_cast<size_t>(replica)]);
  }
  return true;
}

bool FindDeviceAssignment(std::string_view compile_options, DeviceAssignment* assignment) {
  if (!IsWellFormedProto(compile_options)) return false;
  const std::string_view build_options = FindBytes(compile_options, kCompileOptionsBuildOptions);
  if (!IsWellFormedProto(build_options)) return false;
  const std::string_view message = FindBytes(build_options, kBuildOptionsAssignment);
  return message.data() == nullptr || ParseDeviceAssignment(message, assignment);
}

std::string ModuleWithConfig(std::string_view program, int64_t num_replicas, int64_t num_partitions) {
  const std::string_view module = FindBytes(program, kProgramModule);
  if (module.data() == nullptr) return {};
  ProtoWriter config;
  const std::string_view shape = FindBytes(module, kModuleHostProgramShape);
  if (shape.data() != nullptr) config.Bytes(kConfigEntryLayout, shape);
  config.Varint(kConfigReplicas, static_cast<uint64_t>(num_replicas));
  config.Varint(kConfigPartitions, static_cast<uint64_t>(num_partitions));
  ProtoWriter writer;
  writer.Bytes(kWithConfigModule, module);
  writer.Bytes(kWithConfigConfig, config.Take());
  return writer.Take();
}

std::string SerializeShape(int32_t type, const int64_t* dims, size_t rank, const int64_t* minor_to_major) {
  ProtoWriter writer;
  writer.Varint(kShapeElementType, static_cast<uint64_t>(type));
  writer.PackedInt64(kShapeDimensions, dims, rank);
  ProtoWriter layout;
  layout.PackedInt64(kLayoutMinorToMajor, minor_to_major, rank);
  writer.Bytes(kShapeLayout, layout.Take());
  for (size_t i = 0; i < rank; ++i) writer.Varint(kShapeIsDynamic, 0);
  return writer.Take();
}

}  // namespace flagos_pjrt
