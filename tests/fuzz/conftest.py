"""The harness of all fuzz tests: inputs that hypothesis draws, a limit of time, and what a clear error is.

`pytest --fuzz N` sets how many inputs each test draws (default 100), `--seed` which ones. A generator takes
a `random.Random` whose numbers are hypothesis's, so that a failing input is made smaller before it is shown.
"""

import json
import resource
import signal
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import hypothesis
import pytest
from hypothesis import strategies as st

SECONDS = 60  # of the processor, for one input; the slowest takes below one
MEMORY = 1 << 30  # bytes of addresses for one input; the largest takes below 200 MiB

WORDS = ("a", "the", "cat", "42", "3.14", "L'homme", "«oui»", "grün", "日本語", "well-known", "", " ", "\t", "\u3000")
SEPARATORS = ("\n", "\r\n", "\r", "\x0b", "\x0c", "\x1c", "\x1d", "\x1e", "\x85", "\u2028", "\u2029")
ODD = tuple('\0\x01\x07\x7f\ufeff\ufffe\u200b\u202e\u0301\ud800\udcff\U0010ffff𝕏ßİﬁ▁\\"')
ODD += ("\x1b[31m", "👩‍👩‍👧", "<pad>", "<unk>", "</s>", "= a =", "[/bold]", "%s", "{}")
ENCODINGS = ("utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-32", "latin-1", "cp1252", "utf-7", "cp500")


class Hang(BaseException):
    """An input took more of the processor's time than `SECONDS`. No handler of errors in the code catches it."""


@contextmanager
def limits(memory: bool = False) -> Iterator[None]:
    """Raise `Hang` in the main thread when the time is up; with `memory`, on Linux, MemoryError beyond `MEMORY`."""

    def stop(*of_signal: Any) -> None:
        raise Hang(f"more than {SECONDS} s")

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    limited = memory and sys.platform == "linux"
    if limited:
        now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        old = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (now + MEMORY, old[1]))
    try:
        yield
    finally:
        if limited:
            resource.setrlimit(resource.RLIMIT_AS, old)
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


Explore = Callable[..., None]


@pytest.fixture
def explore(request: pytest.FixtureRequest) -> Explore:
    """Return what draws inputs for a check."""

    def run(check: Callable[[Random], str], least: dict[str, float], share: float = 1.0) -> None:
        """Draw inputs, and see that they are not all nonsense.

        Args:
            check: of one input; returns in a word what came of it.
            least: the least share of the inputs with that word.
            share: of the number of inputs, for a check that takes long.
        """
        outcomes: Counter[str] = Counter()

        @hypothesis.seed(request.config.getoption("--seed"))
        @hypothesis.settings(
            max_examples=max(int(request.config.getoption("--fuzz") * share), 1),
            database=None,
            deadline=None,
            suppress_health_check=list(hypothesis.HealthCheck),
        )
        @hypothesis.given(st.randoms(use_true_random=False))
        def inputs(random: Random) -> None:
            with warnings.catch_warnings(), limits():
                warnings.simplefilter("ignore")
                outcomes[check(random)] += 1

        inputs()
        for outcome, expected in least.items():
            assert outcomes[outcome] >= expected * outcomes.total(), outcomes

    return run


def attempt(action: Callable[[], Any], *allowed: type[Exception]) -> Any:
    """Return what an action gives, or None after an error of a documented kind, whose message is one line."""
    try:
        return action()
    except allowed as caught:
        error = caught
    assert len(str(error).splitlines()) == 1, f"not one line: {error!r}"
    assert not isinstance(error, UnicodeError), repr(error)  # names neither file nor line
    return None


def chance(random: Random, percent: int) -> bool:
    """Return True so often; hypothesis draws whole numbers evenly, and fractions not."""
    return random.randrange(100) >= 100 - percent


def text(random: Random, most: int = 12, odd: int = 30) -> str:
    """Return words, odd characters and line ends of every kind; now and then a gigantic line or word."""
    parts: list[str] = []
    for _ in range(random.randrange(most)):
        drawn = random.randrange(100)
        if drawn >= 100 - odd:
            parts.append(random.choice(ODD))
        elif drawn < 20:
            parts.append(random.choice(SEPARATORS))
        elif drawn < 22:
            parts.append(random.choice(WORDS) * random.choice((100, 5_000)))
        else:
            parts.append(random.choice(WORDS) + random.choice(("", " ")))
    return "".join(parts)


def damaged(random: Random, data: bytes) -> bytes:
    """Return the data with a few bytes changed, cut out, put in, doubled or cut off."""
    content = bytearray(data)
    for _ in range(random.randint(1, 4)):
        at = random.randrange(len(content) + 1)
        match random.randrange(5):
            case 0 if at < len(content):
                content[at] ^= 1 << random.randrange(8)
            case 1:
                del content[at : at + random.choice((1, 4, 50))]
            case 2:
                content[at:at] = content[: random.choice((1, 20))]
            case 3:
                del content[at:]
            case _:
                content[at:at] = random.choice(
                    (b"\0", b"\n", b"\r\n", b"\xff\xfe", b"\xef\xbb\xbf", b"\xc3", b"\x80" * 50)
                )
    return bytes(content)


def encoded(random: Random, content: str) -> bytes:
    """Return the text in one of many encodings; half the time UTF-8, with lone surrogates as the bytes they are."""
    encoding = "utf-8" if chance(random, 50) else random.choice(ENCODINGS)
    errors = "surrogatepass" if encoding.startswith("utf-") and encoding != "utf-7" else "replace"
    return content.encode(encoding, errors)


def scalar(random: Random) -> Any:
    """Return a value of a wrong type, out of range, or enormous."""
    numbers = (None, True, False, 0, -1, 1, 2**31, 2**63, 2**64, 10**40, 1.5, -0.0, 1e308, float("inf"), float("nan"))
    texts = ("", " ", "nan", "1", "\0", "a\nb", "\ud800", "x" * 3000)
    return random.choice((*numbers, *texts, [], [1, 2], [[1]], ["a", None], {}, {"a": 1}, {"unk_id": 0}))


def changed_json(random: Random, content: Any) -> bytes:
    """Return a JSON text like `content` with values changed, left out or added; sometimes damaged or too deep."""
    copy = json.loads(json.dumps(content))
    for _ in range(random.randint(1, 3)):
        _change(random, copy)
    data = json.dumps(copy, ensure_ascii=random.choice((False, True))).encode("utf-8", "surrogatepass")
    match random.randrange(20):
        case 0 | 1 | 2 | 3:
            return damaged(random, data)
        case 4:
            return encoded(random, data.decode("utf-8", "replace"))
        case 5:
            return b"[" * 100_000 + data
        case 6:
            return data.replace(b":", b":" + b"9" * 5000, 1)
        case 7:
            return json.dumps(scalar(random)).encode()
    return data


def _change(random: Random, content: Any) -> None:
    """Change one place, at any depth."""
    while content:
        key = random.choice(list(content) if isinstance(content, dict) else range(len(content)))
        if isinstance(content[key], dict | list) and content[key] and chance(random, 60):
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
                content.insert(key, scalar(random))
        return


TOML_VALUES = (
    *("true", "0", "-1", "1", "9223372036854775808", "1" + "0" * 40, "9" * 5000, "1.5", "-1.5", "1e400", "nan", "inf"),
    *('""', '"\\u0000"', '"\\n"', '"\\ud800"', '"fr"', '"adamw"', "[]", "[0.9, 0.98]", '["a"]', "{}", "{a = 1}"),
    *("1979-05-27", "2020-13-45", "0x1F", "'''a\nb'''", "[" * 5000, "", "=", '"open', '"' + "x" * 3000 + '"', '"."'),
)


def toml(random: Random, sections: dict[str, list[str]]) -> bytes:
    """Return a settings file with known and unknown sections and keys, and values that may or may not fit."""
    lines: list[str] = []
    for _ in range(random.randrange(4)):
        section = random.choice([*sections, *sections, "trian", "", "a.b", '"\\u0000"', "[data]"])
        lines.append(f"[{section}]")
        for _ in range(random.randrange(4)):
            known = sections.get(section, ["steps"])
            key = random.choice(known) if chance(random, 85) else random.choice(("stesp", "", '"a b"', "a.b", "é"))
            lines.append(f"{key} = {random.choice(TOML_VALUES)}")
    content = random.choice(("\n", "\n", "\n", "\r\n", "\r", "\x85")).join(lines) + "\n"
    data = content.encode("utf-8", "surrogatepass")
    return damaged(random, data) if chance(random, 10) else data
