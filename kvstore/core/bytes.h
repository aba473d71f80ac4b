/* Copies out of memory that somebody may write to meanwhile, as behind a seqlock: what was copied counts only if the
 * generation says so afterwards. */
#ifndef KVSTORE_CORE_BYTES_H
#define KVSTORE_CORE_BYTES_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "steps.h"

#if defined(__SANITIZE_THREAD__) || defined(KVSTORE_CORE_ATOMIC_COPIES)
/* memcpy beside a writer is a race by the letter; word by word it is none. Addresses and sizes are multiples of 8. */
static inline void core_copy_some(uint8_t *target, const uint8_t *source, uint64_t size) {
    for (uint64_t at = 0; at + 8 <= size; at += 8) {
        uint64_t word = __atomic_load_n((const uint64_t *)(source + at), __ATOMIC_RELAXED);
        memcpy(target + at, &word, 8);
    }
}
#else
static inline void core_copy_some(uint8_t *target, const uint8_t *source, uint64_t size) {
    memmove(target, source, size); /* a caller's buffer may be a view of the arena */
}
#endif

static inline void core_copy_out(uint8_t *target, const uint8_t *source, uint64_t size) {
#ifdef KVSTORE_CORE_STEPS
    core_copy_some(target, source, size / 2);
    CORE_STEP("half");
    core_copy_some(target + size / 2, source + size / 2, size - size / 2);
#else
    core_copy_some(target, source, size);
#endif
}

#endif
