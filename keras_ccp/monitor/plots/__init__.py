"""Pictures of what an embedder finds and of what CCP does to its proxies."""

from keras_ccp.monitor.plots.gallery import neighbor_gallery
from keras_ccp.monitor.plots.projection import projection_figure
from keras_ccp.monitor.plots.search import search_figure

__all__ = ["neighbor_gallery", "projection_figure", "search_figure"]
