#include "past_caches.h"

#include <string.h>

#if defined(__SSE2__) && !defined(__SANITIZE_THREAD__)
#include <emmintrin.h>

/* Below it the caches' lines are soon used again, and what it takes to begin and to end counts. */
#define LEAST 16384
#define LINE 64

void core_copy_past_caches(uint8_t *target, const uint8_t *source, uint64_t size) {
    uint64_t distance = target > source ? (uint64_t)(target - source) : (uint64_t)(source - target);
    if (size < LEAST || distance < size) { /* a caller's buffer may be a view of the arena */
        memmove(target, source, size);
        return;
    }
    uint64_t head = -(uintptr_t)target % LINE;
    memcpy(target, source, head);
    __m128i *to = (__m128i *)(target + head);
    const __m128i *from = (const __m128i *)(source + head);
    for (uint64_t lines = (size - head) / LINE; lines; lines--, to += 4, from += 4) {
        __m128i a = _mm_loadu_si128(from), b = _mm_loadu_si128(from + 1);
        __m128i c = _mm_loadu_si128(from + 2), d = _mm_loadu_si128(from + 3);
        _mm_stream_si128(to, a);
        _mm_stream_si128(to + 1, b);
        _mm_stream_si128(to + 2, c);
        _mm_stream_si128(to + 3, d);
    }
    _mm_sfence(); /* streamed stores wait for no others */
    memcpy(to, from, (size - head) % LINE);
}
#else
void core_copy_past_caches(uint8_t *target, const uint8_t *source, uint64_t size) { memmove(target, source, size); }
#endif
