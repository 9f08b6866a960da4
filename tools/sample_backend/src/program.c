/* Reads protobuf's wire format: each field is a number and a type, then a varint, 4 or 8 bytes, or bytes with a length. Fields
 * that are not wanted are stepped over. */
#include "program.h"

#include <stdlib.h>
#include <string.h>

enum { VARINT = 0, FIXED64 = 1, BYTES = 2, FIXED32 = 5 };
enum { MAX_ELEMENTS = 1 << 30 };

typedef struct Reader {
  const uint8_t* at;
  const uint8_t* end;
  int is_malformed;
} Reader;

typedef struct Field {
  uint32_t number;
  int wire_type;
  uint64_t value; /* of a varint */
  Reader bytes;   /* of bytes: a message, a text, or packed numbers */
} Field;

static uint64_t read_varint(Reader* reader) {
  uint64_t value = 0;
  for (int shift = 0; shift < 64 && reader->at < reader->end; shift += 7) {
    const uint8_t byte = *reader->at++;
    value |= (uint64_t)(byte & 0x7f) << shift;
    if (byte < 0x80) return value;
  }
  reader->is_malformed = 1;
  reader->at = reader->end;
  return 0;
}

static int skip(Reader* reader, uint64_t size) {
  if (size > (uint64_t)(reader->end - reader->at)) {
    reader->is_malformed = 1;
    reader->at = reader->end;
    return 0;
  }
  reader->at += size;
  return 1;
}

/* The next field of a message; 0 at its end, or where it is malformed. */
static int next_field(Reader* reader, Field* field) {
  if (reader->at == reader->end) return 0;
  const uint64_t key = read_varint(reader);
  memset(field, 0, sizeof *field);
  field->number = (uint32_t)(key >> 3);
  field->wire_type = (int)(key & 7);
  switch (field->wire_type) {
    case VARINT:
      field->value = read_varint(reader);
      break;
    case BYTES: {
      const uint64_t size = read_varint(reader);
      field->bytes.at = reader->at;
      if (skip(reader, size)) field->bytes.end = reader->at;
      break;
    }
    case FIXED64:
      skip(reader, 8);
      break;
    case FIXED32:
      skip(reader, 4);
      break;
    default:
      reader->is_malformed = 1;
  }
  return !reader->is_malformed;
}

/* Appends the numbers of a repeated field, which comes packed or one by one. */
static void append(Reader* message, Field* field, int64_t** values, size_t* count) {
  Reader one = {0}, *numbers = &field->bytes;
  if (field->wire_type == VARINT) numbers = &one;
  do {
    const int64_t value = numbers == &one ? (int64_t)field->value : (int64_t)read_varint(numbers);
    *values = realloc(*values, (*count + 1) * sizeof **values);
    (*values)[(*count)++] = value;
  } while (numbers->at < numbers->end);
  message->is_malformed |= numbers->is_malformed;
}

static void copy_text(const Field* field, char* text, size_t capacity) {
  size_t size = (size_t)(field->bytes.end - field->bytes.at);
  if (size >= capacity) size = capacity - 1;
  if (size != 0) memcpy(text, field->bytes.at, size);
  text[size] = '\0';
}

static void read_shape(Reader* message, Reader bytes, Shape* shape) {
  Field field;
  int64_t* dims = NULL;
  while (next_field(&bytes, &field)) {
    if (field.number == 2) shape->element_type = (int32_t)field.value;
    if (field.number == 3 && (field.wire_type == VARINT || field.bytes.at < field.bytes.end)) {
      append(&bytes, &field, &dims, &shape->rank);
    }
  }
  if (shape->rank > MAX_RANK) {
    message->is_malformed = 1;
    shape->rank = 0;
  }
  /* So that no product of dimensions overflows. */
  int64_t elements = 1;
  for (size_t i = 0; i < shape->rank; ++i) {
    if (dims[i] < 0 || dims[i] > MAX_ELEMENTS || elements * dims[i] > MAX_ELEMENTS) {
      message->is_malformed = 1;
      break;
    }
    shape->dims[i] = dims[i];
    if (dims[i] != 0) elements *= dims[i];
  }
  message->is_malformed |= bytes.is_malformed;
  free(dims);
}

static void read_literal(Reader* message, Reader bytes, Instruction* instruction) {
  Field field;
  while (next_field(&bytes, &field)) {
    if (field.number != 8) continue; /* f32s */
    const size_t size = (size_t)(field.bytes.end - field.bytes.at);
    free(instruction->literal);
    instruction->literal = malloc(size + 1);
    if (size != 0) memcpy(instruction->literal, field.bytes.at, size);
    instruction->literal_size = size;
  }
  message->is_malformed |= bytes.is_malformed;
}

static void read_dot(Reader* message, Reader bytes, Instruction* instruction) {
  Field field;
  while (next_field(&bytes, &field)) {
    int64_t* values = NULL;
    size_t count = 0;
    if (field.wire_type == BYTES && field.bytes.at == field.bytes.end) continue;
    append(&bytes, &field, &values, &count);
    if (field.number == 1) instruction->lhs_contracting = count == 1 ? values[0] : -1;
    if (field.number == 2) instruction->rhs_contracting = count == 1 ? values[0] : -1;
    if (field.number == 3) instruction->has_batch_dimensions = 1;
    free(values);
  }
  message->is_malformed |= bytes.is_malformed;
}

static void read_instruction(Reader* message, Reader bytes, Instruction* out) {
  Field field;
  int64_t* called = NULL;
  size_t num_called = 0;
  out->called = out->lhs_contracting = out->rhs_contracting = -1;
  while (next_field(&bytes, &field)) {
    const int is_empty = field.wire_type == BYTES && field.bytes.at == field.bytes.end;
    if (field.number == 2) copy_text(&field, out->opcode, sizeof out->opcode);
    if (field.number == 3) read_shape(&bytes, field.bytes, &out->shape);
    if (field.number == 8) read_literal(&bytes, field.bytes, out);
    if (field.number == 9) out->parameter_number = (int64_t)field.value;
    if (field.number == 13) out->tuple_index = (int64_t)field.value;
    if (field.number == 14 && !is_empty) append(&bytes, &field, &out->dimensions, &out->num_dimensions);
    if (field.number == 30) read_dot(&bytes, field.bytes, out);
    if (field.number == 35) out->id = (int64_t)field.value;
    if (field.number == 36 && !is_empty) append(&bytes, &field, &out->operands, &out->num_operands);
    if (field.number == 38 && !is_empty) append(&bytes, &field, &called, &num_called);
  }
  if (num_called == 1) out->called = called[0];
  message->is_malformed |= bytes.is_malformed;
  free(called);
}

static void read_computation(Reader* message, Reader bytes, Computation* out) {
  Field field;
  while (next_field(&bytes, &field)) {
    if (field.number == 5) out->id = (int64_t)field.value;
    if (field.number == 6) out->root = (int64_t)field.value;
    if (field.number != 2) continue;
    out->instructions = realloc(out->instructions, (out->num_instructions + 1) * sizeof *out->instructions);
    Instruction* instruction = &out->instructions[out->num_instructions++];
    memset(instruction, 0, sizeof *instruction);
    read_instruction(&bytes, field.bytes, instruction);
  }
  message->is_malformed |= bytes.is_malformed;
}

static void read_module(Reader* message, Reader bytes, Program* out) {
  Field field;
  while (next_field(&bytes, &field)) {
    if (field.number == 1) copy_text(&field, out->name, sizeof out->name);
    if (field.number == 6) out->entry = (int64_t)field.value;
    if (field.number != 3) continue;
    out->computations = realloc(out->computations, (out->num_computations + 1) * sizeof *out->computations);
    Computation* computation = &out->computations[out->num_computations++];
    memset(computation, 0, sizeof *computation);
    read_computation(&bytes, field.bytes, computation);
  }
  message->is_malformed |= bytes.is_malformed;
}

FlagosError* program_read(const void* bytes, size_t size, Program** out) {
  Reader message = {bytes, (const uint8_t*)bytes + size, 0};
  Program* program = calloc(1, sizeof *program);
  uint64_t version = 0;
  Field field;
  while (next_field(&message, &field)) {
    if (field.number == 1) version = field.value;
    if (field.number == 3) read_module(&message, field.bytes, program);
  }
  if (message.is_malformed || version != 1) {
    program_destroy(program);
    return sample_error(FLAGOS_INVALID_ARGUMENT, "compile",
                        "the bytes are no flagos.Program of schema version 1; send one");
  }
  *out = program;
  return NULL;
}

void program_destroy(Program* program) {
  for (size_t i = 0; i < program->num_computations; ++i) {
    Computation* computation = &program->computations[i];
    for (size_t j = 0; j < computation->num_instructions; ++j) {
      free(computation->instructions[j].operands);
      free(computation->instructions[j].dimensions);
      free(computation->instructions[j].literal);
    }
    free(computation->instructions);
  }
  free(program->computations);
  free(program);
}

const Computation* program_computation(const Program* program, int64_t id) {
  for (size_t i = 0; i < program->num_computations; ++i) {
    if (program->computations[i].id == id) return &program->computations[i];
  }
  return NULL;
}

const Instruction* computation_instruction(const Computation* computation, int64_t id) {
  for (size_t i = 0; i < computation->num_instructions; ++i) {
    if (computation->instructions[i].id == id) return &computation->instructions[i];
  }
  return NULL;
}
