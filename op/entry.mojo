"""Entry points: a function on the address of a record, such as a `Call`, as a function of C and of Python."""

from std.collections.string.string_span import get_static_string
from std.python import Python
from std.python._cpython import GILReleased, Py_ssize_t, PyObjectPtr
from std.python.bindings import PythonModuleBuilder

from .python import Arguments, Values, failure, integer


def from_python[
    Record: AnyType,
    //,
    does: def(Pointer[Record, MutUntrackedOrigin]) raises thin -> None,
](module: PyObjectPtr, values: Values, count: Py_ssize_t) abi(
    "C"
) -> PyObjectPtr:
    """Runs a function as one to register with `def_py_c_function`: returns 0, or raises a RuntimeError.

    Parameters:
        Record: The record.
        does: The function.

    Args:
        module: The extension.
        values: One integer, the address of a record.
        count: 1.

    Returns:
        The integer 0.
    """
    var arguments = Arguments(values)
    try:
        does({unsafe_from_address = arguments.integer()})
    except error:
        return failure(error)
    return integer(0)


def from_c[
    Record: AnyType,
    //,
    does: def(Pointer[Record, MutUntrackedOrigin]) raises thin -> None,
](record: Pointer[Record, MutUntrackedOrigin]) -> Int:
    """Runs a function as the body of an exported one.

    Parameters:
        Record: The record.
        does: The function.

    Args:
        record: The record.

    Returns:
        0 if nothing failed, otherwise 1.
    """
    try:
        does(record)
    except:
        return 1
    return 0


def from_python_unlocked[
    Record: AnyType,
    //,
    does: def(Pointer[Record, MutUntrackedOrigin]) raises thin -> None,
    work: def(Record) thin -> Int,
    least: Int,
](module: PyObjectPtr, values: Values, count: Py_ssize_t) abi(
    "C"
) -> PyObjectPtr:
    """Runs a function like `from_python`, without Python's lock where there is enough work.

    Parameters:
        Record: The record.
        does: The function.
        work: How much work a record is.
        least: The least work for which other Python threads may run meanwhile.

    Args:
        module: The extension.
        values: One integer, the address of a record.
        count: 1.

    Returns:
        The integer 0.
    """
    var arguments = Arguments(values)
    var record = Pointer[Record, MutUntrackedOrigin](
        unsafe_from_address=arguments.integer()
    )
    if work(record[]) < least:
        return from_python[does](module, values, count)
    var status: Int
    with GILReleased(Python()):
        status = from_c[does](record)
    if status != 0:
        return failure(Error("the pass failed"))
    return integer(0)


def add_pass[
    Record: AnyType,
    //,
    does: def(Pointer[Record, MutUntrackedOrigin]) raises thin -> None,
    name: StaticString,
    effect: StaticString,
](mut builder: PythonModuleBuilder):
    """Adds a function on the address of a record to an extension.

    Parameters:
        Record: The record.
        does: The function.
        name: Its name in Python.
        effect: What it does, for its docstring.

    Args:
        builder: The extension.
    """
    builder.def_py_c_function(
        from_python[does],
        name,
        docstring=get_static_string[name, "(call) -> 0; ", effect](),
    )
