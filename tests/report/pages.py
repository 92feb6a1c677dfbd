"""What a browser would see of a page that `tfdist report` or a sweep has written."""

from __future__ import annotations

import html
import html.parser
import re

from tfdist.storage import files


class Page(html.parser.HTMLParser):
    """A page, whose tags must nest, and which may refer to nothing outside but runs by links.

    Attributes:
      text: all but what the scripts hold, without escapes.
      sections: the titles of its sections.
      names: of figures and facts.
      rows: the cells of all tables.
    """

    _VOID = ("meta", "br")

    def __init__(self, path: str) -> None:
        super().__init__()
        markup = re.sub(r"<script>.*?</script>", "<script></script>", files.read(path).decode(), flags=re.DOTALL)
        assert "default-src 'none'" in markup and "url(" not in markup
        self.text = html.unescape(markup)
        self.open: list[str] = []
        self.links: list[str] = []
        self.rows: list[list[str]] = []
        self.sections: list[str] = []
        self.names: list[str] = []
        self.num_scripts = 0
        self.feed(markup)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        named = [value or "" for name, value in attributes if name in ("src", "srcset", "href", "action")]
        assert tag == "a" or not named
        assert tag not in ("link", "img", "iframe")
        self.links += named
        self.num_scripts += tag == "script"
        if tag not in self._VOID:
            self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, text: str) -> None:
        if self.open and self.open[-1] == "h2":
            self.sections.append(text)
        if self.open and self.open[-1] in ("dt", "figcaption"):
            self.names.append(text.strip())
        if {"td", "th"} & set(self.open):
            self.rows[-1][-1] += text
