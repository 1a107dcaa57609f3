"""`WordTokenizer`: one id for each word, `<unk>` for unknown words.

For tokenised corpora (WikiText-2: split at spaces) and for word-level translation (split at punctuation, in scripts
with spaces). Text that looks like a special symbol never becomes one, except `<unk>`, which WikiText contains.
"""

import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, Literal, Self, get_args

from fastformer.settings import check_value

from .files import TextError, check_texts, encode_text
from .tokenizer import UNK, SpecialIds, Tokenizer

Splitting = Literal["punctuation", "whitespace"]
SPLITTINGS: tuple[Splitting, ...] = get_args(Splitting)

# Combining marks, such as the vowel signs of Hindi, and the joiners inside Persian words, none of which `\w` contains.
# Marks beyond U+FFFF are left out, because with them `re` searches a list, which takes ten times as long.
_MARKS = "".join(c for c in map(chr, range(0x10000)) if unicodedata.category(c).startswith("M")) + "\u200c\u200d"
_LETTERS = rf"\w+(?:[{_MARKS}]\w*)*"
# A number with separators, an elided word with its apostrophe (l', don', man'), a word with inner hyphens, or one sign.
_WORD = re.compile(rf"\d+(?:[.,:]\d+)+|{_LETTERS}['’](?=\w)|{_LETTERS}(?:-{_LETTERS})*|[^\w\s][{_MARKS}]*")
_NO_SPACE_BEFORE = frozenset(".,!?;:)]}%…”»’।॥،؛؟")
_NO_SPACE_AFTER = frozenset('([{“„«¿¡$£"')
_CLOSING = {'"': '"', "„": "“"}  # opening quotation marks whose closing mark may also open a quotation


def split_words(text: str, splitting: Splitting = "punctuation") -> list[str]:
    """Split a sentence at white space, or into words, numbers and single punctuation marks, after NFC normalisation.

    >>> split_words("L'homme (45 ans) dit: «oui», don't you?")
    ["L'", 'homme', '(', '45', 'ans', ')', 'dit', ':', '«', 'oui', '»', ',', "don'", 't', 'you', '?']
    """
    return text.split() if splitting == "whitespace" else _WORD.findall(unicodedata.normalize("NFC", text))


def join_words(words: Sequence[str]) -> str:
    """Join words as in usual typing: no space before a comma, none after an opening bracket or an elision.

    >>> join_words(["L'", "homme", "(", "45", "ans", ")", "dort", "."])
    "L'homme (45 ans) dort."
    """
    text, glue, quote = "", True, ""
    for word in words:
        closing = _CLOSING.get(quote) == word
        text += word if glue or closing or word in _NO_SPACE_BEFORE else f" {word}"
        if closing or word in _CLOSING:
            quote = "" if closing else word
        glue = not closing and (word in _NO_SPACE_AFTER or (len(word) > 1 and word[-1] in "'’"))
    return text


class WordTokenizer(Tokenizer):
    """A list of words with their ids; build it with `from_lines`, on the training split only.

    `words` is the table in id order with the special symbols at their ids; ``TextError`` if it is not.
    """

    kind = "word"

    def __init__(
        self,
        words: Sequence[str],
        special_ids: SpecialIds | None = None,
        lowercase: bool = False,
        splitting: Splitting = "punctuation",
    ) -> None:
        super().__init__(words, special_ids or SpecialIds(), lowercase)
        self.splitting = check_value("splitting", splitting, str, choices=SPLITTINGS)
        encode_text("".join(self.words), "a word")  # so that the table can be saved
        names = self.special_ids.names()
        self._ids = {word: i for i, word in enumerate(self.words) if i not in names}
        at_their_ids = all(i < self.size and self.words[i] == name for i, name in names.items())
        if not at_their_ids or len(self._ids) + len(names) != self.size:
            raise TextError(f"the table must hold every word once, and the special symbols at their ids: {names}")
        self._ids[UNK] = self.unk_id

    @classmethod
    def from_lines(
        cls,
        lines: Iterable[str],
        *,
        minimum_frequency: int = 1,
        maximum_size: int | None = None,
        lowercase: bool = False,
        splitting: Splitting = "punctuation",
        special_ids: SpecialIds | None = None,
    ) -> Self:
        """Build the table of the words in `lines`, the most frequent first (ties in alphabetical order).

        `maximum_size` includes the four special symbols. Raises ``TextError`` if no word is left.
        """
        check_texts("lines", lines)
        special_ids = (special_ids or SpecialIds()).distinct()
        names = special_ids.names()
        texts = (line.lower() if lowercase else line for line in lines)
        counts = Counter(word for text in texts for word in split_words(text, splitting))
        ranked = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
        words = [word for word, count in ranked if count >= minimum_frequency and word not in names.values()]
        if maximum_size is not None:
            words = words[: maximum_size - len(names)]
        if not words:
            raise TextError(f"no word occurs {minimum_frequency} times in the training lines: nothing to build from")
        if (last := max(names)) >= len(words) + len(names):
            raise ValueError(f"special id {last} is beyond the vocabulary of {len(words) + len(names)} entries")
        for i in sorted(names):
            words.insert(i, names[i])
        return cls(words, special_ids, lowercase, splitting)

    def _encode(self, lines: list[str]) -> list[list[int]]:
        ids, unk = self._ids, self.unk_id
        return [[ids.get(word, unk) for word in split_words(line, self.splitting)] for line in lines]

    def decode(self, ids: Iterable[int]) -> str:
        """Return the detokenised text; padding, bos and eos are dropped, unk shows as `<unk>`."""
        words = self.pieces(self.special_ids.drop(ids))
        return join_words(words) if self.splitting == "punctuation" else " ".join(words)

    def _stored(self) -> tuple[dict[str, Any], dict[str, bytes]]:
        settings = {"lowercase": self.lowercase, "splitting": self.splitting, "words": self.words}
        return {"special_ids": vars(self.special_ids), **settings}, {}
