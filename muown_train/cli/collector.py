"""Python's collector of cyclic garbage, kept from passing through all objects of torch's modules, some 300,000."""

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def resting() -> Iterator[None]:
    """Nothing is collected meanwhile; for imports, of whose objects next to none are garbage."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@contextmanager
def loading_torch() -> Iterator[None]:
    """The same; and what is there afterwards, if torch is new, no later collection passes through again.

    Of a run there must be nothing yet: what refers to itself would never be freed.
    """
    new = "torch" not in sys.modules
    with resting():
        yield
    if new:
        gc.freeze()
