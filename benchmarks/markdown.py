"""Tables in Markdown, and text between marks in a page that is written by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def table(header: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> str:
    """Return a table.

    Args:
        header: The titles of the columns.
        rows: The cells of each row.
        right: The columns that are aligned to the right.
    """
    rules = ["---:" if column in right else "---" for column in range(len(header))]
    lines = [header, rules, *([cell.replace("|", "\\|") for cell in row] for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def filled(text: str, fragments: Mapping[str, str]) -> str:
    """Return a page with what is between `<!-- begin: NAME -->` and `<!-- end: NAME -->` replaced.

    Args:
        text: The page.
        fragments: What belongs there, by name.

    Raises:
        ValueError: If the page has a mark more or less than once.
    """
    for name, fragment in fragments.items():
        begin, end = f"<!-- begin: {name} -->\n", f"<!-- end: {name} -->"
        count = text.count(begin)
        if count != 1 or end not in text:
            raise ValueError(f"expected the marks of {name!r} once, found them {count} times")
        before, rest = text.split(begin)
        text = before + begin + fragment + end + rest.split(end, 1)[1]
    return text
