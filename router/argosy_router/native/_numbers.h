/* Reads the unsigned integers of a Python argument: in place if it is an array (anything with a buffer, such as
   `array("Q")` or a view of one), otherwise from a copy of the items that it yields, cut to their lower 64 bits.

       Numbers hashes = {0};
       if (read_numbers(argument, &hashes) == 0)
           for (Py_ssize_t index = 0; index < hashes.count; index++)
               use(number_at(&hashes, index));
       release_numbers(&hashes);

   Until `release_numbers` an array cannot be resized, so it can be read whatever Python code runs meanwhile. */

#include <Python.h>
#include <stdint.h>
#include <string.h>

typedef struct {
    const char *items; /* may be unaligned, as a view may begin anywhere */
    Py_ssize_t count;
    size_t width; /* bytes of an item: 4 or 8 */
    Py_buffer array;
    uint64_t *copy;
} Numbers;

static inline uint64_t number_at(const Numbers *numbers, Py_ssize_t index) {
    const char *item = numbers->items + (size_t)index * numbers->width;
    uint64_t wide;
    uint32_t narrow;
    if (numbers->width == sizeof wide) {
        memcpy(&wide, item, sizeof wide);
        return wide;
    }
    memcpy(&narrow, item, sizeof narrow);
    return narrow;
}

static int read_array(PyObject *argument, Numbers *numbers) {
    Py_buffer *array = &numbers->array;
    if (PyObject_GetBuffer(argument, array, PyBUF_FULL_RO) < 0)
        return -1;
    const char *format = array->format ? array->format : "B";
    if (array->ndim != 1 || !PyBuffer_IsContiguous(array, 'C') || strlen(format) != 1 || !strchr("ILQ", *format)) {
        PyErr_SetString(PyExc_TypeError, "an array must be contiguous, of unsigned integers of 4 or 8 bytes");
        return -1;
    }
    numbers->items = array->buf;
    numbers->count = array->len / array->itemsize;
    numbers->width = (size_t)array->itemsize;
    return 0;
}

static int read_others(PyObject *argument, Numbers *numbers) {
    PyObject *sequence = PySequence_Fast(argument, "neither an array nor iterable");
    if (!sequence)
        return -1;
    Py_ssize_t count = PySequence_Fast_GET_SIZE(sequence), index = 0;
    numbers->copy = PyMem_RawMalloc((size_t)count * sizeof(uint64_t));
    if (!numbers->copy)
        PyErr_NoMemory();
    for (; numbers->copy && index < count && index < PySequence_Fast_GET_SIZE(sequence); index++) {
        numbers->copy[index] = PyLong_AsUnsignedLongLongMask(PySequence_Fast_GET_ITEM(sequence, index));
        if (numbers->copy[index] == UINT64_MAX && PyErr_Occurred())
            break;
    }
    Py_DECREF(sequence);
    numbers->items = (const char *)numbers->copy;
    numbers->count = index;
    numbers->width = sizeof(uint64_t);
    return PyErr_Occurred() ? -1 : 0;
}

/* 0, or -1 with an exception set. */
static int read_numbers(PyObject *argument, Numbers *numbers) {
    return PyObject_CheckBuffer(argument) ? read_array(argument, numbers) : read_others(argument, numbers);
}

static void release_numbers(Numbers *numbers) {
    PyBuffer_Release(&numbers->array);
    PyMem_RawFree(numbers->copy);
}
