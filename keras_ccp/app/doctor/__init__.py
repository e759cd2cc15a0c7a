"""`keras-ccp doctor`: what is wrong with data and configuration, before training."""

from keras_ccp.app.doctor.diagnosis import diagnose
from keras_ccp.app.doctor.findings import Finding, findings_text, has_errors

__all__ = ["Finding", "diagnose", "findings_text", "has_errors"]
