"""Combinations of options for `pytest.mark.parametrize`."""

from collections.abc import Iterable
from itertools import combinations, product
from typing import Any


def all_pairs(*options: Iterable[Any]) -> list[tuple[Any, ...]]:
    """Return few combinations in which any two values of two options meet: one or two options show most faults."""
    values = [list(option) for option in options]
    longest = sorted(range(len(values)), key=lambda i: -len(values[i]))
    covered: set[tuple[int, int, int, int]] = set()
    chosen_rows = []

    def pairs(row: dict[int, int]) -> set[tuple[int, int, int, int]]:
        return {(i, row[i], j, row[j]) for i, j in combinations(sorted(row), 2)}

    for i, j in combinations(longest, 2):
        others = [k for k in longest if k not in (i, j)]
        for a, b in product(range(len(values[i])), range(len(values[j]))):
            if pairs({i: a, j: b}) <= covered:
                continue
            rows = [
                {i: a, j: b, **dict(zip(others, chosen, strict=True))}
                for chosen in product(*(range(len(values[k])) for k in others))
            ]
            row = max(rows, key=lambda row: len(pairs(row) - covered))
            covered |= pairs(row)
            chosen_rows.append(tuple(values[k][row[k]] for k in range(len(values))))
    return chosen_rows


def name(value: Any) -> str:
    """Return a value as part of a test's name: a function by its name, because an address differs by process."""
    return getattr(value, "__name__", None) or str(value)
