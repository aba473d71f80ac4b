#include "writer.h"

#include <string.h>

/* What a mapping that was taken for writing has at these places. */
static uint64_t *header_of(const struct core_index *index, uint64_t frame) {
    return (uint64_t *)index->headers + frame * CORE_HEADER_WORDS;
}

static uint64_t *home_of(const struct core_index *index, uint64_t namespace_number, const uint8_t *hash,
                         uint64_t frame, uint64_t *word) {
    uint64_t home;
    uint32_t upper;
    core_place(index, namespace_number, hash, &home, &upper);
    *word = (uint64_t)upper << 32 | frame;
    return (uint64_t *)index->words + home * CORE_BUCKET_WORDS;
}

/* Put `value` where a bucket has `before`, the first time. False: it has it nowhere. */
static int exchange_word(uint64_t *bucket, uint64_t before, uint64_t value) {
    for (int i = 0; i < CORE_BUCKET_WORDS; i++)
        if (__atomic_load_n(bucket + i, __ATOMIC_RELAXED) == before) {
            __atomic_store_n(bucket + i, value, __ATOMIC_RELEASE);
            return 1;
        }
    return 0;
}

int core_begin_change(const struct core_index *index, uint64_t frame, uint16_t owner) {
    uint64_t *header = header_of(index, frame), generation = __atomic_load_n(header, __ATOMIC_RELAXED);
    int was_page = generation && generation % 2 == 0;
    if (generation % 2 == 0)
        __atomic_store_n(header + CORE_GENERATION_WORD, generation + 1, __ATOMIC_RELEASE);
    __atomic_thread_fence(__ATOMIC_SEQ_CST); /* before anything else is written there */
    uint64_t description = __atomic_load_n(header + CORE_DESCRIPTION_WORD, __ATOMIC_RELAXED);
    description = (description & ~((uint64_t)0xFFFF << CORE_OWNER_SHIFT)) | (uint64_t)owner << CORE_OWNER_SHIFT;
    __atomic_store_n(header + CORE_DESCRIPTION_WORD, description, __ATOMIC_RELAXED);
    return was_page;
}

int core_withdraw(const struct core_index *index, uint64_t frame) {
    const uint64_t *header = header_of(index, frame);
    uint64_t word, *home = home_of(index, header[CORE_DESCRIPTION_WORD] >> 32 & 0xFFFF,
                                   (const uint8_t *)(header + CORE_HASH_WORD), frame, &word);
    return exchange_word(home, word, 0);
}

void core_publish(const struct core_index *index, uint64_t frame, const struct core_page *page) {
    uint64_t *header = header_of(index, frame), key[4];
    memcpy(key, page->hash, sizeof key);
    for (int i = 0; i < 4; i++)
        __atomic_store_n(header + CORE_HASH_WORD + i, key[i], __ATOMIC_RELAXED);
    __atomic_store_n(header + CORE_CHECKSUM_WORD, page->checksum, __ATOMIC_RELAXED);
    __atomic_store_n(header + CORE_SEQUENCE_WORD, page->sequence, __ATOMIC_RELAXED);
    __atomic_store_n(header + CORE_DESCRIPTION_WORD, page->length | page->namespace_number << 32, __ATOMIC_RELAXED);
    uint64_t generation = __atomic_load_n(header + CORE_GENERATION_WORD, __ATOMIC_RELAXED);
    __atomic_store_n(header + CORE_GENERATION_WORD, generation + 1, __ATOMIC_RELEASE);
}

int core_name(const struct core_index *index, uint64_t frame, uint64_t namespace_number, const uint8_t *hash) {
    uint64_t word, *home = home_of(index, namespace_number, hash, frame, &word);
    return exchange_word(home, 0, word);
}

/* How many places of a bucket are free; -1: all of its pages are "maybe". The first of them is `*at`. */
static int free_places(const uint32_t *bucket, int *at) {
    int free = 0;
    if (__atomic_load_n(bucket, __ATOMIC_RELAXED) == CORE_SUMMARY_FULL)
        return -1;
    for (int i = CORE_SUMMARY_PLACES - 1; i >= 0; i--)
        if (__atomic_load_n(bucket + i, __ATOMIC_RELAXED) == 0) {
            *at = i;
            free++;
        }
    return free;
}

int core_put_tag(const struct core_summary *summary, const uint8_t *hash) {
    const uint32_t *home, *partner;
    uint32_t tag = core_place_in_summary(summary, hash, &home, &partner);
    int at = 0, at_partner = 0, free = free_places(home, &at), free_there = free_places(partner, &at_partner);
    if (free < 0 || free_there < 0)
        return 1;
    if (!free && !free_there) {
        __atomic_store_n((uint32_t *)home, CORE_SUMMARY_FULL, __ATOMIC_RELEASE);
        return 0;
    }
    uint32_t *place = free >= free_there ? (uint32_t *)home + at : (uint32_t *)partner + at_partner;
    __atomic_store_n(place, tag, __ATOMIC_RELEASE);
    return 1;
}

void core_take_tag(const struct core_summary *summary, const uint8_t *hash) {
    const uint32_t *buckets[2];
    uint32_t tag = core_place_in_summary(summary, hash, &buckets[0], &buckets[1]);
    for (int which = 0; which < 2; which++)
        for (int i = 0; i < CORE_SUMMARY_PLACES; i++)
            if (__atomic_load_n(buckets[which] + i, __ATOMIC_RELAXED) == tag) {
                __atomic_store_n((uint32_t *)buckets[which] + i, 0, __ATOMIC_RELEASE);
                return;
            }
}
