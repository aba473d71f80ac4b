#include "module.h"

#include <errno.h>
#include <poll.h>
#include <sched.h>
#include <sys/socket.h>
#include <time.h>

static int is_ready(int fd) {
    struct pollfd one = {fd, POLLIN, 0};
    return poll(&one, 1, 0) > 0;
}

static int64_t nanoseconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

PyObject *core_look_method(PyObject *module, PyObject *arguments) {
    int fd;
    unsigned int microseconds;
    (void)module;
    if (!PyArg_ParseTuple(arguments, "iI", &fd, &microseconds))
        return NULL;
    int ready = is_ready(fd); /* at once, as most often, the lock is kept */
    if (!ready && microseconds) {
        Py_BEGIN_ALLOW_THREADS
        int64_t end = nanoseconds() + (int64_t)microseconds * 1000;
        do {
            sched_yield();
            ready = is_ready(fd);
        } while (!ready && nanoseconds() < end);
        Py_END_ALLOW_THREADS
    }
    return PyBool_FromLong(ready);
}

/* What a call that does not wait has moved: `nothing` where it would have had to wait, or NULL and an OSError. */
static PyObject *moved(ssize_t size, long nothing) {
    if (size >= 0)
        return PyLong_FromSsize_t(size);
    if (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR)
        return PyLong_FromLong(nothing);
    return PyErr_SetFromErrno(PyExc_OSError);
}

PyObject *core_receive_method(PyObject *module, PyObject *arguments) {
    int fd;
    Py_buffer into;
    (void)module;
    if (!PyArg_ParseTuple(arguments, "iw*", &fd, &into))
        return NULL;
    PyObject *size = moved(recv(fd, into.buf, (size_t)into.len, MSG_DONTWAIT), -1);
    PyBuffer_Release(&into);
    return size;
}

PyObject *core_send_method(PyObject *module, PyObject *arguments) {
    int fd;
    Py_buffer data;
    (void)module;
    if (!PyArg_ParseTuple(arguments, "iy*", &fd, &data))
        return NULL;
    PyObject *size = moved(send(fd, data.buf, (size_t)data.len, MSG_DONTWAIT | MSG_NOSIGNAL), 0);
    PyBuffer_Release(&data);
    return size;
}
