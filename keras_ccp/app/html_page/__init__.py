"""HTML files that hold all they need: no network, light and dark, down to a phone."""

from keras_ccp.app.html_page.render import render
from keras_ccp.app.html_page.thumbnail import thumbnail

__all__ = ["render", "thumbnail"]
