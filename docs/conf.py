"""How Sphinx builds the site: ``make docs``."""

import fedshuffle

project = "fedshuffle"
author = "the fedshuffle developers"
version = release = fedshuffle.__version__

extensions = ["myst_parser"]
myst_heading_anchors = 4

html_theme = "pydata_sphinx_theme"
html_title = "fedshuffle"
