"""Hook of mkdocs: links to files of the repository outside docs/, which the site does not have."""

from __future__ import annotations

import posixpath
import re
from typing import Any

_LINK = re.compile(r"\[([^\]]+)\]\(((?:\.\./)+[^)\s]*)\)")


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    """Return the page with links that leave docs/ replaced by links to `repo_url`, or by paths if it is not set."""
    def replace(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join("docs", posixpath.dirname(page.file.src_uri), link[2]))
        if target.startswith("docs/"):
            return link[0]
        if config.repo_url:
            return f"[{link[1]}]({config.repo_url.rstrip('/')}/blob/main/{target})"
        path = f"`{target.partition('#')[0]}`"
        return path if link[1].strip("`") in target else f"{link[1]} ({path} in the repository)"
    return _LINK.sub(replace, markdown)
