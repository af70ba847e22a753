"""How the pages of this directory become a site: offline, from what lies in this repository and nothing else.

    python -m sphinx -W --keep-going -b html docs build/site          (or `make docs`)

Every page can also be read as a file. Only the docstrings of `reference.md` are added by autodoc.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "_ext"))

from samestep import __version__

project = "samestep"
author = "the samestep contributors"
version = release = __version__
language = "en"
html_title = f"samestep {__version__}"

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "outside",
    "chinese",
    "docstrings",
    "tables",
]
exclude_patterns = ["_ext", "_static"]
source_suffix = {".md": "markdown"}

# --- pages ---------------------------------------------------------------------------------------

myst_heading_anchors = 4  # the same anchors that a code host makes of headings
smartquotes = False  # --hosts is no dash
suppress_warnings = ["misc.highlighting_failure"]  # `…` in code stands for what is left out

# --- docstrings ----------------------------------------------------------------------------------

default_role = "literal"  # `batch_size` in a docstring is code
add_module_names = False
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
maximum_signature_line_length = 80
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False
napoleon_use_ivar = True  # attributes of a docstring beside properties of the class

# --- looks ---------------------------------------------------------------------------------------

html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sourcelink = False
html_show_sphinx = False
html_show_copyright = False
html_use_opensearch = ""
pygments_style = "friendly"
pygments_dark_style = "monokai"
highlight_language = "text"  # a block without a language is what a terminal shows
html_theme_options = {
    "light_css_variables": {"color-brand-primary": "#0b5394", "color-brand-content": "#0b5394"},
    "dark_css_variables": {"color-brand-primary": "#8ab8e6", "color-brand-content": "#8ab8e6"},
}
