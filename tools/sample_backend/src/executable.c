/* Compiles a program by checking that every instruction is one of `operations`, and runs it one instruction after the other.
 * This is the file that a vendor replaces: by a compiler for the chip, and launches on a stream of it. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "program.h"

typedef struct Value Value;
struct Value {
  const void* data; /* F32 or S32, as the instruction's shape says */
  Value* elements;  /* of a tuple */
  size_t num_elements;
};

struct FlagosExecutable {
  FlagosContext* context;
  void* serialized; /* the program as it came */
  size_t serialized_size;
  Program* program;
  char fingerprint[17];
  size_t num_arguments, num_outputs;
  const Instruction** parameters; /* by their number */
  const Instruction** outputs;    /* the elements of the root, or the root */
  int64_t* output_dims;
  size_t* output_ranks;
  int32_t* output_types;
  const char** memory_kinds; /* as many as there are arguments or outputs, the more of them */
  int64_t* aliases;
  size_t argument_bytes, output_bytes;
};

static size_t count_of(const Shape* shape) {
  size_t count = 1;
  for (size_t i = 0; i < shape->rank; ++i) count *= (size_t)shape->dims[i];
  return count;
}

static int same_shape(const Shape* a, const Shape* b) {
  return a->element_type == b->element_type && a->rank == b->rank &&
         (a->rank == 0 || memcmp(a->dims, b->dims, a->rank * sizeof *a->dims) == 0);
}

/* ---- The operations ---- */

static float add(float x, float y) { return x + y; }
static float subtract(float x, float y) { return x - y; }
static float multiply(float x, float y) { return x * y; }
static float divide(float x, float y) { return x / y; }
/* NaN where one of both is. */
static float maximum(float x, float y) { return x > y || x != x ? x : y; }
static float minimum(float x, float y) { return x < y || x != x ? x : y; }
static float negate(float x) { return -x; }

enum { PARAMETER, CONSTANT, TUPLE, ELEMENT, CALL, RESHAPE, BROADCAST, CONVERT, DOT, UNARY, BINARY };

static const struct Operation {
  const char* opcode;
  int kind;
  int num_operands; /* -1: any number */
  float (*unary)(float);
  float (*binary)(float, float);
} operations[] = {
    {"parameter", PARAMETER, 0, NULL, NULL}, {"constant", CONSTANT, 0, NULL, NULL},
    {"tuple", TUPLE, -1, NULL, NULL},        {"get-tuple-element", ELEMENT, 1, NULL, NULL},
    {"call", CALL, -1, NULL, NULL},          {"reshape", RESHAPE, 1, NULL, NULL},
    {"broadcast", BROADCAST, 1, NULL, NULL}, {"dot", DOT, 2, NULL, NULL},
    {"convert", CONVERT, 1, NULL, NULL},     {"negate", UNARY, 1, negate, NULL},
    {"exponential", UNARY, 1, expf, NULL},   {"tanh", UNARY, 1, tanhf, NULL},
    {"sqrt", UNARY, 1, sqrtf, NULL},         {"abs", UNARY, 1, fabsf, NULL},
    {"add", BINARY, 2, NULL, add},           {"subtract", BINARY, 2, NULL, subtract},
    {"multiply", BINARY, 2, NULL, multiply}, {"divide", BINARY, 2, NULL, divide},
    {"maximum", BINARY, 2, NULL, maximum},   {"minimum", BINARY, 2, NULL, minimum},
};

static const struct Operation* operation_of(const Instruction* instruction) {
  for (size_t i = 0; i < sizeof operations / sizeof *operations; ++i) {
    if (strcmp(operations[i].opcode, instruction->opcode) == 0) return &operations[i];
  }
  return NULL;
}

/* ---- Compile: check ---- */

static FlagosError* refused(int32_t code, const Instruction* instruction, const char* what) {
  char message[200];
  snprintf(message, sizeof message, "%s: %s", instruction->opcode, what);
  return sample_error(code, "compile", message);
}

static int is_dot_of_matrices(const Instruction* dot, const Shape* lhs, const Shape* rhs) {
  return lhs->element_type == FLAGOS_TYPE_F32 && rhs->element_type == FLAGOS_TYPE_F32 && !dot->has_batch_dimensions &&
         lhs->rank == 2 && rhs->rank == 2 && dot->shape.rank == 2 && dot->lhs_contracting == 1 &&
         dot->rhs_contracting == 0 && lhs->dims[1] == rhs->dims[0] && dot->shape.dims[0] == lhs->dims[0] &&
         dot->shape.dims[1] == rhs->dims[1];
}

static int is_broadcast(const Instruction* broadcast, const Shape* operand) {
  if (operand->element_type != broadcast->shape.element_type || broadcast->num_dimensions != operand->rank) return 0;
  for (size_t i = 0; i < operand->rank; ++i) {
    const int64_t axis = broadcast->dimensions[i];
    if (axis < 0 || (size_t)axis >= broadcast->shape.rank || broadcast->shape.dims[axis] != operand->dims[i]) return 0;
  }
  return 1;
}

/* The element of a tuple that an instruction takes, if its operand is a tuple or a call of what ends in one. */
static const Instruction* element_of(const Program* program, const Computation* computation,
                                     const Instruction* instruction) {
  const Instruction* tuple = computation_instruction(computation, instruction->operands[0]);
  if (strcmp(tuple->opcode, "call") == 0) {
    computation = program_computation(program, tuple->called);
    tuple = computation_instruction(computation, computation->root);
  }
  const int64_t index = instruction->tuple_index;
  if (strcmp(tuple->opcode, "tuple") != 0 || index < 0 || (size_t)index >= tuple->num_operands) return NULL;
  return computation_instruction(computation, tuple->operands[index]);
}

/* A call gives as many operands as the computation has parameters, of their shapes, and has its root's shape. */
static int is_call(const Program* program, const Computation* computation, const Instruction* call) {
  const Computation* called = program_computation(program, call->called);
  if (called == NULL || called >= computation) return 0;
  const Instruction* root = computation_instruction(called, called->root);
  if (root == NULL || !same_shape(&root->shape, &call->shape)) return 0;
  for (size_t i = 0; i < called->num_instructions; ++i) {
    const Instruction* parameter = &called->instructions[i];
    if (strcmp(parameter->opcode, "parameter") != 0) continue;
    const int64_t number = parameter->parameter_number;
    if (number < 0 || (size_t)number >= call->num_operands) return 0;
    const Instruction* operand = computation_instruction(computation, call->operands[number]);
    if (operand == NULL || !same_shape(&operand->shape, &parameter->shape)) return 0;
  }
  return 1;
}

/* Operands come before what uses them, and computations before what calls them: so that what runs comes to an end. */
static FlagosError* check(const Program* program, const Computation* computation, const Instruction* instruction) {
  const struct Operation* operation = operation_of(instruction);
  if (operation == NULL) {
    return refused(FLAGOS_UNIMPLEMENTED, instruction,
                   "the " SAMPLE_NAME " backend does not compute it; add it to `operations`");
  }
  const int32_t type = instruction->shape.element_type;
  const int is_moved = operation->kind == PARAMETER || operation->kind == RESHAPE || operation->kind == BROADCAST;
  const int may_be_tuple = operation->kind == TUPLE || operation->kind == CALL || operation->kind == ELEMENT;
  if (type != FLAGOS_TYPE_F32 && !(type == FLAGOS_TYPE_S32 && is_moved) && !may_be_tuple) {
    return refused(FLAGOS_UNIMPLEMENTED, instruction,
                   "the " SAMPLE_NAME " backend computes F32, and takes S32 to convert it; convert to F32");
  }
  if (operation->num_operands >= 0 && instruction->num_operands != (size_t)operation->num_operands) {
    return refused(FLAGOS_INVALID_ARGUMENT, instruction, "it has another number of operands than its kind");
  }
  const Shape* shapes[2] = {NULL, NULL};
  for (size_t i = 0; i < instruction->num_operands; ++i) {
    const Instruction* operand = computation_instruction(computation, instruction->operands[i]);
    if (operand == NULL || operand >= instruction) {
      return refused(FLAGOS_INVALID_ARGUMENT, instruction, "an operand does not come before it");
    }
    if (i < 2) shapes[i] = &operand->shape;
  }
  int is_right = 1;
  switch (operation->kind) {
    case CONSTANT:
      is_right = instruction->literal_size == count_of(&instruction->shape) * sizeof(float);
      break;
    case CALL:
      is_right = is_call(program, computation, instruction);
      break;
    case ELEMENT: {
      const Instruction* element = element_of(program, computation, instruction);
      is_right = element != NULL && same_shape(&element->shape, &instruction->shape);
      break;
    }
    case RESHAPE:
      is_right = shapes[0]->element_type == type && count_of(&instruction->shape) == count_of(shapes[0]);
      break;
    case BROADCAST:
      is_right = is_broadcast(instruction, shapes[0]);
      break;
    case CONVERT:
      is_right = shapes[0]->rank == instruction->shape.rank && count_of(shapes[0]) == count_of(&instruction->shape);
      if (shapes[0]->element_type != FLAGOS_TYPE_F32 && shapes[0]->element_type != FLAGOS_TYPE_S32) is_right = 0;
      break;
    case DOT:
      if (!is_dot_of_matrices(instruction, shapes[0], shapes[1])) {
        return refused(FLAGOS_UNIMPLEMENTED, instruction, "products are of matrices [m, k] and [k, n] only");
      }
      break;
    case UNARY:
    case BINARY:
      for (size_t i = 0; i < instruction->num_operands; ++i) is_right &= same_shape(shapes[i], &instruction->shape);
      break;
    default:
      break;
  }
  return is_right ? NULL : refused(FLAGOS_INVALID_ARGUMENT, instruction, "it is malformed");
}

/* ---- Execute ---- */

/* What a launch allocates; all of it goes at once. */
typedef struct Arena {
  void** blocks;
  size_t count;
} Arena;

static void* allocate(Arena* arena, size_t size) {
  arena->blocks = realloc(arena->blocks, (arena->count + 1) * sizeof *arena->blocks);
  return arena->blocks[arena->count++] = calloc(1, size + 1);
}

static void release(Arena* arena) {
  for (size_t i = 0; i < arena->count; ++i) free(arena->blocks[i]);
  free(arena->blocks);
}

/* Of elements of four bytes. */
static void broadcast(const Instruction* instruction, const Shape* operand, const uint32_t* from, uint32_t* to) {
  const Shape* shape = &instruction->shape;
  for (size_t n = 0; n < count_of(shape); ++n) {
    int64_t index[MAX_RANK];
    size_t rest = n, at = 0;
    for (size_t axis = shape->rank; axis-- > 0;) {
      index[axis] = (int64_t)(rest % (size_t)shape->dims[axis]);
      rest /= (size_t)shape->dims[axis];
    }
    for (size_t i = 0; i < operand->rank; ++i) {
      at = at * (size_t)operand->dims[i] + (size_t)index[instruction->dimensions[i]];
    }
    to[n] = from[at];
  }
}

static void dot(const Shape* lhs, const Shape* rhs, const float* a, const float* b, float* to) {
  const int64_t m = lhs->dims[0], k = lhs->dims[1], n = rhs->dims[1];
  for (int64_t i = 0; i < m; ++i) {
    for (int64_t j = 0; j < n; ++j) {
      double sum = 0;
      for (int64_t l = 0; l < k; ++l) sum += (double)a[i * k + l] * b[l * n + j];
      to[i * n + j] = (float)sum;
    }
  }
}

static Value evaluate(const Program* program, const Computation* computation, const Value* arguments, Arena* arena) {
  Value* values = allocate(arena, computation->num_instructions * sizeof *values);
  for (size_t i = 0; i < computation->num_instructions; ++i) {
    const Instruction* instruction = &computation->instructions[i];
    const struct Operation* operation = operation_of(instruction);
    const Shape* shapes[2] = {NULL, NULL};
    Value* operands = allocate(arena, instruction->num_operands * sizeof *operands);
    for (size_t j = 0; j < instruction->num_operands; ++j) {
      const Instruction* operand = computation_instruction(computation, instruction->operands[j]);
      operands[j] = values[operand - computation->instructions];
      if (j < 2) shapes[j] = &operand->shape;
    }
    const size_t count = count_of(&instruction->shape);
    float* data = operation->kind >= BROADCAST ? allocate(arena, count * sizeof *data) : NULL;
    const float* x = instruction->num_operands > 0 ? operands[0].data : NULL;
    const float* y = instruction->num_operands > 1 ? operands[1].data : NULL;
    Value* value = &values[i];
    value->data = data;
    switch (operation->kind) {
      case PARAMETER:
        *value = arguments[instruction->parameter_number];
        break;
      case CONSTANT:
        value->data = instruction->literal;
        break;
      case TUPLE:
        value->elements = operands;
        value->num_elements = instruction->num_operands;
        break;
      case ELEMENT:
        *value = operands[0].elements[instruction->tuple_index];
        break;
      case CALL:
        *value = evaluate(program, program_computation(program, instruction->called), operands, arena);
        break;
      case RESHAPE:
        value->data = operands[0].data;
        break;
      case BROADCAST:
        broadcast(instruction, shapes[0], operands[0].data, (uint32_t*)data);
        break;
      case CONVERT:
        for (size_t n = 0; n < count; ++n) {
          data[n] = shapes[0]->element_type == FLAGOS_TYPE_S32 ? (float)((const int32_t*)x)[n] : x[n];
        }
        break;
      case DOT:
        dot(shapes[0], shapes[1], x, y, data);
        break;
      case UNARY:
        for (size_t n = 0; n < count; ++n) data[n] = operation->unary(x[n]);
        break;
      case BINARY:
        for (size_t n = 0; n < count; ++n) data[n] = operation->binary(x[n], y[n]);
        break;
    }
  }
  return values[computation_instruction(computation, computation->root) - computation->instructions];
}

FlagosError* sample_execute(FlagosExecuteArgs* args) {
  const FlagosExecutable* executable = args->executable;
  if (args->num_devices != 1 || args->num_arguments != executable->num_arguments) {
    return sample_error(FLAGOS_INVALID_ARGUMENT, "execute",
                        "the devices or arguments are not as many as compiled; pass those");
  }
  Arena arena = {NULL, 0};
  Value* arguments = allocate(&arena, args->num_arguments * sizeof *arguments);
  for (size_t i = 0; i < args->num_arguments; ++i) {
    const FlagosBuffer* buffer = args->arguments[0][i];
    const Shape* wanted = &executable->parameters[i]->shape;
    Shape given = {buffer->element_type, {0}, buffer->rank};
    memcpy(given.dims, buffer->dims, sizeof given.dims);
    FlagosError* error = sample_live(buffer, "execute");
    if (error == NULL && (buffer->element_type != wanted->element_type || !same_shape(&given, wanted))) {
      error = sample_error(FLAGOS_INVALID_ARGUMENT, "execute",
                           "an argument has another type or shape than compiled; convert it");
    }
    if (error != NULL) {
      release(&arena);
      return error;
    }
    arguments[i].data = buffer->data;
  }
  const Computation* entry = program_computation(executable->program, executable->program->entry);
  Value result = evaluate(executable->program, entry, arguments, &arena);
  for (size_t i = 0; i < executable->num_outputs; ++i) {
    const Shape* shape = &executable->outputs[i]->shape;
    FlagosBufferAllocateArgs out = {.struct_size = sizeof out,
                                    .context = executable->context,
                                    .memory = executable->context->memories[0],
                                    .dims = shape->dims,
                                    .rank = shape->rank,
                                    .element_type = shape->element_type};
    FlagosError* error = sample_buffer_allocate(&out);
    if (error != NULL) {
      while (i-- > 0) sample_buffer_destroy(args->outputs[0][i]);
      release(&arena);
      return error;
    }
    memcpy(out.buffer->data, result.elements != NULL ? result.elements[i].data : result.data, out.buffer->size_bytes);
    args->outputs[0][i] = out.buffer;
  }
  release(&arena);
  if (args->done != NULL) args->done[0] = sample_event(1);
  return NULL;
}

/* ---- Executables ---- */

void sample_executable_destroy(FlagosExecutable* executable) {
  if (executable->program != NULL) program_destroy(executable->program);
  free(executable->serialized);
  free(executable->parameters);
  free(executable->outputs);
  free(executable->output_dims);
  free(executable->output_ranks);
  free(executable->output_types);
  free(executable->memory_kinds);
  free(executable->aliases);
  free(executable);
}

/* What the program takes and gives, from its entry's parameters and its root. */
static FlagosError* read_interface(FlagosExecutable* executable) {
  const Computation* entry = program_computation(executable->program, executable->program->entry);
  const Instruction* root = entry == NULL ? NULL : computation_instruction(entry, entry->root);
  if (root == NULL)
    return sample_error(FLAGOS_INVALID_ARGUMENT, "compile", "the program has no entry; send one that has");
  const size_t most = entry->num_instructions + root->num_operands;
  executable->parameters = calloc(most, sizeof *executable->parameters);
  executable->outputs = calloc(most, sizeof *executable->outputs);
  executable->output_ranks = calloc(most, sizeof *executable->output_ranks);
  executable->output_types = calloc(most, sizeof *executable->output_types);
  executable->output_dims = calloc(most * MAX_RANK, sizeof *executable->output_dims);
  executable->memory_kinds = calloc(most, sizeof *executable->memory_kinds);
  executable->aliases = calloc(most, sizeof *executable->aliases);
  for (size_t i = 0; i < most; ++i) {
    executable->memory_kinds[i] = "device";
    executable->aliases[i] = -1; /* no output takes over an argument's storage */
  }
  for (size_t i = 0; i < entry->num_instructions; ++i) {
    const Instruction* instruction = &entry->instructions[i];
    if (strcmp(instruction->opcode, "parameter") != 0) continue;
    const int64_t number = instruction->parameter_number;
    if (number < 0 || (size_t)number >= most || executable->parameters[number] != NULL) {
      return refused(FLAGOS_INVALID_ARGUMENT, instruction, "its number is not one of the parameters'");
    }
    executable->parameters[number] = instruction;
    executable->num_arguments += 1;
    executable->argument_bytes += count_of(&instruction->shape) * sizeof(float);
  }
  for (size_t i = 0; i < executable->num_arguments; ++i) {
    if (executable->parameters[i] == NULL)
      return refused(FLAGOS_INVALID_ARGUMENT, root, "a parameter of the entry is missing");
  }
  const int is_tuple = strcmp(root->opcode, "tuple") == 0;
  executable->num_outputs = is_tuple ? root->num_operands : 1;
  size_t written = 0;
  for (size_t i = 0; i < executable->num_outputs; ++i) {
    const Instruction* output = is_tuple ? computation_instruction(entry, root->operands[i]) : root;
    if (output->shape.element_type != FLAGOS_TYPE_F32) {
      return refused(FLAGOS_UNIMPLEMENTED, output, "outputs are F32 arrays, or one tuple of such");
    }
    executable->outputs[i] = output;
    executable->output_types[i] = output->shape.element_type;
    executable->output_ranks[i] = output->shape.rank;
    for (size_t j = 0; j < output->shape.rank; ++j) executable->output_dims[written++] = output->shape.dims[j];
    executable->output_bytes += count_of(&output->shape) * sizeof(float);
  }
  return NULL;
}

static FlagosError* compiled(FlagosContext* context, const void* bytes, size_t size, FlagosExecutable** out) {
  FlagosExecutable* executable = calloc(1, sizeof *executable);
  executable->context = context;
  executable->serialized = malloc(size + 1);
  if (size != 0) memcpy(executable->serialized, bytes, size);
  executable->serialized_size = size;
  uint64_t hash = 14695981039346656037u; /* FNV-1a */
  for (size_t i = 0; i < size; ++i) hash = (hash ^ ((const uint8_t*)bytes)[i]) * 1099511628211u;
  snprintf(executable->fingerprint, sizeof executable->fingerprint, "%016llx", (unsigned long long)hash);
  FlagosError* error = program_read(bytes, size, &executable->program);
  for (size_t i = 0; error == NULL && i < executable->program->num_computations; ++i) {
    const Computation* computation = &executable->program->computations[i];
    for (size_t j = 0; error == NULL && j < computation->num_instructions; ++j) {
      error = check(executable->program, computation, &computation->instructions[j]);
    }
  }
  if (error == NULL) error = read_interface(executable);
  if (error != NULL) {
    sample_executable_destroy(executable);
    return error;
  }
  *out = executable;
  return NULL;
}

FlagosError* sample_compile(FlagosCompileArgs* args) {
  return compiled(args->context, args->program, args->program_size, &args->executable);
}

FlagosError* sample_executable_load(FlagosExecutableLoadArgs* args) {
  return compiled(args->context, args->serialized, args->serialized_size, &args->executable);
}

FlagosError* sample_executable_describe(FlagosExecutableDescribeArgs* args) {
  static const int64_t assignment[] = {0};
  const FlagosExecutable* executable = args->executable;
  args->name = executable->program->name;
  args->fingerprint = executable->fingerprint;
  args->num_replicas = args->num_partitions = 1;
  args->devices = executable->context->devices;
  args->num_devices = 1;
  args->device_assignment = assignment;
  args->num_arguments = executable->num_arguments;
  args->num_outputs = executable->num_outputs;
  args->output_types = executable->output_types;
  args->output_dims = executable->output_dims;
  args->output_ranks = executable->output_ranks;
  args->output_memory_kinds = args->argument_memory_kinds = executable->memory_kinds;
  args->argument_aliases = executable->aliases;
  args->argument_bytes = executable->argument_bytes;
  args->output_bytes = executable->output_bytes;
  return NULL;
}

FlagosError* sample_executable_artifact(FlagosExecutableArtifactArgs* args) {
  const FlagosExecutable* executable = args->executable;
  if (args->kind == FLAGOS_ARTIFACT_COMPILE_OPTIONS) return sample_unimplemented("executable_artifact");
  if (args->kind == FLAGOS_ARTIFACT_EXPLANATION) {
    static const char text[] = "each instruction by itself, on the calling thread";
    args->sink(args->sink_data, text, sizeof text - 1);
    return NULL;
  }
  args->sink(args->sink_data, executable->serialized, executable->serialized_size);
  return NULL;
}
