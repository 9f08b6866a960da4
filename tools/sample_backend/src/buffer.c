/* Arrays in the host's memory. Everything is done before a call returns, so every event is ready. A real backend allocates on
 * its chip, and gives events that become ready when the transfer is over. */
#include <stdlib.h>
#include <string.h>

#include "sample.h"

static FlagosError* invalid(const char* slot, const char* message) {
  return sample_error(FLAGOS_INVALID_ARGUMENT, slot, message);
}

static size_t item_size(int32_t element_type) {
  switch (element_type) {
    case FLAGOS_TYPE_PRED:
    case FLAGOS_TYPE_S8:
    case FLAGOS_TYPE_U8:
      return 1;
    case FLAGOS_TYPE_S32:
    case FLAGOS_TYPE_U32:
    case FLAGOS_TYPE_F32:
      return 4;
    case FLAGOS_TYPE_S64:
    case FLAGOS_TYPE_F64:
      return 8;
    default:
      return 0;
  }
}

static FlagosError* new_buffer(const char* slot, FlagosMemory* memory, const int64_t* dims, size_t rank, int32_t type,
                               FlagosBuffer** out) {
  size_t size = item_size(type);
  if (size == 0) return invalid(slot, "the element type is not one of this backend; convert it first");
  if (rank > MAX_RANK) return invalid(slot, "the rank is above 8; reshape the array");
  for (size_t i = 0; i < rank; ++i) {
    if (dims[i] < 0) return invalid(slot, "a dimension is negative; correct the shape");
    size *= (size_t)dims[i];
  }
  FlagosBuffer* buffer = calloc(1, sizeof *buffer);
  buffer->memory = memory;
  if (rank != 0) memcpy(buffer->dims, dims, rank * sizeof *dims);
  buffer->rank = rank;
  buffer->element_type = type;
  buffer->size_bytes = size;
  *out = buffer;
  return NULL;
}

FlagosError* sample_buffer_allocate(FlagosBufferAllocateArgs* args) {
  FlagosError* error =
      new_buffer("buffer_allocate", args->memory, args->dims, args->rank, args->element_type, &args->buffer);
  if (error != NULL) return error;
  args->buffer->data = calloc(1, args->buffer->size_bytes + 1);
  args->buffer->owns_data = 1;
  return NULL;
}

/* Copies an array between dense memory and memory that strides describe. */
static void copy_strided(char* dense, char* strided, const FlagosBuffer* shape, const int64_t* strides, int to_dense) {
  size_t width = item_size(shape->element_type);
  for (size_t n = 0; n < shape->size_bytes / width; ++n) {
    size_t rest = n;
    int64_t offset = 0;
    for (size_t axis = shape->rank; axis-- > 0;) {
      offset += (int64_t)(rest % (size_t)shape->dims[axis]) * strides[axis];
      rest /= (size_t)shape->dims[axis];
    }
    if (to_dense) {
      memcpy(dense + n * width, strided + offset, width);
    } else {
      memcpy(strided + offset, dense + n * width, width);
    }
  }
}

FlagosError* sample_buffer_from_host(FlagosBufferFromHostArgs* args) {
  FlagosBufferAllocateArgs allocate = {
      sizeof allocate, args->context, args->memory, args->dims, args->rank, args->element_type, 0, NULL};
  FlagosError* error = sample_buffer_allocate(&allocate);
  if (error != NULL) return error;
  FlagosBuffer* buffer = allocate.buffer;
  if (args->byte_strides != NULL) {
    copy_strided(buffer->data, (char*)args->data, buffer, args->byte_strides, 1);
  } else if (buffer->size_bytes != 0) {
    memcpy(buffer->data, args->data, buffer->size_bytes);
  }
  args->buffer = buffer;
  args->done_with_host = sample_event(1);
  return NULL;
}

FlagosError* sample_buffer_view(FlagosBufferViewArgs* args) {
  FlagosError* error =
      new_buffer("buffer_view", args->memory, args->dims, args->rank, args->element_type, &args->buffer);
  if (error != NULL) return error;
  args->buffer->data = args->data;
  args->buffer->release = args->release;
  args->buffer->release_user_data = args->release_user_data;
  return NULL;
}

FlagosError* sample_buffer_promise(FlagosBufferPromiseArgs* args) {
  sample_error_destroy(args->error);
  return sample_unimplemented("buffer_promise");
}

FlagosError* sample_buffer_fulfill(FlagosBufferFulfillArgs* args) {
  sample_error_destroy(args->error);
  return sample_unimplemented("buffer_fulfill");
}

static void give_up(FlagosBuffer* buffer) {
  if (buffer->owns_data) free(buffer->data);
  if (buffer->release != NULL) buffer->release(buffer->release_user_data);
  buffer->data = NULL;
  buffer->owns_data = 0;
  buffer->release = NULL;
}

void sample_buffer_destroy(FlagosBuffer* buffer) {
  give_up(buffer);
  free(buffer);
}

FlagosError* sample_buffer_describe(FlagosBufferDescribeArgs* args) {
  args->dims = args->buffer->dims;
  args->rank = args->buffer->rank;
  args->size_bytes = args->buffer->size_bytes;
  args->device = &args->buffer->memory->context->device;
  args->memory = args->buffer->memory;
  args->element_type = args->buffer->element_type;
  args->is_deleted = args->buffer->is_deleted;
  return NULL;
}

FlagosError* sample_live(const FlagosBuffer* buffer, const char* slot) {
  return buffer->is_deleted ? invalid(slot, "the buffer is deleted; use it before it is deleted") : NULL;
}

FlagosError* sample_buffer_ready_event(FlagosBufferReadyEventArgs* args) {
  FlagosError* error = sample_live(args->buffer, "buffer_ready_event");
  if (error == NULL) args->event = sample_event(1);
  return error;
}

FlagosError* sample_buffer_to_host(FlagosBufferToHostArgs* args) {
  FlagosError* error = sample_live(args->buffer, "buffer_to_host");
  if (error != NULL) return error;
  if (args->size < args->buffer->size_bytes) return invalid("buffer_to_host", "the memory is too small; enlarge it");
  if (args->byte_strides != NULL) {
    copy_strided(args->buffer->data, args->data, args->buffer, args->byte_strides, 0);
  } else if (args->buffer->size_bytes != 0) {
    memcpy(args->data, args->buffer->data, args->buffer->size_bytes);
  }
  args->done = sample_event(1);
  return NULL;
}

static FlagosError* in_bounds(const FlagosBuffer* buffer, const char* slot, int64_t offset, int64_t size) {
  FlagosError* error = sample_live(buffer, slot);
  if (error != NULL) return error;
  int64_t end = (int64_t)buffer->size_bytes;
  if (offset >= 0 && size >= 0 && offset <= end && size <= end - offset) return NULL;
  return sample_error(FLAGOS_OUT_OF_RANGE, slot, "the range lies outside the buffer; correct it");
}

FlagosError* sample_buffer_read_raw(FlagosBufferReadRawArgs* args) {
  FlagosError* error = in_bounds(args->buffer, "buffer_read_raw", args->offset, args->size);
  if (error != NULL) return error;
  memcpy(args->data, (char*)args->buffer->data + args->offset, (size_t)args->size);
  args->done = sample_event(1);
  return NULL;
}

FlagosError* sample_buffer_write_raw(FlagosBufferWriteRawArgs* args) {
  FlagosError* error = in_bounds(args->buffer, "buffer_write_raw", args->offset, args->size);
  if (error != NULL) return error;
  memcpy((char*)args->buffer->data + args->offset, args->data, (size_t)args->size);
  args->done = sample_event(1);
  return NULL;
}

FlagosError* sample_buffer_copy(FlagosBufferCopyArgs* args) {
  FlagosError* error = sample_live(args->buffer, "buffer_copy");
  if (error != NULL) return error;
  FlagosBufferFromHostArgs copy = {.struct_size = sizeof copy,
                                   .memory = args->memory,
                                   .data = args->buffer->data,
                                   .dims = args->buffer->dims,
                                   .rank = args->buffer->rank,
                                   .element_type = args->buffer->element_type};
  error = sample_buffer_from_host(&copy);
  if (error != NULL) return error;
  sample_event_destroy(copy.done_with_host);
  args->copy = copy.buffer;
  return NULL;
}

FlagosError* sample_buffer_bitcast(FlagosBufferBitcastArgs* args) {
  (void)args;
  return sample_unimplemented("buffer_bitcast");
}

FlagosError* sample_buffer_delete(FlagosBufferDeleteArgs* args) {
  args->buffer->is_deleted = 1;
  if (args->buffer->holds == 0) give_up(args->buffer);
  return NULL;
}

FlagosError* sample_buffer_hold(FlagosBufferHoldArgs* args) {
  if (args->buffer->holds + args->delta < 0) return invalid("buffer_hold", "the count is zero; hold it first");
  args->buffer->holds += args->delta;
  return NULL;
}

FlagosError* sample_buffer_pointer(FlagosBufferPointerArgs* args) {
  FlagosError* error = sample_live(args->buffer, "buffer_pointer");
  if (error == NULL) args->pointer = args->buffer->data;
  return error;
}

FlagosError* sample_buffer_donate(FlagosBufferDonateArgs* args) {
  (void)args;
  return sample_unimplemented("buffer_donate");
}
