/* Chunk table in flat memory: chunk hash -> the slots that hold the chunk. `prefixes/table.py` documents the methods.

   A shard is a hash table with open addressing and linear probing over two arrays: keys, eight per cache line, and
   rows, which are read only where the key matches. A row is `tokens | stamp << 32`, then one bit per slot. Removal moves the
   following entries back, so there are no tombstones. A shard counts its touches, and a row's stamp is the count at its
   last touch, so the lowest stamp is the least recently used entry. All memory comes from PyMem_RawMalloc, which
   tracemalloc sees. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "_numbers.h"

#define AHEAD 8 /* chunks whose memory is prefetched */
#define MAX_CAPACITY (UINT32_MAX / 4)
#define EVICTED_SHARE 16 /* of a shard at once: finding the oldest entries takes a scan */
#define FEW_WORDS 64 /* bit masks of up to this many words live on the stack */

typedef struct {
    uint64_t *keys; /* chunk + 1, or 0 for a free position; the highest chunk shares the key of chunk 0 */
    uint64_t *rows;
    uint32_t size; /* positions */
    uint32_t count;
    uint32_t words; /* of slot bits in each row */
    uint32_t stamp;
} Shard;

typedef struct {
    PyObject_HEAD
    Shard *shards;
    uint32_t shard_count; /* a power of two */
    uint32_t capacity; /* entries of a shard */
    uint64_t *live;
    uint32_t words; /* of slot bits in `live` and in new rows */
    uint64_t mix; /* odd and random, so that clients cannot choose chunks that collide */
    size_t count;
    size_t bytes;
} Table;

static uint64_t key_of(uint64_t chunk) { return chunk + 1 ? chunk + 1 : 1; }

static uint32_t home(const Table *table, const Shard *shard, uint64_t key) {
    return (uint32_t)(((unsigned __int128)(key * table->mix) * shard->size) >> 64);
}

static uint64_t *row(const Shard *shard, uint32_t position) {
    return shard->rows + (size_t)position * (1 + shard->words);
}

static uint32_t next(const Shard *shard, uint32_t position) {
    return position + 1 == shard->size ? 0 : position + 1;
}

/* Return the positions needed for `count` entries, with a quarter of them free. */
static uint32_t size_for(uint32_t count) { return count + count / 3 + 2; }

static size_t shard_bytes(uint32_t size, uint32_t words) { return (size_t)size * (2 + words) * sizeof(uint64_t); }

static Shard *shard_of(const Table *table, uint64_t chunk) {
    return table->shards + (chunk & (table->shard_count - 1));
}

static int64_t find(const Table *table, const Shard *shard, uint64_t key) {
    if (!shard->count)
        return -1;
    for (uint32_t position = home(table, shard, key); shard->keys[position]; position = next(shard, position))
        if (shard->keys[position] == key)
            return position;
    return -1;
}

static uint32_t claim(const Table *table, Shard *shard, uint64_t key) {
    uint32_t position = home(table, shard, key);
    while (shard->keys[position])
        position = next(shard, position);
    shard->keys[position] = key;
    shard->count++;
    return position;
}

static int rebuild(Table *table, Shard *shard, uint32_t size, uint32_t words) {
    Shard made = {.size = size, .words = words, .stamp = shard->stamp};
    made.keys = PyMem_RawCalloc(size, sizeof(uint64_t));
    made.rows = PyMem_RawMalloc((size_t)size * (1 + words) * sizeof(uint64_t));
    if (!made.keys || !made.rows) {
        PyMem_RawFree(made.keys);
        PyMem_RawFree(made.rows);
        PyErr_NoMemory();
        return -1;
    }
    uint32_t common = shard->words < words ? shard->words : words;
    for (uint32_t position = 0; position < shard->size; position++) {
        if (!shard->keys[position])
            continue;
        uint64_t *to = row(&made, claim(table, &made, shard->keys[position]));
        memcpy(to, row(shard, position), (1 + common) * sizeof(uint64_t));
        memset(to + 1 + common, 0, (words - common) * sizeof(uint64_t));
    }
    PyMem_RawFree(shard->keys);
    PyMem_RawFree(shard->rows);
    table->bytes += shard_bytes(size, words) - shard_bytes(shard->size, shard->words);
    *shard = made;
    return 0;
}

static void erase(Table *table, Shard *shard, uint32_t hole) {
    for (uint32_t at = next(shard, hole); shard->keys[at]; at = next(shard, at)) {
        uint32_t from = home(table, shard, shard->keys[at]);
        if (hole < at ? from <= hole || from > at : from <= hole && from > at) {
            shard->keys[hole] = shard->keys[at];
            memcpy(row(shard, hole), row(shard, at), (1 + shard->words) * sizeof(uint64_t));
            hole = at;
        }
    }
    shard->keys[hole] = 0;
    shard->count--;
    table->count--;
}

static uint32_t stamp_of(const Shard *shard, uint32_t position) { return (uint32_t)(row(shard, position)[0] >> 32); }

static void touch(Shard *shard, uint32_t position) {
    if (shard->stamp == UINT32_MAX) { /* halve all stamps, which merges only neighbours */
        for (uint32_t at = 0; at < shard->size; at++)
            if (shard->keys[at])
                row(shard, at)[0] = (row(shard, at)[0] & UINT32_MAX) | (uint64_t)(stamp_of(shard, at) / 2) << 32;
        shard->stamp /= 2;
    }
    uint64_t *entry = row(shard, position);
    entry[0] = (entry[0] & UINT32_MAX) | (uint64_t)++shard->stamp << 32;
}

/* Return the stamp that sorting would put at `rank` (quickselect). Reorders the stamps. */
static uint32_t stamp_at(uint32_t *stamps, uint32_t count, uint32_t rank) {
    uint32_t low = 0, high = count - 1;
    while (low < high) {
        uint32_t pivot = stamps[low + (high - low) / 2], left = low, right = high;
        for (;;) {
            while (stamps[left] < pivot)
                left++;
            while (stamps[right] > pivot)
                right--;
            if (left >= right)
                break;
            uint32_t swapped = stamps[left];
            stamps[left++] = stamps[right];
            stamps[right--] = swapped;
        }
        if (rank <= right)
            high = right;
        else
            low = right + 1;
    }
    return stamps[rank];
}

/* Evict the least recently used 1/EVICTED_SHARE of a full shard. */
static int evict(Table *table, Shard *shard) {
    uint32_t surplus = shard->count - table->capacity + 1 + table->capacity / EVICTED_SHARE;
    if (surplus > shard->count)
        surplus = shard->count;
    uint32_t *stamps = PyMem_RawMalloc(shard->count * sizeof(uint32_t)), found = 0;
    if (!stamps) {
        PyErr_NoMemory();
        return -1;
    }
    for (uint32_t position = 0; position < shard->size; position++)
        if (shard->keys[position])
            stamps[found++] = stamp_of(shard, position);
    uint32_t last = stamp_at(stamps, found, surplus - 1);
    PyMem_RawFree(stamps);
    for (uint32_t position = 0; position < shard->size && surplus;) {
        if (shard->keys[position] && stamp_of(shard, position) <= last) {
            erase(table, shard, position); /* then check the entry that moved here */
            surplus--;
        } else {
            position++;
        }
    }
    return 0;
}

/* Widen the shard's rows so that they have a bit for `slot`. */
static int widen(Table *table, Shard *shard, uint32_t slot) {
    if (slot / 64 < shard->words)
        return 0;
    return rebuild(table, shard, shard->size ? shard->size : 8, table->words);
}

static int64_t insert(Table *table, Shard *shard, uint64_t key, uint32_t tokens) {
    if (shard->count >= table->capacity && evict(table, shard) < 0)
        return -1;
    uint32_t needed = size_for(shard->count + 1), most = size_for(table->capacity);
    if (needed > shard->size) {
        uint32_t size = 2 * shard->size > needed ? 2 * shard->size : needed;
        if (rebuild(table, shard, size > most && most >= needed ? most : size, shard->words) < 0)
            return -1;
    }
    uint32_t position = claim(table, shard, key);
    table->count++;
    memset(row(shard, position), 0, (1 + shard->words) * sizeof(uint64_t));
    row(shard, position)[0] = tokens;
    touch(shard, position);
    return position;
}

static uint64_t bit_of(uint32_t slot) { return (uint64_t)1 << (slot & 63); }

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
        entry[1 + slot / 64] |= bit_of(slot);
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
        uint64_t *word = row(shard, (uint32_t)position) + 1 + slot / 64;
        if (!(*word & bit_of(slot)) && append(added, chunk) < 0)
            goto end;
        *word |= bit_of(slot);
    }
    result = Py_NewRef(added);
end:
    release_numbers(&hashes);
    release_numbers(&estimates);
    Py_XDECREF(made);
    Py_XDECREF(added);
    return result;
}

static int is_held(const Shard *shard, uint32_t position) {
    const uint64_t *slots = row(shard, position) + 1;
    for (uint32_t word = 0; word < shard->words; word++)
        if (slots[word])
            return 1;
    return 0;
}

PyDoc_STRVAR(remove_doc, "remove(slot, hashes)");

static PyObject *Table_remove(Table *table, PyObject *args) {
    unsigned slot;
    PyObject *hash_argument;
    Numbers hashes = {0};
    if (!PyArg_ParseTuple(args, "IO", &slot, &hash_argument))
        return NULL;
    int failed = read_numbers(hash_argument, &hashes);
    for (Py_ssize_t index = 0; !failed && index < hashes.count; index++) {
        uint64_t chunk = number_at(&hashes, index);
        Shard *shard = shard_of(table, chunk);
        int64_t position = slot / 64 < shard->words ? find(table, shard, key_of(chunk)) : -1;
        if (position < 0)
            continue;
        row(shard, (uint32_t)position)[1 + slot / 64] &= ~bit_of(slot);
        if (!is_held(shard, (uint32_t)position))
            erase(table, shard, (uint32_t)position);
    }
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
    return PyBool_FromLong(position >= 0 && row(shard, (uint32_t)position)[1 + slot / 64] & bit_of(slot));
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
    uint64_t few[FEW_WORDS], *alive = few;
    if (read_numbers(argument, &hashes) < 0 || !(runs = PyDict_New()))
        goto end;
    if (table->words > FEW_WORDS && !(alive = PyMem_RawMalloc(table->words * sizeof(uint64_t)))) {
        PyErr_NoMemory();
        goto end;
    }
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
        is_alive = 0;
        for (uint32_t word = 0; word < table->words; word++) {
            uint64_t held = word < shard->words ? alive[word] & entry[1 + word] : 0;
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
            uint64_t *held = row(shard, position) + 1, touched = 0;
            for (uint32_t word = 0; word < shard->words; word++) {
                touched |= held[word] & gone[word];
                held[word] &= ~gone[word];
            }
            if (touched && !is_held(shard, position)) {
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
    return shard->count > table->capacity || shard->size > size_for(table->capacity);
}

PyDoc_STRVAR(trim_doc, "trim(number)");

static PyObject *Table_trim(Table *table, PyObject *args) {
    unsigned number;
    if (!PyArg_ParseTuple(args, "I", &number))
        return NULL;
    Shard *shard = table->shards + (number & (table->shard_count - 1));
    if (shard->count > table->capacity && evict(table, shard) < 0)
        return NULL;
    if (is_overfull(table, shard) && rebuild(table, shard, size_for(table->capacity), shard->words) < 0)
        return NULL;
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

PyDoc_STRVAR(resize_doc, "resize(shard_capacity)");

static PyObject *Table_resize(Table *table, PyObject *args) {
    unsigned capacity;
    if (!PyArg_ParseTuple(args, "I", &capacity))
        return NULL;
    if (capacity < 1 || capacity > MAX_CAPACITY)
        return PyErr_Format(PyExc_ValueError, "a shard cannot hold %u entries", capacity);
    table->capacity = capacity;
    Py_RETURN_NONE;
}

PyDoc_STRVAR(capacity_doc, "shard_capacity(limit, beside): entries of a shard that take no more than `limit` bytes");

static PyObject *Table_shard_capacity(Table *table, PyObject *args) {
    Py_ssize_t limit, beside;
    if (!PyArg_ParseTuple(args, "nn", &limit, &beside))
        return NULL;
    /* The inverse of `size_for`: four positions for three entries, plus two. */
    double position = (double)shard_bytes(1, table->words ? table->words : 1);
    double available = (double)limit - sizeof(Shard) - 2 * position;
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
    table->mix = mix;
    return (PyObject *)table;
}

static void Table_dealloc(Table *table) {
    PyTypeObject *type = Py_TYPE(table);
    for (uint32_t number = 0; number < table->shard_count; number++) {
        PyMem_RawFree(table->shards[number].keys);
        PyMem_RawFree(table->shards[number].rows);
    }
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
