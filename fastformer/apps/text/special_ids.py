"""The ids of `<unk> <pad> <bos> <eos>`: one small value that travels with a tokenizer, its files and its corpora.

They are configurable because checkpoints from elsewhere have their own; the default order is the word vocabulary's.
"""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass

UNK, PAD, BOS, EOS = "<unk>", "<pad>", "<bos>", "<eos>"


@dataclass(frozen=True)
class SpecialIds:
    """Four ids >= 0, distinct but that padding may be what begins; raises ``ValueError`` otherwise."""

    unk_id: int = 0
    pad_id: int = 1
    bos_id: int = 2
    eos_id: int = 3

    def __post_init__(self) -> None:
        ids = list(asdict(self).values())
        alone = [self.unk_id, self.eos_id, *{self.pad_id, self.bos_id}]
        if any(type(i) is not int or i < 0 for i in ids) or len(set(alone)) != len(alone):
            shown = ", ".join(f"{name}={value!r}" for name, value in asdict(self).items())
            raise ValueError(f"special ids must be four distinct integers >= 0, got {shown}")

    def distinct(self) -> "SpecialIds":
        """Return itself, for vocabularies that are learned; raises ``ValueError`` where padding is what begins."""
        if self.pad_id == self.bos_id:
            raise ValueError(f"special ids must be four distinct integers >= 0, got {self}")
        return self

    def names(self) -> Mapping[int, str]:
        """Return the symbol of each special id."""
        return {self.unk_id: UNK, self.pad_id: PAD, self.bos_id: BOS, self.eos_id: EOS}

    def drop(self, ids: Iterable[int]) -> list[int]:
        """Return the ids without padding, bos and eos; unk stays, since a word stood there."""
        silent = {self.pad_id, self.bos_id, self.eos_id}
        return [i for i in ids if i not in silent]
