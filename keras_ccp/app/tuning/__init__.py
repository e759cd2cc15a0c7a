"""Search for the hyper-parameters of an experiment on its validation classes."""

from keras_ccp.app.tuning.study import tune

__all__ = ["tune"]
