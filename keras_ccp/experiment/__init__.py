"""Experiments from a configuration: train, evaluate, resume."""

from keras_ccp.experiment.run import evaluate_run, load_run_config, train_run

__all__ = ["evaluate_run", "load_run_config", "train_run"]
