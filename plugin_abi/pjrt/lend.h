/* Lending a buffer's memory to another framework, as DLPack has it. jaxlib exports arrays of the platforms it knows by name
 * only, and gives its callers no handle of a buffer but the address of its contents. So a host asks jaxlib for that address,
 * and then, in the same thread, this for the memory that is there. */
#ifndef FLAGOS_PJRT_LEND_H_
#define FLAGOS_PJRT_LEND_H_

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* DLPack 0.x, whose structs have no version: DLManagedTensor and what is in it. */
typedef struct FlagosDlManagedTensor {
  void* data;
  int32_t device_type; /* DLDeviceType */
  int32_t device_id;
  int32_t rank;
  uint8_t type_code; /* DLDataTypeCode */
  uint8_t type_bits;
  uint16_t type_lanes;
  int64_t* dims;
  int64_t* strides; /* NULL: dense, row major */
  uint64_t byte_offset;
  void* manager;
  void (*deleter)(struct FlagosDlManagedTensor* self); /* from any thread */
} FlagosDlManagedTensor;

/* The buffer for which this thread last called PJRT_Buffer_UnsafePointer, if that gave `pointer`; it must still be alive,
 * and lends once for each call. Until `deleter` its memory is neither freed nor donated. NULL when it is another buffer,
 * when its contents are gone, or for an element type that DLPack lacks. */
FlagosDlManagedTensor* FlagosPjrtLend(uintptr_t pointer, int32_t device_type, int32_t device_id);

#ifdef __cplusplus
}
#endif

#endif /* FLAGOS_PJRT_LEND_H_ */
