"""The command line's parser, whose errors fit 80 columns."""

from __future__ import annotations

import argparse
import sys
import textwrap
from typing import NoReturn

WIDTH = 79


class Parser(argparse.ArgumentParser):
    """A parser that breaks the first line of an error between words; later lines stay."""

    def error(self, message: str) -> NoReturn:
        """Print the usage and the error, and exit with status 2.

        Args:
            message: The error.
        """
        first, *rest = message.split("\n")
        text = f"{self.prog}: error: {first}"
        lines = textwrap.wrap(text, WIDTH, break_long_words=False, break_on_hyphens=False)
        self.print_usage(sys.stderr)
        self.exit(2, "\n".join([*lines, *rest]) + "\n")
