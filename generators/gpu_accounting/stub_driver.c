/* A CUDA driver without a device: what Triton and our launcher ask of libcuda.so.1, as far as starting kernels goes.
   A launch is written down: function, grid, block, shared memory, stream, and the bytes of each parameter.
   The functions are those that `stub_function` makes, which knows the sizes of their parameters. */

#include <stddef.h>
#include <stdint.h>
#include <string.h>

typedef int Result;
typedef unsigned long long Pointer;
enum { SUCCESS = 0, INVALID_VALUE = 1, MAX_FUNCTIONS = 16384, MAX_PARAMETERS = 128, MAX_LAUNCHES = 16384 };

typedef struct {
  int count;
  int sizes[MAX_PARAMETERS];
} Function;

typedef struct {
  int64_t function;
  uint32_t grid[3], block[3], shared, attributes;
  uint64_t stream;
  uint32_t count, padding;
  unsigned char bytes[MAX_PARAMETERS * 8];
} Launch;

static Function functions[MAX_FUNCTIONS];
static Launch launches[MAX_LAUNCHES];
static int num_functions, num_written, is_writing;
static long long num_launches;
static void *context = (void *)0x1000;
static Pointer refused;
static void (*listener)(const Launch *);

/* For the tests. */
int64_t stub_function(const int *sizes, int count) {
  if (num_functions == MAX_FUNCTIONS || count > MAX_PARAMETERS) return 0;
  functions[num_functions].count = count;
  memcpy(functions[num_functions].sizes, sizes, count * sizeof *sizes);
  return ++num_functions;
}
void stub_write(int on) { is_writing = on, num_written = 0; }
int stub_written(void) { return num_written; }
const Launch *stub_launch(int index) { return &launches[index]; }
long long stub_launches(void) { return num_launches; }
void stub_set_context(void *value) { context = value; }
void stub_refuse(Pointer pointer) { refused = pointer; }
void stub_listen(void (*function)(const Launch *)) { listener = function; }

static Result started(int64_t handle, const unsigned *grid, const unsigned *block, unsigned shared, void *stream,
                      unsigned attributes, void **parameters) {
  if (handle < 1 || handle > num_functions) return INVALID_VALUE;
  ++num_launches;
  if (!is_writing && listener == NULL) return SUCCESS;
  if (num_written == MAX_LAUNCHES) return INVALID_VALUE;
  Launch *launch = &launches[is_writing ? num_written++ : 0];
  Function *function = &functions[handle - 1];
  memset(launch, 0, sizeof *launch);
  launch->function = handle;
  memcpy(launch->grid, grid, sizeof launch->grid);
  memcpy(launch->block, block, sizeof launch->block);
  launch->shared = shared;
  launch->attributes = attributes;
  launch->stream = (uint64_t)(uintptr_t)stream;
  launch->count = function->count;
  for (int index = 0; index < function->count; ++index) {
    memcpy(launch->bytes + 8 * index, parameters[index], function->sizes[index]);
  }
  if (listener != NULL) listener(launch);
  return SUCCESS;
}

/* The driver. */
typedef struct {
  unsigned grid[3], block[3], shared;
  void *stream;
  void *attributes;
  unsigned num_attributes;
} Config; /* CUlaunchConfig */

Result cuLaunchKernelEx(const Config *config, void *function, void **parameters, void **extra) {
  return started((int64_t)function, config->grid, config->block, config->shared, config->stream,
                 config->num_attributes, parameters);
}
Result cuLaunchKernel(void *function, unsigned x, unsigned y, unsigned z, unsigned bx, unsigned by, unsigned bz,
                      unsigned shared, void *stream, void **parameters, void **extra) {
  unsigned grid[] = {x, y, z}, block[] = {bx, by, bz};
  return started((int64_t)function, grid, block, shared, stream, 0, parameters);
}
Result cuFuncGetParamInfo(void *function, size_t index, size_t *offset, size_t *size) {
  int64_t handle = (int64_t)function;
  if (handle < 1 || handle > num_functions || index >= (size_t)functions[handle - 1].count) return INVALID_VALUE;
  *offset = 8 * index, *size = functions[handle - 1].sizes[index];
  return SUCCESS;
}
Result cuPointerGetAttribute(void *data, int attribute, Pointer pointer) {
  if (pointer == refused && refused) return INVALID_VALUE;
  *(Pointer *)data = pointer;
  return SUCCESS;
}
Result cuCtxGetCurrent(void **out) { return *out = context, SUCCESS; }
Result cuCtxGetDevice(int *out) { return *out = 0, SUCCESS; }
Result cuGetErrorString(Result result, const char **text) {
  return *text = result == INVALID_VALUE ? "invalid argument" : "no error", SUCCESS;
}
Result cuDeviceGet(int *out, int ordinal) { return *out = ordinal, SUCCESS; }
Result cuDriverGetVersion(int *out) { return *out = 13020, SUCCESS; }
Result cuInit(unsigned flags) { return SUCCESS; }
Result cuDeviceGetCount(int *out) { return *out = 1, SUCCESS; }
Result cuDeviceGetAttribute(int *out, int attribute, int device) { return *out = 232448, SUCCESS; }
Result cuCtxSetCurrent(void *value) { return SUCCESS; }
Result cuDevicePrimaryCtxRetain(void **out, int device) { return *out = (void *)0x1000, SUCCESS; }
Result cuStreamIsCapturing(void *stream, int *out) { return *out = 0, SUCCESS; }

/* Linked, and not called. */
#define UNUSED(name) \
  Result name(void) { return INVALID_VALUE; }
UNUSED(cuCtxGetLimit)
UNUSED(cuCtxSetLimit)
UNUSED(cuFuncGetAttribute)
UNUSED(cuFuncSetAttribute)
UNUSED(cuFuncSetCacheConfig)
UNUSED(cuModuleGetFunction)
UNUSED(cuModuleLoadData)
UNUSED(cuModuleUnload)
UNUSED(cuOccupancyMaxActiveClusters)
UNUSED(cuPointerGetAttributes)
UNUSED(cuTensorMapEncodeIm2col)
UNUSED(cuTensorMapEncodeTiled)
