/* Starts compiled Triton kernels by cuLaunchKernel, without a Python object for any argument.

   direct_launch.py builds this module and decides which kernels it may start. It keeps, for each function decorated by
   triton.jit, what was compiled for it, by all that Triton compiles for: context, options, and of each argument its
   type and what of its value matters. The arguments are read from the dict of the call, in the order of the kernel's
   parameters, into words of 8 bytes, whose addresses the driver is given; nothing is kept from one launch to the next.

   Arguments that it doesn't know how to pass are left to Triton, whose errors are then the ones that are seen. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <dlfcn.h>
#include <stdint.h>
#include <string.h>

enum { MAX_PARAMETERS = 96, MAX_SCRATCH = 4, MAX_CONSTANTS = 4096 };
enum { PLAIN, GENERAL, CONSTANT }; /* kinds of parameters: GENERAL ones are not specialised */
enum { NONE, BOOL, INT, FLOAT, TENSOR, OBJECT };
enum { DEVICE_POINTER = 3 }; /* CU_POINTER_ATTRIBUTE_DEVICE_POINTER */

typedef int Result; /* CUresult */

static struct {
  Result (*launch)(void *function, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned shared,
                   void *stream, void **parameters, void **extra);
  Result (*context)(void **context);
  Result (*device)(int *device);
  Result (*pointer)(void *value, int attribute, unsigned long long pointer);
  Result (*parameter)(void *function, size_t index, size_t *offset, size_t *size);
  Result (*error)(Result result, const char **text);
} driver;

static PyTypeObject *tensor_type, *parameter_type;
static PyObject *stream_of;  /* from a device's index to the handle of its current stream */
static PyObject *hooks;      /* lists; a launch that any of them listens to is Triton's */
static PyObject *constants;  /* from compile-time constants to their numbers in keys */
static PyObject *data_ptr_name, *dtype_name;

static PyObject *driver_error(const char *call, Result result) {
  const char *text = NULL;
  if (driver.error(result, &text) || text == NULL) text = "unknown error";
  return PyErr_Format(PyExc_RuntimeError, "%s: %s (%d)", call, text, result);
}

/* What was compiled for arguments of one kind. */
typedef struct {
  PyObject_HEAD
  void *function;
  unsigned threads, shared;
  Py_ssize_t count, scratch;
  PyObject *owner; /* keeps the function loaded */
  char types[MAX_PARAMETERS];
} Variant;

static void variant_dealloc(Variant *self) {
  Py_XDECREF(self->owner);
  Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyTypeObject VariantType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "argosy_driver_launch.Variant",
    .tp_basicsize = sizeof(Variant),
    .tp_dealloc = (destructor)variant_dealloc,
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_doc = "A compiled kernel; made by `variant`.",
};

/* variant(function, threads, shared, types, scratch, owner): types has a letter per parameter, p i l f as in `pack`, or
   '.' for one that is compiled in; scratch is the number of null pointers that follow. */
static PyObject *make_variant(PyObject *module, PyObject *arguments) {
  unsigned long long function;
  unsigned threads, shared;
  const char *types;
  Py_ssize_t count, scratch;
  PyObject *owner;
  if (!PyArg_ParseTuple(arguments, "KIIs#nO", &function, &threads, &shared, &types, &count, &scratch, &owner)) {
    return NULL;
  }
  if (count > MAX_PARAMETERS || scratch < 0 || scratch > MAX_SCRATCH) {
    return PyErr_Format(PyExc_ValueError, "%zd parameters and %zd of scratch", count, scratch);
  }
  Variant *self = PyObject_New(Variant, &VariantType);
  if (self == NULL) return NULL;
  self->function = (void *)(uintptr_t)function;
  self->threads = threads;
  self->shared = shared;
  self->count = count;
  self->scratch = scratch;
  self->owner = Py_NewRef(owner);
  memcpy(self->types, types, count);
  return (PyObject *)self;
}

/* parameter_sizes(function): bytes of each parameter of a loaded function, as the driver knows them. */
static PyObject *parameter_sizes(PyObject *module, PyObject *argument) {
  unsigned long long function = PyLong_AsUnsignedLongLong(argument);
  if (PyErr_Occurred()) return NULL;
  PyObject *sizes = PyList_New(0);
  if (sizes == NULL) return NULL;
  for (size_t index = 0; index < MAX_PARAMETERS + MAX_SCRATCH + 1; ++index) {
    size_t offset, size;
    Result result = driver.parameter((void *)(uintptr_t)function, index, &offset, &size);
    if (result == 1 && index) break; /* CUDA_ERROR_INVALID_VALUE: there are no more */
    PyObject *found = result ? driver_error("cuFuncGetParamInfo", result) : PyLong_FromSize_t(size);
    if (found == NULL || PyList_Append(sizes, found)) {
      Py_XDECREF(found);
      Py_DECREF(sizes);
      return NULL;
    }
    Py_DECREF(found);
  }
  return sizes;
}

/* One function decorated by triton.jit. */
typedef struct {
  PyObject_HEAD
  Py_ssize_t count;
  PyObject *names;    /* of its parameters, a tuple */
  PyObject *variants; /* from keys to a Variant, or to None if Triton has to start them */
  char kinds[MAX_PARAMETERS];
} Kernel;

static void kernel_dealloc(Kernel *self) {
  Py_XDECREF(self->names);
  Py_XDECREF(self->variants);
  Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyObject *kernel_new(PyTypeObject *type, PyObject *arguments, PyObject *keywords) {
  PyObject *names;
  const char *kinds;
  Py_ssize_t count;
  if (!PyArg_ParseTuple(arguments, "O!y#", &PyTuple_Type, &names, &kinds, &count)) return NULL;
  if (count != PyTuple_GET_SIZE(names) || count > MAX_PARAMETERS) {
    return PyErr_Format(PyExc_ValueError, "%zd kinds of %zd parameters", count, PyTuple_GET_SIZE(names));
  }
  Kernel *self = (Kernel *)type->tp_alloc(type, 0);
  if (self == NULL) return NULL;
  self->count = count;
  self->names = Py_NewRef(names);
  memcpy(self->kinds, kinds, count);
  if ((self->variants = PyDict_New()) == NULL) {
    Py_DECREF(self);
    return NULL;
  }
  return (PyObject *)self;
}

/* Number of a compile-time constant: equal ones have the same. -1: none, with or without an error. */
static long long constant_number(PyObject *value) {
  PyObject *known = PyDict_GetItemWithError(constants, value);
  if (known != NULL) return PyLong_AsLongLong(known);
  if (PyErr_Occurred() || PyDict_GET_SIZE(constants) >= MAX_CONSTANTS) return -1;
  long long number = PyDict_GET_SIZE(constants);
  PyObject *object = PyLong_FromLongLong(number);
  if (object == NULL || PyDict_SetItem(constants, value, object)) number = -1;
  Py_XDECREF(object);
  return number;
}

/* Read one argument: its tag, its value for the driver, and what of the value a kernel is compiled for.
   1: read; 0: Triton has to start this; -1: an error. */
static int read_argument(PyObject *value, char kind, char *tag, uint64_t *raw, uint64_t *fact) {
  if (value == Py_None) {
    *tag = NONE;
    *raw = *fact = 0;
  } else if (PyBool_Check(value)) {
    *tag = BOOL;
    *raw = *fact = value == Py_True;
  } else if (PyLong_CheckExact(value)) {
    int overflow;
    long long number = PyLong_AsLongLongAndOverflow(value, &overflow);
    if (overflow) return 0;
    if (number == -1 && PyErr_Occurred()) return -1;
    *tag = INT;
    *raw = (uint64_t)number;
    *fact = kind == GENERAL ? (number >= INT32_MIN && number <= INT32_MAX) : (uint64_t)number;
  } else if (PyFloat_CheckExact(value)) {
    double number = PyFloat_AS_DOUBLE(value);
    *tag = FLOAT;
    memcpy(raw, &number, sizeof number);
    *fact = kind == CONSTANT ? *raw : 0;
  } else if (Py_TYPE(value) == tensor_type || Py_TYPE(value) == parameter_type) {
    PyObject *address = PyObject_CallMethodNoArgs(value, data_ptr_name);
    if (address == NULL) return -1;
    *raw = PyLong_AsUnsignedLongLong(address);
    Py_DECREF(address);
    PyObject *dtype = PyObject_GetAttr(value, dtype_name);
    if (dtype == NULL || PyErr_Occurred()) return -1;
    *tag = TENSOR;
    *fact = (uint64_t)(uintptr_t)dtype << 1 | (*raw % 16 == 0); /* torch keeps its dtypes for ever */
    Py_DECREF(dtype);
  } else {
    if (kind != CONSTANT) return 0;
    long long number = constant_number(value);
    if (number < 0) return PyErr_Occurred() ? -1 : 0;
    *tag = OBJECT;
    *raw = *fact = (uint64_t)number;
  }
  return 1;
}

/* Turn an argument into what the kernel's parameter holds, in place; 0 if the two don't fit. */
static int pack(char type, char tag, uint64_t *value) {
  switch (type) {
    case 'p':
      return tag == TENSOR && (*value == 0 || driver.pointer(value, DEVICE_POINTER, *value) == 0);
    case 'i': {
      int64_t number = (int64_t)*value;
      int32_t narrow = (int32_t)number;
      memcpy(value, &narrow, sizeof narrow);
      return tag == INT && narrow == number;
    }
    case 'l':
      return tag == INT;
    case 'f': {
      double number;
      memcpy(&number, value, sizeof number);
      float narrow = (float)number;
      memcpy(value, &narrow, sizeof narrow);
      return tag == FLOAT;
    }
  }
  return 0;
}

static int read_grid(PyObject *grid, unsigned sizes[3]) {
  if (!PyTuple_CheckExact(grid) || PyTuple_GET_SIZE(grid) > 3) return 0;
  sizes[0] = sizes[1] = sizes[2] = 1;
  for (Py_ssize_t axis = 0; axis < PyTuple_GET_SIZE(grid); ++axis) {
    long size = PyLong_Check(PyTuple_GET_ITEM(grid, axis)) ? PyLong_AsLong(PyTuple_GET_ITEM(grid, axis)) : 0;
    if (size < 1 || size > INT32_MAX) {
      PyErr_Clear();
      return 0;
    }
    sizes[axis] = (unsigned)size;
  }
  return 1;
}

static PyObject *start_variant(Kernel *self, Variant *variant, const unsigned grid[3], const char *tags,
                               uint64_t *values) {
  void *parameters[MAX_PARAMETERS + MAX_SCRATCH];
  uint64_t nothing = 0;
  Py_ssize_t num_parameters = 0;
  for (Py_ssize_t index = 0; index < self->count; ++index) {
    if (variant->types[index] == '.') continue;
    if (!pack(variant->types[index], tags[index], &values[index])) Py_RETURN_FALSE;
    parameters[num_parameters++] = &values[index];
  }
  for (Py_ssize_t index = 0; index < variant->scratch; ++index) parameters[num_parameters++] = &nothing;

  int device = 0;
  Result result = driver.device(&device);
  if (result) return driver_error("cuCtxGetDevice", result);
  PyObject *number = PyLong_FromLong(device);
  PyObject *stream = number == NULL ? NULL : PyObject_CallOneArg(stream_of, number);
  Py_XDECREF(number);
  if (stream == NULL) return NULL;
  unsigned long long handle = PyLong_AsUnsignedLongLong(stream);
  Py_DECREF(stream);
  if (PyErr_Occurred()) return NULL;

  Py_BEGIN_ALLOW_THREADS;
  result = driver.launch(variant->function, grid[0], grid[1], grid[2], variant->threads, 1, 1, variant->shared,
                         (void *)(uintptr_t)handle, parameters, NULL);
  Py_END_ALLOW_THREADS;
  if (result) return driver_error("cuLaunchKernel", result);
  Py_RETURN_TRUE;
}

/* start(grid, num_warps, num_stages, arguments): True if the kernel was started; False if Triton has to start it; or a
   key, which `learn` wants to know what Triton has compiled for these arguments. */
static PyObject *kernel_start(Kernel *self, PyObject *const *arguments, Py_ssize_t count) {
  if (count != 4 || !PyDict_CheckExact(arguments[3])) {
    return PyErr_Format(PyExc_TypeError, "start(grid, num_warps, num_stages, arguments)");
  }
  void *context = NULL;
  /* The key: context, options, of each argument what a kernel is compiled for, and its tag in a byte. */
  uint64_t key[2 + MAX_PARAMETERS + MAX_PARAMETERS / 8], *facts = key + 2;
  char *tags = (char *)(facts + self->count);
  unsigned grid[3];
  uint64_t values[MAX_PARAMETERS];
  if (hooks == NULL || driver.context(&context) || context == NULL || !read_grid(arguments[0], grid)) Py_RETURN_FALSE;
  for (Py_ssize_t index = 0; index < PyTuple_GET_SIZE(hooks); ++index) {
    if (PyList_GET_SIZE(PyTuple_GET_ITEM(hooks, index))) Py_RETURN_FALSE;
  }
  long num_warps = PyLong_AsLong(arguments[1]), num_stages = PyLong_AsLong(arguments[2]);
  if (PyErr_Occurred()) return NULL;
  key[0] = (uint64_t)(uintptr_t)context;
  key[1] = (uint64_t)num_warps << 32 | (uint32_t)num_stages;
  for (Py_ssize_t index = 0; index < self->count; ++index) {
    PyObject *value = PyDict_GetItemWithError(arguments[3], PyTuple_GET_ITEM(self->names, index));
    if (value == NULL) {
      if (PyErr_Occurred()) return NULL;
      Py_RETURN_FALSE;
    }
    int read = read_argument(value, self->kinds[index], &tags[index], &values[index], &facts[index]);
    if (read < 0) return NULL;
    if (read == 0) Py_RETURN_FALSE;
  }
  PyObject *bytes = PyBytes_FromStringAndSize((char *)key, tags + self->count - (char *)key);
  if (bytes == NULL) return NULL;
  PyObject *known = PyDict_GetItemWithError(self->variants, bytes);
  if (known == NULL) {
    if (!PyErr_Occurred()) return bytes;
    Py_DECREF(bytes);
    return NULL;
  }
  Py_DECREF(bytes);
  if (known == Py_None) Py_RETURN_FALSE;

  Py_INCREF(known); /* another thread may learn while this one is in the driver */
  PyObject *started = start_variant(self, (Variant *)known, grid, tags, values);
  Py_DECREF(known);
  return started;
}

/* learn(key, variant, most): start what has this key by the variant, or with None by Triton; keep at most `most`. */
static PyObject *kernel_learn(Kernel *self, PyObject *arguments) {
  PyObject *key, *variant;
  Py_ssize_t most;
  if (!PyArg_ParseTuple(arguments, "SOn", &key, &variant, &most)) return NULL;
  if (variant != Py_None) {
    if (Py_TYPE(variant) != &VariantType || ((Variant *)variant)->count != self->count) {
      return PyErr_Format(PyExc_TypeError, "no variant of this kernel");
    }
  }
  if (PyDict_GET_SIZE(self->variants) >= most) PyDict_Clear(self->variants);
  if (PyDict_SetItem(self->variants, key, variant)) return NULL;
  Py_RETURN_NONE;
}

static PyMethodDef kernel_methods[] = {
    {"start", (PyCFunction)(void (*)(void))kernel_start, METH_FASTCALL, "Start the kernel if it is known."},
    {"learn", (PyCFunction)kernel_learn, METH_VARARGS, "Remember what was compiled."},
    {NULL, NULL, 0, NULL},
};

static PyTypeObject KernelType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "argosy_driver_launch.Kernel",
    .tp_basicsize = sizeof(Kernel),
    .tp_dealloc = (destructor)kernel_dealloc,
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_doc = "Kernel(names, kinds): a function decorated by triton.jit; kinds has a byte per parameter.",
    .tp_methods = kernel_methods,
    .tp_new = kernel_new,
};

/* open(library, tensor_type, parameter_type, stream_of, hooks): find the driver's functions. */
static PyObject *open_driver(PyObject *module, PyObject *arguments) {
  const char *library;
  PyObject *tensors, *parameters, *streams, *lists;
  if (!PyArg_ParseTuple(arguments, "sO!O!OO!", &library, &PyType_Type, &tensors, &PyType_Type, &parameters, &streams,
                        &PyTuple_Type, &lists)) {
    return NULL;
  }
  for (Py_ssize_t index = 0; index < PyTuple_GET_SIZE(lists); ++index) {
    if (!PyList_CheckExact(PyTuple_GET_ITEM(lists, index))) {
      return PyErr_Format(PyExc_TypeError, "hooks must be lists");
    }
  }
  void *handle = dlopen(library, RTLD_NOW | RTLD_LOCAL);
  if (handle == NULL) return PyErr_Format(PyExc_OSError, "%s", dlerror());
  const struct {
    const char *name;
    void *place;
  } symbols[] = {
      {"cuLaunchKernel", &driver.launch},         {"cuCtxGetCurrent", &driver.context},
      {"cuCtxGetDevice", &driver.device},         {"cuPointerGetAttribute", &driver.pointer},
      {"cuFuncGetParamInfo", &driver.parameter},  {"cuGetErrorString", &driver.error},
  };
  for (size_t index = 0; index < sizeof symbols / sizeof *symbols; ++index) {
    void *found = dlsym(handle, symbols[index].name);
    if (found == NULL) return PyErr_Format(PyExc_OSError, "the driver has no %s", symbols[index].name);
    memcpy(symbols[index].place, &found, sizeof found);
  }
  tensor_type = (PyTypeObject *)Py_NewRef(tensors);
  parameter_type = (PyTypeObject *)Py_NewRef(parameters);
  Py_XSETREF(stream_of, Py_NewRef(streams));
  Py_XSETREF(hooks, Py_NewRef(lists));
  Py_RETURN_NONE;
}

static PyMethodDef module_methods[] = {
    {"open", open_driver, METH_VARARGS, "Find the driver's functions; before anything else."},
    {"variant", make_variant, METH_VARARGS, "Make a Variant."},
    {"parameter_sizes", parameter_sizes, METH_O, "Return the bytes of each parameter of a function."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "argosy_driver_launch", NULL, -1, module_methods,
};

PyMODINIT_FUNC PyInit_argosy_driver_launch(void) {
  if (PyType_Ready(&VariantType) || PyType_Ready(&KernelType)) return NULL;
  PyObject *module = PyModule_Create(&definition);
  if (module == NULL) return NULL;
  constants = PyDict_New();
  data_ptr_name = PyUnicode_InternFromString("data_ptr");
  dtype_name = PyUnicode_InternFromString("dtype");
  if (constants == NULL || data_ptr_name == NULL || dtype_name == NULL ||
      PyModule_AddObjectRef(module, "Kernel", (PyObject *)&KernelType)) {
    Py_DECREF(module);
    return NULL;
  }
  return module;
}
