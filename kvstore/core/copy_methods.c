#include "module.h"

#include <string.h>

#include "past_caches.h"
#include "runs.h"

PyObject *core_copy_slots_method(PyObject *module, PyObject *arguments) {
    Py_buffer arena;
    PyObject *offsets, *pages;
    unsigned long long length;
    int out;
    struct core_buffers buffers;
    uint64_t *at = NULL;
    PyObject *done = NULL;
    (void)module;
    if (!PyArg_ParseTuple(arguments, "w*O!KOp", &arena, &PyList_Type, &offsets, &length, &pages, &out))
        return NULL;
    Py_ssize_t count = PyList_Size(offsets);
    if (!core_take_buffers(&buffers, pages, count, length, out)) {
        PyBuffer_Release(&arena);
        return NULL;
    }
    at = PyMem_Calloc(count ? count : 1, sizeof *at);
    if (!at) {
        PyErr_NoMemory();
        goto end;
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        at[i] = PyLong_AsUnsignedLongLong(PyList_GetItem(offsets, i));
        if (PyErr_Occurred())
            goto end;
        if (length > (uint64_t)arena.len || at[i] > (uint64_t)arena.len - length) {
            PyErr_Format(PyExc_ValueError, "a slot of %llu bytes at %llu lies outside an arena of %zd bytes", length,
                         (unsigned long long)at[i], arena.len);
            goto end;
        }
    }
    Py_BEGIN_ALLOW_THREADS
    for (Py_ssize_t i = 0; i < count; i++) {
        uint8_t *slot = (uint8_t *)arena.buf + at[i];
        if (out)
            memmove(buffers.pages[i], slot, length);
        else
            core_copy_past_caches(slot, buffers.pages[i], length);
    }
    Py_END_ALLOW_THREADS
    done = Py_NewRef(Py_None);
end:
    PyMem_Free(at);
    core_release_buffers(&buffers);
    PyBuffer_Release(&arena);
    return done;
}

/* Whether every run lies in a region; else an error is set. */
static int check_runs(const char *name, const Py_buffer *starts, uint64_t run, const Py_buffer *regions) {
    size_t count = (size_t)starts->len / 8;
    size_t stray =
        core_stray_run(starts->buf, count, run, regions->buf, (size_t)regions->len / sizeof(struct core_region));
    if (stray == count)
        return 1;
    PyErr_Format(PyExc_ValueError, "%s %zu, %llu bytes at %p, lies in none of the regions", name, stray,
                 (unsigned long long)run, (void *)(uintptr_t)((const uint64_t *)starts->buf)[stray]);
    return 0;
}

PyObject *core_copy_runs_method(PyObject *module, PyObject *arguments) {
    Py_buffer targets, sources, regions;
    unsigned long long run;
    PyObject *done = NULL;
    (void)module;
    if (!PyArg_ParseTuple(arguments, "y*y*Ky*", &targets, &sources, &run, &regions))
        return NULL;
    if (targets.len % 8 || targets.len != sources.len || regions.len % sizeof(struct core_region) ||
        ((uintptr_t)targets.buf | (uintptr_t)sources.buf | (uintptr_t)regions.buf) % 8)
        PyErr_SetString(PyExc_ValueError, "addresses are words of 8 bytes, as many targets as sources; regions are pairs");
    else if (check_runs("target", &targets, run, &regions) && check_runs("source", &sources, run, &regions)) {
        Py_BEGIN_ALLOW_THREADS
        core_copy_runs(targets.buf, sources.buf, (size_t)targets.len / 8, run);
        Py_END_ALLOW_THREADS
        done = Py_NewRef(Py_None);
    }
    PyBuffer_Release(&targets);
    PyBuffer_Release(&sources);
    PyBuffer_Release(&regions);
    return done;
}
