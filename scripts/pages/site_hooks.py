"""What mkdocs does to the pages of docs/ beyond Markdown, so that GitHub shows the same files.

- The README is the front page.
- Links out of docs/ lead to files of the repository: Markdown becomes a page of the site, and so
  does code, highlighted; other files are copied as text, and a folder becomes a list of its files.
- `<picture>` becomes a picture for each color scheme and width, of which the style shows one.
- `<!-- ::: name -->` becomes mkdocstrings' directive, which GitHub would print.
- Images load when they come into view, and names in tables break after `::`.
- The style knows columns of numbers, whose title is `#`, and options such as `--all`.
- The table of contents of the reference names each function once.
- The search leaves out code and lists of files.
- Formulas between dollar signs become MathML, which needs no script.
"""

from __future__ import annotations

import html
import os
import re
from pathlib import Path, PurePosixPath
from typing import Any

from latex2mathml.converter import convert
from mkdocs.structure.files import File, Files, InclusionLevel

ROOT = Path(__file__).resolve().parents[2]
SOURCES = "repository"
# The placeholder of the list of a folder's files.
FOLDER = "index.md"
NOT_IN_NAV = InclusionLevel.NOT_IN_NAV
HOME = PurePosixPath("README.md")
HOME_URI = "index.md"
CODE = {".mojo": "mojo", ".py": "python", ".h": "cpp", ".cpp": "cpp", ".toml": "toml"}
LINK = re.compile(r"\[(?P<text>[^\]]*)\]\((?P<target>[^)#\s]+)(?P<anchor>#[^)\s]*)?\)")
FENCED = re.compile(r"^(```|~~~).*?^\1", re.MULTILINE | re.DOTALL)
PICTURE = re.compile(
    r'<picture>(?P<sources>.*?)<img alt="(?P<alt>[^"]*)" src="(?P<light>[^"]+)".*?</picture>',
    re.DOTALL,
)
SOURCE = re.compile(r'<source media="(?P<media>[^"]+)" srcset="(?P<file>[^"]+)">')
DIRECTIVE = re.compile(r"^<!-- (::: [\w.]+) -->$", re.MULTILINE)
FORMULA = re.compile(
    r'<(?P<tag>span|div) class="arithmatex">\\[(\[](?P<latex>.*?)\\[)\]]</(?P=tag)>', re.DOTALL
)
OPTION = re.compile(r"<code>(--?\w[\w-]{0,30})(?=[ <])")
CODE_IN_CELL = re.compile(r"<code>[^<]*::[^<]*</code>")
# Anchors of mkdocstrings begin like this, below a heading that the page has itself.
DOCUMENTED = "fused_norm."
NO_SEARCH = "---\nsearch: {exclude: true}\n"


def on_files(files: Files, config: Any) -> Files:
    """Add what pages link to outside of docs/, and what those pages link to in turn.

    Args:
        files: What is in docs/.
        config: Of mkdocs.
    """
    home = str(ROOT / HOME)
    files.append(File.generated(config, HOME_URI, abs_src_path=home))
    waiting = [
        (_place(PurePosixPath(file.src_uri)), file.content_string)
        for file in files.documentation_pages()
    ]
    while waiting:
        page, text = waiting.pop()
        for match in LINK.finditer(FENCED.sub("", text)):
            path = _outside(page, match["target"])
            if path is None or files.get_file_from_path(_uri(path)):
                continue
            uri = _uri(path)
            if path.name == FOLDER:
                text = _listed(path.parent)
                files.append(File.generated(config, uri, content=text, inclusion=NOT_IN_NAV))
                waiting.append((path, text))
                continue
            if path.suffix in CODE:
                text = _highlighted(path)
                files.append(File.generated(config, uri, content=text, inclusion=NOT_IN_NAV))
                continue
            source = str(ROOT / path)
            files.append(File.generated(config, uri, abs_src_path=source, inclusion=NOT_IN_NAV))
            if uri.endswith(".md"):
                waiting.append((path, (ROOT / path).read_text()))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Return a page's Markdown with links, pictures and directives as the site has them.

    Args:
        markdown: The page.
        page: Its place.
    """
    uri = PurePosixPath(page.file.src_uri)
    here = _place(uri)
    inside = here.parts[0] != "docs"

    def link(match: re.Match[str]) -> str:
        path = _outside(here, match["target"])
        target = _uri(path) if path else None
        if target is None:
            # Within docs/, which is elsewhere to a page that comes from outside.
            found = _resolved(here, match["target"])
            if not inside or found is None or found.parts[0] != "docs":
                return match[0]
            target = str(PurePosixPath(*found.parts[1:]))
        relative = os.path.relpath(target, uri.parent)
        return f"[{match['text']}]({relative}{match['anchor'] or ''})"

    def outside_code(pattern: re.Pattern[str], replacement: Any, text: str) -> str:
        parts, last = [], 0
        for block in FENCED.finditer(text):
            parts += [pattern.sub(replacement, text[last : block.start()]), block[0]]
            last = block.end()
        return "".join([*parts, pattern.sub(replacement, text[last:])])

    markdown = outside_code(PICTURE, _schemes, markdown)
    markdown = outside_code(LINK, link, markdown)
    return DIRECTIVE.sub(r"\1", markdown)


def on_page_content(content: str, page: Any, **_: Any) -> str:
    """Return a page's HTML with its formulas as MathML, and images that load when they are seen.

    Args:
        content: The page.
        page: Its table of contents.
    """
    _name_once(page.toc)
    content = CODE_IN_CELL.sub(lambda found: found[0].replace("::", "::<wbr>"), content)
    content = OPTION.sub(r'<code><span class="option">\1</span>', content)
    content = re.sub(r"<th([^>]*)>#</th>", r'<th class="numbers"\1>#</th>', content)

    def formula(match: re.Match[str]) -> str:
        display = "block" if match["tag"] == "div" else "inline"
        return convert(html.unescape(match["latex"]).strip(), display=display)

    return FORMULA.sub(formula, content.replace("<img ", '<img loading="lazy" '))


def _name_once(items: Any) -> None:
    """Leave mkdocstrings' heading out of a table of contents where the page has one for it."""
    for item in items:
        children: list[Any] = []
        for child in item.children:
            is_double = child.id.startswith(DOCUMENTED) and not item.id.startswith(DOCUMENTED)
            children += child.children if is_double else [child]
        item.children = children
        _name_once(children)


def _place(uri: PurePosixPath) -> PurePosixPath:
    """Return the path in the repository of a page of the site."""
    if uri == PurePosixPath(HOME_URI):
        return HOME
    return PurePosixPath(*uri.parts[1:]) if uri.parts[0] == SOURCES else "docs" / uri


def _highlighted(path: PurePosixPath) -> str:
    """Return a page with a file's code, which the search leaves out."""
    code = (ROOT / path).read_text()
    fence = "~~~~"
    return (
        f"{NO_SEARCH}hide: [toc]\n---\n\n# {path.name}\n\n`{path}`\n\n"
        f"{fence}{CODE[path.suffix]}\n{code.rstrip()}\n{fence}\n"
    )


def _schemes(match: re.Match[str]) -> str:
    found = [(each["media"], each["file"]) for each in SOURCE.finditer(match["sources"])]
    found.append(("", match["light"]))
    has_narrow = any("max-width" in media for media, _ in found)
    lines = []
    for media, file in found:
        scheme = "dark" if "dark" in media else "light"
        form = "{ .narrow }" if "max-width" in media else "{ .wide }" if has_narrow else ""
        lines.append(f"![{match['alt']}]({file}#only-{scheme}){form}")
    return "\n".join(lines)


def _resolved(page: PurePosixPath, target: str) -> PurePosixPath | None:
    """Return the file of the repository that a link leads to, None if it leads elsewhere.

    A folder is its README, or a list that does not exist as a file.
    """
    if re.match(r"[a-z]+:", target):
        return None
    path = PurePosixPath(os.path.normpath(page.parent / target))
    if path.parts[0] == "..":
        return None
    if (ROOT / path).is_dir():
        has_readme = (ROOT / path / "README.md").is_file()
        return path / ("README.md" if has_readme else FOLDER)
    return path if (ROOT / path).is_file() or path.name == FOLDER else None


def _listed(folder: PurePosixPath) -> str:
    names = sorted(each.name for each in (ROOT / folder).iterdir() if each.is_file())
    return f"{NO_SEARCH}---\n\n# {folder}\n\n" + "".join(f"- [{name}]({name})\n" for name in names)


def _outside(page: PurePosixPath, target: str) -> PurePosixPath | None:
    path = _resolved(page, target)
    return path if path and path.parts[0] != "docs" else None


def _uri(path: PurePosixPath) -> str:
    """Return where a file of the repository stands on the site."""
    if path == HOME:
        return HOME_URI
    if path.suffix in CODE:
        return f"{SOURCES}/{path}.md"
    # A browser shows text, and saves what it does not know.
    suffix = "" if path.suffix in (".md", ".json", ".txt") else ".txt"
    return f"{SOURCES}/{path}{suffix}"
