/* Chunk table in flat memory: chunk hash -> the slots that hold the chunk. `substitutes.py` documents the methods, and
   `_shards.h` has the entries. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "_numbers.h"
#include "_shards.h"

static int check_slot(const Table *table, uint32_t slot) {
    if (slot < (uint64_t)table->words * 64)
        return 0;
    PyErr_Format(PyExc_IndexError, "slot %u was never made live", slot);
    return -1;
}

PyDoc_STRVAR(add_doc, "add(slot, hashes, tokens)");

static PyObject *Table_add(Table *table, PyObject *args) {
    unsigned slot;
    PyObject *hash_argument, *token_argument, *result = NULL;
    Numbers hashes = {0}, tokens = {0};
    if (!PyArg_ParseTuple(args, "IOO", &slot, &hash_argument, &token_argument) || check_slot(table, slot) < 0)
        return NULL;
    if (read_numbers(hash_argument, &hashes) < 0 || read_numbers(token_argument, &tokens) < 0)
        goto end;
    if (hashes.count != tokens.count) {
        PyErr_SetString(PyExc_ValueError, "hashes and tokens differ in length");
        goto end;
    }
    for (Py_ssize_t index = 0; index < hashes.count; index++) {
        uint64_t chunk = number_at(&hashes, index);
        uint32_t count = (uint32_t)number_at(&tokens, index);
        Shard *shard = shard_of(table, chunk);
        if (widen(table, shard, slot) < 0)
            goto end;
        int64_t position = find(table, shard, key_of(chunk));
        if (position < 0)
            position = insert(table, shard, key_of(chunk), count);
        if (position < 0)
            goto end;
        uint64_t *entry = row(shard, (uint32_t)position);
        entry[0] = (entry[0] & ~(uint64_t)UINT32_MAX) | count;
        if (hold(table, shard, (uint32_t)position, slot) < 0)
            goto end;
    }
    result = Py_NewRef(Py_None);
end:
    release_numbers(&hashes);
    release_numbers(&tokens);
    return result;
}

static int append(PyObject *list, uint64_t number) {
    PyObject *item = PyLong_FromUnsignedLongLong(number);
    int failed = !item || PyList_Append(list, item) < 0;
    Py_XDECREF(item);
    return failed ? -1 : 0;
}

PyDoc_STRVAR(
    insert_speculatively_doc, "insert_speculatively(slot, hashes, tokens): the chunks that the slot did not hold before"
);

static PyObject *Table_insert_speculatively(Table *table, PyObject *args) {
    unsigned slot;
    PyObject *hash_argument, *estimator, *made = NULL, *added = NULL, *result = NULL;
    Numbers hashes = {0}, estimates = {0};
    if (!PyArg_ParseTuple(args, "IOO", &slot, &hash_argument, &estimator) || check_slot(table, slot) < 0)
        return NULL;
    if (read_numbers(hash_argument, &hashes) < 0 || !(added = PyList_New(0)))
        goto end;
    for (Py_ssize_t index = 0; index < hashes.count; index++) {
        uint64_t chunk = number_at(&hashes, index);
        Shard *shard = shard_of(table, chunk);
        if (widen(table, shard, slot) < 0)
            goto end;
        int64_t position = find(table, shard, key_of(chunk));
        if (position < 0) {
            if (!made && (!(made = PyObject_CallNoArgs(estimator)) || read_numbers(made, &estimates) < 0))
                goto end;
            if (index >= estimates.count) {
                PyErr_SetString(PyExc_IndexError, "there are fewer estimates than hashes");
                goto end;
            }
            position = insert(table, shard, key_of(chunk), (uint32_t)number_at(&estimates, index));
            if (position < 0)
                goto end;
        } else {
            touch(shard, (uint32_t)position);
        }
        if (is_held_by(shard, row(shard, (uint32_t)position)[1], slot))
            continue;
        if (append(added, chunk) < 0 || hold(table, shard, (uint32_t)position, slot) < 0)
            goto end;
    }
    result = Py_NewRef(added);
end:
    release_numbers(&hashes);
    release_numbers(&estimates);
    Py_XDECREF(made);
    Py_XDECREF(added);
    return result;
}

PyDoc_STRVAR(remove_doc, "remove(slot, hashes)");

static PyObject *Table_remove(Table *table, PyObject *args) {
    unsigned slot;
    PyObject *hash_argument;
    Numbers hashes = {0};
    if (!PyArg_ParseTuple(args, "IO", &slot, &hash_argument))
        return NULL;
    if (read_numbers(hash_argument, &hashes) < 0) {
        release_numbers(&hashes);
        return NULL;
    }
    uint32_t wide = 1;
    for (uint32_t number = 0; number < table->shard_count; number++)
        if (table->shards[number].words > wide)
            wide = table->shards[number].words;
    uint64_t few[FEW_WORDS] = {0}, *gone = few;
    int failed = 0;
    if (wide > FEW_WORDS && !(gone = PyMem_RawCalloc(wide, sizeof(uint64_t)))) {
        PyErr_NoMemory();
        failed = 1;
    } else if (slot / 64 < wide) {
        gone[slot / 64] = bit_of(slot);
    }
    for (Py_ssize_t index = 0; !failed && index < hashes.count; index++) {
        uint64_t chunk = number_at(&hashes, index);
        Shard *shard = shard_of(table, chunk);
        int64_t position = slot / 64 < shard->words ? find(table, shard, key_of(chunk)) : -1;
        int is_left = 1;
        if (position >= 0 && release(shard, (uint32_t)position, gone, &is_left) && !is_left)
            erase(table, shard, (uint32_t)position);
    }
    if (gone != few)
        PyMem_RawFree(gone);
    release_numbers(&hashes);
    return failed ? NULL : Py_NewRef(Py_None);
}

PyDoc_STRVAR(holds_doc, "holds(slot, chunk)");

static PyObject *Table_holds(Table *table, PyObject *args) {
    unsigned slot;
    unsigned long long chunk;
    if (!PyArg_ParseTuple(args, "IK", &slot, &chunk))
        return NULL;
    Shard *shard = shard_of(table, chunk);
    int64_t position = slot / 64 < shard->words ? find(table, shard, key_of(chunk)) : -1;
    return PyBool_FromLong(position >= 0 && is_held_by(shard, row(shard, (uint32_t)position)[1], slot));
}

/* Set runs[slot] = tokens for every slot whose bit is set in a word. */
static int assign(PyObject *runs, uint32_t word, uint64_t slots, uint32_t tokens) {
    if (!slots)
        return 0;
    PyObject *value = PyLong_FromUnsignedLong(tokens);
    int failed = !value;
    for (; slots && !failed; slots &= slots - 1) {
        PyObject *slot = PyLong_FromLong((long)word * 64 + __builtin_ctzll(slots));
        failed = !slot || PyDict_SetItem(runs, slot, value) < 0;
        Py_XDECREF(slot);
    }
    Py_XDECREF(value);
    return failed ? -1 : 0;
}

static void ask_for(const Table *table, uint64_t chunk) {
    const Shard *shard = shard_of(table, chunk);
    if (shard->count) {
        uint32_t position = home(table, shard, key_of(chunk));
        __builtin_prefetch(shard->keys + position);
        __builtin_prefetch(row(shard, position));
    }
}

PyDoc_STRVAR(match_doc, "match(hashes): ({slot: prompt tokens of its run}, chunks of the longest run)");

static PyObject *Table_match(Table *table, PyObject *argument) {
    PyObject *runs = NULL, *result = NULL;
    Numbers hashes = {0};
    uint64_t few[2 * FEW_WORDS], *alive = few;
    if (read_numbers(argument, &hashes) < 0 || !(runs = PyDict_New()))
        goto end;
    if (table->words > FEW_WORDS && !(alive = PyMem_RawMalloc(2 * table->words * sizeof(uint64_t)))) {
        PyErr_NoMemory();
        goto end;
    }
    uint64_t *holding = alive + table->words;
    if (table->words)
        memcpy(alive, table->live, table->words * sizeof(uint64_t));
    Py_ssize_t length = 0;
    uint32_t tokens = 0; /* of the prefix so far */
    uint64_t is_alive = 0;
    for (uint32_t word = 0; word < table->words; word++)
        is_alive |= alive[word];
    for (Py_ssize_t index = 0; index < hashes.count && index < AHEAD; index++)
        ask_for(table, number_at(&hashes, index));
    for (; length < hashes.count; length++) {
        if (length + AHEAD < hashes.count)
            ask_for(table, number_at(&hashes, length + AHEAD));
        uint64_t chunk = number_at(&hashes, length);
        const Shard *shard = shard_of(table, chunk);
        int64_t position = find(table, shard, key_of(chunk));
        if (position < 0)
            break;
        const uint64_t *entry = row(shard, (uint32_t)position);
        expand(shard, entry[1], holding, table->words);
        is_alive = 0;
        for (uint32_t word = 0; word < table->words; word++) {
            uint64_t held = alive[word] & holding[word];
            /* A prefix of zero tokens is none: the role that chats begin with is shorter than a block. */
            if (tokens && assign(runs, word, alive[word] ^ held, tokens) < 0)
                goto end;
            alive[word] = held;
            is_alive |= held;
        }
        if (!is_alive)
            break;
        tokens = (uint32_t)entry[0];
    }
    for (uint32_t word = 0; word < table->words && is_alive && tokens; word++)
        if (assign(runs, word, alive[word], tokens) < 0)
            goto end;
    result = Py_BuildValue("On", runs, length);
end:
    if (alive != few)
        PyMem_RawFree(alive);
    Py_XDECREF(runs);
    release_numbers(&hashes);
    return result;
}

PyDoc_STRVAR(set_live_doc, "set_live(slot, is_live)");

static PyObject *Table_set_live(Table *table, PyObject *args) {
    unsigned slot;
    int is_live;
    if (!PyArg_ParseTuple(args, "Ip", &slot, &is_live))
        return NULL;
    if (slot / 64 >= table->words) {
        uint32_t words = slot / 64 + 1;
        uint64_t *live = PyMem_RawRealloc(table->live, words * sizeof(uint64_t));
        if (!live)
            return PyErr_NoMemory();
        memset(live + table->words, 0, (words - table->words) * sizeof(uint64_t));
        table->live = live;
        table->words = words;
    }
    if (is_live)
        table->live[slot / 64] |= bit_of(slot);
    else
        table->live[slot / 64] &= ~bit_of(slot);
    Py_RETURN_NONE;
}

PyDoc_STRVAR(scrub_doc, "scrub(number, slots): True, for all of the shard is done at once");

static PyObject *Table_scrub(Table *table, PyObject *args) {
    unsigned number;
    PyObject *slot_argument;
    Numbers slots = {0};
    if (!PyArg_ParseTuple(args, "IO", &number, &slot_argument))
        return NULL;
    int failed = read_numbers(slot_argument, &slots);
    Shard *shard = table->shards + (number & (table->shard_count - 1));
    /* As wide as the rows, which `narrow` leaves wider than `live` until `narrow_shard`. */
    uint64_t *gone = PyMem_RawCalloc(shard->words + 1, sizeof(uint64_t));
    for (Py_ssize_t index = 0; !failed && gone && index < slots.count; index++) {
        uint64_t slot = number_at(&slots, index);
        if (slot / 64 < shard->words)
            gone[slot / 64] |= bit_of((uint32_t)slot);
    }
    release_numbers(&slots);
    if (failed || !gone) {
        PyMem_RawFree(gone);
        return failed ? NULL : PyErr_NoMemory();
    }
    for (uint32_t position = 0; position < shard->size;) {
        if (shard->keys[position]) {
            int is_left = 1;
            if (release(shard, position, gone, &is_left) && !is_left) {
                erase(table, shard, position); /* then check the entry that moved here */
                continue;
            }
        }
        position++;
    }
    PyMem_RawFree(gone);
    Py_RETURN_TRUE;
}

static int is_overfull(const Table *table, const Shard *shard) {
    return shard->count > table->capacity || shard->size > size_for(table->capacity) ||
           shard->map_size > most_maps(table, shard->words);
}

PyDoc_STRVAR(trim_doc, "trim(number)");

static PyObject *Table_trim(Table *table, PyObject *args) {
    unsigned number;
    if (!PyArg_ParseTuple(args, "I", &number))
        return NULL;
    Shard *shard = table->shards + (number & (table->shard_count - 1));
    if (shard->count > table->capacity && make_room(table, shard) < 0)
        return NULL;
    if (shard->map_count > most_maps(table, shard->words) && make_map_room(table, shard) < 0)
        return NULL;
    if (is_overfull(table, shard)) {
        uint32_t most = size_for(table->capacity);
        if (rebuild(table, shard, shard->size > most ? most : shard->size, shard->words) < 0)
            return NULL;
    }
    Py_RETURN_NONE;
}

PyDoc_STRVAR(narrow_doc, "narrow(slots): whether there are shards for `narrow_shard`");

static PyObject *Table_narrow(Table *table, PyObject *args) {
    unsigned slots;
    if (!PyArg_ParseTuple(args, "I", &slots))
        return NULL;
    uint32_t words = slots ? (slots - 1) / 64 + 1 : 1;
    if (words >= table->words)
        Py_RETURN_FALSE;
    table->words = words; /* `live` keeps its few surplus words */
    Py_RETURN_TRUE;
}

PyDoc_STRVAR(narrow_shard_doc, "narrow_shard(number)");

static PyObject *Table_narrow_shard(Table *table, PyObject *args) {
    unsigned number;
    if (!PyArg_ParseTuple(args, "I", &number))
        return NULL;
    Shard *shard = table->shards + (number & (table->shard_count - 1));
    if (shard->words > table->words && rebuild(table, shard, shard->size, table->words) < 0)
        return NULL;
    Py_RETURN_NONE;
}

/* Return what the bitmaps of a shard may take of `limit` bytes until memory is divided again. It stays the same while it
   fits, because every change of it is one of the capacity, for which all shards are written anew. */
static size_t map_allowance(const Table *table, Py_ssize_t limit) {
    size_t used = 0, step = limit > 0 ? (size_t)limit / MAP_SHARE : 0, half = limit > 0 ? (size_t)limit / 2 : 0;
    uint32_t words = table->words;
    for (uint32_t number = 0; number < table->shard_count; number++) {
        const Shard *shard = table->shards + number;
        size_t bytes = shard->map_count * map_row_bytes(shard->words);
        used = bytes > used ? bytes : used;
        words = shard->words > words ? shard->words : words;
    }
    if (words <= 1)
        return 0;
    if (table->map_limit == limit && used + step / 4 <= table->map_bytes &&
        table->map_bytes <= used + used / MAP_GROWTH + 3 * step)
        return table->map_bytes;
    size_t most = used + used / MAP_GROWTH + step, least = LEAST_MAPS * map_row_bytes(words);
    most = most > half ? half : most;
    return most > least ? most : least;
}

PyDoc_STRVAR(resize_doc, "resize(shard_capacity, limit=0): `limit` bytes of memory for each shard; 0 for any");

static PyObject *Table_resize(Table *table, PyObject *args) {
    unsigned capacity;
    Py_ssize_t limit = 0;
    if (!PyArg_ParseTuple(args, "I|n", &capacity, &limit))
        return NULL;
    if (capacity < 1 || capacity > MAX_CAPACITY)
        return PyErr_Format(PyExc_ValueError, "a shard cannot hold %u entries", capacity);
    table->map_bytes = limit ? map_allowance(table, limit) : SIZE_MAX;
    table->map_limit = limit;
    table->capacity = capacity;
    Py_RETURN_NONE;
}

PyDoc_STRVAR(capacity_doc, "shard_capacity(limit, beside): entries of a shard that take no more than `limit` bytes");

static PyObject *Table_shard_capacity(Table *table, PyObject *args) {
    Py_ssize_t limit, beside;
    if (!PyArg_ParseTuple(args, "nn", &limit, &beside))
        return NULL;
    /* The inverse of `size_for`: four positions for three entries, plus two. */
    double position = 3 * sizeof(uint64_t);
    double available = (double)limit - sizeof(Shard) - 2 * position - (double)map_allowance(table, limit);
    double capacity = available / (position * 4 / 3 + (double)(beside > 0 ? beside : 0));
    return PyLong_FromDouble(capacity < 1 ? 1 : capacity > MAX_CAPACITY ? MAX_CAPACITY : capacity);
}

static PyObject *Table_is_overfull(Table *table, void *closure) {
    for (uint32_t number = 0; number < table->shard_count; number++)
        if (is_overfull(table, table->shards + number))
            Py_RETURN_TRUE;
    Py_RETURN_FALSE;
}

static PyObject *Table_bytes(Table *table, void *closure) {
    return PyLong_FromSize_t(table->bytes + table->shard_count * sizeof(Shard));
}

static Py_ssize_t Table_length(Table *table) { return (Py_ssize_t)table->count; }

static PyObject *Table_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    unsigned shard_count;
    static char *names[] = {"shards", NULL};
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "I", names, &shard_count))
        return NULL;
    if (!shard_count || shard_count & (shard_count - 1))
        return PyErr_Format(PyExc_ValueError, "shards must be a power of two, not %u", shard_count);
    PyObject *random = PyImport_ImportModule("random");
    PyObject *number = random ? PyObject_CallMethod(random, "getrandbits", "i", 64) : NULL;
    Py_XDECREF(random);
    if (!number)
        return NULL;
    uint64_t mix = PyLong_AsUnsignedLongLong(number) | 1;
    Py_DECREF(number);
    Table *table = (Table *)type->tp_alloc(type, 0);
    if (!table)
        return NULL;
    table->shards = PyMem_RawCalloc(shard_count, sizeof(Shard));
    if (!table->shards) {
        Py_DECREF(table);
        return PyErr_NoMemory();
    }
    table->shard_count = shard_count;
    table->capacity = 1;
    table->map_bytes = SIZE_MAX;
    table->mix = mix;
    return (PyObject *)table;
}

static void Table_dealloc(Table *table) {
    PyTypeObject *type = Py_TYPE(table);
    for (uint32_t number = 0; number < table->shard_count; number++)
        free_shard(table->shards + number);
    PyMem_RawFree(table->shards);
    PyMem_RawFree(table->live);
    type->tp_free(table);
    Py_DECREF(type);
}

static PyMethodDef methods[] = {
    {"add", (PyCFunction)Table_add, METH_VARARGS, add_doc},
    {"insert_speculatively", (PyCFunction)Table_insert_speculatively, METH_VARARGS, insert_speculatively_doc},
    {"remove", (PyCFunction)Table_remove, METH_VARARGS, remove_doc},
    {"holds", (PyCFunction)Table_holds, METH_VARARGS, holds_doc},
    {"match", (PyCFunction)Table_match, METH_O, match_doc},
    {"set_live", (PyCFunction)Table_set_live, METH_VARARGS, set_live_doc},
    {"scrub", (PyCFunction)Table_scrub, METH_VARARGS, scrub_doc},
    {"trim", (PyCFunction)Table_trim, METH_VARARGS, trim_doc},
    {"narrow", (PyCFunction)Table_narrow, METH_VARARGS, narrow_doc},
    {"narrow_shard", (PyCFunction)Table_narrow_shard, METH_VARARGS, narrow_shard_doc},
    {"resize", (PyCFunction)Table_resize, METH_VARARGS, resize_doc},
    {"shard_capacity", (PyCFunction)Table_shard_capacity, METH_VARARGS, capacity_doc},
    {NULL},
};

static PyGetSetDef properties[] = {
    {"is_overfull", (getter)Table_is_overfull, NULL, "whether some shard can be trimmed", NULL},
    {"bytes", (getter)Table_bytes, NULL, "memory used now, in bytes", NULL},
    {NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_new, Table_new},
    {Py_tp_dealloc, Table_dealloc},
    {Py_tp_methods, methods},
    {Py_tp_getset, properties},
    {Py_sq_length, Table_length},
    {0, NULL},
};

static PyType_Spec spec = {
    .name = "argosy_router.native._table.ChunkTable",
    .basicsize = sizeof(Table),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = slots,
};

static int add_type(PyObject *module) {
    PyObject *type = PyType_FromSpec(&spec);
    int failed = !type || PyModule_AddObjectRef(module, "ChunkTable", type) < 0;
    Py_XDECREF(type);
    return failed ? -1 : 0;
}

static PyModuleDef_Slot module_slots[] = {{Py_mod_exec, add_type}, {0, NULL}};

static PyModuleDef module = {
    PyModuleDef_HEAD_INIT,
    .m_name = "_table",
    .m_doc = "ChunkTable in flat memory.",
    .m_slots = module_slots,
};

PyMODINIT_FUNC PyInit__table(void) { return PyModuleDef_Init(&module); }
