/* The arguments that all readers of an arena share. */
#ifndef KVSTORE_CORE_READER_H
#define KVSTORE_CORE_READER_H

#include "arena.h"
#include "module.h"

/* Searching for more keys gives the interpreter's lock away. Getting it back may take 5 ms, and a search for these far
 * less. */
#define CORE_MANY_KEYS 4096

struct reader {
    Py_buffer headers;
    struct core_index index;
    struct core_wanted wanted;
    Py_ssize_t count;
};

/* False: an error is set, and `headers` is released. */
int core_check_reader(struct reader *reader, const char *geometry, Py_ssize_t geometry_size, Py_ssize_t size);

#endif
