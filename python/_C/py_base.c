/* SPDX-License-Identifier: Apache-2.0 */
/* Versions, options tables, log. */
#include "py.h"

static PyObject *version(PyObject *self, PyObject *none)
{
    (void)self, (void)none;
    return Py_BuildValue("(si)", lf_version_string(), (int)lf_abi_version());
}

static PyObject *option_row(const lf_option *row)
{
    static const char *const types[] = {"i32", "i64", "f64", "bool", "text"};
    return Py_BuildValue("{s:s,s:s,s:s,s:z,s:s,s:d,s:d}", "name", row->name, "default", row->default_text, "help", row->help,
                         "choices", row->choices, "type", types[row->type], "min", row->min, "max", row->max);
}

/* {section: [row, …]} of every options table. */
static PyObject *options_tables(PyObject *self, PyObject *none)
{
    (void)self, (void)none;
    PyObject *all = PyDict_New();
    const lf_options_section *s;
    for (uint32_t i = 0; all && (s = lf_options_at(i)) != NULL; i++) {
        PyObject *rows = PyList_New(0);
        for (uint32_t j = 0; rows && j < s->n_rows; j++) {
            PyObject *row = option_row(&s->rows[j]);
            if (!row || PyList_Append(rows, row) < 0) Py_CLEAR(rows);
            Py_XDECREF(row);
        }
        if (!rows || PyDict_SetItemString(all, s->name, rows) < 0) Py_CLEAR(all);
        Py_XDECREF(rows);
    }
    return all;
}

static PyObject *typed_value(const lf_option *row, const char *text)
{
    if (row->type == LF_OPT_TEXT) return PyUnicode_FromString(text);
    if (row->type == LF_OPT_BOOL) return PyBool_FromLong(text[0] == 't');
    PyObject *word = PyUnicode_FromString(text);
    PyObject *value = !word ? NULL : row->type == LF_OPT_F64 ? PyFloat_FromString(word) : PyLong_FromString(text, NULL, 10);
    Py_XDECREF(word);
    return value;
}

/* options_check(section, dict) -> dict: defaults, overwritten by the given values, all checked and typed. */
static PyObject *options_check(PyObject *self, PyObject *args)
{
    (void)self;
    const char *section;
    PyObject *given = Py_None, *checked = NULL;
    if (!PyArg_ParseTuple(args, "s|O", &section, &given)) return NULL;
    const lf_options_section *s = lf_options_find(section);
    if (!s) return PyErr_Format(PyExc_KeyError, "no options section '%s'", section);
    void *options = PyMem_Malloc(s->struct_bytes);
    if (!options) return PyErr_NoMemory();
    if (lfpy_options(section, options, s->struct_bytes, given) == 0) checked = PyDict_New();
    for (uint32_t i = 0; checked && i < s->n_rows; i++) {
        char text[LF_TEXT_MAX];
        lf_status rc = lf_options_get(section, options, s->rows[i].name, text, sizeof text);
        PyObject *value = rc < 0 ? lfpy_raise(rc) : typed_value(&s->rows[i], text);
        if (!value || PyDict_SetItemString(checked, s->rows[i].name, value) < 0) Py_CLEAR(checked);
        Py_XDECREF(value);
    }
    PyMem_Free(options);
    return checked;
}

static PyObject *log_target;

static void forward_log(void *user, int32_t level, const char *line)
{
    (void)user;
    PyGILState_STATE gil = PyGILState_Ensure();
    if (log_target) {
        PyObject *done = PyObject_CallFunction(log_target, "is", (int)level, line);
        if (!done) PyErr_WriteUnraisable(log_target);
        Py_XDECREF(done);
    }
    PyGILState_Release(gil);
}

/* log_set(callable or None, level): callable(level, line) from any thread. */
static PyObject *log_set(PyObject *self, PyObject *args)
{
    (void)self;
    PyObject *target;
    int level = LF_LOG_INFO;
    if (!PyArg_ParseTuple(args, "O|i", &target, &level)) return NULL;
    LFPY_FREE_GIL(lf_log_set(target == Py_None ? NULL : forward_log, NULL, level));
    Py_XDECREF(log_target);
    log_target = target == Py_None ? NULL : target;
    Py_XINCREF(log_target);
    Py_RETURN_NONE;
}

PyMethodDef lfpy_base_methods[] = {
    {"version", version, METH_NOARGS, "(version, ABI number) of the C library."},
    {"options_tables", options_tables, METH_NOARGS, "Every options table: {section: [row, ...]}."},
    {"options_check", options_check, METH_VARARGS, "Defaults of a section with a dict's values over them, checked and typed."},
    {"log_set", log_set, METH_VARARGS, "Send the library's log lines to callable(level, line)."},
    {NULL, NULL, 0, NULL},
};
