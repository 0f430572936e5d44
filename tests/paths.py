"""Trees read by people: what parents mean."""

from collections.abc import Sequence


def paths_of(parents: Sequence[int]) -> list[list[int]]:
    """For every node its path from the root."""
    found: list[list[int]] = []
    for node, parent in enumerate(parents):
        found.append([*(found[parent] if parent >= 0 else []), node])
    return found
