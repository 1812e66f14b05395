"""What a wrong edit is."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutation:
    """A wrong edit.

    Attributes:
        name: What is wrong, in words.
        target: `cpu`, or `gpu` where only one shows it.
        file: The file, from the root of the repository.
        old: Text that occurs once in it.
        new: What takes its place.
        tests: Arguments of pytest, of which one test at least must fail.
    """

    name: str
    target: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
