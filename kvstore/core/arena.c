#include "arena.h"

#include "bytes.h"
#include "steps.h"

static const uint64_t factors[4] = CORE_FACTORS;

/* A part of `items` things of `width` bytes at `at` that lies in `size` bytes. */
static int lies_in(uint64_t at, uint64_t items, uint64_t width, uint64_t size) {
    return at <= size && items <= (size - at) / width;
}

const char *core_index_of(struct core_index *index, const void *file, uint64_t size,
                          const struct core_geometry *geometry) {
    if ((uintptr_t)file % 8 || geometry->slots % 8 || geometry->words % 8)
        return "the headers must begin at a multiple of 8";
    if (!geometry->frames || !geometry->buckets || geometry->buckets >> 32)
        return "an arena has at least 1 frame, and 1 to 2^32 - 1 buckets";
    if (size < CORE_SUMMARY_OFFSET + 8 || !lies_in(geometry->slots, geometry->frames, CORE_HEADER_BYTES, size) ||
        !lies_in(geometry->words, geometry->buckets, 8 * CORE_BUCKET_WORDS, size) ||
        !lies_in(geometry->reach, geometry->buckets, 1, size))
        return "the headers end before what they should hold";
    index->file = file;
    index->headers = (const uint64_t *)(index->file + geometry->slots);
    index->words = (const uint64_t *)(index->file + geometry->words);
    index->reach = index->file + geometry->reach;
    index->frames = geometry->frames;
    index->buckets = geometry->buckets;
    return NULL;
}

/* As kvstore.arena.index.place. */
void core_place(const struct core_index *index, uint64_t namespace_number, const uint8_t *hash, uint64_t *home,
                uint32_t *upper) {
    uint64_t key[4];
    memcpy(key, hash, sizeof key);
    uint64_t mixed = namespace_number * CORE_NAMESPACE_FACTOR;
    for (int i = 0; i < 4; i++)
        mixed += key[i] * factors[i];
    mixed = (mixed ^ mixed >> 32) * CORE_FINAL_FACTOR;
    *home = (mixed >> 32) * index->buckets >> 32;
    *upper = (uint32_t)(CORE_IN_MEMORY | (mixed & (CORE_IN_MEMORY - 1)));
}

/* A slot's generation if it holds the page, else 0: generation, key, generation again. */
static uint64_t generation_of(const struct core_index *index, uint64_t frame, const uint8_t *hash, uint64_t last) {
    const uint64_t *header = index->headers + frame * CORE_HEADER_WORDS;
    uint64_t key[4];
    memcpy(key, hash, sizeof key);
    uint64_t generation = __atomic_load_n(header + CORE_GENERATION_WORD, __ATOMIC_ACQUIRE);
    CORE_STEP("generation");
    if (generation & 1)
        return 0;
    for (int i = 0; i < 4; i++)
        if (__atomic_load_n(header + CORE_HASH_WORD + i, __ATOMIC_RELAXED) != key[i])
            return 0;
    if (__atomic_load_n(header + CORE_DESCRIPTION_WORD, __ATOMIC_RELAXED) != last)
        return 0;
    CORE_STEP("key");
    __atomic_thread_fence(__ATOMIC_ACQUIRE);
    return __atomic_load_n(header + CORE_GENERATION_WORD, __ATOMIC_RELAXED) == generation ? generation : 0;
}

static int64_t find_at(const struct core_index *index, uint64_t home, uint32_t upper, const uint8_t *hash,
                       uint64_t last, uint64_t *generation) {
    unsigned reach = __atomic_load_n(index->reach + home, __ATOMIC_RELAXED);
    if (reach > CORE_MOST_REACH)
        reach = CORE_MOST_REACH;
    for (unsigned distance = 0; distance <= reach; distance++) {
        const uint64_t *bucket = index->words + (home + distance) % index->buckets * CORE_BUCKET_WORDS;
        for (int i = 0; i < CORE_BUCKET_WORDS; i++) {
            uint64_t word = __atomic_load_n(bucket + i, __ATOMIC_ACQUIRE);
            if ((uint32_t)(word >> 32) != upper)
                continue;
            CORE_STEP("word");
            uint64_t frame = word & CORE_FRAME_MASK;
            if (frame >= index->frames) /* rubbish; the header there decides */
                frame = index->frames - 1;
            *generation = generation_of(index, frame, hash, last);
            if (*generation)
                return (int64_t)frame;
        }
    }
    return -1;
}

void core_find(const struct core_index *index, const struct core_wanted *wanted, size_t first, size_t count,
               int64_t *frames, uint64_t *generations) {
    uint64_t home[CORE_CHUNK], last = wanted->length | wanted->namespace_number << 32;
    uint32_t upper[CORE_CHUNK];
    const uint8_t *hashes = wanted->hashes + first * CORE_HASH_BYTES;
    for (size_t i = 0; i < count; i++) {
        core_place(index, wanted->namespace_number, hashes + i * CORE_HASH_BYTES, &home[i], &upper[i]);
        __builtin_prefetch(index->words + home[i] * CORE_BUCKET_WORDS);
        __builtin_prefetch(index->reach + home[i]);
    }
    for (size_t i = 0; i < count; i++) { /* the header that the home bucket names first */
        const uint64_t *bucket = index->words + home[i] * CORE_BUCKET_WORDS;
        for (int j = 0; j < CORE_BUCKET_WORDS; j++) {
            uint64_t word = __atomic_load_n(bucket + j, __ATOMIC_RELAXED);
            if ((uint32_t)(word >> 32) == upper[i]) {
                if ((word & CORE_FRAME_MASK) < index->frames)
                    __builtin_prefetch(index->headers + (word & CORE_FRAME_MASK) * CORE_HEADER_WORDS);
                break;
            }
        }
    }
    for (size_t i = 0; i < count; i++) {
        generations[i] = 0;
        frames[i] = find_at(index, home[i], upper[i], hashes + i * CORE_HASH_BYTES, last, &generations[i]);
    }
}

int core_is_unchanged(const struct core_index *index, int64_t frame, uint64_t generation) {
    __atomic_thread_fence(__ATOMIC_ACQUIRE);
    return __atomic_load_n(index->headers + (uint64_t)frame * CORE_HEADER_WORDS, __ATOMIC_RELAXED) == generation;
}

static uint64_t edition_of(const struct core_index *index) {
    return __atomic_load_n((const uint64_t *)(index->file + CORE_EDITION_OFFSET), __ATOMIC_ACQUIRE);
}

/* Copy pages that were found; those that lie side by side on both sides at once. */
static void copy_found(const int64_t *frames, size_t count, uint64_t length, const uint8_t *pages,
                       uint8_t *const *into) {
    uint64_t stride = (length + CORE_FRAME_BYTES - 1) / CORE_FRAME_BYTES;
    for (size_t start = 0, end; start < count; start = end) {
        end = start + 1;
        if (length == stride * CORE_FRAME_BYTES)
            while (end < count && frames[end] == frames[end - 1] + (int64_t)stride &&
                   into[end] == into[end - 1] + length)
                end++;
        core_copy_out(into[start], pages + (uint64_t)frames[start] * CORE_FRAME_BYTES, (end - start) * length);
    }
}

size_t core_load(const struct core_index *index, const struct core_wanted *wanted, size_t count, uint64_t edition,
                 const uint8_t *pages, uint64_t pages_size, uint8_t *const *into) {
    int64_t frames[CORE_CHUNK];
    uint64_t generations[CORE_CHUNK];
    size_t good = 0;
    /* The announcement was a store: it is seen before anything is looked at. */
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    CORE_STEP("announced");
    if (edition_of(index) != edition)
        return 0;
    for (size_t first = 0; first < count && good == first; first += CORE_CHUNK) {
        size_t some = count - first < CORE_CHUNK ? count - first : CORE_CHUNK, found = 0, same = 0;
        core_find(index, wanted, first, some, frames, generations);
        while (found < some && frames[found] >= 0 &&
               lies_in((uint64_t)frames[found] * CORE_FRAME_BYTES, wanted->length, 1, pages_size))
            found++;
        CORE_STEP("found");
        copy_found(frames, found, wanted->length, pages, into + first);
        CORE_STEP("copied");
        while (same < found && core_is_unchanged(index, frames[same], generations[same]))
            same++;
        good += same;
        if (same < some)
            break;
    }
    CORE_STEP("checked");
    /* Last: with another node, the namespace's number may stand for another one. */
    return edition_of(index) == edition ? good : 0;
}
