#include "cuda/conditionals.h"

#include "error.h"

namespace flagos::cuda {
namespace {

// Conditions are set by kernels only. The driver itself has the function that this one calls.
constexpr const char* kSetCondition = R"(
.version 6.0
.target sm_50
.address_size 64
.extern .func cudaGraphSetConditional (.param .b64 handle, .param .b32 value);
.visible .entry flagos_set_condition (.param .u64 handle, .param .u64 flag)
{
  .reg .b64 %address<4>;
  .reg .b32 %value<3>;
  .reg .pred %is_set;
  ld.param.u64 %address1, [handle];
  ld.param.u64 %address2, [flag];
  cvta.to.global.u64 %address3, %address2;
  ld.global.u8 %value1, [%address3];
  setp.ne.u32 %is_set, %value1, 0;
  selp.u32 %value2, 1, 0, %is_set;
  {
    .param .b64 first;
    st.param.b64 [first+0], %address1;
    .param .b32 second;
    st.param.b32 [second+0], %value2;
    call.uni cudaGraphSetConditional, (first, second);
  }
  ret;
}
)";

StreamHandle StreamAt(uint64_t address) noexcept { return reinterpret_cast<StreamHandle>(address); }

}  // namespace

CudaConditionals::CudaConditionals(const Driver& driver, ContextHandle context) : driver_(driver), context_(context) {
  if (driver.missing_for_conditionals != nullptr) {
    Fail(FLAGOS_UNIMPLEMENTED, "the CUDA driver has no %s, which came with CUDA 12.4", driver.missing_for_conditionals);
  }
  ContextScope current(driver, context);
  Module module = nullptr;  // stays: graphs have its kernel
  driver.Check(driver.ModuleLoadData(&module, kSetCondition), "loading the kernel that sets conditions");
  driver.Check(driver.ModuleGetFunction(&set_condition_, module, "flagos_set_condition"),
               "finding the kernel that sets conditions");
}

Captures::Conditional CudaConditionals::Open(uint64_t stream, uint64_t flag, bool repeats, uint64_t inside) {
  const Driver& driver = driver_;
  ContextScope current(driver, context_);
  ConditionalParams params{};
  params.type = NodeType::kConditional;
  params.kind = repeats ? ConditionalKind::kWhile : ConditionalKind::kIf;
  params.num_bodies = 1;
  params.context = context_;
  driver.Check(driver.ConditionalHandleCreate(&params.handle, CaptureOf(StreamAt(stream)).graph, context_, 0, 0),
               "making a condition");
  driver.Check(SetCondition(StreamAt(stream), params.handle, flag), "launching the kernel that sets conditions");
  const Capture capture = CaptureOf(StreamAt(stream));
  Node node = nullptr;
  driver.Check(driver.GraphAddNode(&node, capture.graph, capture.last, capture.count, &params),
               "making a conditional node");
  driver.Check(driver.StreamUpdateCaptureDependencies(StreamAt(stream), &node, 1, kSetDependencies),
               "going on after a conditional node");
  const Graph body = params.bodies[0];
  driver.Check(driver.StreamBeginCaptureToGraph(StreamAt(inside), body, nullptr, nullptr, 0, kCaptureThreadLocal),
               "capturing the body of a conditional node");
  return {reinterpret_cast<uint64_t>(node), params.handle, reinterpret_cast<uint64_t>(body)};
}

void CudaConditionals::Close(uint64_t inside, uint64_t handle, uint64_t flag) {
  ContextScope current(driver_, context_);
  const Result set = flag == 0 ? 0 : SetCondition(StreamAt(inside), handle, flag);
  Graph body = nullptr;
  const Result ended = driver_.StreamEndCapture(StreamAt(inside), &body);
  driver_.Check(set, "launching the kernel that sets conditions");
  driver_.Check(ended, "ending the body of a conditional node");
}

CudaConditionals::Capture CudaConditionals::CaptureOf(StreamHandle stream) const {
  Capture capture;
  CaptureStatus status{};
  uint64_t number = 0;
  driver_.Check(driver_.StreamGetCaptureInfo(stream, &status, &number, &capture.graph, &capture.last, &capture.count),
                "reading what is captured");
  if (status != CaptureStatus::kActive) {
    Fail(FLAGOS_INTERNAL, "a conditional node is put into what is not captured (status %d)", static_cast<int>(status));
  }
  return capture;
}

Result CudaConditionals::SetCondition(StreamHandle stream, uint64_t handle, uint64_t flag) const {
  void* values[] = {&handle, &flag};
  return driver_.LaunchKernel(set_condition_, 1, 1, 1, 1, 1, 1, 0, stream, values, nullptr);
}

}  // namespace flagos::cuda
