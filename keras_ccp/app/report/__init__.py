"""`keras-ccp report`: a run as one HTML file."""

from keras_ccp.app.report.report import write_report

__all__ = ["write_report"]
