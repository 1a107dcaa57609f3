"""`SpecialIds`: the ids of `<unk> <pad> <bos> <eos>`, stored with tokenizers, their files and encoded corpora.

They are configurable because pretrained models have other ids; the default order is that of the word vocabulary.
"""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass

UNK, PAD, BOS, EOS = "<unk>", "<pad>", "<bos>", "<eos>"


@dataclass(frozen=True)
class SpecialIds:
    """Four distinct ids >= 0, except that `pad_id` may equal `bos_id`; raises ``ValueError`` otherwise."""

    unk_id: int = 0
    pad_id: int = 1
    bos_id: int = 2
    eos_id: int = 3

    def __post_init__(self) -> None:
        ids = list(asdict(self).values())
        distinct = [self.unk_id, self.eos_id, *{self.pad_id, self.bos_id}]
        if any(type(i) is not int or i < 0 for i in ids) or len(set(distinct)) != len(distinct):
            values = ", ".join(f"{name}={value!r}" for name, value in asdict(self).items())
            raise ValueError(f"special ids must be four distinct integers >= 0, got {values}")

    def distinct(self) -> "SpecialIds":
        """Return the ids for a vocabulary to be learned; raises ``ValueError`` if `pad_id` equals `bos_id`."""
        if self.pad_id == self.bos_id:
            raise ValueError(f"special ids must be four distinct integers >= 0, got {self}")
        return self

    def names(self) -> Mapping[int, str]:
        """Return the symbol of each special id."""
        return {self.unk_id: UNK, self.pad_id: PAD, self.bos_id: BOS, self.eos_id: EOS}

    def drop(self, ids: Iterable[int]) -> list[int]:
        """Return the ids without padding, bos and eos; unk stays, because it stands for a word."""
        silent = {self.pad_id, self.bos_id, self.eos_id}
        return [i for i in ids if i not in silent]
