"""Check the links of the built site: every file and every anchor is there.

    python scripts/pages/links.py [site]

Links to other hosts are not followed. The exit status is 1 if a link leads nowhere.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

ROOT = Path(__file__).resolve().parents[2]


class Page(HTMLParser):
    """What a page links to, and the anchors that it has."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note a tag's link and anchor."""
        for name, value in attrs:
            if value and name in ("href", "src"):
                self.links.append(value)
            elif value and name in ("id", "name"):
                self.anchors.add(value)


def broken(site: Path) -> Iterator[str]:
    """Yield each link that leads nowhere.

    Args:
        site: The folder of the built site.
    """
    pages = {path: Page(path.read_text()) for path in sorted(site.rglob("*.html"))}
    for path, page in pages.items():
        # The page for what is missing is served at any address.
        if path.name == "404.html":
            continue
        for link in sorted(set(page.links)):
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            target = target / "index.html" if target.is_dir() else target
            where = f"{path.relative_to(site)}: {link}"
            if not target.is_file():
                yield f"{where}: no such file"
            elif parts.fragment and target in pages:
                anchor = unquote(parts.fragment)
                if anchor not in pages[target].anchors and not anchor.startswith("only-"):
                    yield f"{where}: no such anchor"


def main(arguments: list[str]) -> int:
    """Print the links that lead nowhere and return an exit status."""
    site = Path(arguments[0]) if arguments else ROOT / "site"
    if not (site / "index.html").is_file():
        print(f"{site} is not built; `poe docs` builds it", file=sys.stderr)
        return 1
    found = list(broken(site.resolve()))
    print("\n".join(found) or "every link leads somewhere")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
