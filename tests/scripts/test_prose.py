"""The checks of the pages' words and links find what is wrong, and only that."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "scripts"))
sys.path.append(str(ROOT / "scripts/pages"))

import links  # noqa: E402
import prose  # noqa: E402


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("The tile lies\nbeside it.", ["lies", "beside"]),
        ("Its behaviour was optimised.", ["behaviour", "optimised"]),
        ('`lies beside`, [this](lies.md), "so many"\n```\nbeside\n```\n', []),
        ("LayerNorm is computed at the same time.", []),
        (
            "Since then, rows lie transposed, whatever their number.",
            ["Since then", "rows lie", "whatever their number"],
        ),
        (
            "It takes turns with others all the same, and likewise mends them anew, by newer code.",
            ["takes turns", "all the same", "likewise", "mends", "anew", "newer code"],
        ),
        (
            "Besides, at one time it finished sooner than the other way round. Turn it down.",
            ["Besides", "at one time", "sooner", "the other way round", "Turn it down"],
        ),
        ("Turn the page; differentiable in turn.", []),
        (
            "The backend finds the head; calls are chosen by it, in place of theirs, where there "
            "is one. It leaves them out since.",
            ["backend finds", "calls are chosen by", "in place of", "where there is one", "since"],
        ),
        ("It is right since rows are whole, where there is no compiler.", []),
    ],
)
def test_words(text: str, words: list[str]) -> None:
    assert sorted(word for _, word, _ in prose.faults(text)) == sorted(words)


def test_lines_are_those_of_the_page() -> None:
    assert [line for line, *_ in prose.faults("<!-- a\nb -->\n\nIt lies there.")] == [4]


def test_docstrings_are_read_and_code_is_not() -> None:
    code = 'lies = "beside"\n\n\ndef f():\n    """It lies there."""\n    # beside\n'
    assert list(prose.faults(prose.docstrings(code))) == [(5, "lies", "is, are, be")]


def test_messages_are_read_and_names_are_not() -> None:
    code = (
        '"""It lies there."""\n'
        "def f(name):\n"
        '    print(f"{name} is beside it")\n'
        '    raise ValueError("beside", "the rows lie apart")\n'
    )
    found = [(line, word) for line, word, _ in prose.faults(prose.messages(code))]
    assert found == [(3, "beside"), (4, "rows lie")]


def test_comments_are_read() -> None:
    code = '"""It is fine."""\nrows = "beside"  # as it lies\n\n\ndef f():\n    """Apart."""\n'
    words = prose.WORDS | prose.IN_COMMENTS
    found = [(line, word) for line, word, _ in prose.faults(prose.comments(code, True), words)]
    assert found == [(2, "lies"), (6, "Apart")]
    code = '// So many rows.\nconst auto beside = "lies";  // apart\n'
    found = [(line, word) for line, word, _ in prose.faults(prose.comments(code, False), words)]
    assert found == [(1, "So many"), (2, "apart")]


def test_which_files_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of the library's Python and C++: with a word in each file, none is skipped."""
    monkeypatch.setattr(prose, "WORDS", {"": "anything"})
    read = {path for path, _ in prose.commented()}
    library = (ROOT / "fused_norm").rglob("*")
    assert read >= {path for path in library if path.suffix in (".py", ".h", ".cpp")}


def test_links(tmp_path: Path) -> None:
    page = '<a href="b.html#here">1</a><a href="b.html#gone">2</a><img src="none.png">'
    (tmp_path / "a.html").write_text(page + '<a href="https://example.org/x">3</a>')
    (tmp_path / "b.html").write_text('<h1 id="here">b</h1><a href="a.html">a</a>')
    assert list(links.broken(tmp_path)) == [
        "a.html: b.html#gone: no such anchor",
        "a.html: none.png: no such file",
    ]
