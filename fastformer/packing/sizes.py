"""Rounded sizes of packed batches, so that few sizes occur, as CUDA graphs and compiled graphs need."""


def power_of_two(number: int) -> int:
    """Return the smallest power of two that is at least `number`."""
    return 1 << max(number - 1, 0).bit_length()


def filler_lengths(tokens: int, longest: int) -> list[int]:
    """Return the lengths of filler sequences that hold `tokens` tokens in all, `longest` at most each."""
    return [longest] * (tokens // longest) + [tokens % longest] * (tokens % longest > 0)
