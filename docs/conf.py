"""How Sphinx makes the documentation: `make docs` writes it to build/docs, warnings are errors."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import api_pages  # noqa: E402  # pyright: ignore[reportMissingImports]

project = "rlinf_embodied"
extensions = ["myst_parser"]
source_suffix = {".rst": "restructuredtext", ".md": "markdown"}
exclude_patterns: list[str] = []
suppress_warnings = [
    "ref.python",  # annotations are names without modules, of which several may have one
    "misc.highlighting_failure",  # outputs and excerpts are shown as they are
]
myst_heading_anchors = 4  # links to headings, as code hosts make them
myst_enable_extensions = ["colon_fence"]
html_theme = "furo"
html_title = "rlinf_embodied"
html_copy_source = False
html_show_sphinx = False
python_display_short_literal_types = True
add_module_names = False

api_pages.write_pages(HERE.parent, HERE / "api")
