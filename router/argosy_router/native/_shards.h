/* Shards of the chunk table: its entries, who holds them, and which are evicted. `_table.c` has the methods.

   A shard is a hash table with open addressing and linear probing over two arrays: keys, eight per cache line, and
   rows, which are read only where the key matches. A row is `tokens | stamp << 32`, then the holders. Removal moves the
   following entries back, so there are no tombstones. A shard counts its touches, and a row's stamp is the count at its
   last touch, so the lowest stamp is the least recently used entry. All memory comes from PyMem_RawMalloc, which
   tracemalloc sees.

   Most chunks have few holders. In a shard of up to 64 slots the holders are a bit mask, in others a list of up to four
   slots, each as `slot + 1` in 16 bits, without gaps. A chunk with more holders, or with one whose number is too
   large, has a bitmap of all slots elsewhere: its holders are `MAPPED | index << 32`. The bitmaps of a shard take up to
   `map_bytes`; beyond that the chunks with bitmaps that were used longest ago are evicted. */

#include <Python.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define AHEAD 8 /* chunks whose memory is prefetched */
#define MAX_CAPACITY (UINT32_MAX / 4)
#define EVICTED_SHARE 16 /* of a shard at once: finding the oldest entries takes a scan */
#define EVICTED_MAP_SHARE 4 /* of a shard's bitmaps at once: they are few, and to find the oldest takes the same scan */
#define FEW_WORDS 64 /* bit masks of up to this many words live on the stack */
#define LISTED 4 /* holders in a list */
#define LISTED_AGAIN 3 /* a bitmap of so many holders becomes a list: not at once again a bitmap */
#define MAPPED 0xFFFF
#define LEAST_MAPS 4 /* that a shard may have in any case */
#define MAP_GROWTH 4 /* bitmaps may grow by a quarter, and by */
#define MAP_SHARE 32 /* one part of the memory in so many, until memory is divided again; so do they shrink */

typedef struct {
    uint64_t *keys; /* chunk + 1, or 0 for a free position; the highest chunk shares the key of chunk 0 */
    uint64_t *rows;
    uint64_t *maps;
    uint32_t size; /* positions */
    uint32_t count;
    uint32_t words; /* of a bitmap; up to one there are none */
    uint32_t stamp;
    uint32_t map_size; /* bitmaps with memory */
    uint32_t map_top; /* of which so many were ever used */
    uint32_t map_count; /* and are used now */
    uint32_t map_free; /* 1 + the first free one below the top, whose first word is the same of the next; 0: none */
} Shard;

typedef struct {
    PyObject_HEAD
    Shard *shards;
    uint32_t shard_count; /* a power of two */
    uint32_t capacity; /* entries of a shard */
    uint64_t *live;
    size_t map_bytes; /* that the bitmaps of a shard may take */
    Py_ssize_t map_limit; /* of the memory of a shard, for which that was decided; 0: any */
    uint32_t words; /* of slot bits in `live` and in new bitmaps */
    uint64_t mix; /* odd and random, so that clients cannot choose chunks that collide */
    size_t count;
    size_t bytes;
} Table;

static uint64_t key_of(uint64_t chunk) { return chunk + 1 ? chunk + 1 : 1; }

static uint32_t home(const Table *table, const Shard *shard, uint64_t key) {
    return (uint32_t)(((unsigned __int128)(key * table->mix) * shard->size) >> 64);
}

static uint64_t *row(const Shard *shard, uint32_t position) {
    return shard->rows + (size_t)position * 2;
}

static uint32_t next(const Shard *shard, uint32_t position) {
    return position + 1 == shard->size ? 0 : position + 1;
}

/* Return the positions needed for `count` entries, with a quarter of them free. */
static uint32_t size_for(uint32_t count) { return count + count / 3 + 2; }

static size_t map_row_bytes(uint32_t words) { return (words ? words : 1) * sizeof(uint64_t); }

static size_t shard_bytes(const Shard *shard) {
    return (size_t)shard->size * 3 * sizeof(uint64_t) + shard->map_size * map_row_bytes(shard->words);
}

static uint64_t bit_of(uint32_t slot) { return (uint64_t)1 << (slot & 63); }

/* Bitmaps that a shard may have. */
static uint32_t most_maps(const Table *table, uint32_t words) {
    size_t most = table->map_bytes / map_row_bytes(words);
    return most < LEAST_MAPS ? LEAST_MAPS : most > UINT32_MAX / 4 ? UINT32_MAX / 4 : (uint32_t)most;
}

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

/* Holders */

static int is_mask(const Shard *shard) { return shard->words <= 1; }

static int is_mapped(const Shard *shard, uint64_t holders) {
    return !is_mask(shard) && (holders & MAPPED) == MAPPED;
}

static uint64_t *map_of(const Shard *shard, uint64_t holders) {
    return shard->maps + (size_t)(holders >> 32) * shard->words;
}

static uint32_t listed(uint64_t holders, int place) { return holders >> (16 * place) & 0xFFFF; }

static int is_held_by(const Shard *shard, uint64_t holders, uint32_t slot) {
    if (slot / 64 >= shard->words)
        return 0;
    if (is_mask(shard))
        return (holders & bit_of(slot)) != 0;
    if (is_mapped(shard, holders))
        return (map_of(shard, holders)[slot / 64] & bit_of(slot)) != 0;
    for (int place = 0; place < LISTED; place++)
        if (listed(holders, place) == slot + 1)
            return 1;
    return 0;
}

/* Write the holders as a bit mask of so many words, without those beyond it. */
static void expand(const Shard *shard, uint64_t holders, uint64_t *mask, uint32_t words) {
    memset(mask, 0, words * sizeof(uint64_t));
    if (is_mapped(shard, holders)) {
        memcpy(mask, map_of(shard, holders), (words < shard->words ? words : shard->words) * sizeof(uint64_t));
    } else if (is_mask(shard)) {
        if (words)
            mask[0] = holders;
    } else {
        for (int place = 0; place < LISTED && listed(holders, place); place++) {
            uint32_t slot = listed(holders, place) - 1;
            if (slot / 64 < words)
                mask[slot / 64] |= bit_of(slot);
        }
    }
}

/* Return the holders in a mask as a list, if they fit into one of `most`, else MAPPED. */
static uint64_t as_list(const uint64_t *mask, uint32_t words, int most) {
    uint64_t holders = 0;
    int place = 0;
    for (uint32_t word = 0; word < words; word++)
        for (uint64_t bits = mask[word]; bits; bits &= bits - 1) {
            uint64_t number = (uint64_t)word * 64 + __builtin_ctzll(bits) + 1;
            if (place == most || number >= MAPPED)
                return MAPPED;
            holders |= number << (16 * place++);
        }
    return holders;
}

static void free_map(Shard *shard, uint64_t holders) {
    map_of(shard, holders)[0] = shard->map_free;
    shard->map_free = (uint32_t)(holders >> 32) + 1;
    shard->map_count--;
}

/* Return the holders of a chunk with a new bitmap, whose words are to be written; 0 without memory. */
static uint64_t new_map(Table *table, Shard *shard) {
    uint32_t index;
    if (shard->map_free) {
        index = shard->map_free - 1;
        shard->map_free = (uint32_t)shard->maps[(size_t)index * shard->words];
    } else {
        if (shard->map_top == shard->map_size) {
            uint32_t most = most_maps(table, shard->words), size = shard->map_size + shard->map_size / 4 + 4;
            size = size > most && most > shard->map_size ? most : size;
            uint64_t *maps = PyMem_RawRealloc(shard->maps, size * map_row_bytes(shard->words));
            if (!maps) {
                PyErr_NoMemory();
                return 0;
            }
            table->bytes += (size - shard->map_size) * map_row_bytes(shard->words);
            shard->maps = maps;
            shard->map_size = size;
        }
        index = shard->map_top++;
    }
    shard->map_count++;
    return MAPPED | (uint64_t)index << 32;
}

static void free_shard(Shard *shard) {
    PyMem_RawFree(shard->keys);
    PyMem_RawFree(shard->rows);
    PyMem_RawFree(shard->maps);
}

/* Write the holders in a mask as those of a row. If the shard may have no further bitmap, the first few are kept. */
static int write_holders(Table *table, Shard *shard, uint64_t *entry, const uint64_t *mask) {
    uint64_t holders = is_mask(shard) ? mask[0] : as_list(mask, shard->words, LISTED);
    if (is_mapped(shard, holders)) {
        if (shard->map_count >= most_maps(table, shard->words)) {
            holders = 0;
            for (uint32_t word = 0, place = 0; word < shard->words; word++)
                for (uint64_t bits = mask[word]; bits && place < LISTED; bits &= bits - 1) {
                    uint64_t number = (uint64_t)word * 64 + __builtin_ctzll(bits) + 1;
                    if (number < MAPPED)
                        holders |= number << (16 * place++);
                }
        } else {
            if (!(holders = new_map(table, shard)))
                return -1;
            memcpy(map_of(shard, holders), mask, shard->words * sizeof(uint64_t));
        }
    }
    entry[1] = holders;
    return 0;
}

static int rebuild(Table *table, Shard *shard, uint32_t size, uint32_t words) {
    Shard made = {.size = size, .words = words, .stamp = shard->stamp};
    int is_same = words == shard->words && shard->map_size <= most_maps(table, words);
    uint32_t wide = words > shard->words ? words : shard->words;
    uint64_t *mask = is_same ? NULL : PyMem_RawMalloc((wide + 1) * sizeof(uint64_t));
    size_t before = table->bytes;
    made.keys = PyMem_RawCalloc(size, sizeof(uint64_t));
    made.rows = PyMem_RawMalloc((size_t)size * 2 * sizeof(uint64_t));
    if (!made.keys || !made.rows || (!mask && !is_same)) {
        PyErr_NoMemory();
        goto failed;
    }
    for (uint32_t position = 0; position < shard->size; position++) {
        if (!shard->keys[position])
            continue;
        const uint64_t *from = row(shard, position);
        uint64_t *to = row(&made, claim(table, &made, shard->keys[position]));
        to[0] = from[0];
        to[1] = from[1];
        if (is_same)
            continue;
        expand(shard, from[1], mask, wide);
        if (write_holders(table, &made, to, mask) < 0)
            goto failed;
    }
    if (is_same) {
        made.maps = shard->maps;
        made.map_size = shard->map_size;
        made.map_top = shard->map_top;
        made.map_count = shard->map_count;
        made.map_free = shard->map_free;
        shard->maps = NULL;
    }
    table->bytes = before + shard_bytes(&made) - shard_bytes(shard);
    free_shard(shard);
    PyMem_RawFree(mask);
    *shard = made;
    return 0;
failed:
    table->bytes = before;
    free_shard(&made);
    PyMem_RawFree(mask);
    return -1;
}

static void erase(Table *table, Shard *shard, uint32_t hole) {
    if (is_mapped(shard, row(shard, hole)[1]))
        free_map(shard, row(shard, hole)[1]);
    for (uint32_t at = next(shard, hole); shard->keys[at]; at = next(shard, at)) {
        uint32_t from = home(table, shard, shard->keys[at]);
        if (hole < at ? from <= hole || from > at : from <= hole && from > at) {
            shard->keys[hole] = shard->keys[at];
            memcpy(row(shard, hole), row(shard, at), 2 * sizeof(uint64_t));
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

static int is_candidate(const Shard *shard, uint32_t position, int only_mapped) {
    return shard->keys[position] && (!only_mapped || is_mapped(shard, row(shard, position)[1]));
}

/* Evict the `surplus` least recently used entries of a shard: all, or of those with a bitmap. */
static int evict(Table *table, Shard *shard, uint32_t surplus, int only_mapped) {
    uint32_t count = only_mapped ? shard->map_count : shard->count, found = 0;
    if (surplus > count)
        surplus = count;
    if (!surplus)
        return 0;
    uint32_t *stamps = PyMem_RawMalloc(count * sizeof(uint32_t));
    if (!stamps) {
        PyErr_NoMemory();
        return -1;
    }
    for (uint32_t position = 0; position < shard->size; position++)
        if (is_candidate(shard, position, only_mapped))
            stamps[found++] = stamp_of(shard, position);
    uint32_t last = stamp_at(stamps, found, surplus - 1);
    PyMem_RawFree(stamps);
    for (uint32_t position = 0; position < shard->size && surplus;) {
        if (is_candidate(shard, position, only_mapped) && stamp_of(shard, position) <= last) {
            erase(table, shard, position); /* then check the entry that moved here */
            surplus--;
        } else {
            position++;
        }
    }
    return 0;
}

/* Evict the least recently used 1/EVICTED_SHARE of a full shard. */
static int make_room(Table *table, Shard *shard) {
    return evict(table, shard, shard->count - table->capacity + 1 + table->capacity / EVICTED_SHARE, 0);
}

/* Evict the least recently used 1/EVICTED_MAP_SHARE of the entries with a bitmap. */
static int make_map_room(Table *table, Shard *shard) {
    uint32_t most = most_maps(table, shard->words);
    return evict(table, shard, shard->map_count - most + 1 + most / EVICTED_MAP_SHARE, 1);
}

/* Add a holder to an entry. Return its position, which may have changed; -1 on failure. */
static int64_t hold(Table *table, Shard *shard, uint32_t position, uint32_t slot) {
    uint64_t *holders = row(shard, position) + 1;
    if (is_mask(shard)) {
        *holders |= bit_of(slot);
        return position;
    }
    if (is_mapped(shard, *holders)) {
        map_of(shard, *holders)[slot / 64] |= bit_of(slot);
        return position;
    }
    int place = 0;
    for (; place < LISTED && listed(*holders, place); place++)
        if (listed(*holders, place) == slot + 1)
            return position;
    if (place < LISTED && slot + 1 < MAPPED) {
        *holders |= (uint64_t)(slot + 1) << (16 * place);
        return position;
    }
    if (shard->map_count >= most_maps(table, shard->words)) {
        uint64_t key = shard->keys[position];
        if (make_map_room(table, shard) < 0)
            return -1;
        position = (uint32_t)find(table, shard, key); /* it has no bitmap, and so was not evicted */
        holders = row(shard, position) + 1;
    }
    uint64_t mapped = new_map(table, shard);
    if (!mapped)
        return -1;
    uint64_t *map = map_of(shard, mapped);
    expand(shard, *holders, map, shard->words);
    map[slot / 64] |= bit_of(slot);
    *holders = mapped;
    return position;
}

/* Take those slots away from the holders of an entry that `gone`, of `shard->words` words, has. Return whether it had
   one of them; `*is_left` tells whether any is left. */
static int release(Shard *shard, uint32_t position, const uint64_t *gone, int *is_left) {
    uint64_t *holders = row(shard, position) + 1, before = *holders, touched = 0, left = 0;
    if (is_mask(shard)) {
        *holders = shard->words ? before & ~gone[0] : before;
        touched = before ^ *holders;
    } else if (is_mapped(shard, before)) {
        uint64_t *map = map_of(shard, before);
        for (uint32_t word = 0; word < shard->words; word++) {
            touched |= map[word] & gone[word];
            left |= map[word] &= ~gone[word];
        }
        uint64_t list = touched ? as_list(map, shard->words, LISTED_AGAIN) : MAPPED;
        if (list != MAPPED) {
            free_map(shard, before);
            *holders = list;
        }
        *is_left = left != 0;
        return touched != 0;
    } else {
        *holders = 0;
        for (int place = 0, kept = 0; place < LISTED && listed(before, place); place++) {
            uint32_t slot = listed(before, place) - 1;
            if (slot / 64 < shard->words && gone[slot / 64] & bit_of(slot))
                touched = 1;
            else
                *holders |= (uint64_t)(slot + 1) << (16 * kept++);
        }
    }
    *is_left = *holders != 0;
    return touched != 0;
}

/* Widen the shard's bitmaps so that they have a bit for `slot`. */
static int widen(Table *table, Shard *shard, uint32_t slot) {
    if (slot / 64 < shard->words)
        return 0;
    return rebuild(table, shard, shard->size ? shard->size : 8, table->words);
}

static int64_t insert(Table *table, Shard *shard, uint64_t key, uint32_t tokens) {
    if (shard->count >= table->capacity && make_room(table, shard) < 0)
        return -1;
    uint32_t needed = size_for(shard->count + 1), most = size_for(table->capacity);
    if (needed > shard->size) {
        uint32_t size = 2 * shard->size > needed ? 2 * shard->size : needed;
        if (rebuild(table, shard, size > most && most >= needed ? most : size, shard->words) < 0)
            return -1;
    }
    uint32_t position = claim(table, shard, key);
    table->count++;
    row(shard, position)[0] = tokens;
    row(shard, position)[1] = 0;
    touch(shard, position);
    return position;
}
