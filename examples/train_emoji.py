"""Trains an embedding with CCP on half of the emoji and searches the other half.

Each of 461 emoji was drawn by six vendors. The network learns from 230 of them what
makes two drawings the same emoji, and is scored on the 231 it never saw.
"""

import argparse
import json
import logging
import pathlib
import time

import keras
import numpy as np
import tensorflow as tf

from keras_ccp import (
    CCPCallback,
    CCPModel,
    balanced_batches,
    build_embedder,
    datasets,
    losses,
    plots,
    retrieval,
)
from keras_ccp.pipeline import small_image_augmentation

METRICS = ("precision_at_1", "precision_at_r", "map_at_r")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=pathlib.Path, default="runs/emoji")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="a taste, under 40 s")
    parser.add_argument(
        "--no-switching", action="store_true", help="one proxy problem to the end"
    )
    arguments = parser.parse_args()
