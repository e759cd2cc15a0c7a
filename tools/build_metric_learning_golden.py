"""Records what pytorch-metric-learning computes, as golden values.

    pip install torch pytorch-metric-learning==2.9.0
    python tools/build_metric_learning_golden.py tests/golden/metric_learning.npz

In an environment of its own: keras_ccp needs neither. The file in the repository was
made with torch 2.13.0 on CPU and numpy 2.4.6; tests/test_golden_metric_learning.py
compares with it, and docs/losses.md lists how the conventions differ.

Inputs are float32, named `in/<name>`. Everything is computed in float64 and stored as
`out/<case>/loss`, `.../grad_embeddings` and, against references or proxies,
`.../grad_references`; gradients are with respect to the vectors before normalisation.
A case is `<loss>_<vectors>_<references>`: vectors that the distance normalises
(`unit`) or takes as they come (`raw`); the batch itself without pairs of a sample with
itself (`batch`), `references` of any class, or one or three `proxies` a class.
`one_class_...` is a batch of one class, `memory_<loss>_<step>` a cross-batch memory.
"""

import argparse
from pathlib import Path

import numpy as np
import pytorch_metric_learning as pml
import torch
from pytorch_metric_learning import distances, losses, reducers, regularizers

VERSION = "2.9.0"
SEED = 0
DIM = 6
# Five classes of unlike size; the fourth has one sample.
LABELS = [0, 0, 0, 1, 1, 1, 1, 2, 2, 3, 4, 4, 4, 4, 4]
# Unlike numbers of them, in no order; class 5 has no sample.
REFERENCE_LABELS = [4, 1, 3, 1, 0, 5, 3, 2, 1, 4, 0, 5, 2]
NUM_CLASSES = 5
PROXIES_PER_CLASS = 3
MEMORY_BATCHES = 3
# Two batches. Of an oldest batch that is kept in part, they keep the last rows and
# keras_ccp the first.
MEMORY_SIZE = 16


def make_inputs() -> dict[str, np.ndarray]:
    """Random vectors with norms around 1 and their labels."""
    rng = np.random.default_rng(SEED)

    def vectors(*shape):
        return (rng.normal(size=(*shape, DIM)) / DIM**0.5).astype(np.float32)

    batch = len(LABELS)
    return {
        "labels": np.array(LABELS, np.int32),
        "embeddings": vectors(batch),
        "reference_labels": np.array(REFERENCE_LABELS, np.int32),
        "references": vectors(len(REFERENCE_LABELS)),
        # One class after another, as many rows for each.
        "proxies_1": vectors(NUM_CLASSES),
        "proxies_3": vectors(NUM_CLASSES * PROXIES_PER_CLASS),
        "one_class_labels": np.full(batch, 2, np.int32),
        "memory_labels": np.stack(
            [rng.permutation(LABELS)[:8] for _ in range(MEMORY_BATCHES)]
        ).astype(np.int32),
        "memory_embeddings": vectors(MEMORY_BATCHES, 8),
    }


def distance(kind: str, vectors: str) -> distances.BaseDistance:
    """Makes a distance or similarity.

    Args:
        kind: `"l2"`, `"squared"` or `"dot"`.
        vectors: `"unit"` or `"raw"`.
    """
    normalize = vectors == "unit"
    if kind == "dot":
        return distances.DotProductSimilarity(normalize_embeddings=normalize)
    power = 2 if kind == "squared" else 1
    return distances.LpDistance(normalize_embeddings=normalize, power=power)


def pair_losses(vectors: str) -> dict[str, torch.nn.Module]:
    """Losses that take a batch or references, set to the conventions of keras_ccp."""
    dot = distance("dot", vectors)
    cases = {
        "contrastive": losses.ContrastiveLoss(
            0.1, 0.9, distance=distance("l2", vectors)
        ),
        # Its mean over rows is taken in `record`: this is the sum over the batch.
        "cosine_contrastive": losses.ContrastiveLoss(
            1 - 1e-5, 0.5, distance=dot, reducer=reducers.SumReducer()
        ),
        "multi_similarity": losses.MultiSimilarityLoss(2, 40, 0.5, distance=dot),
        "triplet": losses.TripletMarginLoss(0.1, distance=distance("l2", vectors)),
        "proxy_nca": losses.NCALoss(10, distance=dot),
        "nt_xent": losses.NTXentLoss(0.07, distance=dot),
        "sup_con": losses.SupConLoss(0.1, distance=dot),
        "margin": losses.MarginLoss(0.2, 0, 1.2, distance=distance("l2", vectors)),
        # Its references are compared with anchors of the same number: batch only.
        "lifted_structure": losses.LiftedStructureLoss(
            1, 0, distance=distance("l2", vectors)
        ),
    }
    if vectors == "unit":
        cases["circle"] = losses.CircleLoss(0.4, 80)
    return cases


def proxy_losses(vectors: str) -> dict[str, tuple]:
    """`(loss, number of proxies a class)` of the losses that own their proxies."""
    dot, shape = distance("dot", vectors), (NUM_CLASSES, DIM)
    cases = {
        "proxy_anchor": (losses.ProxyAnchorLoss(*shape, 0.1, 32, distance=dot), 1),
        "proxy_nca": (losses.ProxyNCALoss(*shape, softmax_scale=10, distance=dot), 1),
    }
    for per_class in (1, PROXIES_PER_CLASS):
        cases[f"soft_triple_{per_class}"] = (
            losses.SoftTripleLoss(*shape, per_class, 20, 0.1, 0.01, distance=dot),
            per_class,
        )
    if vectors == "unit":
        squared = distance("squared", vectors)
        cases["proxy_nca_squared"] = (
            losses.ProxyNCALoss(*shape, softmax_scale=10, distance=squared),
            1,
        )
        for per_class in (1, PROXIES_PER_CLASS):
            cases[f"sub_center_arc_face_{per_class}"] = (
                losses.SubCenterArcFaceLoss(
                    num_classes=NUM_CLASSES,
                    embedding_size=DIM,
                    margin=28.6,
                    scale=64,
                    sub_centers=per_class,
                ),
                per_class,
            )
        cases["arc_face"] = (losses.ArcFaceLoss(*shape, margin=28.6, scale=64), 1)
        # Half of the angles are beyond pi with this margin.
        cases["arc_face_wide"] = (losses.ArcFaceLoss(*shape, margin=90, scale=4), 1)
        cases["cos_face"] = (losses.CosFaceLoss(*shape, margin=0.35, scale=64), 1)
        spread = regularizers.SparseCentersRegularizer(NUM_CLASSES, PROXIES_PER_CLASS)
        cases["soft_triple_regularized"] = (
            losses.SoftTripleLoss(
                *shape,
                PROXIES_PER_CLASS,
                20,
                0.1,
                0.01,
                weight_regularizer=spread,
                weight_reg_weight=0.2,
            ),
            PROXIES_PER_CLASS,
        )
    return cases


def leaf(array: np.ndarray) -> torch.Tensor:
    """The float64 tensor of an array, whose gradient is recorded."""
    return torch.tensor(array, dtype=torch.float64, requires_grad=True)


def record(outputs: dict, case: str, value: torch.Tensor, **leaves: torch.Tensor):
    """Stores a loss and its gradients."""
    value.backward()
    outputs[f"out/{case}/loss"] = value.detach().numpy()
    for name, tensor in leaves.items():
        outputs[f"out/{case}/grad_{name}"] = tensor.grad.numpy()


def record_pairs(outputs: dict, inputs: dict, vectors: str):
    """In-batch and against references."""
    labels = torch.tensor(inputs["labels"]).long()
    reference_labels = torch.tensor(inputs["reference_labels"]).long()
    for name, loss in pair_losses(vectors).items():
        divisor = len(labels) if name == "cosine_contrastive" else 1
        embeddings = leaf(inputs["embeddings"])
        value = loss(embeddings, labels) / divisor
        record(outputs, f"{name}_{vectors}_batch", value, embeddings=embeddings)
        if name == "lifted_structure":
            continue
        embeddings, references = leaf(inputs["embeddings"]), leaf(inputs["references"])
        value = loss(
            embeddings, labels, ref_emb=references, ref_labels=reference_labels
        )
        record(
            outputs,
            f"{name}_{vectors}_references",
            value / divisor,
            embeddings=embeddings,
            references=references,
        )


def record_proxies(outputs: dict, inputs: dict, vectors: str, label_key: str):
    """Against proxies, which become the parameter of the loss."""
    labels = torch.tensor(inputs[label_key]).long()
    prefix = "one_class_" if label_key != "labels" else ""
    for name, (loss, per_class) in proxy_losses(vectors).items():
        proxies = torch.tensor(inputs[f"proxies_{per_class}"], dtype=torch.float64)
        is_transposed = not name.startswith("proxy")
        names = {"proxy": "proxies", "soft": "fc"}
        parameter = getattr(loss, names.get(name.split("_")[0], "W"))
        parameter.data = proxies.T.contiguous() if is_transposed else proxies
        embeddings = leaf(inputs["embeddings"])
        case = f"{prefix}{name}_{vectors}_proxies"
        record(outputs, case, loss(embeddings, labels), embeddings=embeddings)
        gradient = parameter.grad.T if is_transposed else parameter.grad
        outputs[f"out/{case}/grad_references"] = gradient.numpy()


def record_n_pairs(outputs: dict, inputs: dict, vectors: str):
    """The first two samples of each class that has them, one against the other."""
    labels = inputs["labels"]
    first_two = [np.flatnonzero(labels == label)[:2] for label in np.unique(labels)]
    anchors, positives = np.array([two for two in first_two if len(two) == 2]).T
    sides = leaf(inputs["embeddings"][anchors]), leaf(inputs["embeddings"][positives])
    loss = losses.NPairsLoss(distance=distance("dot", vectors))
    value = loss(torch.cat(sides), torch.tensor(labels[np.r_[anchors, positives]]))
    case = f"n_pairs_{vectors}_references"
    record(outputs, case, value, embeddings=sides[0], references=sides[1])
    outputs["in/n_pairs_anchors"], outputs["in/n_pairs_positives"] = anchors, positives


def record_memory(outputs: dict, inputs: dict):
    """Three batches through a memory in which the third takes the place of the first.

    The batch enters the memory before it is compared with it, detached, and is not
    compared with its own copies; there is no other in-batch term.
    """
    for name in ("contrastive", "cosine_contrastive", "multi_similarity"):
        loss = pair_losses("unit")[name]
        memory = losses.CrossBatchMemory(loss, DIM, memory_size=MEMORY_SIZE)
        batches = zip(inputs["memory_embeddings"], inputs["memory_labels"], strict=True)
        for step, (embeddings, labels) in enumerate(batches):
            divisor = len(labels) if name == "cosine_contrastive" else 1
            embeddings = leaf(embeddings)
            value = memory(embeddings, torch.tensor(labels).long()) / divisor
            record(outputs, f"memory_{name}_{step}", value, embeddings=embeddings)


def main(arguments: list[str] | None = None) -> None:
    """Writes the file.

    Args:
        arguments: Command line without the program; default `sys.argv[1:]`.
    """
    parser = argparse.ArgumentParser(
        description="Records golden values of pytorch-metric-learning."
    )
    parser.add_argument("output", type=Path, help="npz to write")
    options = parser.parse_args(arguments)
    if pml.__version__ != VERSION:
        parser.error(f"needs pytorch-metric-learning {VERSION}, not {pml.__version__}")
    inputs, outputs = make_inputs(), {}
    for vectors in ("unit", "raw"):
        record_pairs(outputs, inputs, vectors)
        record_proxies(outputs, inputs, vectors, "labels")
        record_n_pairs(outputs, inputs, vectors)
    record_proxies(outputs, inputs, "unit", "one_class_labels")
    record_memory(outputs, inputs)
    arrays = {f"in/{name}": array for name, array in inputs.items()}
    np.savez_compressed(options.output, **arrays, **outputs)


if __name__ == "__main__":
    main()
