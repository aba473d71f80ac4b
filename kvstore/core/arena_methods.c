#include "module.h"

#include <string.h>

#include "reader.h"

int core_check_reader(struct reader *reader, const char *geometry, Py_ssize_t geometry_size, Py_ssize_t size) {
    const char *wrong = NULL;
    struct core_geometry parts;
    if (geometry_size != (Py_ssize_t)sizeof parts)
        wrong = "the geometry is not 5 words of 8 bytes";
    else if (reader->wanted.namespace_number > 0xFFFF || reader->wanted.length > 0xFFFFFFFF)
        wrong = "a namespace's number has 16 bits, a page's length 32";
    else if (size % CORE_HASH_BYTES)
        wrong = "hashes take 32 bytes each";
    else {
        memcpy(&parts, geometry, sizeof parts);
        wrong = core_index_of(&reader->index, reader->headers.buf, (uint64_t)reader->headers.len, &parts);
    }
    if (wrong) {
        PyErr_SetString(PyExc_ValueError, wrong);
        PyBuffer_Release(&reader->headers);
        return 0;
    }
    reader->count = size / CORE_HASH_BYTES;
    return 1;
}

static int parse_reader(struct reader *reader, PyObject *arguments) {
    const char *geometry, *hashes;
    Py_ssize_t geometry_size, size;
    unsigned long long number, length;
    if (!PyArg_ParseTuple(arguments, "y*y#KKy#", &reader->headers, &geometry, &geometry_size, &number, &length, &hashes,
                          &size))
        return 0;
    reader->wanted = (struct core_wanted){number, length, (const uint8_t *)hashes};
    return core_check_reader(reader, geometry, geometry_size, size);
}

static void find_all(const struct reader *reader, char *here) {
    int64_t frames[CORE_CHUNK];
    uint64_t generations[CORE_CHUNK];
    size_t count = (size_t)reader->count;
    for (size_t first = 0; first < count; first += CORE_CHUNK) {
        size_t some = count - first < CORE_CHUNK ? count - first : CORE_CHUNK;
        core_find(&reader->index, &reader->wanted, first, some, frames, generations);
        for (size_t i = 0; i < some; i++)
            here[first + i] = frames[i] >= 0;
    }
}

PyObject *core_find_method(PyObject *module, PyObject *arguments) {
    struct reader reader;
    (void)module;
    if (!parse_reader(&reader, arguments))
        return NULL;
    PyObject *found = PyBytes_FromStringAndSize(NULL, reader.count);
    if (found) {
        char *here = PyBytes_AsString(found);
        if (reader.count > CORE_MANY_KEYS) {
            Py_BEGIN_ALLOW_THREADS
            find_all(&reader, here);
            Py_END_ALLOW_THREADS
        } else
            find_all(&reader, here);
    }
    PyBuffer_Release(&reader.headers);
    return found;
}

/* Append a number to a list. */
static int append(PyObject *list, PyObject *number) {
    int failed = number == NULL || PyList_Append(list, number);
    Py_XDECREF(number);
    return !failed;
}

PyObject *core_search_method(PyObject *module, PyObject *arguments) {
    struct reader reader;
    (void)module;
    if (!parse_reader(&reader, arguments))
        return NULL;
    int64_t at[CORE_CHUNK];
    uint64_t of[CORE_CHUNK];
    PyObject *frames = PyList_New(0), *generations = PyList_New(0), *found = NULL;
    if (!frames || !generations)
        goto done;
    for (Py_ssize_t first = 0, some = 0, i = 0; first < reader.count && i == some; first += some) {
        some = reader.count - first < CORE_CHUNK ? reader.count - first : CORE_CHUNK;
        core_find(&reader.index, &reader.wanted, (size_t)first, (size_t)some, at, of);
        for (i = 0; i < some && at[i] >= 0; i++)
            if (!append(frames, PyLong_FromLongLong(at[i])) ||
                !append(generations, PyLong_FromUnsignedLongLong(of[i])))
                goto done;
        if (i < some)
            break;
    }
    found = PyTuple_Pack(2, frames, generations);
done:
    Py_XDECREF(frames);
    Py_XDECREF(generations);
    PyBuffer_Release(&reader.headers);
    return found;
}

PyObject *core_load_method(PyObject *module, PyObject *arguments) {
    struct reader reader;
    struct core_buffers into;
    Py_buffer pages;
    const char *geometry, *hashes;
    Py_ssize_t geometry_size, size;
    unsigned long long number, length, edition;
    PyObject *buffers;
    size_t good = 0;
    (void)module;
    if (!PyArg_ParseTuple(arguments, "y*y#y*KKKy#O", &reader.headers, &geometry, &geometry_size, &pages, &number, &length,
                          &edition, &hashes, &size, &buffers))
        return NULL;
    reader.wanted = (struct core_wanted){number, length, (const uint8_t *)hashes};
    if (!core_check_reader(&reader, geometry, geometry_size, size)) {
        PyBuffer_Release(&pages);
        return NULL;
    }
    int taken = core_take_buffers(&into, buffers, reader.count, length, 1);
    if (taken) {
        Py_BEGIN_ALLOW_THREADS
        good = core_load(&reader.index, &reader.wanted, (size_t)reader.count, edition, pages.buf, (uint64_t)pages.len,
                         into.pages);
        Py_END_ALLOW_THREADS
        core_release_buffers(&into);
    }
    PyBuffer_Release(&pages);
    PyBuffer_Release(&reader.headers);
    return taken ? PyLong_FromSize_t(good) : NULL;
}
