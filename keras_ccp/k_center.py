"""Greedy K-Center, batched over classes: how the next proxies are chosen.

Source: "Deep Metric Learning with Chance Constraints" (arXiv 2209.09060), Algorithm 2.
"""

import numpy as np

from keras_ccp.checks import as_array, as_floats, check_finite, check_int

# Classes handled at once: keeps the working set in cache and the memory flat.
_CHUNK_BYTES = 2**22
_UNIT_ROUNDOFF = 2.0**-24


def k_center_greedy(
    candidates: np.ndarray,
    covered: np.ndarray,
    num_centers: int,
    mask: np.ndarray | None = None,
) -> np.ndarray:
    """Picks, for every class, the candidates that cover it best.

    Repeats `num_centers` times in each class: take the candidate `x` that maximises
    `min_{c in covered} ||x - c||^2`; it joins the covered points. Ties go to the lowest
    index. The picks are those of exact (float64, direct differences) distances. A row
    is not picked twice while the class has an unused one, even when rows are equal in
    value; once a class has used all of its candidates, its picks repeat in their order.

    Source: Algorithm 2 of arXiv 2209.09060.

    Args:
        candidates: `(num_classes, pool_size, dim)` floats, the points to choose from.
        covered: `(num_classes, num_covered, dim)` floats, the points that are covered
            already. `num_covered` may be 0: the first candidate is then the first pick.
        num_centers: int, picks per class, at least 1.
        mask: `(num_classes, pool_size)` booleans, `False` for padding that must not be
            picked and may hold anything, NaN too. Defaults to `None`: every candidate
            is real.

    Returns:
        `(num_classes, num_centers)` int64 array of indices into axis 1 of `candidates`.

    Raises:
        ValueError: for wrong shapes, real candidates or covered points that are not
            finite, `num_centers` below 1, or a class without a single real candidate.
        TypeError: for points that are no real numbers or a `num_centers` that is no
            integer.
    """
    candidates = _as_points("candidates", candidates)
    covered = _as_points("covered", covered)
    check_int("num_centers", num_centers, minimum=1)
    num_classes, pool_size, dim = candidates.shape
    if covered.shape[0] != num_classes or covered.shape[2] != dim:
        raise ValueError(
            f"`covered` must have shape ({num_classes}, num_covered, {dim}) to go with "
            f"`candidates`. Received: covered.shape={covered.shape}"
        )
    mask = _as_mask(mask, (num_classes, pool_size))
    if not mask.all():
        # Padding becomes a copy of a real candidate, which changes nothing.
        first = candidates[np.arange(num_classes), mask.argmax(axis=1)]
        candidates = np.where(mask[:, :, None], candidates, first[:, None])
    check_finite("candidates", candidates, "classes")
    check_finite("covered", covered, "classes")

    num_centers = int(num_centers)
    picks = np.empty((num_classes, num_centers), np.int64)
    row_bytes = 4 * (pool_size + covered.shape[1]) * (dim + pool_size)
    step = max(1, _CHUNK_BYTES // max(1, row_bytes))
    for start in range(0, num_classes, step):
        chunk = slice(start, start + step)
        picks[chunk] = _pick(
            candidates[chunk], covered[chunk], num_centers, mask[chunk]
        )
    return picks


def _as_points(name, points):
    points = as_floats(name, points)
    if points.ndim != 3:
        raise ValueError(
            f"`{name}` must have rank 3, (num_classes, num_points, dim). "
            f"Received: {name}.shape={points.shape}"
        )
    return points


def _as_mask(mask, shape):
    mask = np.ones(shape, bool) if mask is None else as_array("mask", mask)
    if mask.shape != shape or mask.dtype != bool:
        raise ValueError(
            f"`mask` must be booleans of shape {shape}. "
            f"Received: mask.shape={mask.shape}, mask.dtype={mask.dtype}"
        )
    empty = np.flatnonzero(~mask.any(axis=1))
    if empty.size:
        raise ValueError(
            "`candidates` must have at least one real candidate in every class. "
            f"Received: none in {empty.size} classes, the first is class {empty[0]}"
        )
    return mask


def _pick(candidates, covered, num_centers, mask):
    """Quick distances first; classes they cannot decide for certain are redone."""
    distances, error = _expanded_distances(candidates, covered)
    picks, gap = _greedy(distances, num_centers, mask)
    # Two distances, each off by up to `error`, are in the right order beyond this gap.
    # Written so that NaN (overflow) counts as undecided.
    undecided = np.flatnonzero(~(gap > 2.0 * error))
    if undecided.size:
        distances = _direct_distances(candidates[undecided], covered[undecided])
        picks[undecided], _ = _greedy(distances, num_centers, mask[undecided])
    return picks


def _expanded_distances(candidates, covered):
    """`||x||^2 + ||y||^2 - 2 x.y` in float32, with a bound on the error of each class.

    The points are taken relative to the first candidate of their class, so that it is
    the extent of the class that limits the precision, not its place.

    Returns:
        `(classes, pool, pool + num_covered)` squared distances of the candidates to
        candidates and covered points, and the `(classes,)` bound.
    """
    num_classes, pool_size, dim = candidates.shape
    points = np.empty((num_classes, pool_size + covered.shape[1], dim), np.float32)
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        origin = candidates[:, :1]
        np.subtract(candidates, origin, out=points[:, :pool_size], casting="same_kind")
        np.subtract(covered, origin, out=points[:, pool_size:], casting="same_kind")
        norms = np.einsum("cpd,cpd->cp", points, points)
        distances = np.matmul(points[:, :pool_size], points.transpose(0, 2, 1))
        distances *= -2.0
        distances += norms[:, None, :]
        distances += norms[:, :pool_size, None]
        # Sums of `dim` products are off by dim * u * |x||y| at most (u: the unit
        # roundoff); moving the origin and the additions cost a few u more. The whole
        # is below (dim + 8) * u * (|x| + |y|)^2, and (|x| + |y|)^2 <= 4 max |x|^2.
        # The last term stands for products that underflow.
        relative = 4.04 * (dim + 8) * _UNIT_ROUNDOFF / (1.0 - dim * _UNIT_ROUNDOFF)
        error = relative * norms.max(axis=1).astype(np.float64) + dim * 1e-37
    return distances, error


def _direct_distances(candidates, covered):
    """The same distances from float64 differences, a class at a time."""
    num_classes, pool_size, _ = candidates.shape
    points = np.concatenate([candidates, covered], axis=1).astype(np.float64)
    # A power of two is exact and keeps the squares of any class from overflow; those
    # of small differences, beside large ones, are farthest from underflow.
    _, exponent = np.frexp(np.abs(points).max(axis=(1, 2), keepdims=True, initial=0))
    points = np.ldexp(points, 480 - exponent)
    distances = np.empty((num_classes, pool_size, points.shape[1]))
    for row in range(pool_size):
        difference = points[:, row, None] - points
        np.einsum("cpd,cpd->cp", difference, difference, out=distances[:, row])
    return distances


def _greedy(distances, num_centers, mask):
    """Runs the picks on given distances.

    Returns:
        `(classes, num_centers)` picks, and the `(classes,)` smallest gap between a pick
        and its runner-up (the picks are sure if it exceeds the error of the distances).
    """
    num_classes, pool_size, _ = distances.shape
    rows = np.arange(num_classes)
    num_real = mask.sum(axis=1)
    picks = np.empty((num_classes, num_centers), np.int64)
    gap = np.full(num_classes, np.inf)
    nearest = distances[:, :, pool_size:].min(axis=2, initial=np.inf)
    nearest[~mask] = -np.inf
    for turn in range(num_centers):
        # Where all candidates are used, the picks start again from the first.
        exhausted = num_real <= turn
        pick = nearest.argmax(axis=1)
        if exhausted.any():
            repeat = picks[rows, turn % num_real]
            pick = np.where(exhausted, repeat, pick)
        best = nearest[rows, pick]
        nearest[rows, pick] = -np.inf
        # Without covered points all are infinitely far: the first is right by rule.
        decided = exhausted | np.isposinf(best)
        with np.errstate(invalid="ignore"):
            lead = np.where(decided, np.inf, best - nearest.max(axis=1))
        gap = np.minimum(gap, lead)
        picks[:, turn] = pick
        used = np.isneginf(nearest)
        np.minimum(nearest, distances[rows, :, pick], out=nearest)
        nearest[used] = -np.inf
    return picks, gap
