#include "module.h"

#define METHOD(name, signature, text) {#name, core_##name##_method, METH_VARARGS, #name signature "\n--\n\n" text},
static PyMethodDef methods[] = {
#include "methods.h"
    {NULL, NULL, 0, NULL},
};
#undef METHOD

static int add_constants(PyObject *module) {
    PyObject *abi = PyLong_FromUnsignedLongLong(CORE_ABI);
    int failed = abi == NULL || PyModule_AddObjectRef(module, "ABI", abi);
    Py_XDECREF(abi);
    return failed ? -1 : 0;
}

static PyModuleDef_Slot slots[] = {
    {Py_mod_exec, add_constants},
    {0, NULL},
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT,
    .m_name = "kvstore._core",
    .m_doc = "The native core: see kvstore.core.",
    .m_size = 0,
    .m_methods = methods,
    .m_slots = slots,
};

PyMODINIT_FUNC PyInit__core(void) { return PyModuleDef_Init(&module); }

int core_take_buffers(struct core_buffers *buffers, PyObject *pages, Py_ssize_t count, uint64_t length, int writable) {
    int many = PyList_Check(pages) || PyTuple_Check(pages);
    Py_ssize_t views = many ? count : 1;
    buffers->count = 0;
    buffers->views = PyMem_Calloc(views ? views : 1, sizeof *buffers->views);
    buffers->pages = PyMem_Calloc(count ? count : 1, sizeof *buffers->pages);
    if (!buffers->views || !buffers->pages) {
        PyErr_NoMemory();
        goto failed;
    }
    if (many && PySequence_Size(pages) != count) {
        PyErr_Format(PyExc_ValueError, "%zd buffers were given for %zd pages", PySequence_Size(pages), count);
        goto failed;
    }
    for (Py_ssize_t i = 0; i < views; i++) {
        PyObject *page = many ? PySequence_GetItem(pages, i) : Py_NewRef(pages);
        if (!page)
            goto failed;
        int taken = !PyObject_GetBuffer(page, &buffers->views[i], writable ? PyBUF_WRITABLE : PyBUF_SIMPLE);
        Py_DECREF(page); /* the buffer keeps it */
        if (!taken)
            goto failed;
        buffers->count++;
        uint64_t size = (uint64_t)buffers->views[i].len, pages_in_it = many ? 1 : (uint64_t)count;
        if (length ? size / length != pages_in_it || size % length : size != 0) {
            PyErr_Format(PyExc_ValueError, "a buffer of %llu bytes can't hold %llu pages of %llu bytes",
                         (unsigned long long)size, (unsigned long long)pages_in_it, (unsigned long long)length);
            goto failed;
        }
    }
    for (Py_ssize_t i = 0; i < count; i++)
        buffers->pages[i] = many ? buffers->views[i].buf : (uint8_t *)buffers->views[0].buf + (uint64_t)i * length;
    return 1;
failed:
    core_release_buffers(buffers);
    return 0;
}

void core_release_buffers(struct core_buffers *buffers) {
    for (Py_ssize_t i = 0; i < buffers->count; i++)
        PyBuffer_Release(&buffers->views[i]);
    PyMem_Free(buffers->views);
    PyMem_Free(buffers->pages);
    buffers->views = NULL;
    buffers->pages = NULL;
    buffers->count = 0;
}
