"""Backbones: images -> feature map, with their preprocessing inside."""

from keras_ccp.backbones.resnet import resnet20_v2

__all__ = ["resnet20_v2"]
