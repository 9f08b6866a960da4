#include "program.h"

#ifdef FLAGOS_TEST_PROGRAMS
#include "testing/test_program.h"
#endif
#include "profiler.h"
#include "python_program.h"

namespace flagos {
namespace {

thread_local QueueScope* t_scope = nullptr;

}  // namespace

int64_t Program::NumberIn(Profiler& profiler) {
  int64_t number = number_.load(std::memory_order_relaxed);
  if (number >= 0) return number;
  number = profiler.NumberOf(info_.fingerprint);
  if (number < 0) number = profiler.Describe(info_.fingerprint, info_.name, Notes());
  number_.store(number, std::memory_order_relaxed);
  return number;
}

std::unique_ptr<Program> CompileProgram(Context* context, const void* program, size_t size) {
#ifdef FLAGOS_TEST_PROGRAMS
  if (auto test = testing::CompileTestProgram(program, size)) return test;
#endif
  return CompilePythonProgram(context, program, size);
}

std::unique_ptr<Program> LoadProgram(Context* context, const void* serialized, size_t size,
                                     const std::vector<int64_t>& assignment) {
  return LoadPythonProgram(context, serialized, size, assignment);
}

QueueScope::QueueScope(DeviceQueue* queue, bool nested) noexcept
    : queue_(queue), nested_(nested), outer_(std::exchange(t_scope, this)) {}

QueueScope::~QueueScope() {
  t_scope = outer_;
  if (has_ticket_) queue_->EndTicket();
}

bool QueueScope::InCallback() noexcept { return t_scope != nullptr && t_scope->queue_ == nullptr; }

CallbackScope::CallbackScope() : task_(t_scope), outside_(nullptr, false) {
  if (task_ == nullptr || task_->queue_ == nullptr) return;
  const bool takes_ticket = !task_->nested_ && !task_->has_ticket_;
  const DeviceQueue::Ticket ticket = takes_ticket ? task_->queue_->TakeTicket() : 0;
  task_->queue_->BeginBlocking();
  if (!takes_ticket) return;
  task_->queue_->AwaitTicket(ticket);
  task_->has_ticket_ = true;
}

CallbackScope::~CallbackScope() {
  if (task_ != nullptr && task_->queue_ != nullptr) task_->queue_->EndBlocking();
}

}  // namespace flagos
