"""Check the words of the pages and of the reference: plain American English, the glossary's words.

    python scripts/prose.py

Code, links and quotations are left out. The exit status is 1 if a word has a plainer one.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGES = ("*.md", "docs/*.md", "docs/guide/*.md", "op/*.md", "problems/*/*.md")
# Their docstrings are the reference.
DOCUMENTED = ("fused_norm/*.py", "fused_norm/modules/*.py")
LEFT_OUT = {"CHANGELOG.md"}
# What to avoid, as a pattern, and what to say.
WORDS = {
    r"beside": "next to, with, among, compared with, at the same time",
    r"lies|(to|can|must|may|they|it|rows|that|elements|things|slices) lie": "is, are, be",
    r"since then|by now|nowadays|used to be|no longer needed|originally": "what is true now",
    r"what(ever)? stands (for|in)|whatever (its|their) \w+": "a noun, or however many",
    r"comes? down to|so does it|so are they|so is it": "a sentence of its own",
    r"so many": "that many, or the number",
    r"besides": "as well, also, or what else",
    r"anew": "again",
    r"sooner": "first, or faster",
    r"all the same": "anyway",
    r"likewise": "the same, or also",
    r"at one time": "at once, or at the same time",
    r"(the other|either) way round": "vice versa",
    r"mends?": "fixes, or corrects",
    # Not the heading of the log, by which kernels and data refer to it.
    r"(take|takes|(?<!# )taking|in) turns": "alternate, or interleave",
    r"(turn|turns|turned) (it |them )?down": "decline",
    r"(newer|older) code|code that is (newer|older)": "the commit, or what is true now",
    r"leave[sd]? away|left away": "omit",
    r"(kernel|pass|loop|call|block|thread|row|first|second|it) finds": "computes or reads",
    r"behaviour|colour|favour|neighbour|centre|catalogue|cancelled|labelled|modelling|whilst|"
    r"(normal|optim|initial|vector|real|recogn|quant|organ|summar|general|parallel|serial)"
    r"is(e|ed|es|ing|ation)": "the American spelling",
    r"utili[sz]e[sd]?|leverage[sd]?|in order to|blazing(ly)?|seamless(ly)?": "a plainer word",
    r"inverse standard deviation|inv_?std|norm_factor": "rstd",
    r"epsilon": "eps",
    r"layer-norm|layernorm(?!_|s? of|ed)": "LayerNorm",
}
HIDDEN = re.compile(
    r"<!--.*?-->|^```.*?^```|^~~~.*?^~~~|`[^`\n]*`|\$[^$\n]+\$|\]\([^)]*\)|\"[^\"\n]*\"|<[^>\n]+>",
    re.DOTALL | re.MULTILINE,
)


def faults(text: str) -> Iterator[tuple[int, str, str]]:
    """Yield the line of each word to avoid, the word, and what to say.

    Args:
        text: A page in Markdown.
    """
    # Lines stay where they are.
    plain = HIDDEN.sub(lambda found: re.sub(r"[^\n]", " ", found[0]), text)
    for pattern, better in WORDS.items():
        is_name = "ayernorm" in pattern
        flags = 0 if is_name else re.IGNORECASE
        for found in re.finditer(rf"\b(?:{pattern})\b", plain, flags):
            yield plain.count("\n", 0, found.start()) + 1, found[0], better


def docstrings(code: str) -> str:
    """Return Python code with its docstrings alone, in the lines where they are.

    Args:
        code: A module.
    """
    lines = code.splitlines()
    kept = [""] * len(lines)
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(
            node
        ):
            text = node.body[0]
            assert text.end_lineno
            place = slice(text.lineno - 1, text.end_lineno)
            kept[place] = [line.replace('"""', "") for line in lines[place]]
    return "\n".join(kept)


def main() -> int:
    """Print what to change and return an exit status."""
    failed = False
    for path in sorted({path for each in PAGES + DOCUMENTED for path in ROOT.glob(each)}):
        name = str(path.relative_to(ROOT))
        if name in LEFT_OUT:
            continue
        text = path.read_text()
        text = docstrings(text) if path.suffix == ".py" else text
        for line, word, better in sorted(faults(text)):
            print(f"{name}:{line}: {word!r}; say {better}")
            failed = True
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
