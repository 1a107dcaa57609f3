"""Corpora for which no file is needed: numbers in words, and the docstrings of the installed Python and torch.

Numbers are translated from English to French and to German, by grammars in this module. A translation is either right
or wrong, and there is real grammar: French counts in scores, has agreement (`quatre-vingts` but `quatre-vingt-un` and
`quatre-vingt mille`) and drops the `un` of `mille`; German puts the units before the tens and changes `eins` to `ein`
inside a number. English is without `and` and with hyphens, French has the spelling before the reform of 1990, German is
one lower-case word.

Docstrings are read with `ast`; no file is imported. Each becomes one line, one document, and counts once if files share
it. A file belongs to training, validation or test by a hash of its path, so that the corpora share no file and do not
change when other files come or go.
"""

import ast
import hashlib
import os
import random
import sysconfig
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from fastformer.settings import check_value

from .corpora import ParallelCorpus, TextCorpus
from .files import TextError

LIMIT = 1_000_000

_ENGLISH = str.split(
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen"
)
_ENGLISH_TENS = str.split("- - twenty thirty forty fifty sixty seventy eighty ninety")
_FRENCH = str.split(
    "zéro un deux trois quatre cinq six sept huit neuf dix onze douze treize quatorze quinze seize dix-sept dix-huit "
    "dix-neuf"
)
_FRENCH_TENS = str.split("- - vingt trente quarante cinquante soixante - quatre-vingt")
_GERMAN = str.split(
    "null ein zwei drei vier fünf sechs sieben acht neun zehn elf zwölf dreizehn vierzehn fünfzehn sechzehn siebzehn "
    "achtzehn neunzehn"
)
_GERMAN_TENS = str.split("- - zwanzig dreißig vierzig fünfzig sechzig siebzig achtzig neunzig")


def _check(number: int) -> None:
    if not 0 <= number < LIMIT:
        raise ValueError(f"number must be between 0 and {LIMIT - 1:,}, got {number:,}")


def english(number: int) -> str:
    """Return a number below one million in English words.

    >>> english(342_071)
    'three hundred forty-two thousand seventy-one'
    """
    _check(number)
    if number < 20:
        return _ENGLISH[number]
    if number < 100:
        tens, units = divmod(number, 10)
        return _ENGLISH_TENS[tens] + (f"-{_ENGLISH[units]}" if units else "")
    size, name = (1000, "thousand") if number >= 1000 else (100, "hundred")
    count, remainder = divmod(number, size)
    return f"{english(count)} {name}" + (f" {english(remainder)}" if remainder else "")


def french(number: int, final: bool = True) -> str:
    """Return a number below one million in French words, traditional spelling.

    final: no word follows, so that quatre-vingts and cents keep the plural s.

    >>> french(280_080)
    'deux cent quatre-vingt mille quatre-vingts'
    """
    _check(number)
    if number < 20:
        return _FRENCH[number]
    if number < 100:
        tens, units = divmod(number, 10)
        if tens in (7, 9):  # sixty-ten, four-twenty-ten: the units run on from ten to nineteen
            tens, units = tens - 1, units + 10
        if units == 0:
            return "quatre-vingts" if tens == 8 and final else _FRENCH_TENS[tens]
        return _FRENCH_TENS[tens] + (" et " if units in (1, 11) and tens < 8 else "-") + _FRENCH[units]
    size = 1000 if number >= 1000 else 100
    count, remainder = divmod(number, size)
    words = [french(count, final=False)] if count > 1 else []
    words.append("mille" if size == 1000 else "cents" if count > 1 and final and not remainder else "cent")
    return " ".join(words + ([french(remainder, final)] if remainder else []))


def german(number: int) -> str:
    """Return a number below one million as one German word.

    >>> german(342_071)
    'dreihundertzweiundvierzigtausendeinundsiebzig'
    """
    _check(number)
    return _german(number) + ("s" if number % 100 == 1 else "")


def _german(number: int) -> str:
    """Return a number as before `tausend`, ending in `ein`; at the end of a number it is `eins`."""
    if number < 20:
        return _GERMAN[number]
    if number < 100:
        tens, units = divmod(number, 10)
        return (f"{_GERMAN[units]}und" if units else "") + _GERMAN_TENS[tens]
    size, name = (1000, "tausend") if number >= 1000 else (100, "hundert")
    count, remainder = divmod(number, size)
    return f"{_german(count)}{name}" + (_german(remainder) if remainder else "")


LANGUAGES: dict[str, Callable[[int], str]] = {"fr": french, "de": german}


def number_corpus(
    language: str, train: int = 10_000, valid: int = 500, test: int = 500, seed: int = 1
) -> tuple[ParallelCorpus, ...]:
    """Return training, validation and test pairs of English numbers and translations into `language` ("fr" or "de").

    No number is in two corpora. Training has every number below 1,000 (below ``train // 2`` if that is less). All other
    numbers have four to six digits, each count of digits equally often as long as there are such numbers. Half of them
    have many zeros, because numbers such as 500,002 would hardly occur in a uniform draw.

    Raises ``ValueError`` for an unknown language, and for more pairs than there are numbers.
    """
    check_value("language", language, str, choices=LANGUAGES)
    small = min(1000, train // 2)
    drawn = _draw(train - small + valid + test, random.Random(seed))
    numbers = {"train": [*range(small), *drawn[valid + test :]], "valid": drawn[:valid], "test": drawn[valid:][:test]}
    translate = LANGUAGES[language]
    return tuple(
        ParallelCorpus([english(n) for n in chosen], [translate(n) for n in chosen], name)
        for name, chosen in numbers.items()
    )


def _draw(count: int, generator: random.Random) -> list[int]:
    """Return distinct numbers of four to six digits in random order."""
    if count > LIMIT - 1000:
        raise ValueError(f"there are {LIMIT - 1000:,} numbers above 999, and {count:,} are asked for")
    drawn: list[int] = []
    for digits in (4, 5, 6):
        numbers = range(10 ** (digits - 1), 10**digits)
        share = (count - len(drawn)) // (7 - digits) if digits < 6 else count - len(drawn)
        share = min(share, len(numbers))
        # A dictionary keeps the order, and each number once. Digits but the first become 0 with probability 1/2.
        half = [str(n) for n in generator.sample(numbers, share // 2)]
        zeroed = [n[0] + "".join(digit if generator.random() < 0.5 else "0" for digit in n[1:]) for n in half]
        distinct = dict.fromkeys(map(int, zeroed)) | dict.fromkeys(generator.sample(numbers, share))
        drawn += list(distinct)[:share]
    generator.shuffle(drawn)
    return drawn


_HELD_OUT = 5  # percent of the files for validation, and as many for test
_SHORTEST = 8  # words; shorter docstrings are mostly "Return self." and the like
_SKIPPED_FOLDERS = {"site-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__"}


def docstring_corpora(size: int = 2_000_000, roots: dict[str, Path] | None = None) -> tuple[TextCorpus, ...]:
    """Return training, validation and test docstrings.

    Args:
        size: characters to collect for all three corpora together; files are read until there are so many.
        roots: name -> folder of Python files; by default the standard library and torch.

    Raises ``TextError`` if no docstring was found for one of the corpora.
    """
    if roots is None:
        roots = {"python": Path(sysconfig.get_paths()["stdlib"]), "torch": Path(torch.__file__).parent}
    train, valid, test = corpora = tuple(TextCorpus([], name) for name in ("train", "valid", "test"))
    seen: set[str] = set()
    remaining = size  # characters
    # In the order of their hashes, the first files are a sample of all of them.
    for digest, path in sorted(_files(roots)):
        # The end of the hash, because files are sorted by its beginning.
        bucket = int(digest[-8:], 16) % 100
        corpus = valid if bucket < _HELD_OUT else test if bucket < 2 * _HELD_OUT else train
        for text in _docstrings(path):
            if text not in seen and remaining > 0:
                seen.add(text)
                corpus.documents.append([text])
                remaining -= len(text)
        if remaining <= 0:
            break
    for corpus in corpora:
        if not corpus.documents:
            folders = ", ".join(map(str, roots.values())) or "no folder"
            raise TextError(f"no docstring for {corpus.name} within {size:,} characters of {folders}; raise the size")
    return corpora


def _files(roots: dict[str, Path]) -> Iterator[tuple[str, Path]]:
    """Yield a hash of the name, and the path, of every Python file outside of skipped folders."""
    for name, root in roots.items():
        for folder, folders, files in os.walk(root):
            folders[:] = [each for each in folders if each not in _SKIPPED_FOLDERS]
            for path in (Path(folder, file) for file in files if file.endswith(".py")):
                inside = path.relative_to(root).as_posix()
                yield hashlib.sha256(f"{name}/{inside}".encode()).hexdigest(), path


def _docstrings(path: Path) -> Iterator[str]:
    """Yield the docstrings of a file in order, each as one line; none if the file cannot be parsed."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes in strings
            tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError):
        return
    for node in _statements(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = (ast.get_docstring(node, clean=False) or "").encode("utf-8", "ignore").decode()  # no surrogates
            words = text.replace("\0", " ").split()
            if len(words) >= _SHORTEST:
                yield " ".join(words)


def _statements(node: ast.AST) -> Iterator[ast.AST]:
    """Yield a node and all statements in it; expressions are most of a tree and contain no docstrings."""
    yield node
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt | ast.excepthandler | ast.match_case):
            yield from _statements(child)
