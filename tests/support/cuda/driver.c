// A CUDA driver without devices: writes down, as a line of text each, what it is asked to launch. Of the interface that Triton's
// launchers and ours call; parameters are as wide as `fake_sizes` says.
#include <stdint.h>
#include <stdio.h>
#include <string.h>

typedef struct {
  int id, padding;
  unsigned value[16];
} Attribute;
typedef struct {
  unsigned grid[3], block[3], shared_bytes;
  void* stream;
  Attribute* attributes;
  unsigned num_attributes;
} Configuration;

int fake_sizes[512];
int fake_num_sizes;
char fake_log[1 << 18];
int fake_no_context;

#define SAY(...) (void)snprintf(fake_log + strlen(fake_log), sizeof fake_log - strlen(fake_log), __VA_ARGS__)

int cuGetErrorString(int result, const char** text) {
  *text = result == 1 ? "invalid argument" : "something else";
  return 0;
}
int cuDeviceGet(int* device, int number) { return *device = number, 0; }
int cuDevicePrimaryCtxRetain(void** context, int device) {
  SAY("context of %d\n", device);
  *context = (void*)0x77;
  return 0;
}
int cuCtxGetCurrent(void** context) { return *context = fake_no_context ? NULL : (void*)0x77, 0; }
int cuCtxSetCurrent(void* context) {
  fake_no_context = 0;
  SAY("current %p\n", context);
  return 0;
}
// Below 2^32 lies the host's memory, from 2^60 on what another failure is about; odd addresses are mapped elsewhere.
int cuPointerGetAttribute(void* data, int attribute, uint64_t pointer) {
  if (attribute != 3 || pointer < 1ull << 32) return 1;
  if (pointer >= 1ull << 60) return 700;
  *(uint64_t*)data = pointer & 1 ? pointer + (1ull << 40) : pointer;
  return 0;
}
int cuFuncSetAttribute(void* function, int attribute, int value) {
  SAY("function %p attribute %d is %d\n", function, attribute, value);
  return 0;
}
int cuLaunchKernelEx(const Configuration* c, void* function, void** parameters, void** extra) {
  SAY("launch %p grid %u %u %u block %u %u %u shared %u stream %p extra %p", function, c->grid[0], c->grid[1],
      c->grid[2], c->block[0], c->block[1], c->block[2], c->shared_bytes, c->stream, (void*)extra);
  for (unsigned i = 0; i < c->num_attributes; ++i) {
    const Attribute* a = &c->attributes[i];
    SAY(" attribute %d is %u", a->id, a->value[0]);
    if (a->id == 4) SAY(" %u %u", a->value[1], a->value[2]);
  }
  for (int i = 0; i < fake_num_sizes; ++i) {
    SAY(" ");
    for (int byte = 0; byte < fake_sizes[i]; ++byte) SAY("%02x", ((unsigned char*)parameters[i])[byte]);
  }
  SAY("\n");
  return c->stream == (void*)0xbad ? 719 : 0;
}

// What Triton's other functions link.
#define UNUSED(name) \
  int name(void) { return 801; }
UNUSED(cuCtxGetDevice)
UNUSED(cuCtxGetLimit)
UNUSED(cuCtxSetLimit)
UNUSED(cuDeviceGetAttribute)
UNUSED(cuDriverGetVersion)
UNUSED(cuFuncGetAttribute)
UNUSED(cuFuncSetCacheConfig)
UNUSED(cuModuleGetFunction)
UNUSED(cuModuleLoadData)
UNUSED(cuModuleUnload)
UNUSED(cuOccupancyMaxActiveClusters)
UNUSED(cuStreamIsCapturing)
UNUSED(cuTensorMapEncodeIm2col)
UNUSED(cuTensorMapEncodeTiled)
