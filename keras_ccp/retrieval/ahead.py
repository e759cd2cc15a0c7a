"""A few calls ahead of their consumer, in threads."""

import collections
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

# Calls under way at once.
THREADS = 3


def ahead(function: Callable[[Any], Any], items: Iterable) -> Iterator:
    """Yields `function(item)` in order, the next few under way in threads.

    A product keeps all cores busy, what follows it only one: so they overlap.

    Args:
        function: what is called, from several threads.
        items: its arguments.
    """
    with ThreadPoolExecutor(THREADS) as pool:
        futures = collections.deque()
        for item in items:
            futures.append(pool.submit(function, item))
            if len(futures) > THREADS:
                yield futures.popleft().result()
        while futures:
            yield futures.popleft().result()
