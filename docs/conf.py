"""How Sphinx builds the site of these pages: `make docs`. Every warning is an error there, a broken link above all."""

from importlib import metadata

project = "Pagebus"
author = "the Pagebus authors"
release = metadata.version("pagebus")

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.coverage", "sphinx.ext.napoleon", "sphinx_copybutton"]
html_theme = "furo"
html_title = f"Pagebus {release}"
exclude_patterns = ["_build", "measurements"]

# Headings are linked to as on GitHub, also those of other pages.
myst_heading_anchors = 4
myst_enable_extensions = ["attrs_block"]

autodoc_member_order = "bysource"
autodoc_typehints = "description"
# An undocumented public name of the modules in api.md is an error.
coverage_show_missing_items = True
