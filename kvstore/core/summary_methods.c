#include "module.h"

#include <string.h>

#include "reader.h"
#include "summary.h"

PyObject *core_where_method(PyObject *module, PyObject *arguments) {
    struct reader reader;
    struct core_summary summary;
    Py_buffer file;
    const char *geometry, *hashes;
    Py_ssize_t geometry_size, size;
    unsigned long long number, length, edition, word, buckets, seed;
    PyObject *found = NULL;
    (void)module;
    if (!PyArg_ParseTuple(arguments, "y*y#KKKy#y*KKK", &reader.headers, &geometry, &geometry_size, &number, &length,
                          &edition, &hashes, &size, &file, &buckets, &word, &seed))
        return NULL;
    reader.wanted = (struct core_wanted){number, length, (const uint8_t *)hashes};
    if (!core_check_reader(&reader, geometry, geometry_size, size)) {
        PyBuffer_Release(&file);
        return NULL;
    }
    const char *wrong = core_summary_of(&summary, file.buf, (uint64_t)file.len, buckets);
    if (wrong)
        PyErr_SetString(PyExc_ValueError, wrong);
    else
        found = PyBytes_FromStringAndSize(NULL, reader.count);
    if (found) {
        uint8_t *said = (uint8_t *)PyBytes_AsString(found);
        summary.word = word;
        summary.seed = seed;
        if (reader.count > CORE_MANY_KEYS) {
            Py_BEGIN_ALLOW_THREADS
            core_where(&reader.index, &summary, &reader.wanted, (size_t)reader.count, edition, said);
            Py_END_ALLOW_THREADS
        } else
            core_where(&reader.index, &summary, &reader.wanted, (size_t)reader.count, edition, said);
    }
    PyBuffer_Release(&file);
    PyBuffer_Release(&reader.headers);
    return found;
}
