// A device adaptor of FlagCX's whose device is the host: memory is the process's own, and a stream runs what it is given
// before the call returns. FLAGOS_FLAGCX_VENDOR is the vendor that it says, FLAGOS_FLAGCX_DEVICE its number.

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "flagcx_device_adaptor.h"

struct flagcxStream {
  void* base;
};

struct flagcxEvent {
  std::chrono::steady_clock::time_point recorded;
};

namespace {

int device_number() {
  const char* text = std::getenv("FLAGOS_FLAGCX_DEVICE");
  return text ? std::atoi(text) : 0;
}

flagcxResult_t synchronize() { return flagcxSuccess; }

flagcxResult_t copy(void* to, void* from, size_t size, flagcxMemcpyType_t, flagcxStream_t, void*) {
  std::memmove(to, from, size);
  return flagcxSuccess;
}

flagcxResult_t fill(void* to, int value, size_t size, flagcxMemType_t, flagcxStream_t) {
  std::memset(to, value, size);
  return flagcxSuccess;
}

flagcxResult_t allocate(void** out, size_t size, flagcxMemType_t, flagcxStream_t) {
  *out = std::calloc(size ? size : 1, 1);
  return *out ? flagcxSuccess : flagcxSystemError;
}

flagcxResult_t release(void* memory, flagcxMemType_t, flagcxStream_t) {
  std::free(memory);
  return flagcxSuccess;
}

flagcxResult_t set_device(int) { return flagcxSuccess; }

// The device is the only one: its number in the process is 0.
flagcxResult_t get_device(int* device) {
  *device = 0;
  return flagcxSuccess;
}

flagcxResult_t get_device_count(int* count) {
  *count = 1;
  return flagcxSuccess;
}

flagcxResult_t get_vendor(char* vendor) {
  const char* name = std::getenv("FLAGOS_FLAGCX_VENDOR");
  std::snprintf(vendor, 128, "%s", name ? name : "HOST");  // 128: MAX_VENDOR_LEN
  return flagcxSuccess;
}

flagcxResult_t host_pointer(void** device, void* host) {
  *device = host;
  return flagcxSuccess;
}

flagcxResult_t gdr_allocate(void** out, size_t size, void*) { return allocate(out, size, flagcxMemDevice, nullptr); }

flagcxResult_t gdr_release(void* memory, void*) { return release(memory, flagcxMemDevice, nullptr); }

flagcxResult_t stream_create(flagcxStream_t* stream) {
  *stream = new flagcxStream{};
  return flagcxSuccess;
}

flagcxResult_t stream_destroy(flagcxStream_t stream) {
  delete stream;
  return flagcxSuccess;
}

flagcxResult_t stream_copy(flagcxStream_t* stream, void* old) {
  *stream = new flagcxStream{old};
  return flagcxSuccess;
}

flagcxResult_t of_stream(flagcxStream_t) { return flagcxSuccess; }

flagcxResult_t stream_wait(flagcxStream_t, flagcxEvent_t) { return flagcxSuccess; }

// A stream that has run everything cannot wait for what comes later.
flagcxResult_t stream_value(flagcxStream_t, void*, uint64_t, int) { return flagcxNotSupported; }

flagcxResult_t event_create(flagcxEvent_t* event, flagcxEventType_t) {
  *event = new flagcxEvent{};
  return flagcxSuccess;
}

flagcxResult_t event_destroy(flagcxEvent_t event) {
  delete event;
  return flagcxSuccess;
}

flagcxResult_t event_record(flagcxEvent_t event, flagcxStream_t) {
  event->recorded = std::chrono::steady_clock::now();
  return flagcxSuccess;
}

flagcxResult_t of_event(flagcxEvent_t) { return flagcxSuccess; }

flagcxResult_t event_elapsed(float* milliseconds, flagcxEvent_t start, flagcxEvent_t end) {
  *milliseconds = std::chrono::duration<float, std::milli>(end->recorded - start->recorded).count();
  return flagcxSuccess;
}

flagcxResult_t ipc_create(flagcxIpcMemHandle_t*, size_t*) { return flagcxNotSupported; }
flagcxResult_t ipc_get(flagcxIpcMemHandle_t, void*) { return flagcxNotSupported; }
flagcxResult_t ipc_open(flagcxIpcMemHandle_t, void**) { return flagcxNotSupported; }
flagcxResult_t ipc_close(void*) { return flagcxNotSupported; }
flagcxResult_t ipc_free(flagcxIpcMemHandle_t) { return flagcxNotSupported; }

// Each process has a device of its own: FlagCX refuses two members on one.
flagcxResult_t bus_id(char* text, int length, int) {
  std::snprintf(text, static_cast<size_t>(length), "0000:%02x:00.0", device_number() + 1);
  return flagcxSuccess;
}

flagcxResult_t properties(flagcxDevProps* out, int) {
  *out = {};
  std::snprintf(out->name, sizeof out->name, "host memory");
  out->pciBusId = device_number() + 1;
  return flagcxSuccess;
}

flagcxResult_t by_bus_id(int* device, const char*) { return get_device(device); }

flagcxResult_t host_function(flagcxStream_t, void (*function)(void*), void* arguments) {
  function(arguments);
  return flagcxSuccess;
}

flagcxResult_t no_dma(bool* supported) {
  *supported = false;
  return flagcxSuccess;
}

flagcxDeviceAdaptor_v1 make() {
  flagcxDeviceAdaptor_v1 made = {};
  std::snprintf(made.name, sizeof made.name, "FLAGOS_HOST");
  made.deviceSynchronize = synchronize;
  made.deviceMemcpy = copy;
  made.deviceMemset = fill;
  made.deviceMalloc = allocate;
  made.deviceFree = release;
  made.setDevice = set_device;
  made.getDevice = get_device;
  made.getDeviceCount = get_device_count;
  made.getVendor = get_vendor;
  made.hostGetDevicePointer = host_pointer;
  made.gdrMemAlloc = gdr_allocate;
  made.gdrMemFree = gdr_release;
  made.streamCreate = stream_create;
  made.streamDestroy = stream_destroy;
  made.streamCopy = stream_copy;
  made.streamFree = stream_destroy;
  made.streamSynchronize = of_stream;
  made.streamQuery = of_stream;
  made.streamWaitEvent = stream_wait;
  made.streamWaitValue64 = stream_value;
  made.streamWriteValue64 = stream_value;
  made.eventCreate = event_create;
  made.eventDestroy = event_destroy;
  made.eventRecord = event_record;
  made.eventSynchronize = of_event;
  made.eventQuery = of_event;
  made.eventElapsedTime = event_elapsed;
  made.ipcMemHandleCreate = ipc_create;
  made.ipcMemHandleGet = ipc_get;
  made.ipcMemHandleOpen = ipc_open;
  made.ipcMemHandleClose = ipc_close;
  made.ipcMemHandleFree = ipc_free;
  made.getDeviceProperties = properties;
  made.getDevicePciBusId = bus_id;
  made.getDeviceByPciBusId = by_bus_id;
  made.launchHostFunc = host_function;
  made.dmaSupport = no_dma;
  return made;
}

}  // namespace

extern "C" __attribute__((visibility("default"))) flagcxDeviceAdaptor_v1 flagcxDeviceAdaptorPlugin_v1 = make();
