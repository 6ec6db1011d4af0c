"""Hooks of mkdocs for README.md and for links that lead out of docs/; see mkdocs.yml."""

import re
from pathlib import Path

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[1]


def on_files(files, config):
    """README.md is the first page."""
    text = re.sub(r"\]\((?!https?:|#)", "](../", (ROOT / "README.md").read_text())
    files.append(File.generated(config, "index.md", content=text.replace("](../docs/", "](")))
    return files


def on_page_markdown(markdown, config, **_):
    """Show examples in the pages, and let links out of docs/ lead into the repository.

    Raises:
        ValueError: a file that a page names does not exist.
    """

    def into_the_repository(match: re.Match) -> str:
        path = match[1].partition("#")[0]
        if not (ROOT / path).exists():
            raise ValueError(f"a link leads to ../{path}, which does not exist")
        return f"]({config.repo_url.rstrip('/')}/blob/main/{match[1]})"

    def code_of(match: re.Match) -> str:
        return f'```python title="{match[1]}"\n{(ROOT / match[1]).read_text()}```'

    markdown = re.sub(r"\]\(\.\./([^)]+)\)", into_the_repository, markdown)
    return re.sub(r"<!-- include (\S+) -->", code_of, markdown)
