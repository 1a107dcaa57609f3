"""Prepare and open datasets by name, from files on this machine: nothing is downloaded.

`prepare` recognises the files of a distribution in a folder, counts them, and writes plain UTF-8 text under fixed
names (`train.en`, `valid.en`, `test.en`, …), and last a `dataset.json`, which marks a complete folder. `open_dataset`
reads two of the languages as corpora. A wrong count is an error for a corpus with one published form; for Europarl,
which is often used in part, it is a warning in the report.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from fastformer.apps.system.files import write_file

from .corpora import DocumentKind, ParallelCorpus, TextCorpus, count_words, read_parallel, read_text, split
from .files import COMPRESSED, TextError, read_lines, write_lines

Files = dict[str, list[str]]

SPLITS = ("train", "valid", "test")
_REPORT, _UNFINISHED = "dataset.json", b"{}"  # a folder whose preparation did not end may be prepared again
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
    languages: list[str]
    lines: dict[str, int]
    notice: str
    tokens: dict[str, int] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    folder: str = ""

    def __str__(self) -> str:
        rows = [f"{self.name} in {self.folder}"]
        for file, lines in self.lines.items():
            tokens = f", {self.tokens[file]:,} tokens (one <eos> a line counted)" if file in self.tokens else ""
            rows.append(f"  {file}: {lines:,} lines{tokens}")
        return "\n".join([*rows, *(f"  note: {warning}" for warning in self.warnings), f"  {self.notice}"])


_REPORTS = TypeAdapter(DatasetReport)


def _find(folder: Path, names: Sequence[str]) -> Path:
    """Return the first of the names that exists, plain or compressed."""
    for path in (folder / f"{name}{suffix}" for name in names for suffix in ("", *COMPRESSED)):
        if path.is_file():
            return path
    raise FileNotFoundError(f"{folder}: none of {', '.join(names)} is there, plain or compressed")


def _read(folder: Path, *names: str) -> tuple[Path, list[str]]:
    path = _find(folder, names)
    return path, [line.strip() for line in read_lines(path)]


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
    for name, expected in _MULTI30K_LINES.items():
        for language in languages:
            path, lines = _read(folder, *(f"{stem}.{language}" for stem in _MULTI30K_FILES[name]))
            if len(lines) != expected:
                raise TextError(f"{path}: {len(lines):,} lines, but Multi30k has {expected:,} there")
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
    files: Files = {}
    for each in splits:
        files |= {f"{each.name}.{first}": each.source, f"{each.name}.{second}": each.target}
    return files, [*warnings, str(splits[0])]


def _wikitext2(folder: Path) -> tuple[Files, list[str]]:
    files = {}
    for name, expected in _WIKITEXT_TOKENS.items():
        path, lines = _read(folder, f"{name}.txt", f"wiki.{name}.tokens")
        if (count := count_words(lines)) != expected:
            raise TextError(f"{path}: {count:,} tokens with one <eos> a line, but WikiText-2 has {expected:,} there")
        files[f"{name}.txt"] = lines
    return files, []


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
        languages=sorted({file.partition(".")[2] for file in files} - {"txt"}),
        lines={file: len(lines) for file, lines in files.items()},
        notice=_NOTICES[name],
        tokens={file: count_words(lines) for file, lines in files.items() if file.endswith(".txt")},
        warnings=warnings,
        folder=str(folder),
    )
    folder.mkdir(parents=True, exist_ok=True)
    write_file(folder / _REPORT, _UNFINISHED)
    for file, lines in files.items():
        write_lines(folder / file, lines)
    write_file(folder / _REPORT, _REPORTS.dump_json(report, indent=2, exclude={"folder"}))
    return report


def _was_prepared(folder: Path) -> bool:
    """Return whether `prepare` wrote the folder's dataset.json, which other programs may also write."""
    try:
        return (folder / _REPORT).read_bytes() == _UNFINISHED or _read_report(folder).name in DATASETS
    except (FileNotFoundError, TextError):
        return False


def _read_report(folder: Path) -> DatasetReport:
    path = folder / _REPORT
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file; make the folder with: fastformer data NAME --from PATH")
    try:
        return _REPORTS.validate_json(path.read_bytes())
    except ValidationError as error:
        raise TextError(f"{path}: damaged, or its preparation did not end; prepare the dataset again") from error


def open_dataset(
    folder: str | Path, source_language: str, target_language: str, limit: int | None = None
) -> tuple[ParallelCorpus, ParallelCorpus, ParallelCorpus]:
    """Read training, validation and test pairs of a prepared folder.

    limit: the most training pairs, the first ones; None: all. Europarl's are in random order.

    Raises ``FileNotFoundError`` if the folder was not prepared, ``ValueError`` for a missing language, and
    ``TextError`` if a file is damaged.
    """
    languages = _read_report(Path(folder)).languages
    if source_language == target_language or {source_language, target_language} - set(languages):
        raise ValueError(
            f"{folder}: the languages must be two different ones of {languages or 'none at all'}, "
            f"got {source_language!r} and {target_language!r}"
        )
    corpora = []
    for name in SPLITS:
        source, target = (Path(folder, f"{name}.{language}") for language in (source_language, target_language))
        corpora.append(read_parallel(source, target, name, limit if name == "train" else None))
    train, valid, test = corpora
    return train, valid, test


def open_text_dataset(
    folder: str | Path, document: DocumentKind | None = None
) -> tuple[TextCorpus, TextCorpus, TextCorpus]:
    """Read training, validation and test text of a prepared folder.

    document: what counts as a document; None: an article. Raises ``FileNotFoundError`` if the folder was not prepared,
    ``ValueError`` if it holds sentence pairs, and ``TextError`` if a file is damaged.
    """
    report = _read_report(Path(folder))
    if report.languages:
        raise ValueError(
            f"{folder}: holds {report.name}, sentence pairs; a language model needs text, such as wikitext2"
        )
    train, valid, test = (read_text(Path(folder, f"{name}.txt"), document or "article", name) for name in SPLITS)
    return train, valid, test
