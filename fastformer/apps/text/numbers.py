"""The embedded corpus: numbers in words, English to French and to German, from grammars in this module.

It needs no network, a translation is either right or wrong, and there is real grammar: French counts in scores, has
agreement (`quatre-vingts` but `quatre-vingt-un` and `quatre-vingt mille`) and drops the `un` of `mille`; German puts
the units before the tens and changes `eins` to `ein` inside a number. English is without `and` and with hyphens, French
has the spelling before the reform of 1990, German is one lower-case word.
"""

import random
from collections.abc import Callable

from fastformer.settings import check_value

from .corpora import ParallelCorpus

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
