"""Bad input by the thousand: generators that a seed decides, a limit of time, and what a clear error is.

`pytest --fuzz N` sets how many inputs each test makes (300 if nothing is said). Input i is made from `Random(i)` alone,
so that a failing one is named by its number and can be repeated by itself.
"""

import json
import signal
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from random import Random
from types import FrameType
from typing import Any

SECONDS = 20.0  # for one input, on a busy machine; the slowest takes below one

SEPARATORS = ("\n", "\r\n", "\r", "\x0b", "\x0c", "\x1c", "\x1d", "\x1e", "\x85", "\u2028", "\u2029")
ODD = (
    *("\0", "\x01", "\x07", "\x1b[31m", "\x7f", "\ufeff", "\ufffe", "\u200b", "\u202e", "\u0301", "\ud800", "\udcff"),
    *(
        "\U0010ffff",
        "👩‍👩‍👧",
        "𝕏",
        "ß",
        "İ",
        "ﬁ",
        "▁",
        "<pad>",
        "<unk>",
        "</s>",
        "= a =",
        "[/bold]",
        "%s",
        "{}",
        "\\",
        '"',
    ),
)
WORDS = ("a", "the", "cat", "42", "3.14", "L'homme", "«oui»", "grün", "日本語", "well-known", "", " ", "\t", "\u3000")
ENCODINGS = ("utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-32", "latin-1", "cp1252", "utf-7", "cp500")


class Hang(BaseException):
    """An input took longer than `SECONDS`. No handler of errors in the code catches it."""


@contextmanager
def time_limit(seconds: float = SECONDS) -> Iterator[None]:
    """Raise `Hang` in the main thread when the time is up."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise Hang(f"more than {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def attempt(action: Callable[[], Any], allowed: tuple[type[Exception], ...], number: int) -> Any:
    """What an action on input `number` gives, or None after an error of a documented kind, whose message is one line.

    The kinds are compared exactly or by the package's own subclasses: a `UnicodeEncodeError` is a ValueError, but names
    neither file nor line.
    """
    try:
        with time_limit():
            return action()
    except allowed as error:
        caught = error
    except (Exception, Hang) as error:
        raise AssertionError(f"input {number}: {type(error).__name__}: {str(error)[:300]}") from error
    message = str(caught)
    assert len(message.splitlines()) == 1, f"input {number}: not one line: {message!r}"
    assert not isinstance(caught, UnicodeError), f"input {number}: {caught!r}"
    return None


def each(
    numbers: range,
    check: Callable[[int], str],
    least: dict[str, float],
    drawn: Callable[[int], Any] = lambda number: "",
) -> None:
    """Check every input, and that the inputs are not all nonsense: the shares of what came of them.

    `drawn` tells an input that failed in words.
    """
    counts: Counter[str] = Counter()
    for number in numbers:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                with time_limit():
                    counts[check(number)] += 1
            except (Exception, Hang) as error:
                said = f"{type(error).__name__}: {str(error)[:500]}"
                raise AssertionError(f"input {number}: {said}\n{drawn(number)}") from error
    for came, share in least.items():
        assert counts[came] > share * len(numbers), counts


def text(random: Random, most: int = 12, odd: float = 0.3) -> str:
    """Words, odd characters and line ends of every kind; now and then a gigantic line or word."""
    parts: list[str] = []
    for _ in range(random.randrange(most)):
        drawn = random.random()
        if drawn < odd:
            parts.append(random.choice(ODD))
        elif drawn < odd + 0.2:
            parts.append(random.choice(SEPARATORS))
        elif drawn < odd + 0.22:
            parts.append(random.choice(WORDS) * random.choice((100, 5_000)))
        else:
            parts.append(random.choice(WORDS) + random.choice(("", " ")))
    return "".join(parts)


def damaged(random: Random, data: bytes) -> bytes:
    """The data with a few bytes changed, cut out, put in, doubled or cut off."""
    found = bytearray(data)
    for _ in range(random.randint(1, 4)):
        at = random.randrange(len(found) + 1)
        match random.randrange(6):
            case 0 if at < len(found):
                found[at] ^= 1 << random.randrange(8)
            case 1:
                del found[at : at + random.choice((1, 4, 50))]
            case 2:
                found[at:at] = random.randbytes(random.choice((1, 4, 50)))
            case 3:
                found[at:at] = found[: random.choice((1, 20))]
            case 4:
                del found[at:]
            case _:
                found[at:at] = random.choice((b"\0", b"\n", b"\r\n", b"\xff\xfe", b"\xef\xbb\xbf", b"\xc3", b"\x80"))
    return bytes(found)


def encoded(random: Random, content: str) -> bytes:
    """The text in one of many encodings; half the time UTF-8, with lone surrogates as the bytes that they are."""
    encoding = "utf-8" if random.random() < 0.5 else random.choice(ENCODINGS)
    errors = "surrogatepass" if encoding.startswith("utf-") and encoding != "utf-7" else "replace"
    return content.encode(encoding, errors)


def scalar(random: Random) -> Any:
    """A value of a wrong type, out of range, or enormous."""
    return random.choice(
        (
            *(None, True, False, 0, -1, 1, 2**31, 2**63, 2**64, -(2**63) - 1, 10**40, 1.5, -0.0, 1e308, -1e-320),
            *(float("inf"), float("-inf"), float("nan"), "", " ", "nan", "1", "\0", "a\nb", "\ud800", "x" * 3000),
            *([], [1, 2], [[1]], ["a", None], {}, {"a": 1}, {"unk_id": 0}),
        )
    )


def changed_json(random: Random, content: Any) -> bytes:
    """A JSON text like `content` with a value changed, left out or added somewhere; sometimes damaged or too deep."""
    copy = json.loads(json.dumps(content))
    for _ in range(random.randint(1, 3)):
        _change(random, copy)
    if random.random() < 0.05:
        copy = scalar(random)
    written = json.dumps(copy, ensure_ascii=random.random() < 0.5)
    data = written.encode("utf-8", "surrogatepass")
    drawn = random.random()
    if drawn < 0.25:
        return damaged(random, data)
    if drawn < 0.3:
        return encoded(random, written)
    if drawn < 0.33:
        return b"[" * 100_000 + data
    if drawn < 0.36:
        return data.replace(b":", b":" + b"9" * 5000, 1)
    return data


def _change(random: Random, content: Any) -> None:
    """Change one place, at any depth."""
    while True:
        keys: list[Any] = list(content) if isinstance(content, dict) else list(range(len(content)))
        if not keys:
            return
        key = random.choice(keys)
        if isinstance(content[key], dict | list) and content[key] and random.random() < 0.6:
            content = content[key]
            continue
        match random.randrange(3):
            case 0:
                del content[key]
            case 1:
                content[key] = scalar(random)
            case _ if isinstance(content, dict):
                content[text(random, 3)] = scalar(random)
            case _:
                content.insert(key, content[random.choice(keys)])
        return


def toml_value(random: Random) -> str:
    """A TOML value, or what looks like one."""
    return random.choice(
        (
            *("true", "0", "-1", "1", "9223372036854775808", "1" + "0" * 40, "9" * 5000, "1.5", "-1.5", "1e400", "nan"),
            *("inf", "-inf", '""', '"\\u0000"', '"\\n"', '"\\ud800"', '"fr"', '"adamw"', "[]", "[1]", "[0.9, 0.98]"),
            *('["a"]', "[[1], [2]]", "{}", "{a = 1}", "1979-05-27", "07:32:00", "2020-13-45", "0x1F", "'''a\nb'''"),
            *("[" * 5000, "", "=", '"open', "truee", "01", "1__0", '"' + "x" * 3000 + '"', '"no/such/file"', '"."'),
        )
    )


def toml(random: Random, sections: dict[str, list[str]]) -> bytes:
    """A settings file with known and unknown sections and keys, and values that may or may not fit."""
    lines: list[str] = []
    for _ in range(random.randint(0, 3)):
        section = random.choice([*sections, "trian", "", "a.b", '"\\u0000"', "[data]", "model"])
        lines.append(f"[{section}]" if random.random() < 0.97 else f"{section} = 1")
        for _ in range(random.randint(0, 3)):
            known = sections.get(section, ["steps"])
            key = random.choice(known) if random.random() < 0.85 else random.choice(("stesp", "", '"a b"', "a.b", "é"))
            lines.append(f"{key} = {toml_value(random)}")
    content = random.choice(("\n", "\n", "\n", "\r\n", "\r", "\x85")).join(lines) + "\n"
    drawn = random.random()
    if drawn < 0.1:
        return damaged(random, content.encode("utf-8", "surrogatepass"))
    return encoded(random, content) if drawn < 0.2 else content.encode("utf-8", "surrogatepass")
