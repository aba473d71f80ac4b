/* The arena's index and pages as the core reads them: no Python, no allocation, nothing decided.
 *
 * What is read is another process's, and may be anything: every place is checked against the mapping before it is used.
 * The order of loads is that of docs/architecture/arena.md, by the atomics of C11's memory model. */
#ifndef KVSTORE_CORE_ARENA_H
#define KVSTORE_CORE_ARENA_H

#include <stddef.h>
#include <stdint.h>

#include "layout.h"

/* How many keys are searched for at once, so that the cache misses of one do not wait for those of another. */
#define CORE_CHUNK 64

/* A mapped `headers` file. */
struct core_index {
    const uint8_t *file;
    const uint64_t *words;
    const uint8_t *reach;
    const uint64_t *headers;
    uint64_t buckets;
    uint64_t frames;
};

/* What is looked for: pages of one namespace. */
struct core_wanted {
    uint64_t namespace_number;
    uint64_t length;
    const uint8_t *hashes;
};

/* Where the parts of a `headers` file lie, in bytes, as kvstore.arena.format computes them. */
struct core_geometry {
    uint64_t slots;
    uint64_t words;
    uint64_t reach;
    uint64_t frames;
    uint64_t buckets;
};

/* NULL, or what is wrong with a mapping of `size` bytes that shall have these parts. */
const char *core_index_of(struct core_index *index, const void *file, uint64_t size,
                          const struct core_geometry *geometry);

/* A key's home bucket, and the upper half of its word. */
void core_place(const struct core_index *index, uint64_t namespace_number, const uint8_t *hash, uint64_t *home,
                uint32_t *upper);

/* Search for `count` keys from the one at `first` on; CORE_CHUNK at most. A frame is -1 where there is no page. */
void core_find(const struct core_index *index, const struct core_wanted *wanted, size_t first, size_t count,
               int64_t *frames, uint64_t *generations);

/* Whether a page that was found is still what it was. Call it behind a copy: loads before it stay before it. */
int core_is_unchanged(const struct core_index *index, int64_t frame, uint64_t generation);

/* Search for `count` keys and copy the leading pages that are there to `into`, each checked behind its copy. Returns how
 * many are whole and right; 0 where the edition is, or becomes, another one. The reader is announced before. */
size_t core_load(const struct core_index *index, const struct core_wanted *wanted, size_t count, uint64_t edition,
                 const uint8_t *pages, uint64_t pages_size, uint8_t *const *into);

#endif
