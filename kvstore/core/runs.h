/* Lists of runs: memory that this process owns, copied piece by piece. No Python. */
#ifndef KVSTORE_CORE_RUNS_H
#define KVSTORE_CORE_RUNS_H

#include <stddef.h>
#include <stdint.h>

/* Memory that runs may lie in. */
struct core_region {
    uint64_t start;
    uint64_t size;
};

/* The first run of `size` bytes that lies in no region, or `count`. */
size_t core_stray_run(const uint64_t *starts, size_t count, uint64_t size, const struct core_region *regions,
                      size_t region_count);

/* Copy each run of `size` bytes, in order. A run and its target may overlap. */
void core_copy_runs(const uint64_t *targets, const uint64_t *sources, size_t count, uint64_t size);

#endif
