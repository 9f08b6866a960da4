// An executable: a program bound to the devices of a context, with everything a host may ask about it laid out in C.
#ifndef FLAGOS_NATIVE_EXECUTABLE_H_
#define FLAGOS_NATIVE_EXECUTABLE_H_

#include "program.h"

struct FlagosExecutable : flagos::RefCounted<FlagosExecutable> {
  // Throws Failure when the program names devices or memory kinds that the context does not have.
  FlagosExecutable(flagos::Context* context, std::unique_ptr<flagos::Program> program);

  void Describe(FlagosExecutableDescribeArgs& args) const;

  const flagos::ProgramInfo& info() const noexcept { return program->info(); }

  const flagos::Ref<flagos::Context> context;
  const std::unique_ptr<flagos::Program> program;
  std::vector<flagos::Place> places;  // the addressable ones, in order of the assignment
  // [place][output]: where the output lies.
  std::vector<std::vector<flagos::Memory*>> output_memories;

  // Whether devices of other processes take part.
  bool spans() const noexcept { return places.size() < info().device_assignment.size(); }

  // Bytes in the arguments and results of one device.
  size_t launch_bytes() const noexcept { return launch_bytes_; }

  std::vector<flagos::Memory*> OutputMemories(const flagos::Device& device) const;

 private:
  size_t launch_bytes_ = 0;
  std::vector<FlagosDevice*> devices_;
  std::vector<int32_t> output_types_;
  std::vector<int64_t> output_dims_;
  std::vector<size_t> output_ranks_;
  std::vector<const char*> output_kinds_, argument_kinds_;
  std::vector<FlagosBytes> output_shardings_, argument_shardings_;
  std::vector<FlagosNamedValue> costs_;
  size_t argument_bytes_ = 0, output_bytes_ = 0, alias_bytes_ = 0;
};

namespace flagos {

using Executable = ::FlagosExecutable;

}  // namespace flagos

#endif  // FLAGOS_NATIVE_EXECUTABLE_H_
