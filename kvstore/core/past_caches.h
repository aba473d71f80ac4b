/* Copies of what nobody here reads again: past the caches, which then keep what they hold. */
#ifndef KVSTORE_CORE_PAST_CACHES_H
#define KVSTORE_CORE_PAST_CACHES_H

#include <stdint.h>

/* As memmove. All of it is in memory before anything that the caller stores behind it. */
void core_copy_past_caches(uint8_t *target, const uint8_t *source, uint64_t size);

#endif
