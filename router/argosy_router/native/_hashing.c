/* Chunk hashes, as in `argosy_engine.protocol.chunks`, and the ranking of `ranking.py`: what needs many short hashes. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#define XXH_INLINE_ALL
#include <xxhash.h>

#define CHUNK_BYTES 256
#define COARSE_BYTES (64 * CHUNK_BYTES)
#define KIND_MIX 0x9E3779B97F4A7C15u

/* Where the chunk that begins at `begin` ends, in a segment of `size` bytes; `step` is its length, which doubles whenever
   the offset does. */
static Py_ssize_t end_of(Py_ssize_t begin, Py_ssize_t size, Py_ssize_t *step, Py_ssize_t *until) {
    while (begin >= *until) {
        *until *= 2;
        *step *= 2;
    }
    return begin + *step < size ? begin + *step : size;
}

static int append(PyObject *list, PyObject *item) {
    int failed = !item || PyList_Append(list, item) < 0;
    Py_XDECREF(item);
    return failed ? -1 : 0;
}

/* Adds the hashes of one segment, `(kind, bytes)`, to the chain. */
static int add_segment(PyObject *hashes, PyObject *segment, XXH64_hash_t *previous) {
    if (!PyTuple_Check(segment) || PyTuple_GET_SIZE(segment) != 2 || !PyBytes_Check(PyTuple_GET_ITEM(segment, 1))) {
        PyErr_SetString(PyExc_TypeError, "a segment is a tuple of its kind and bytes");
        return -1;
    }
    unsigned long long kind = PyLong_AsUnsignedLongLongMask(PyTuple_GET_ITEM(segment, 0));
    if (PyErr_Occurred())
        return -1;
    const char *data = PyBytes_AS_STRING(PyTuple_GET_ITEM(segment, 1));
    Py_ssize_t size = PyBytes_GET_SIZE(PyTuple_GET_ITEM(segment, 1)), step = CHUNK_BYTES, until = COARSE_BYTES;
    Py_ssize_t begin = 0;
    do { /* an empty segment is one empty chunk */
        Py_ssize_t end = end_of(begin, size, &step, &until);
        *previous = XXH3_64bits_withSeed(data + begin, (size_t)(end - begin), *previous ^ KIND_MIX * (kind + 1));
        if (append(hashes, PyLong_FromUnsignedLongLong(*previous)) < 0)
            return -1;
        begin = end;
    } while (begin < size);
    return 0;
}

PyDoc_STRVAR(chunk_hashes_doc, "chunk_hashes(segments, seed)");

static PyObject *chunk_hashes(PyObject *module, PyObject *args) {
    PyObject *argument;
    unsigned long long seed;
    if (!PyArg_ParseTuple(args, "OK", &argument, &seed))
        return NULL;
    PyObject *segments = PySequence_Fast(argument, "segments must be iterable");
    PyObject *hashes = segments ? PyList_New(0) : NULL;
    XXH64_hash_t previous = seed;
    for (Py_ssize_t index = 0; hashes && index < PySequence_Fast_GET_SIZE(segments); index++)
        if (add_segment(hashes, PySequence_Fast_GET_ITEM(segments, index), &previous) < 0)
            Py_CLEAR(hashes);
    Py_XDECREF(segments);
    return hashes;
}

PyDoc_STRVAR(chunk_offsets_doc, "chunk_offsets(sizes)");

static PyObject *chunk_offsets(PyObject *module, PyObject *argument) {
    PyObject *sizes = PySequence_Fast(argument, "sizes must be iterable");
    PyObject *offsets = sizes ? PyList_New(0) : NULL;
    Py_ssize_t base = 0;
    for (Py_ssize_t index = 0; offsets && index < PySequence_Fast_GET_SIZE(sizes); index++) {
        Py_ssize_t size = PyLong_AsSsize_t(PySequence_Fast_GET_ITEM(sizes, index));
        Py_ssize_t step = CHUNK_BYTES, until = COARSE_BYTES, end = 0;
        if (size < 0) {
            if (!PyErr_Occurred())
                PyErr_SetString(PyExc_ValueError, "a segment has no negative size");
            Py_CLEAR(offsets);
            break;
        }
        do {
            end = end_of(end, size, &step, &until);
            if (append(offsets, PyLong_FromSsize_t(base + end)) < 0)
                Py_CLEAR(offsets);
        } while (offsets && end < size);
        base += size;
    }
    Py_XDECREF(sizes);
    return offsets;
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
    {"chunk_offsets", chunk_offsets, METH_O, chunk_offsets_doc},
    {"first_ranked", first_ranked, METH_VARARGS, first_ranked_doc},
    {NULL},
};

static PyModuleDef module = {
    PyModuleDef_HEAD_INIT,
    .m_name = "_hashing",
    .m_doc = "Many short hashes.",
    .m_methods = functions,
};

PyMODINIT_FUNC PyInit__hashing(void) { return PyModuleDef_Init(&module); }
