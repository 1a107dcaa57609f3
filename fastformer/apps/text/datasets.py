"""Prepare and open datasets by name, from files on this machine: nothing is downloaded.

A prepared folder has plain UTF-8 text under fixed names: `train.en`, `valid.en`, `test.en`, …, or `train.txt` and so
on. A wrong count is an error for a corpus with one published form; for Europarl, which is often used in part, it is a
note in the report.
"""

import re
from collections.abc import Callable, Sequence
from pathlib import Path

from fastformer.apps.system.files import new_folder
from fastformer.settings import check_value

from .corpora import DocumentKind, ParallelCorpus, TextCorpus, count_words, read_parallel, read_text, split
from .files import COMPRESSED, TextError, read_lines, write_lines

Files = dict[str, list[str]]

SPLITS = ("train", "valid", "test")
_EUROPARL_HELD_OUT = 3000  # sentence pairs for validation and as many for test, the size of a WMT test set
_EUROPARL_SEED = 1
_EUROPARL_LINES = {"fr-en": 2_007_723, "de-en": 1_920_209}
_MULTI30K_LINES = {"train": 29_000, "valid": 1_014, "test": 1_000}
_MULTI30K_FILES = {"train": ("train",), "valid": ("val", "valid"), "test": ("test_2016_flickr", "test2016")}
_WIKITEXT_TOKENS = {"train": 2_088_628, "valid": 217_646, "test": 245_569}


def _find(folder: Path, *names: str) -> Path:
    """Return the first of the names that exists, plain or compressed."""
    paths = (folder / f"{name}{suffix}" for name in names for suffix in ("", *COMPRESSED))
    path = next((path for path in paths if path.is_file()), None)
    if path is None:
        raise FileNotFoundError(f"{folder}: none of {', '.join(names)} is there, plain or compressed")
    return path


def _read(path: Path, dataset: str, expected: int, count: Callable[[Sequence[str]], int], unit: str) -> list[str]:
    lines = [line.strip() for line in read_lines(path)]
    if count(lines) != expected:
        raise TextError(f"{path}: {count(lines):,} {unit}, but {dataset} has {expected:,} there")
    return lines


def _matches(folder: Path, pattern: str) -> list[str]:
    """Return the first group of every file name that matches up to a suffix: sorted, each once."""
    matches = (re.match(pattern, path.name) for path in folder.iterdir())
    return sorted({match[1] for match in matches if match})


def _multi30k(folder: Path) -> tuple[Files, list[str]]:
    languages = _matches(folder, r"train\.([a-z]{2})\b")
    if len(languages) < 2:
        raise FileNotFoundError(
            f"{folder}: train.LANGUAGE (plain or compressed) of at least two languages is needed, found {languages}"
        )
    files = {}
    for name, expected in _MULTI30K_LINES.items():
        for language in languages:
            path = _find(folder, *(f"{stem}.{language}" for stem in _MULTI30K_FILES[name]))
            files[f"{name}.{language}"] = _read(path, "Multi30k", expected, len, "lines")
    return files, []


def _europarl(folder: Path) -> tuple[Files, list[str]]:
    pairs = _matches(folder, r"europarl-v7\.([a-z]{2}-[a-z]{2})\.[a-z]{2}\b")
    if len(pairs) != 1:
        raise FileNotFoundError(
            f"{folder}: europarl-v7.XX-en.XX and europarl-v7.XX-en.en of one language pair are needed, found {pairs}"
        )
    first, second = pairs[0].split("-")
    source, target = (_find(folder, f"europarl-v7.{pairs[0]}.{language}") for language in (first, second))
    corpus = read_parallel(source, target, "europarl")
    lines = len(corpus) + sum(corpus.left_out.values())
    notes = []
    if lines != (published := _EUROPARL_LINES.get(pairs[0], lines)):
        notes.append(f"{lines:,} lines, where the published corpus has {published:,}: a part of it, or another one")
    splits = split(corpus, _EUROPARL_HELD_OUT, _EUROPARL_HELD_OUT, _EUROPARL_SEED)
    files: Files = {}
    for each in splits:
        files |= {f"{each.name}.{first}": each.source, f"{each.name}.{second}": each.target}
    return files, [*notes, str(splits[0])]


def _wikitext2(folder: Path) -> tuple[Files, list[str]]:
    files = {}
    for name, expected in _WIKITEXT_TOKENS.items():
        path = _find(folder, f"{name}.txt", f"wiki.{name}.tokens")
        files[f"{name}.txt"] = _read(path, "WikiText-2", expected, count_words, "tokens with one <eos> a line")
    return files, []


# How each dataset is read, and its licence notice.
_DATASETS: dict[str, tuple[Callable[[Path], tuple[Files, list[str]]], str]] = {
    "multi30k": (
        _multi30k,
        "Multi30k is derived from Flickr30k captions and may be used for non-commercial research and education only. "
        "Cite Elliott et al. 2016 (Multi30K: Multilingual English-German Image Descriptions) and Elliott et al. 2017 "
        "(Findings of the Second Shared Task on Multimodal Machine Translation).",
    ),
    "europarl": (
        _europarl,
        "Europarl v7 holds the proceedings of the European Parliament, whose reuse is allowed if the source is "
        "acknowledged; see https://www.statmt.org/europarl/. Cite Koehn 2005 (Europarl: A Parallel Corpus for "
        "Statistical Machine Translation).",
    ),
    "wikitext2": (
        _wikitext2,
        "WikiText-2 is text of Wikipedia under CC BY-SA: name the source, and share what you derive under the same "
        "terms. Cite Merity et al. 2016 (Pointer Sentinel Mixture Models).",
    ),
}
DATASETS = tuple(_DATASETS)


def prepare(name: str, from_path: str | Path, to_folder: str | Path) -> str:
    """Check the files of a dataset in the folder `from_path` and write them as plain text into a new folder.

    Returns a report to be shown: lines and tokens of each file, notes, and the licence notice. Raises ``ValueError``
    for an unknown name or a folder that is not empty, ``FileNotFoundError`` and ``TextError`` for missing and wrong
    files.
    """
    check_value("dataset", name, str, choices=DATASETS)
    origin, folder = Path(from_path), Path(to_folder)
    if not origin.is_dir():
        raise FileNotFoundError(f"{origin}: no such folder; it must hold the files of {name}")
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise ValueError(f"{folder} is not empty; choose an empty folder or a new one")
    read, notice = _DATASETS[name]
    files, notes = read(origin)
    report = [f"{name} in {folder}"]
    with new_folder(folder) as temporary:
        for file, lines in files.items():
            write_lines(temporary / file, lines)
            is_text = file.endswith(".txt")
            tokens = f", {count_words(lines):,} tokens (one <eos> a line counted)" if is_text else ""
            report.append(f"{file}: {len(lines):,} lines{tokens}")
    return "\n  ".join([*report, *(f"note: {note}" for note in notes), notice])


def _prepared(folder: str | Path, *endings: str) -> list[list[Path]]:
    """Return the files with these endings for training, validation and test."""
    paths = [[Path(folder, f"{name}.{ending}") for ending in endings] for name in SPLITS]
    if missing := [path for each in paths for path in each if not path.is_file()]:
        raise FileNotFoundError(f"{missing[0]}: no such file; make the folder with: fastformer data NAME --from PATH")
    return paths


def open_dataset(
    folder: str | Path, source_language: str, target_language: str, limit: int | None = None
) -> tuple[ParallelCorpus, ...]:
    """Read training, validation and test pairs of a prepared folder.

    limit: the most training pairs, the first ones; None: all. Europarl's are in random order. Raises
    ``FileNotFoundError`` for a folder without files of a language, and ``ValueError`` for equal languages.
    """
    if source_language == target_language:
        raise ValueError(f"the languages must be two different ones, not {source_language!r} twice")
    pairs = zip(SPLITS, _prepared(folder, source_language, target_language), (limit, None, None), strict=True)
    return tuple(read_parallel(source, target, name, most) for name, (source, target), most in pairs)


def open_text_dataset(folder: str | Path, document: DocumentKind | None = None) -> tuple[TextCorpus, ...]:
    """Read training, validation and test text of a prepared folder; `document` as of `read_text`, None: an article."""
    paths = _prepared(folder, "txt")
    return tuple(read_text(path, document or "article", name) for name, [path] in zip(SPLITS, paths, strict=True))
