/* Chunk hashes as in `argosy_protocol.chunk_hash`, token estimates and rendezvous ranking as in
   `substitutes.py`.

   Results with an item per chunk are arrays (`array.array`), so that no Python integers are allocated. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <limits.h>
#define XXH_INLINE_ALL
#include "third_party/xxhash.h"

#include "_numbers.h"

#define CHUNK_BYTES 256
#define COARSE_BYTES (64 * CHUNK_BYTES)
#define KIND_MIX 0x9E3779B97F4A7C15u

/* Return the end of the chunk that begins at `begin` in a segment of `size` bytes. `step` is its length, which doubles
   whenever the offset does. */
static Py_ssize_t end_of(Py_ssize_t begin, Py_ssize_t size, Py_ssize_t *step, Py_ssize_t *until) {
    while (begin >= *until) {
        *until *= 2;
        *step *= 2;
    }
    return begin + *step < size ? begin + *step : size;
}

/* Count the chunks of a segment. An empty segment is one empty chunk. */
static Py_ssize_t chunk_count(Py_ssize_t size) {
    Py_ssize_t count = 0, end = 0, step = CHUNK_BYTES, until = COARSE_BYTES;
    do {
        end = end_of(end, size, &step, &until);
        count++;
    } while (end < size);
    return count;
}

typedef struct {
    PyObject *one_hash; /* array("Q", [0]) */
    PyObject *one_count; /* array("I", [0]), of tokens */
} State;

/* Make an array of `count` items of the type of `one`. The caller fills it through `buffer` and releases that. Arrays
   have no constructor in C; repeating an array of one item allocates no object per item and copies no bytes. */
static PyObject *new_array(PyObject *one, Py_ssize_t count, Py_buffer *buffer) {
    PyObject *made = PySequence_Repeat(one, count);
    if (made && PyObject_GetBuffer(made, buffer, PyBUF_WRITABLE) < 0)
        Py_CLEAR(made);
    return made;
}

/* Count the chunks of all segments; -1 with an exception if one is not a tuple `(kind, bytes)`. */
static Py_ssize_t count_chunks(PyObject *segments) {
    Py_ssize_t count = 0;
    for (Py_ssize_t index = 0; index < PySequence_Fast_GET_SIZE(segments); index++) {
        PyObject *segment = PySequence_Fast_GET_ITEM(segments, index);
        if (!PyTuple_Check(segment) || PyTuple_GET_SIZE(segment) != 2 || !PyLong_Check(PyTuple_GET_ITEM(segment, 0)) ||
            !PyBytes_Check(PyTuple_GET_ITEM(segment, 1))) {
            PyErr_SetString(PyExc_TypeError, "a segment is a tuple of its kind and bytes");
            return -1;
        }
        count += chunk_count(PyBytes_GET_SIZE(PyTuple_GET_ITEM(segment, 1)));
    }
    return count;
}

/* Write the hashes of one segment; return the position behind them. */
static uint64_t *hash_segment(PyObject *segment, XXH64_hash_t *previous, uint64_t *hash) {
    uint64_t kind = PyLong_AsUnsignedLongLongMask(PyTuple_GET_ITEM(segment, 0));
    const char *data = PyBytes_AS_STRING(PyTuple_GET_ITEM(segment, 1));
    Py_ssize_t size = PyBytes_GET_SIZE(PyTuple_GET_ITEM(segment, 1)), step = CHUNK_BYTES, until = COARSE_BYTES;
    Py_ssize_t begin = 0;
    do {
        Py_ssize_t end = end_of(begin, size, &step, &until);
        *previous = XXH3_64bits_withSeed(data + begin, (size_t)(end - begin), *previous ^ KIND_MIX * (kind + 1));
        *hash++ = *previous;
        begin = end;
    } while (begin < size);
    return hash;
}

PyDoc_STRVAR(chunk_hashes_doc, "chunk_hashes(segments, seed)");

static PyObject *chunk_hashes(PyObject *module, PyObject *args) {
    PyObject *argument, *hashes = NULL;
    unsigned long long seed;
    Py_buffer buffer;
    if (!PyArg_ParseTuple(args, "OK", &argument, &seed))
        return NULL;
    PyObject *segments = PySequence_Fast(argument, "segments must be iterable");
    Py_ssize_t count = segments ? count_chunks(segments) : -1;
    if (count >= 0)
        hashes = new_array(((State *)PyModule_GetState(module))->one_hash, count, &buffer);
    if (hashes) {
        XXH64_hash_t previous = seed;
        uint64_t *hash = buffer.buf;
        for (Py_ssize_t index = 0; index < PySequence_Fast_GET_SIZE(segments); index++)
            hash = hash_segment(PySequence_Fast_GET_ITEM(segments, index), &previous, hash);
        PyBuffer_Release(&buffer);
    }
    Py_XDECREF(segments);
    return hashes;
}

/* Count the chunks of segments of these sizes; -1 with an exception if one is negative. */
static Py_ssize_t count_chunks_of(const Numbers *sizes) {
    Py_ssize_t count = 0;
    for (Py_ssize_t index = 0; index < sizes->count; index++) {
        if (number_at(sizes, index) > PY_SSIZE_T_MAX) {
            PyErr_SetString(PyExc_ValueError, "a segment has no negative size");
            return -1;
        }
        count += chunk_count((Py_ssize_t)number_at(sizes, index));
    }
    return count;
}

PyDoc_STRVAR(chunk_tokens_doc, "chunk_tokens(sizes, bytes_per_token)");

static PyObject *chunk_tokens(PyObject *module, PyObject *args) {
    PyObject *argument, *tokens = NULL;
    double bytes_per_token;
    Numbers sizes = {0};
    Py_buffer buffer;
    if (!PyArg_ParseTuple(args, "Od", &argument, &bytes_per_token))
        return NULL;
    Py_ssize_t count = read_numbers(argument, &sizes) == 0 ? count_chunks_of(&sizes) : -1;
    if (count >= 0)
        tokens = new_array(((State *)PyModule_GetState(module))->one_count, count, &buffer);
    if (tokens) {
        unsigned *item = buffer.buf;
        Py_ssize_t base = 0;
        for (Py_ssize_t index = 0; index < sizes.count; index++) {
            Py_ssize_t size = (Py_ssize_t)number_at(&sizes, index), end = 0, step = CHUNK_BYTES, until = COARSE_BYTES;
            do {
                end = end_of(end, size, &step, &until);
                double estimate = (double)(base + end) / bytes_per_token;
                *item++ = estimate < UINT_MAX ? (unsigned)estimate : UINT_MAX;
            } while (end < size);
            base += size;
        }
        PyBuffer_Release(&buffer);
    }
    release_numbers(&sizes);
    return tokens;
}

PyDoc_STRVAR(first_ranked_doc, "first_ranked(names, key)");

static PyObject *first_ranked(PyObject *module, PyObject *args) {
    PyObject *argument;
    unsigned long long key;
    if (!PyArg_ParseTuple(args, "OK", &argument, &key))
        return NULL;
    PyObject *names = PySequence_Fast(argument, "names must be iterable");
    if (!names)
        return NULL;
    Py_ssize_t count = PySequence_Fast_GET_SIZE(names), first = -1;
    XXH64_hash_t highest = 0;
    for (Py_ssize_t index = 0; index < count; index++) {
        PyObject *name = PySequence_Fast_GET_ITEM(names, index);
        if (!PyBytes_Check(name)) {
            PyErr_SetString(PyExc_TypeError, "a name is bytes");
            break;
        }
        XXH64_hash_t rank = XXH3_64bits_withSeed(PyBytes_AS_STRING(name), (size_t)PyBytes_GET_SIZE(name), key);
        if (first < 0 || rank > highest) {
            first = index;
            highest = rank;
        }
    }
    Py_DECREF(names);
    if (first < 0 && !PyErr_Occurred())
        PyErr_SetString(PyExc_ValueError, "there is no name");
    return PyErr_Occurred() ? NULL : PyLong_FromSsize_t(first);
}

static PyMethodDef functions[] = {
    {"chunk_hashes", chunk_hashes, METH_VARARGS, chunk_hashes_doc},
    {"chunk_tokens", chunk_tokens, METH_VARARGS, chunk_tokens_doc},
    {"first_ranked", first_ranked, METH_VARARGS, first_ranked_doc},
    {NULL},
};

static int make_state(PyObject *module) {
    State *state = PyModule_GetState(module);
    PyObject *arrays = PyImport_ImportModule("array");
    if (arrays) {
        state->one_hash = PyObject_CallMethod(arrays, "array", "C[i]", 'Q', 0);
        state->one_count = PyObject_CallMethod(arrays, "array", "C[i]", 'I', 0);
        Py_DECREF(arrays);
    }
    return state->one_hash && state->one_count ? 0 : -1;
}

static int traverse(PyObject *module, visitproc visit, void *arg) {
    State *state = PyModule_GetState(module);
    Py_VISIT(state->one_hash);
    Py_VISIT(state->one_count);
    return 0;
}

static int clear(PyObject *module) {
    State *state = PyModule_GetState(module);
    Py_CLEAR(state->one_hash);
    Py_CLEAR(state->one_count);
    return 0;
}

static PyModuleDef_Slot module_slots[] = {{Py_mod_exec, make_state}, {0, NULL}};

static PyModuleDef module = {
    PyModuleDef_HEAD_INIT,
    .m_name = "_hashing",
    .m_doc = "Many short hashes.",
    .m_size = sizeof(State),
    .m_methods = functions,
    .m_slots = module_slots,
    .m_traverse = traverse,
    .m_clear = clear,
};

PyMODINIT_FUNC PyInit__hashing(void) { return PyModuleDef_Init(&module); }
