"""Deep metric learning with chance constraints, in TensorFlow and Keras."""

try:
    import keras

    backend = keras.backend.backend()
except ImportError as error:  # of a backend that is not installed
    backend = error.name
if backend != "tensorflow":
    raise ImportError(
        f"keras_ccp needs the TensorFlow backend of Keras. Received: {backend}\n"
        "Set KERAS_BACKEND=tensorflow before Keras is imported"
    )

from keras_ccp import backbones, datasets, losses, pipeline, retrieval
from keras_ccp.backup import Backup
from keras_ccp.callback import CCPCallback, WarmUp
from keras_ccp.k_center import k_center_greedy
from keras_ccp.layers import LipschitzNormalization, build_embedder
from keras_ccp.model import CCPModel
from keras_ccp.monitor import figures as plots
from keras_ccp.monitor.projection_log import ProjectionLog
from keras_ccp.monitor.tensorboard import CCPTensorBoard
from keras_ccp.pipeline import balanced_batches

__version__ = "0.2.0"

__all__ = [
    "Backup",
    "CCPCallback",
    "CCPModel",
    "CCPTensorBoard",
    "LipschitzNormalization",
    "ProjectionLog",
    "WarmUp",
    "backbones",
    "balanced_batches",
    "build_embedder",
    "datasets",
    "k_center_greedy",
    "losses",
    "pipeline",
    "plots",
    "retrieval",
]
