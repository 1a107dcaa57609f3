"""Corpora by name: data sets are recognised, counted and written whole; number words and docstrings need no files."""

import doctest
import gzip
from pathlib import Path

import pytest

from fastformer.apps.text import (
    TextError,
    WordTokenizer,
    datasets,
    docstring_corpora,
    embedded,
    english,
    number_corpus,
    open_dataset,
    open_text_dataset,
    prepare,
    write_lines,
)
from fastformer.apps.text.embedded import french, german

DATA = Path(__file__).parents[4] / "shared" / "data"
needs_data = pytest.mark.skipif(not DATA.is_dir(), reason="the corpora are not there")


@pytest.fixture
def multi30k(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the files of a small Multi30k."""
    counts = {"train": 30, "valid": 4, "test": 3}
    monkeypatch.setattr(datasets, "_MULTI30K_LINES", counts)
    folder = tmp_path / "from"
    folder.mkdir()
    for name, split in (("train", "train"), ("val", "valid"), ("test_2016_flickr", "test")):
        for language in ("en", "de"):
            lines = "".join(f"{split} {language} {i} \r\n" for i in range(counts[split]))
            (folder / f"{name}.{language}.gz").write_bytes(gzip.compress(lines.encode()))
    return folder


def test_multi30k_is_prepared_and_opened(multi30k, tmp_path):
    report = prepare("multi30k", multi30k, tmp_path / "to")
    assert "train.de: 30 lines\n" in report
    assert "non-commercial" in report
    names = sorted(f"{split}.{language}" for split in ("train", "valid", "test") for language in ("de", "en"))
    assert sorted(path.name for path in (tmp_path / "to").iterdir()) == names
    train, valid, test = open_dataset(tmp_path / "to", "en", "de", limit=20)
    assert [(corpus.name, len(corpus)) for corpus in (train, valid, test)] == [("train", 20), ("valid", 4), ("test", 3)]
    assert (test.source[2], test.target[2]) == ("test en 2", "test de 2")
    assert open_dataset(tmp_path / "to", "de", "en")[2].source == test.target
    with pytest.raises(ValueError, match="must be two different ones"):
        open_dataset(tmp_path / "to", "en", "en")
    for open_it in (lambda: open_dataset(tmp_path / "to", "en", "fr"), lambda: open_text_dataset(tmp_path / "to")):
        with pytest.raises(FileNotFoundError, match=r"train\.(fr|txt): no such file; make the folder with: fastformer"):
            open_it()


def test_europarl_is_split_without_overlap(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(datasets, "_EUROPARL_HELD_OUT", 5)
    (tmp_path / "from").mkdir()
    for language in ("fr", "en"):
        write_lines(tmp_path / "from" / f"europarl-v7.fr-en.{language}", [f"{language} {i}" for i in range(60)])
    report = prepare("europarl", tmp_path / "from", tmp_path / "to")
    assert "note: 60 lines, where the published corpus has 2,007,723" in report
    train, valid, test = open_dataset(tmp_path / "to", "en", "fr")
    assert [len(corpus) for corpus in (train, valid, test)] == [50, 5, 5]
    assert len({*train.source, *valid.source, *test.source}) == 60
    assert all(e.split()[1] == f.split()[1] for e, f in zip(train.source, train.target, strict=True))
    prepare("europarl", tmp_path / "from", tmp_path / "again")
    assert (tmp_path / "to" / "test.en").read_bytes() == (tmp_path / "again" / "test.en").read_bytes()
    assert capfd.readouterr() == ("", "")


@needs_data
def test_the_real_multi30k(tmp_path):
    assert "note:" not in prepare("multi30k", DATA / "multi30k", tmp_path)
    corpora = open_dataset(tmp_path, "en", "fr")
    assert [str(corpus) for corpus in corpora] == ["train: 29,000 pairs", "valid: 1,014 pairs", "test: 1,000 pairs"]


@pytest.mark.slow
@needs_data
def test_wikitext2_has_its_counts_and_articles(tmp_path):
    prepare("wikitext2", DATA / "wikitext-2", tmp_path / "w")
    parts = open_text_dataset(tmp_path / "w")
    assert [part.words for part in parts] == [2_088_628, 217_646, 245_569]
    assert [len(part) for part in parts] == [600, 60, 60]
    # The published 33,278 hold <unk> and <eos>; <pad> and <bos> are ours.
    assert WordTokenizer.from_lines(parts[0].lines, splitting="whitespace").size == 33_278 + 2


def test_wrong_counts_and_missing_files_are_named_and_nothing_looks_prepared(multi30k, tmp_path):
    def refused(name, message, kind=FileNotFoundError, folder=multi30k):
        with pytest.raises(kind, match=message):
            prepare(name, folder, tmp_path / "to")

    refused("wmt14", "dataset must be one of multi30k, europarl, wikitext2, not 'wmt14'", ValueError)
    refused("multi30k", "nowhere: no such folder; it must hold the files of multi30k", folder=tmp_path / "nowhere")
    refused("wikitext2", r"none of train\.txt, wiki\.train\.tokens is there, plain or compressed")
    refused("europarl", r"europarl-v7\.XX-en\.XX .* are needed, found \[\]")
    write_lines(multi30k / "train.txt", ["a b c"])
    refused("wikitext2", r"train\.txt: 4 tokens with one <eos> a line, but WikiText-2 has 2,088,628", TextError)
    (multi30k / "val.de.gz").write_bytes(gzip.compress(b"one\n"))
    refused("multi30k", r"val\.de\.gz: 1 lines, but Multi30k has 4 there", TextError)
    (multi30k / "val.de.gz").unlink()
    refused("multi30k", r"none of val\.de, valid\.de is there")
    (multi30k / "train.de.gz").unlink()
    refused("multi30k", r"at least two languages is needed, found \['en'\]")
    assert not (tmp_path / "to").exists()


def test_an_interrupted_preparation_leaves_no_folder_and_may_be_repeated(multi30k, tmp_path, monkeypatch):
    def full_disk(path, *rest):
        if path.name == "valid.en":
            raise OSError(28, "No space left on device")
        write_lines(path, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(datasets, "write_lines", full_disk)
        with pytest.raises(OSError, match="No space left"):
            prepare("multi30k", multi30k, tmp_path / "to")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["from"]
    prepare("multi30k", multi30k, tmp_path / "to")
    assert len(open_dataset(tmp_path / "to", "en", "de")[0]) == 30


# Number words, by forms checked by hand


ENGLISH = {
    **dict(enumerate(str.split("zero one two three four five six seven eight nine ten eleven twelve thirteen"))),
    14: "fourteen", 15: "fifteen", 16: "sixteen", 17: "seventeen", 18: "eighteen", 19: "nineteen", 20: "twenty",
    21: "twenty-one",
    30: "thirty", 40: "forty", 50: "fifty", 60: "sixty", 70: "seventy", 80: "eighty", 90: "ninety", 99: "ninety-nine",
    100: "one hundred", 101: "one hundred one", 119: "one hundred nineteen", 1000: "one thousand",
    2012: "two thousand twelve", 10_000: "ten thousand", 80_080: "eighty thousand eighty",
    101_101: "one hundred one thousand one hundred one", 700_070: "seven hundred thousand seventy",
    999_999: "nine hundred ninety-nine thousand nine hundred ninety-nine",
}  # fmt: skip

FRENCH = {
    **dict(enumerate(str.split("zéro un deux trois quatre cinq six sept huit neuf dix onze douze treize quatorze"))),
    15: "quinze", 16: "seize", 17: "dix-sept",
    19: "dix-neuf", 20: "vingt", 21: "vingt et un", 22: "vingt-deux", 30: "trente",
    40: "quarante", 50: "cinquante", 60: "soixante", 61: "soixante et un", 69: "soixante-neuf", 70: "soixante-dix",
    71: "soixante et onze", 72: "soixante-douze", 79: "soixante-dix-neuf", 80: "quatre-vingts", 81: "quatre-vingt-un",
    90: "quatre-vingt-dix", 91: "quatre-vingt-onze", 99: "quatre-vingt-dix-neuf",
    100: "cent", 101: "cent un", 171: "cent soixante et onze", 180: "cent quatre-vingts", 200: "deux cents",
    201: "deux cent un", 280: "deux cent quatre-vingts", 281: "deux cent quatre-vingt-un", 1000: "mille",
    1001: "mille un", 1080: "mille quatre-vingts", 1100: "mille cent", 1984: "mille neuf cent quatre-vingt-quatre",
    2000: "deux mille", 21_000: "vingt et un mille", 80_000: "quatre-vingt mille", 100_000: "cent mille",
    101_000: "cent un mille", 200_000: "deux cent mille", 200_200: "deux cent mille deux cents",
    280_080: "deux cent quatre-vingt mille quatre-vingts",
}  # fmt: skip

GERMAN = {
    **dict(enumerate(str.split("null eins zwei drei vier fünf sechs sieben acht neun zehn elf zwölf dreizehn"))),
    14: "vierzehn", 15: "fünfzehn", 16: "sechzehn", 17: "siebzehn", 18: "achtzehn", 19: "neunzehn", 20: "zwanzig",
    21: "einundzwanzig", 30: "dreißig", 33: "dreiunddreißig", 40: "vierzig", 50: "fünfzig", 60: "sechzig",
    66: "sechsundsechzig", 70: "siebzig", 77: "siebenundsiebzig", 80: "achtzig", 90: "neunzig", 100: "einhundert",
    101: "einhunderteins", 116: "einhundertsechzehn", 121: "einhunderteinundzwanzig", 201: "zweihunderteins",
    1000: "eintausend", 1001: "eintausendeins", 12_012: "zwölftausendzwölf", 21_000: "einundzwanzigtausend",
    101_000: "einhunderteintausend", 101_001: "einhunderteintausendeins",
    342_071: "dreihundertzweiundvierzigtausendeinundsiebzig",
}  # fmt: skip


@pytest.mark.parametrize(("words", "expected"), [(english, ENGLISH), (french, FRENCH), (german, GERMAN)])
def test_forms_checked_by_hand(words, expected):
    assert {number: words(number) for number in expected} == expected
    for number in (-1, 1_000_000):
        with pytest.raises(ValueError, match="number must be between 0 and 999,999"):
            words(number)


@pytest.mark.parametrize("language", ["fr", "de"])
def test_corpus_is_disjoint_deterministic_and_covers_the_small_numbers(language):
    parts = number_corpus(language, train=4000, valid=300, test=200, seed=5)
    train, valid, test = parts
    assert [len(part) for part in parts] == [4000, 300, 200]
    assert len({*train.source, *valid.source, *test.source}) == 4500
    assert len({*train.target, *valid.target, *test.target}) == 4500
    translate = {english(n): embedded.LANGUAGES[language](n) for n in range(1000)}
    assert translate.items() <= dict(zip(train.source, train.target, strict=True)).items()
    assert number_corpus(language, 4000, 300, 200, seed=5) == parts
    assert number_corpus(language, 4000, 300, 200, seed=6)[2] != test
    # Held-out numbers have four, five and six digits in about equal parts.
    long = sum(text.count("hundred") == 2 or "hundred thousand" in text for text in test.source)
    short = sum(text.split()[1] == "thousand" and "-" not in text.split()[0] for text in test.source)
    assert 40 < long < 110
    assert 40 < short < 110


def test_small_and_impossible_corpora():
    parts = number_corpus("de", train=4, valid=1, test=1)
    assert [len(part) for part in parts] == [4, 1, 1]
    assert parts[0].source[:2] == ["zero", "one"]
    with pytest.raises(ValueError, match="language must be one of fr, de, not 'en'"):
        number_corpus("en")
    with pytest.raises(ValueError, match="there are 999,000 numbers above 999"):
        number_corpus("fr", 1_000_000, 500, 500)


def test_examples_in_the_docstrings():
    assert doctest.testmod(embedded) == (0, 3)


# Docstrings, each once and split by file


SENTENCE = "This docstring number {} has more than the eight words that are needed."


def write_package(folder: Path) -> dict[str, Path]:
    """One file for each of 120 numbers, with a module's, a class's, a method's and a nested function's docstring."""
    for i in range(120):
        (folder / f"m{i}.py").write_text(
            f'"""{SENTENCE.format(f"{i}-module")}"""\n'
            "raise RuntimeError('imported')\n"
            f'class C:\n    """{SENTENCE.format(f"{i}-class")}\n\n    Over two lines."""\n'
            f"    def f(self):\n        '''{SENTENCE.format(f'{i}-method')}'''\n"
            "        if True:\n"
            f'            async def g():\n                """{SENTENCE.format(f"{i}-nested")}"""\n'
            '        def short():\n            """Return self."""\n'
            f'x = """{SENTENCE.format(f"{i}-no-docstring")}"""\n'
        )
    return {"package": folder}


def numbers_in(corpus) -> set[str]:
    return {line.split()[3] for line in corpus.lines}


def test_each_docstring_is_one_line_in_the_part_of_its_file(tmp_path: Path) -> None:
    """Copies count once; tests and broken files do not; a new file moves no other one to another part."""
    roots = write_package(tmp_path)
    parts = docstring_corpora(10**9, roots)
    actual = [numbers_in(part) for part in parts]
    assert set.union(*actual) == {f"{i}-{kind}" for i in range(120) for kind in ("module", "class", "method", "nested")}
    files = [{name.split("-")[0] for name in part} for part in actual]
    assert sum(map(len, files)) == 120
    assert len(files[1]) + len(files[2]) < 40
    (line,) = (line for part in parts for line in part.lines if " 7-class " in line)
    assert line == SENTENCE.format("7-class") + " Over two lines."
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "t.py").write_text(f'"""{SENTENCE.format("of-a-test")}"""\n')
    (tmp_path / "copy.py").write_bytes((tmp_path / "m3.py").read_bytes())
    (tmp_path / "broken.py").write_text(f'"""{SENTENCE.format("broken")}"""\ndef (\n')
    text = f'"""{SENTENCE.format("café")}"""\n'
    (tmp_path / "unknown.py").write_bytes(b"# coding: klingon\n" + text.encode())
    (tmp_path / "stated.py").write_bytes(b"# -*- coding: latin-1 -*-\n" + text.encode("latin-1"))
    (tmp_path / "odd.py").write_text(f'"""{SENTENCE.format("odd")} \\ud800 and \\0 end."""\n')
    after = docstring_corpora(10**9, roots)
    assert [numbers_in(part) - {"café", "odd"} for part in after] == actual
    assert sum(map(len, after)) == sum(map(len, parts)) + 2
    with pytest.raises(TextError, match=r"no docstring for .* within 10 characters of .*; raise the size"):
        docstring_corpora(10, roots)


def test_the_installed_python_and_torch_are_read() -> None:
    corpora = train, valid, test = docstring_corpora(200_000)
    assert 200_000 <= sum(len(line) for corpus in corpora for line in corpus.lines) < 210_000
    assert len(train) > 5 * (len(valid) + len(test)) > 0
    assert train.words > 15_000
