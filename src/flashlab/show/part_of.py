"""An MkDocs hook: a page outside the navigation shows the tab and the side bar of its parent page."""

from __future__ import annotations

import re

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import Files
from mkdocs.structure.pages import Page


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> None:
    """Give a page that begins with "Part of [parent](link)" the place of that parent."""
    link = re.match(r"\s*Part of \[.+\]\((.+)\)", markdown)
    whole = files.get_file_from_path(link[1]) if link else None
    if whole and whole.page:
        page.parent = whole.page.parent
