#include "runs.h"

#include <string.h>

static int lies_in(uint64_t start, uint64_t size, const struct core_region *region) {
    return start >= region->start && size <= region->size && start - region->start <= region->size - size;
}

size_t core_stray_run(const uint64_t *starts, size_t count, uint64_t size, const struct core_region *regions,
                      size_t region_count) {
    size_t last = 0; /* runs come in stretches that lie in one region */
    for (size_t i = 0; i < count; i++) {
        if (last < region_count && lies_in(starts[i], size, regions + last))
            continue;
        for (last = 0; last < region_count && !lies_in(starts[i], size, regions + last);)
            last++;
        if (last == region_count)
            return i;
    }
    return count;
}

void core_copy_runs(const uint64_t *targets, const uint64_t *sources, size_t count, uint64_t size) {
    for (size_t i = 0; i < count; i++)
        memmove((void *)(uintptr_t)targets[i], (const void *)(uintptr_t)sources[i], size);
}
