#include "writer.h"

#include <string.h>

#include "reader.h"

/* Numbers below `limit` (0: any) from a list. NULL: an error is set. */
static uint64_t *take_numbers(PyObject *list, Py_ssize_t *count, uint64_t limit) {
    if (!PyList_Check(list)) {
        PyErr_SetString(PyExc_TypeError, "numbers come in a list");
        return NULL;
    }
    *count = PyList_Size(list);
    uint64_t *numbers = PyMem_Malloc(*count ? (size_t)*count * sizeof *numbers : 1);
    if (!numbers) {
        PyErr_NoMemory();
        return NULL;
    }
    for (Py_ssize_t i = 0; i < *count; i++) {
        PyObject *number = PyNumber_Index(PyList_GetItem(list, i));
        numbers[i] = number ? PyLong_AsUnsignedLongLong(number) : 0;
        Py_XDECREF(number);
        if (PyErr_Occurred())
            goto failed;
        if (limit && numbers[i] >= limit) {
            PyErr_Format(PyExc_ValueError, "frame %llu is none of %llu", (unsigned long long)numbers[i],
                         (unsigned long long)limit);
            goto failed;
        }
    }
    return numbers;
failed:
    PyMem_Free(numbers);
    return NULL;
}

/* Memory for the answer is there before anything is written: behind that nothing fails. */
PyObject *core_begin_changes_method(PyObject *module, PyObject *arguments) {
    struct reader reader = {.wanted = {0, 0, NULL}};
    const char *geometry;
    Py_ssize_t geometry_size, count;
    long owner;
    PyObject *list, *told = NULL;
    (void)module;
    if (!PyArg_ParseTuple(arguments, "w*y#Ol", &reader.headers, &geometry, &geometry_size, &list, &owner) ||
        !core_check_reader(&reader, geometry, geometry_size, 0))
        return NULL;
    uint64_t *frames = NULL;
    if (owner < 0 || owner > 0xFFFF)
        PyErr_Format(PyExc_ValueError, "an owner has 16 bits, got %ld", owner);
    else
        frames = take_numbers(list, &count, reader.index.frames);
    if (frames)
        told = PyBytes_FromStringAndSize(NULL, count);
    if (told) {
        char *was_page = PyBytes_AsString(told);
        for (Py_ssize_t i = 0; i < count; i++)
            was_page[i] = (char)core_begin_change(&reader.index, frames[i], (uint16_t)owner);
        for (Py_ssize_t i = 0; i < count; i++)
            if (was_page[i] && !core_withdraw(&reader.index, frames[i]))
                was_page[i] = 2;
    }
    PyMem_Free(frames);
    PyBuffer_Release(&reader.headers);
    return told;
}

PyObject *core_publish_method(PyObject *module, PyObject *arguments) {
    struct reader reader;
    const char *geometry, *hashes;
    Py_ssize_t geometry_size, size, count, sums_count = 0;
    unsigned long long sequence, number, length;
    PyObject *list, *sums_list, *told = NULL;
    uint64_t *frames = NULL, *sums = NULL;
    (void)module;
    if (!PyArg_ParseTuple(arguments, "w*y#Oy#OKKK", &reader.headers, &geometry, &geometry_size, &list, &hashes, &size,
                          &sums_list, &sequence, &number, &length))
        return NULL;
    reader.wanted = (struct core_wanted){number, length, (const uint8_t *)hashes};
    if (!core_check_reader(&reader, geometry, geometry_size, size))
        return NULL;
    frames = take_numbers(list, &count, reader.index.frames);
    sums = frames ? take_numbers(sums_list, &sums_count, 0) : NULL;
    if (sums && (count != reader.count || sums_count != count))
        PyErr_Format(PyExc_ValueError, "%zd frames, %zd hashes and %zd checksums", count, reader.count, sums_count);
    else if (sums)
        told = PyBytes_FromStringAndSize(NULL, count);
    if (told) {
        char *is_named = PyBytes_AsString(told);
        for (Py_ssize_t i = 0; i < count; i++) {
            struct core_page page = {reader.wanted.hashes + i * CORE_HASH_BYTES, sums[i], sequence - (uint64_t)i,
                                     number, length};
            core_publish(&reader.index, frames[i], &page);
        }
        for (Py_ssize_t i = 0; i < count; i++)
            is_named[i] = (char)core_name(&reader.index, frames[i], number, reader.wanted.hashes + i * CORE_HASH_BYTES);
    }
    PyMem_Free(frames);
    PyMem_Free(sums);
    PyBuffer_Release(&reader.headers);
    return told;
}

/* A writable summary and keys of pages, 64 bytes each. False: an error is set, and nothing is to be released. */
static int take_summary(PyObject *arguments, Py_buffer *file, struct core_summary *summary, const char **keys,
                        Py_ssize_t *size) {
    unsigned long long buckets;
    const char *wrong;
    if (!PyArg_ParseTuple(arguments, "w*Ky#", file, &buckets, keys, size))
        return 0;
    wrong = core_summary_of(summary, file->buf, (uint64_t)file->len, buckets);
    if (!wrong && *size % CORE_KEY_BYTES)
        wrong = "keys take 64 bytes each";
    if (wrong) {
        PyErr_SetString(PyExc_ValueError, wrong);
        PyBuffer_Release(file);
    }
    return !wrong;
}

/* The hash in a key, behind the fingerprint whose first word is the seed (kvstore.arena.summary.seed_of). */
static const uint8_t *hash_in(struct core_summary *summary, const char *key) {
    memcpy(&summary->seed, key, sizeof summary->seed);
    summary->seed *= CORE_SUMMARY_FINGERPRINT_FACTOR;
    return (const uint8_t *)key + CORE_KEY_BYTES - CORE_HASH_BYTES;
}

PyObject *core_put_tags_method(PyObject *module, PyObject *arguments) {
    struct core_summary summary;
    Py_buffer file;
    const char *keys;
    Py_ssize_t size;
    long full = 0;
    (void)module;
    if (!take_summary(arguments, &file, &summary, &keys, &size))
        return NULL;
    for (Py_ssize_t at = 0; at < size; at += CORE_KEY_BYTES) {
        const uint8_t *hash = hash_in(&summary, keys + at);
        full += !core_put_tag(&summary, hash);
    }
    PyBuffer_Release(&file);
    return PyLong_FromLong(full);
}

PyObject *core_take_tags_method(PyObject *module, PyObject *arguments) {
    struct core_summary summary;
    Py_buffer file;
    const char *keys;
    Py_ssize_t size;
    (void)module;
    if (!take_summary(arguments, &file, &summary, &keys, &size))
        return NULL;
    for (Py_ssize_t at = 0; at < size; at += CORE_KEY_BYTES) {
        const uint8_t *hash = hash_in(&summary, keys + at);
        core_take_tag(&summary, hash);
    }
    PyBuffer_Release(&file);
    return Py_NewRef(Py_None);
}
