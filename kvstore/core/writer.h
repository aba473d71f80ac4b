/* What a node writes for readers that take no lock: slots' headers, words of the index, tags of the summary. No Python,
 * no allocation, nothing decided. There is one writer; the order of its stores is that of docs/architecture/arena.md. */
#ifndef KVSTORE_CORE_WRITER_H
#define KVSTORE_CORE_WRITER_H

#include "arena.h"
#include "summary.h"

/* Make a slot's generation odd, and name who may write into it. Whether a page was there. */
int core_begin_change(const struct core_index *index, uint64_t frame, uint16_t owner);

/* Clear the word of the page that was in a slot, whose generation is odd. False: its home bucket has no such word. */
int core_withdraw(const struct core_index *index, uint64_t frame);

/* What a header says of a page. */
struct core_page {
    const uint8_t *hash;
    uint64_t checksum;
    uint64_t sequence;
    uint64_t namespace_number;
    uint64_t length;
};

/* Write the header of a slot whose generation is odd; the generation becomes even last. */
void core_publish(const struct core_index *index, uint64_t frame, const struct core_page *page);

/* Name a published page's slot in its home bucket. False: that is full. */
int core_name(const struct core_index *index, uint64_t frame, uint64_t namespace_number, const uint8_t *hash);

/* Put a page's tag into the emptier one of its two buckets, unless all of their pages are "maybe" anyway. False: both were
 * full, and from now on they are. */
int core_put_tag(const struct core_summary *summary, const uint8_t *hash);

/* Take a page's tag out of one of its two buckets, where it is. Withdrawals were counted before. */
void core_take_tag(const struct core_summary *summary, const uint8_t *hash);

#endif
