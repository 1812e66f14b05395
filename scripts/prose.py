"""Check the words of pages, messages and comments: plain American English, the glossary's words.

    python scripts/prose.py

Code, links and quotations are left out. The exit status is 1 if a word has a plainer one.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

ROOT = Path(__file__).resolve().parents[1]
PAGES = ("*.md", "docs/*.md", "docs/*/*.md", "op/*.md", "problems/*/*.md", "tutorial/*.md")
# What they print is read.
SPEAKING = ("fused_norm/**/*.py", "solutions/**/*.py", "tutorial/puzzle/*.py")
# Their comments and docstrings are read.
COMMENTED = (
    *("fused_norm/**/*.py", "fused_norm/chain/*.h", "fused_norm/chain/*.cpp"),
    *("benchmarks/**/*.py", "examples/**/*.py", "scripts/**/*.py", "tests/**/*.py"),
    "tutorial/*/*.py",
)
# What to avoid, as a pattern, and what to say.
WORDS = {
    r"beside": "next to, with, among, compared with, at the same time",
    r"lies|(to|can|must|may|they|it|rows|that|elements|things|slices) lie": "is, are, be",
    r"since then|since(?=[.;])|by now|nowadays|used to be|no longer needed|originally": "what is "
    "true now",
    r"(is|are) bound by": "limits, or is limited by",
    r"no multiples? of": "not a multiple of",
    r"in ((the|their|its) )?place of|takes? the place of|stands? for": "instead of, replaces, or "
    "means",
    r"(calls|it) (are|is) chosen by|goes by|go by": "uses",
    r"claim's": "headline's",
    r"whoever|nobody knows": "what is meant",
    r"where there (is|are) (one|none)": "if there is one",
    r"takes? \w+ out of": "removes",
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
    r"(kernel|pass|loop|call|block|thread|row|first|second|it|backend) finds": "computes, or fuses",
    r"behaviour|colour|favour|neighbour|centre|catalogue|cancelled|labelled|modelling|whilst|"
    r"(normal|optim|initial|vector|real|recogn|quant|organ|summar|general|parallel|serial)"
    r"is(e|ed|es|ing|ation)": "the American spelling",
    r"utili[sz]e[sd]?|leverage[sd]?|in order to|blazing(ly)?|seamless(ly)?": "a plainer word",
    r"inverse standard deviation|inv_?std|norm_factor": "rstd",
    r"epsilon": "eps",
    r"(?-i:layer-norm|layernorm(?!_|s? of|ed))": "LayerNorm",
}
# What to avoid in comments as well.
IN_COMMENTS = {r"apart": "separate, except for, or the distance"}
HIDDEN = re.compile(
    r"<!--.*?-->|^```.*?^```|^~~~.*?^~~~|`[^`\n]*`|\$[^$\n]+\$|\]\([^)]*\)|\"[^\"\n]*\"|<[^>\n]+>",
    re.DOTALL | re.MULTILINE,
)


def faults(
    text: str, words: Mapping[str, str] = MappingProxyType(WORDS)
) -> Iterator[tuple[int, str, str]]:
    """Yield the line of each word to avoid, the word, and what to say.

    Args:
        text: A page in Markdown, or comments.
        words: What to avoid, and what to say.
    """
    # Lines stay where they are.
    plain = HIDDEN.sub(lambda found: re.sub(r"[^\n]", " ", found[0]), text)
    for pattern, better in words.items():
        for found in re.finditer(rf"\b(?:{pattern})\b", plain, re.IGNORECASE):
            yield plain.count("\n", 0, found.start()) + 1, found[0], better


def messages(code: str) -> str:
    """Return what Python code prints and raises, in the lines where it begins.

    That is every text of three words or more that is no docstring.

    Args:
        code: A module.
    """
    tree = ast.parse(code)
    statements = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    lines = [""] * (len(code.splitlines()) + 1)
    for node in ast.walk(tree):
        if not isinstance(node, ast.Constant) or not isinstance(node.value, str):
            continue
        words = node.value.split()
        if id(node) not in statements and len(words) > 2:
            lines[node.lineno - 1] += " " + " ".join(words)
    return "\n".join(lines)


def docstrings(code: str) -> str:
    """Return Python code with its docstrings alone, in the lines where they are.

    Args:
        code: A module.
    """
    lines = code.split("\n")
    kept = [""] * len(lines)
    for node in ast.walk(ast.parse(code)):
        if not isinstance(node, ast.Expr) or not isinstance(node.value, ast.Constant):
            continue
        if isinstance(node.value.value, str):
            assert node.end_lineno
            place = slice(node.lineno - 1, node.end_lineno)
            kept[place] = [line.replace('"""', "") for line in lines[place]]
    return "\n".join(kept)


def comments(code: str, is_python: bool) -> str:
    """Return the comments and docstrings of code alone, in the lines where they are.

    Args:
        code: A file of Python or C++.
        is_python: Which of the two.
    """
    if not is_python:
        return "\n".join(line.partition("//")[2] for line in code.split("\n"))
    lines = docstrings(code).split("\n")
    for token in tokenize.generate_tokens(io.StringIO(code).readline):
        if token.type == tokenize.COMMENT:
            lines[token.start[0] - 1] += token.string.removeprefix("#")
    return "\n".join(lines)


def commented() -> Iterator[tuple[Path, str]]:
    """Yield the files whose comments may have a word to avoid, each with its comments."""
    words = re.compile(rf"\b({'|'.join((*WORDS, *IN_COMMENTS))})\b", re.IGNORECASE)
    for path in sorted({path for each in COMMENTED for path in ROOT.glob(each)}):
        code = path.read_text()
        # Tokens take longer than a search of the whole text.
        if words.search(code):
            yield path, comments(code, path.suffix == ".py")


def main() -> int:
    """Print what to change and return an exit status."""
    texts = [(path, path.read_text(), WORDS) for each in PAGES for path in ROOT.glob(each)]
    texts += [
        (path, messages(path.read_text()), WORDS) for each in SPEAKING for path in ROOT.glob(each)
    ]
    texts += [(path, text, WORDS | IN_COMMENTS) for path, text in commented()]
    failed = False
    for path, text, words in sorted(texts, key=lambda each: each[0]):
        name = str(path.relative_to(ROOT))
        for line, word, better in sorted(faults(text, words)):
            print(f"{name}:{line}: {word!r}; say {better}")
            failed = True
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
