#include "module.h"

#include <string.h>

/* How many hashes ahead are fetched into the caches: those of a long prompt lie all over memory. */
#define AHEAD 16

PyObject *core_join_method(PyObject *module, PyObject *arguments) {
    PyObject *hashes;
    (void)module;
    if (!PyArg_ParseTuple(arguments, "O", &hashes))
        return NULL;
    if (!PyList_CheckExact(hashes))
        Py_RETURN_NONE;
    Py_ssize_t count = PyList_Size(hashes);
    PyObject *joined = PyBytes_FromStringAndSize(NULL, count * CORE_HASH_BYTES);
    if (!joined)
        return NULL;
    char *to = PyBytes_AsString(joined);
    for (Py_ssize_t i = 0; i < count; i++) {
        if (i + AHEAD < count)
            __builtin_prefetch(PyList_GetItem(hashes, i + AHEAD));
        PyObject *each = PyList_GetItem(hashes, i);
        if (!PyBytes_CheckExact(each) || PyBytes_Size(each) != CORE_HASH_BYTES) {
            Py_DECREF(joined);
            Py_RETURN_NONE;
        }
        memcpy(to + i * CORE_HASH_BYTES, PyBytes_AsString(each), CORE_HASH_BYTES);
    }
    return joined;
}
