#include "summary.h"

#include <string.h>

#include "steps.h"

/* As in kvstore.client.paths.shm.mapped_arena. */
#define LOOKS 3

static const uint64_t factors[4] = CORE_FACTORS;

const char *core_summary_of(struct core_summary *summary, const void *file, uint64_t size, uint64_t buckets) {
    if ((uintptr_t)file % 8)
        return "the summary must begin at a multiple of 8";
    if (!buckets || buckets >> 32)
        return "a summary has 1 to 2^32 - 1 buckets";
    if (size < CORE_SUMMARY_DATA_OFFSET || (size - CORE_SUMMARY_DATA_OFFSET) / (4 * CORE_SUMMARY_PLACES) < buckets)
        return "the summary ends before what it should hold";
    summary->file = file;
    summary->places = (const uint32_t *)(summary->file + CORE_SUMMARY_DATA_OFFSET);
    summary->buckets = buckets;
    return NULL;
}

static uint64_t word_at(const uint8_t *file, uint64_t offset) {
    return __atomic_load_n((const uint64_t *)(file + offset), __ATOMIC_ACQUIRE);
}

/* As kvstore.arena.summary.place. */
uint32_t core_place_in_summary(const struct core_summary *summary, const uint8_t *hash, const uint32_t **home,
                               const uint32_t **partner) {
    uint64_t key[4], mixed = summary->seed;
    memcpy(key, hash, sizeof key);
    for (int i = 0; i < 4; i++)
        mixed += key[i] * factors[i];
    mixed = (mixed ^ mixed >> 32) * CORE_FINAL_FACTOR;
    uint64_t first = (mixed >> 32) * summary->buckets >> 32;
    uint32_t tag = (uint32_t)mixed;
    if (tag == 0)
        tag = 1;
    else if (tag == CORE_SUMMARY_FULL)
        tag = CORE_SUMMARY_FULL - 1;
    uint64_t spread = (uint32_t)(tag * CORE_SUMMARY_TAG_FACTOR) * summary->buckets >> 32;
    uint64_t second = spread >= first ? spread - first : spread + summary->buckets - first;
    *home = summary->places + first * CORE_SUMMARY_PLACES;
    *partner = summary->places + second * CORE_SUMMARY_PLACES;
    return tag;
}

static int bucket_may_have(const uint32_t *bucket, uint32_t tag) {
    int found = 0;
    for (int i = 0; i < CORE_SUMMARY_PLACES; i++) {
        uint32_t here = __atomic_load_n(bucket + i, __ATOMIC_RELAXED);
        found |= here == tag || here == CORE_SUMMARY_FULL;
    }
    return found;
}

/* Of a chunk: which of the pages that the arena lacks may be in a lower tier. */
static void ask_summary(const struct core_summary *summary, const uint8_t *hashes, size_t count, uint8_t *said) {
    const uint32_t *home[CORE_CHUNK], *partner[CORE_CHUNK];
    uint32_t tag[CORE_CHUNK];
    for (size_t i = 0; i < count; i++) {
        if (said[i] == CORE_IN_ARENA)
            continue;
        tag[i] = core_place_in_summary(summary, hashes + i * CORE_HASH_BYTES, &home[i], &partner[i]);
        __builtin_prefetch(home[i]);
        __builtin_prefetch(partner[i]);
    }
    for (size_t i = 0; i < count; i++)
        if (said[i] != CORE_IN_ARENA)
            said[i] = bucket_may_have(home[i], tag[i]) || bucket_may_have(partner[i], tag[i]) ? CORE_UNTOLD_PAGE
                                                                                            : CORE_NOWHERE;
}

/* One look. False: what it says of pages that are not in the arena does not hold. */
static int look(const struct core_index *index, const struct core_summary *summary, const struct core_wanted *wanted,
                size_t count, uint64_t edition, uint8_t *said) {
    int64_t frames[CORE_CHUNK];
    uint64_t generations[CORE_CHUNK];
    uint64_t withdrawals = word_at(summary->file, CORE_SUMMARY_WITHDRAWALS_OFFSET);
    CORE_STEP("withdrawals");
    int told = word_at(index->file, CORE_ELSEWHERE_OFFSET) == CORE_IN_OWN_TIER;
    for (size_t first = 0; first < count; first += CORE_CHUNK) {
        size_t some = count - first < CORE_CHUNK ? count - first : CORE_CHUNK;
        core_find(index, wanted, first, some, frames, generations);
        for (size_t i = 0; i < some; i++)
            said[first + i] = frames[i] >= 0 ? CORE_IN_ARENA : CORE_UNTOLD_PAGE;
        __atomic_thread_fence(__ATOMIC_ACQUIRE); /* the arena was asked */
        CORE_STEP("arena");
        if (told)
            ask_summary(summary, wanted->hashes + first * CORE_HASH_BYTES, some, said + first);
    }
    __atomic_thread_fence(__ATOMIC_ACQUIRE);
    CORE_STEP("summary");
    return told && word_at(summary->file, CORE_SUMMARY_WITHDRAWALS_OFFSET) == withdrawals &&
           word_at(index->file, CORE_SUMMARY_OFFSET) == summary->word &&
           word_at(index->file, CORE_EDITION_OFFSET) == edition;
}

void core_where(const struct core_index *index, const struct core_summary *summary, const struct core_wanted *wanted,
                size_t count, uint64_t edition, uint8_t *said) {
    for (int i = 0; i < LOOKS; i++)
        if (look(index, summary, wanted, count, edition, said))
            return;
    for (size_t i = 0; i < count; i++)
        if (said[i] != CORE_IN_ARENA)
            said[i] = CORE_UNTOLD_PAGE;
}
