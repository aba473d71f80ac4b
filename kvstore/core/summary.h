/* The summary of the node's own lower tiers (kvstore.arena.summary) as the core reads it: no Python, nothing decided. */
#ifndef KVSTORE_CORE_SUMMARY_H
#define KVSTORE_CORE_SUMMARY_H

#include "arena.h"

/* What is said of a page, one byte each. */
enum core_said { CORE_NOWHERE = 0, CORE_IN_ARENA = 1, CORE_UNTOLD_PAGE = CORE_UNTOLD };

/* A mapped summary. */
struct core_summary {
    const uint8_t *file;
    const uint32_t *places;
    uint64_t buckets;
    /* What the superblock says while this file counts. */
    uint64_t word;
    /* What the namespace adds to its pages' hashes. */
    uint64_t seed;
};

/* NULL, or what is wrong with a mapping of `size` bytes that shall have so many buckets. */
const char *core_summary_of(struct core_summary *summary, const void *file, uint64_t size, uint64_t buckets);

/* A page's two buckets. Returns its tag. */
uint32_t core_place_in_summary(const struct core_summary *summary, const uint8_t *hash, const uint32_t **home,
                               const uint32_t **partner);

/* Whether pages are in the arena, nowhere, or perhaps in a lower tier. Nothing is said of what the arena lacks (all of it
 * is "untold") where this summary does not tell everything of it, is another one by then, or pages left a tier during
 * each of a few looks. */
void core_where(const struct core_index *index, const struct core_summary *summary, const struct core_wanted *wanted,
                size_t count, uint64_t edition, uint8_t *said);

#endif
