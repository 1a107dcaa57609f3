"""Prepare and open datasets by name, from files on this machine: nothing is downloaded.

`prepare` recognises the files of a distribution in a folder, counts them, and writes plain UTF-8 text under fixed
names (`train.en`, `valid.en`, `test.en`, …), and last a `dataset.json`, which marks a complete folder. `open_dataset`
reads two of the languages as corpora. A wrong count is an error for a corpus with one published form; for Europarl,
which is often used in part, it is a warning in the report.
"""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from fastformer.apps.system.files import write_file

from .corpora import DocumentKind, ParallelCorpus, TextCorpus, read_parallel, read_text, split
from .files import COMPRESSED, TextError, read_json, read_lines, write_lines

Files = dict[str, list[str]]

SPLITS = ("train", "valid", "test")
_REPORT = "dataset.json"
_COMPRESSED = f"({'|'.join(map(re.escape, COMPRESSED))})?"
_EUROPARL_HELD_OUT = 3000  # sentence pairs for validation and as many for test, the size of a WMT test set
_EUROPARL_SEED = 1
_EUROPARL_LINES = {"fr-en": 2_007_723, "de-en": 1_920_209}
_MULTI30K_LINES = {"train": 29_000, "valid": 1_014, "test": 1_000}
_MULTI30K_FILES = {"train": ("train",), "valid": ("val", "valid"), "test": ("test_2016_flickr", "test2016")}
_WIKITEXT_TOKENS = {"train": 2_088_628, "valid": 217_646, "test": 245_569}


@dataclass(frozen=True)
class DatasetReport:
    """Report of `prepare`: the files written with their line counts, warnings, and the licence notice to be shown."""

    name: str
    folder: str
    languages: list[str]
    lines: dict[str, int]
    notice: str
    tokens: dict[str, int] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        rows = [f"{self.name} in {self.folder}"]
        for file, lines in self.lines.items():
            tokens = f", {self.tokens[file]:,} tokens (one <eos> a line counted)" if file in self.tokens else ""
            rows.append(f"  {file}: {lines:,} lines{tokens}")
        return "\n".join([*rows, *(f"  note: {warning}" for warning in self.warnings), f"  {self.notice}"])


def _find(folder: Path, names: Sequence[str]) -> Path:
    """Return the first of the names that exists, plain or compressed."""
    for path in (folder / f"{name}{suffix}" for name in names for suffix in ("", *COMPRESSED)):
        if path.is_file():
            return path
    raise FileNotFoundError(f"{folder}: none of {', '.join(names)} is there, plain or compressed")


def _matches(folder: Path, pattern: str) -> list[str]:
    """Return the first group of every file name that matches, plain or compressed: sorted, each once."""
    matches = (re.fullmatch(pattern + _COMPRESSED, path.name) for path in folder.iterdir())
    return sorted({match[1] for match in matches if match})


def _multi30k(folder: Path) -> tuple[Files, list[str]]:
    languages = _matches(folder, r"train\.([a-z]{2})")
    if len(languages) < 2:
        raise FileNotFoundError(
            f"{folder}: train.LANGUAGE (plain or compressed) of at least two languages is needed, found {languages}"
        )
    files = {}
    for name in SPLITS:
        for language in languages:
            path = _find(folder, [f"{stem}.{language}" for stem in _MULTI30K_FILES[name]])
            lines = [line.strip() for line in read_lines(path)]
            if len(lines) != _MULTI30K_LINES[name]:
                raise TextError(f"{path}: {len(lines):,} lines, but Multi30k has {_MULTI30K_LINES[name]:,} there")
            files[f"{name}.{language}"] = lines
    return files, []


def _europarl(folder: Path) -> tuple[Files, list[str]]:
    pairs = _matches(folder, r"europarl-v7\.([a-z]{2}-[a-z]{2})\.[a-z]{2}")
    if len(pairs) != 1:
        raise FileNotFoundError(
            f"{folder}: europarl-v7.XX-en.XX and europarl-v7.XX-en.en of one language pair are needed, found {pairs}"
        )
    first, second = pairs[0].split("-")
    source, target = (_find(folder, [f"europarl-v7.{pairs[0]}.{language}"]) for language in (first, second))
    corpus = read_parallel(source, target, "europarl")
    read = len(corpus) + corpus.dropped_empty
    warnings = []
    if read != (published := _EUROPARL_LINES.get(pairs[0], read)):
        warnings.append(f"{read:,} lines, where the published corpus has {published:,}: a part of it, or another one")
    splits = split(corpus, _EUROPARL_HELD_OUT, _EUROPARL_HELD_OUT, _EUROPARL_SEED)
    warnings.append(str(splits[0]))
    files: Files = {}
    for each in splits:
        files |= {f"{each.name}.{first}": each.source, f"{each.name}.{second}": each.target}
    return files, warnings


def _wikitext2(folder: Path) -> tuple[Files, list[str]]:
    files = {}
    for name, expected in _WIKITEXT_TOKENS.items():
        path = _find(folder, (f"{name}.txt", f"wiki.{name}.tokens"))
        files[f"{name}.txt"] = lines = [line.strip() for line in read_lines(path)]
        if (count := _tokens(lines)) != expected:
            raise TextError(f"{path}: {count:,} tokens with one <eos> a line, but WikiText-2 has {expected:,} there")
    return files, []


def _tokens(lines: list[str]) -> int:
    return sum(len(line.split()) + 1 for line in lines)


_NOTICES = {
    "multi30k": (
        "Multi30k is derived from Flickr30k captions and may be used for non-commercial research and education only. "
        "Cite Elliott et al. 2016 (Multi30K: Multilingual English-German Image Descriptions) and Elliott et al. 2017 "
        "(Findings of the Second Shared Task on Multimodal Machine Translation)."
    ),
    "europarl": (
        "Europarl v7 holds the proceedings of the European Parliament, whose reuse is allowed if the source is "
        "acknowledged; see https://www.statmt.org/europarl/. Cite Koehn 2005 (Europarl: A Parallel Corpus for "
        "Statistical Machine Translation)."
    ),
    "wikitext2": (
        "WikiText-2 is text of Wikipedia under CC BY-SA: name the source, and share what you derive under the same "
        "terms. Cite Merity et al. 2016 (Pointer Sentinel Mixture Models)."
    ),
}
_READERS: dict[str, Callable[[Path], tuple[Files, list[str]]]] = {
    "multi30k": _multi30k,
    "europarl": _europarl,
    "wikitext2": _wikitext2,
}
DATASETS = tuple(_READERS)


def prepare(name: str, from_path: str | Path, to_folder: str | Path) -> DatasetReport:
    """Check the files of a dataset in the folder `from_path` and write them as plain text into `to_folder`.

    Nothing is printed: show ``str(report)``, which has the licence notice. Raises ``ValueError`` for an unknown name,
    or a folder that is neither new, nor empty, nor a prepared dataset, ``FileNotFoundError`` if a file is missing, and
    ``TextError`` if a file differs from the published one.
    """
    if name not in DATASETS:
        raise ValueError(f"unknown dataset {name!r}; known are {', '.join(DATASETS)}")
    origin, folder = Path(from_path), Path(to_folder)
    if not origin.is_dir():
        raise FileNotFoundError(f"{origin}: no such folder; it must hold the files of {name}")
    if folder.is_dir() and any(folder.iterdir()) and not _was_prepared(folder):
        raise ValueError(f"{folder} is not empty, and no prepared dataset; choose an empty folder or a new one")
    files, warnings = _READERS[name](origin)
    report = DatasetReport(
        name=name,
        folder=str(folder),
        languages=sorted({file.partition(".")[2] for file in files} - {"txt"}),
        lines={file: len(lines) for file, lines in files.items()},
        notice=_NOTICES[name],
        tokens={file: _tokens(lines) for file, lines in files.items() if file.endswith(".txt")},
        warnings=warnings,
    )
    content = {key: value for key, value in asdict(report).items() if key != "folder"}
    folder.mkdir(parents=True, exist_ok=True)
    write_file(folder / _REPORT, b"{}")  # marks a folder with an unfinished preparation, which may be repeated
    for file, lines in files.items():
        write_lines(folder / file, lines)
    write_file(folder / _REPORT, json.dumps(content, ensure_ascii=False, indent=2).encode("utf-8"))
    return report


def _was_prepared(folder: Path) -> bool:
    """Return whether `prepare` wrote the folder's dataset.json, which other programs may also write."""
    try:
        return read_json(folder / _REPORT) == {} or _read_report(folder).name in DATASETS
    except (FileNotFoundError, TextError):
        return False


def open_dataset(
    folder: str | Path, source_language: str, target_language: str, limit: int | None = None
) -> tuple[ParallelCorpus, ParallelCorpus, ParallelCorpus]:
    """Read training, validation and test pairs of a prepared folder.

    limit: the most training pairs, the first ones; None: all. Europarl's are in random order.

    Raises ``FileNotFoundError`` if the folder was not prepared, ``ValueError`` for a missing language, and
    ``TextError`` if a file has another number of lines than was prepared.
    """
    folder = Path(folder)
    report = _read_report(folder)
    if source_language == target_language or {source_language, target_language} - set(report.languages):
        raise ValueError(
            f"{folder}: the languages must be two different ones of {report.languages or 'none at all'}, "
            f"got {source_language!r} and {target_language!r}"
        )
    corpora = []
    for name in SPLITS:
        source, target = folder / f"{name}.{source_language}", folder / f"{name}.{target_language}"
        corpus = read_parallel(source, target, name, limit if name == "train" else None)
        read, expected = len(corpus) + corpus.dropped_empty + corpus.beyond, report.lines.get(source.name, 0)
        if read != expected:
            raise TextError(f"{source}: {read:,} lines, but {expected:,} were prepared; prepare again")
        corpora.append(corpus)
    train, valid, test = corpora
    return train, valid, test


def open_text_dataset(
    folder: str | Path, document: DocumentKind | None = None
) -> tuple[TextCorpus, TextCorpus, TextCorpus]:
    """Read training, validation and test text of a prepared folder.

    document: what counts as a document; None: an article. Raises ``FileNotFoundError`` if the folder was not prepared,
    ``ValueError`` if it holds sentence pairs, and ``TextError`` if a file has another number of lines or tokens than
    was prepared.
    """
    folder = Path(folder)
    report = _read_report(folder)
    if report.languages or not report.tokens:
        raise ValueError(
            f"{folder}: holds {report.name}, sentence pairs; a language model needs text, such as wikitext2"
        )
    corpora = []
    for name in SPLITS:
        path = folder / f"{name}.txt"
        corpus = read_text(path, document or "article", name)
        read = len(corpus.lines), corpus.words
        expected = report.lines.get(path.name, 0), report.tokens.get(path.name, 0)
        if read != expected:
            raise TextError(
                f"{path}: {read[0]:,} lines and {read[1]:,} tokens (one <eos> a line counted), but {expected[0]:,} and "
                f"{expected[1]:,} were prepared; prepare again"
            )
        corpora.append(corpus)
    train, valid, test = corpora
    return train, valid, test


def _read_report(folder: Path) -> DatasetReport:
    path = folder / _REPORT
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file; make the folder with: fastformer data NAME --from PATH")
    content: Any = None
    try:
        content = read_json(path)
        return DatasetReport(
            name=str(content["name"]),
            folder=str(folder),
            languages=[str(name) for name in content["languages"]],
            lines={name: int(count) for name, count in dict(content["lines"]).items()},
            notice=str(content["notice"]),
            tokens={name: int(count) for name, count in dict(content["tokens"]).items()},
            warnings=list(content["warnings"]),
        )
    except (ValueError, KeyError, TypeError, OverflowError) as error:
        reason = "its preparation did not end" if content == {} else f"damaged ({error!r})"
        raise TextError(f"{path}: {reason}; prepare the dataset again") from error
