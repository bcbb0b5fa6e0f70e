"""How Sphinx builds the site: ``make docs``."""

import sys
from importlib.metadata import metadata
from pathlib import Path

import fedshuffle
from fedshuffle._links import REPOSITORY, SITE

sys.path.insert(0, str(Path(__file__).parent / "_ext"))

project = "fedshuffle"
DESCRIPTION = metadata("fedshuffle")["Summary"]
author = "the fedshuffle developers"
copyright = author
version = release = fedshuffle.__version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "generated_pages",
    "mathml",
    "public_names",
    "search_words",
]
smartquotes = False  # it makes a dash of the two hyphens before an option
exclude_patterns = ["_ext"]
nitpicky = True
nitpick_ignore_regex = [  # other libraries
    (r"py:.*", r"(collections\.abc|dataclasses|torch)\.\w+"),
]

# Markdown and notebooks -------------------------------------------------------------------------
myst_enable_extensions = ["attrs_inline", "colon_fence", "dollarmath"]
myst_heading_anchors = 4
myst_html_meta = {
    "description": DESCRIPTION,
    "property=og:title": "fedshuffle",
    "property=og:description": DESCRIPTION,
    "property=og:type": "website",
    "property=og:url": SITE,
}
nb_execution_mode = "off"  # they show the outputs that are stored in them
nb_merge_streams = True

# The reference ----------------------------------------------------------------------------------
autodoc_inherit_docstrings = False
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_typehints_format = "short"
autodoc_default_options = {"members": True}
napoleon_numpy_docstring = False
napoleon_use_rtype = False
maximum_signature_line_length = 72
python_use_unqualified_type_names = True
toc_object_entries_show_parents = "hide"

# Pages ------------------------------------------------------------------------------------------
copybutton_exclude = ".gp, .go"  # prompts and output are not copied

html_theme = "pydata_sphinx_theme"
html_title = "fedshuffle"
html_baseurl = SITE
html_static_path = ["_static"]
html_favicon = "_static/favicon.svg"  # without one, browsers ask for a file that is not there
html_css_files = ["fedshuffle.css"]
html_show_sourcelink = False
html_copy_source = False
html_context = {
    "github_user": REPOSITORY.split("/")[-2],
    "github_repo": REPOSITORY.split("/")[-1],
    "github_version": "main",
    "doc_path": "docs",
    "default_mode": "auto",
}
html_sidebars: dict[str, list[str]] = {
    page: [] for page in ("index", "install", "faq", "citing", "changelog", "contributing")
}
html_theme_options = {
    "logo": {"text": f"fedshuffle {version}"},
    "github_url": REPOSITORY,
    "use_edit_page_button": True,
    "navbar_align": "left",
    "navbar_persistent": ["search-button"],
    "header_links_before_dropdown": 8,
    "navigation_with_keys": False,
    "show_toc_level": 2,
    "footer_start": ["copyright"],
    "footer_end": [],
    "pygments_light_style": "a11y-high-contrast-light",
    "pygments_dark_style": "a11y-high-contrast-dark",
}
