/* What the files that speak with Python share. The limited API: one binary for every Python from 3.11 on. */
#ifndef KVSTORE_CORE_MODULE_H
#define KVSTORE_CORE_MODULE_H

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>

#include "layout.h"

#define METHOD(name, signature, text) PyObject *core_##name##_method(PyObject *module, PyObject *arguments);
#include "methods.h"
#undef METHOD

/* A caller's memory, as one buffer of all pages or as a sequence of one a page. */
struct core_buffers {
    Py_buffer *views;
    Py_ssize_t count;
    uint8_t **pages;
};

/* The places of `count` pages of `length` bytes in `pages`. False: an error is set; nothing is to be released. */
int core_take_buffers(struct core_buffers *buffers, PyObject *pages, Py_ssize_t count, uint64_t length, int writable);
void core_release_buffers(struct core_buffers *buffers);

#endif
