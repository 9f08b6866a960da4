#include "description.h"

#include <algorithm>
#include <utility>

namespace flagos {

using python::Reader;

std::vector<int64_t> ReadIntegers(Reader reader) {
  std::vector<int64_t> values;
  while (!reader.done()) values.push_back(reader.Integer());
  return values;
}

namespace {

std::vector<std::string> Texts(Reader reader) {
  std::vector<std::string> values;
  while (!reader.done()) values.push_back(reader.Text());
  return values;
}

std::vector<std::string> BytesList(Reader reader) {
  std::vector<std::string> values;
  while (!reader.done()) values.push_back(reader.Bytes());
  return values;
}

std::vector<Shape> Shapes(Reader reader) {
  std::vector<Shape> shapes;
  while (!reader.done()) {
    Reader pair = reader.Tuple();
    const auto type = static_cast<int32_t>(pair.Integer());
    const std::vector<int64_t> dims = ReadIntegers(pair.Tuple());
    shapes.push_back(MakeShape("compile", type, dims.data(), dims.size()));
  }
  return shapes;
}

void CheckInfo(const ProgramInfo& info) {
  const auto fits = [](size_t size, size_t count) { return size == count || size == 0; };
  const auto below = [](const std::vector<int64_t>& numbers, size_t count) {
    return std::all_of(numbers.begin(), numbers.end(),
                       [count](int64_t n) { return n < 0 || static_cast<size_t>(n) < count; });
  };
  const size_t inputs = info.arguments.size(), outputs = info.outputs.size();
  if (info.argument_memory_kinds.size() != inputs || info.output_memory_kinds.size() != outputs ||
      !fits(info.argument_shardings.size(), inputs) || !fits(info.output_shardings.size(), outputs) ||
      info.argument_aliases.size() != inputs || !below(info.argument_aliases, outputs) || !below(info.donors, inputs) ||
      info.num_replicas < 1 || info.num_partitions < 1 ||
      static_cast<int64_t>(info.device_assignment.size()) != info.num_replicas * info.num_partitions) {
    Fail(FLAGOS_INTERNAL,
         "compile: the bridge describes %s inconsistently; this is a defect of the backend, please report "
         "it",
         info.name.c_str());
  }
}

}  // namespace

NativeForm::NativeForm(Reader reader, int64_t devices) {
  if (reader.done()) return;
  bytecode = reader.Bytes();
  constants = reader.Bytes();
  Reader list = reader.Tuple();
  while (!list.done()) {
    Reader call = list.Tuple();
    calls.push_back({});
    calls.back().operands = Shapes(call.Tuple());
    calls.back().results = Shapes(call.Tuple());
    Reader collective = call.Tuple();
    if (!collective.done()) calls.back().collective.emplace(collective, devices);
  }
  functions = ReadIntegers(reader.Tuple());
  lapack = ReadIntegers(reader.Tuple());
}

ProgramInfo ReadInfo(Reader& reader) {
  ProgramInfo info;
  info.name = reader.Text();
  info.fingerprint = reader.Text();
  info.num_replicas = reader.Integer();
  info.num_partitions = reader.Integer();
  info.device_assignment = ReadIntegers(reader.Tuple());
  info.arguments = Shapes(reader.Tuple());
  info.outputs = Shapes(reader.Tuple());
  info.argument_memory_kinds = Texts(reader.Tuple());
  info.output_memory_kinds = Texts(reader.Tuple());
  info.argument_shardings = BytesList(reader.Tuple());
  info.output_shardings = BytesList(reader.Tuple());
  info.argument_aliases = ReadIntegers(reader.Tuple());
  info.donors = ReadIntegers(reader.Tuple());
  info.generated_code_bytes = static_cast<size_t>(reader.Integer());
  info.temporary_bytes = static_cast<size_t>(reader.Integer());
  info.peak_bytes = static_cast<size_t>(reader.Integer());
  Reader costs = reader.Tuple();
  while (!costs.done()) {
    Reader pair = costs.Tuple();
    std::string name = pair.Text();
    info.costs.emplace_back(std::move(name), pair.Double());
  }
  info.is_small = reader.Integer() != 0;
  info.only_copies = reader.Integer() != 0;
  info.calls_host = reader.Integer() != 0;
  CheckInfo(info);
  return info;
}

}  // namespace flagos
