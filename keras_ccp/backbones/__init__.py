"""Backbones: images -> feature map or tokens, with their preprocessing inside."""

from keras_ccp.backbones.applications import application
from keras_ccp.backbones.bn_inception import bn_inception
from keras_ccp.backbones.efficientnet_lite import efficientnet_lite0
from keras_ccp.backbones.keras_hub import keras_hub_backbone
from keras_ccp.backbones.small_networks import resnet20_v2, small_cnn
from keras_ccp.backbones.torch_weights import read_torch_weights
from keras_ccp.layers import FrozenBatchNormalization, freeze_batch_norm

__all__ = [
    "FrozenBatchNormalization",
    "application",
    "bn_inception",
    "efficientnet_lite0",
    "freeze_batch_norm",
    "keras_hub_backbone",
    "read_torch_weights",
    "resnet20_v2",
    "small_cnn",
]
