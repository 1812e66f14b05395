"""Writes what a plan knows from measurements: a `measured.mojo`, rows of named columns."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

_TEXT = '''"""{about}"""

{imports}


@fieldwise_init
struct Measured(TrivialRegisterPassable):
    """{each}"""

{columns}


# fmt: off
comptime MEASURED = [
    #        {head}
{rows}
]
"""The measurements, by {order}."""
# fmt: on
'''


def text(
    about: str,
    imports: str,
    each: str,
    columns: Mapping[str, str],
    head: str,
    rows: Iterable[str],
    order: str,
) -> str:
    """Return the file.

    Args:
        about: What it says of itself.
        imports: Where the names in it come from, as lines.
        each: What a row is.
        columns: What each column is, by its name; all but `dtype` are integers.
        head: The columns' names above the rows.
        rows: Each row's values, aligned.
        order: What the rows are ordered by.
    """
    lines = [
        f'    var {name}: {"DType" if name == "dtype" else "Int"}\n    """{what}"""'
        for name, what in columns.items()
    ]
    return _TEXT.format(
        about=about,
        imports=imports,
        each=each,
        columns="\n".join(lines),
        head=head,
        rows="\n".join(f"    Measured({row})," for row in rows),
        order=order,
    )
