"""Scores of all queries with the whole gallery, a part at a time, as shortlists."""

import collections
import threading
from collections.abc import Iterator, Mapping

import numpy as np

from keras_ccp.retrieval.ahead import THREADS, ahead
from keras_ccp.retrieval.scores import Scores
from keras_ccp.retrieval.shortlist import LARGEST_GROUP, Shortlist

# Scores of a product when the user names no size: 64 MB of float32.
_MOST_SCORES = 2**24
_SMALLEST_CHUNK = 64
# Neighbours that a chunk of queries wants, some 100 bytes each while they are sorted.
_MOST_LISTED = 2**19
# With smaller blocks of one set what is done beside the products would prevail.
SMALLEST_BLOCK = 1024

Groups = Mapping[int, np.ndarray]


def in_rows(
    scores: Scores, groups: Groups, chunk_size: int | None
) -> Iterator[tuple[np.ndarray, Shortlist]]:
    """Takes chunks of queries, each with the whole gallery at once.

    Args:
        scores: of queries and gallery.
        groups: the queries by the length of their list, 0 for those that need none.
        chunk_size: int, queries in a chunk, or `None` for as many as need some 64 MB.

    Yields:
        Queries and their shortlists.
    """
    members = _filled(np.arange(scores.padding), scores.padding)
    gallery = scores.gallery_rows(members)
    chunks = []
    for wanted, rows in groups.items():
        if not wanted:
            continue
        # Each thread gets two chunks or more, if memory allows it.
        most = min(_MOST_SCORES // len(members), -(-len(rows) // (2 * THREADS)))
        most = min(max(_SMALLEST_CHUNK, most), -(-_MOST_LISTED // wanted))
        chunks += [(part, wanted) for part in _parts(rows, chunk_size or most)]

    def shortlist(chunk):
        rows, wanted = chunk
        result = Shortlist(wanted, scores.padding, scores.error[rows])
        result.add(scores.product(rows, gallery), members)
        return rows, result

    yield from ahead(shortlist, chunks)


def in_pairs(
    scores: Scores, groups: Groups, chunk_size: int | None
) -> Iterator[tuple[np.ndarray, Shortlist]]:
    """Takes pairs of blocks of one set, whose scores serve both of them.

    Half of the products are enough, but a list ends only when its block has met all
    others.

    Args:
        scores: of one set with itself.
        groups: all of its rows, otherwise as for `in_rows`.
        chunk_size: int, rows of a block. Defaults to what needs up to 64 MB.

    Yields:
        Queries and their shortlists.
    """
    most = min(int(np.sqrt(_MOST_SCORES)), scores.padding // 4)
    size = chunk_size or max(SMALLEST_BLOCK, most)
    rows, shortlists = [], []
    for wanted, group in groups.items():
        for part in _parts(group, size):
            rows.append(part)
            shortlists.append(
                Shortlist(wanted, scores.padding, scores.error[part])
                if wanted
                else None
            )
    blocks = [_filled(part, scores.padding) for part in rows]
    numbers = range(len(blocks))
    # A block with itself first: its classes are often there, and raise the bar.
    pairs = [(one, one) for one in numbers]
    pairs += [(one, other) for one in numbers for other in numbers[one + 1 :]]
    pairs = [pair for pair in pairs if any(shortlists[i] for i in pair)]
    to_come = collections.Counter(i for pair in pairs for i in set(pair))

    locks = [threading.Lock() for _ in blocks]

    def meet(pair):
        one, other = pair
        found = scores.product(blocks[one], scores.gallery_rows(blocks[other]))
        sides = [(one, other, found), (other, one, found.T)]
        for i, partner, part in sides[: len(set(pair))]:
            if shortlists[i]:
                with locks[i]:
                    shortlists[i].add(part, blocks[partner])

    for pair, _ in zip(pairs, ahead(meet, pairs), strict=True):
        to_come.subtract(set(pair))
        for i in set(pair):
            if shortlists[i] and not to_come[i]:
                yield rows[i], shortlists[i]
                shortlists[i] = None


def _parts(rows: np.ndarray, size: int) -> list[np.ndarray]:
    return [rows[start : start + size] for start in range(0, len(rows), size)]


def _filled(rows: np.ndarray, padding: int) -> np.ndarray:
    """Rows up to a multiple of the group size."""
    return np.pad(rows, (0, -len(rows) % LARGEST_GROUP), constant_values=padding)
