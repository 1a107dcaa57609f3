"""A stream of tokens in columns, as the classical recurrent language models read it, and in windows.

Training: the N tokens become `columns` columns of L = N // columns; the N % columns last ones are left out. A batch is
a window of `context` rows (bptt) of all columns, and predicts for each of its tokens the one below it; so L - 1 tokens
of each column are predicted an epoch, and the last window is short. The order of the windows is that of the text.

Evaluation has no columns: every token is predicted once, from the tokens before it in its window. Windows may overlap,
as the pieces of documents do (`fastformer.apps.text.documents`).

Letters: N tokens, L rows of a column.
"""

from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray

from fastformer.settings import check_value

from .documents import LanguageBatch, Pieces, cut_windows
from .encoding import EncodedDocuments


def token_stream(documents: EncodedDocuments) -> NDArray[np.int32]:
    """The documents one after another, each with its end of line: int32 [N]."""
    return documents.documents.with_special(last=documents.special_ids.eos_id)[0].astype(np.int32)


def cut_stream(documents: EncodedDocuments, context: int, overlap: int = 0) -> Pieces:
    """Windows of at most `context` predictions of the stream, in order; each reads `overlap` tokens before it again.

    The first token is predicted from an end of line, since a stream has no other begin. Raises ``ValueError`` when
    `context` is below 1, and when `overlap` is below 0 or not below `context`.
    """
    stream = np.concatenate([np.array([documents.special_ids.eos_id], np.int32), token_stream(documents)])
    return cut_windows(stream, np.zeros(1, np.int64), np.array([len(stream) - 1]), context, overlap)


class ColumnBatches:
    """The batches of each epoch, the same in every one: `columns` pieces of `context` tokens, the last ones shorter.

    Raises ``ValueError`` when `columns` or `context` is below 1, and when a column would have fewer than two tokens.
    """

    def __init__(self, documents: EncodedDocuments, *, columns: int, context: int) -> None:
        for name, value in (("columns", columns), ("context", context)):
            check_value(name, value, int, at_least=1)
        stream = token_stream(documents)
        rows = len(stream) // columns
        if rows < 2:
            raise ValueError(f"columns={columns} is too many for {len(stream):,} tokens: each column needs two")
        self.table = stream[: rows * columns].reshape(columns, rows)  # [columns, L]
        self.context = context

    @property
    def longest(self) -> int:
        """Tokens of the longest piece."""
        return min(self.context, self.table.shape[1] - 1)

    def batches_in(self, epoch: int) -> int:
        """Number of batches of an epoch."""
        return -(-(self.table.shape[1] - 1) // self.context)

    def epoch(self, epoch: int, start: int = 0) -> Iterator[LanguageBatch]:
        """The batches of an epoch, from number `start` on."""
        columns, rows = self.table.shape
        for first in range(start * self.context, rows - 1, self.context):
            last = min(first + self.context, rows - 1)
            ids_in, ids_out = (
                torch.from_numpy(self.table[:, first + shift : last + shift].astype(np.int64).ravel())
                for shift in (0, 1)
            )
            yield LanguageBatch(ids_in, ids_out, torch.full((columns,), last - first, device="cpu"))
