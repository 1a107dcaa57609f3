"""README and site: every block of Python and of shell runs, page by page, and every link leads somewhere."""

import functools
import gzip
import importlib
import importlib.util
import io
import re
import runpy
import shutil
import sys
import tomllib
import warnings
from contextlib import redirect_stdout
from pathlib import Path

import pytest

from benchmarks.report import BEGIN, END
from fastformer.apps.language import run as language_run
from fastformer.apps.text import datasets, docstring_corpora, number_corpus, write_lines
from tests.apps.cli.test_cli import TRAIN as TRAIN_TRANSLATION
from tests.apps.pretrained.tiny_models import write_marian_folder
from tests.project.documents import DOCUMENTS, ROOT, Block, anchors, blocks, commands, links
from tests.support.command_line import succeed
from tests.support.python import python

# What a page's training gets besides its own flags: a model and a budget for a test. The later of two flags counts.
SMALL = "--d-model 16 --heads 2 --feed-forward 32 --steps 2 --warmup-steps 1 --precision fp32 --device cpu --threads 1"
SMALL_TRANSLATION = f"{SMALL} --encoder-layers 1 --decoder-layers 1 --vocabulary 100 --bleu-sentences 2"
SMALL_LANGUAGE = f"{SMALL} --layers 1 --vocabulary 300"
SMALL_CLASSIFIER = f"{SMALL} --layers 1 --vocabulary 100"
FINE_TUNED = "--steps 2 --warmup-steps 1 --device cpu --threads 1 --bleu-sentences 2"
RESUMED = "--steps 4 --device cpu --threads 1"

LINKING = [*DOCUMENTS, *(ROOT / name for name in ("DESIGN.md", "SECURITY.md", "CODE_OF_CONDUCT.md", "CHANGELOG.md"))]
TARGETS = {target for path in DOCUMENTS for target in re.findall(r"^\((.+)\)=$", path.read_text("utf-8"), re.M)}
NEEDS = {
    "ctranslate2": "import ctranslate2",
    "transformers": "import transformers",
    "triton": r"TRITON_INTERPRET|benchmarks\.(codegen|host)",
}
MULTI30K = {"train": ("train", 60), "valid": ("val", 5), "test": ("test_2016_flickr", 5)}
LANGUAGES = {"python", "bash", "text", "toml", "{eval-rst}", "{toctree}", "{glossary}", "{math}"}


def pages(*languages: str) -> list:
    """The documents with a block in one of these languages, as parameters with their names."""
    actual = {path: {block.language for block in blocks(path.read_text(encoding="utf-8"))} for path in DOCUMENTS}
    return [
        pytest.param(path, id=str(path.relative_to(ROOT)))
        for path, has in actual.items()
        if has.intersection(languages)
    ]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files, the data sets and the runs that the pages speak of, all of them tiny."""
    folder = tmp_path_factory.mktemp("documents")
    shutil.copytree(ROOT / "recipes", folder / "recipes")
    published_files(folder / "FOLDER")
    with pytest.MonkeyPatch.context() as patch:
        accept_few_lines(patch)
        for dataset in ("multi30k", "wikitext2"):
            succeed("data", dataset, "--from", "FOLDER", cwd=folder)
    pairs = number_corpus("fr", 320, 1, 1)[0]
    if importlib.util.find_spec("transformers"):
        write_marian_folder(folder / "opus-mt-en-fr", pairs.take(range(300), "train"))
    characters = ["".join(chr(0x4E00 + ord(letter) % 32) for letter in line) for line in pairs.target]
    for language, lines in (("en", pairs.source), ("fr", pairs.target), ("zh", characters)):
        (folder / f"corpus.{language}.gz").write_bytes(gzip.compress("\n".join(lines).encode()))
        write_lines(folder / f"news.{language}", lines[:3])
    write_lines(folder / "prompts.txt", ["Return the", "A number"])
    write_lines(folder / "texts.txt", ["the soup", "bread"])
    reviews = [
        f"{label}\t{i} {word}s" for label, word in (("praise", "warm"), ("complaint", "cold")) for i in range(30)
    ]
    write_lines(folder / "reviews.tsv", reviews)
    succeed(*TRAIN_TRANSLATION.split(), "--run", "demo", cwd=folder)
    write_lines(folder / "text.txt", pairs.source)
    lm = f"train lm --train-text text.txt --held-out 0.1 --run runs/language {SMALL_LANGUAGE} --tokenizer words"
    succeed(*lm.split(), cwd=folder)
    for run in ("a", "b", "mine"):
        shutil.copytree(folder / "demo", folder / "runs" / run)
    return folder


TEXT = [line for i in range(4) for line in ("", f" = Heading {i} = ", "", *["the cat sat on the mat"] * 5)]


def published_files(folder: Path) -> None:
    """Write files named as those of Multi30k and WikiText-2 are, with a few lines."""
    folder.mkdir()
    for name, count in MULTI30K.values():
        for language in ("de", "fr"):
            pairs = number_corpus(language, (count + 1) // 2, 1, 1)[0]
            for suffix, lines in (("en", pairs.source), (language, pairs.target)):
                twice = [*lines, *lines][:count]  # so that some words are not rare
                (folder / f"{name}.{suffix}.gz").write_bytes(gzip.compress("\n".join(twice).encode() + b"\n"))
    for split in MULTI30K:
        write_lines(folder / f"wiki.{split}.tokens", TEXT)


def accept_few_lines(patch: pytest.MonkeyPatch) -> None:
    """Count the lines of `published_files` as all that there are."""
    patch.setattr(datasets, "_MULTI30K_LINES", {split: count for split, (_, count) in MULTI30K.items()})
    count = sum(len(line.split()) + 1 for line in TEXT)
    patch.setattr(datasets, "_WIKITEXT_TOKENS", dict.fromkeys(MULTI30K, count))


@pytest.mark.slow
@pytest.mark.parametrize("path", pages("python", "bash"))
def test_every_block_runs(path: Path, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In order; a page's Python is one program."""
    markdown = path.read_text(encoding="utf-8")
    for module, sign in NEEDS.items():
        if re.search(sign, markdown):
            pytest.importorskip(module)
    folder = tmp_path / "page"
    shutil.copytree(place, folder)
    accept_few_lines(monkeypatch)
    # Of so many characters, whatever is asked for.
    monkeypatch.setattr(language_run, "docstring_corpora", lambda size: docstring_corpora(100_000))
    monkeypatch.chdir(folder)
    names: dict = {"__name__": "__main__"}
    for block in blocks(markdown):
        if block.language == "python":
            run_python(block, path, names)
        elif block.language == "bash":
            for command in commands(block.text, folder):
                run_command(command, folder)


def run_python(block: Block, path: Path, names: dict) -> None:
    """Run a block; an error names the line of the document."""
    exec(compile("\n" * (block.line - 1) + block.text, path, "exec"), names)


def run_command(command: list[str], folder: Path) -> None:
    """Run what a page has its reader type, or so much of it as a test can."""
    program, *arguments = command
    if program == "torchrun":
        torchrun = importlib.import_module("torch.distributed.run")
        parsed = torchrun.parse_args(arguments)
        program, arguments = parsed.training_script, parsed.training_script_args
    match program, arguments:
        case "fastformer", ["demo"]:
            pass  # takes minutes: tests/apps/translation/test_translation.py
        case "fastformer", ["serve", *options]:  # until it is interrupted
            check_options(options, succeed("serve", "--help", cwd=folder))
        case "fastformer", ["train", *_]:
            train(arguments, folder)
        case "fastformer", ["data", name, *_]:  # which the reader has not prepared yet
            shutil.rmtree(folder / "data" / name, ignore_errors=True)
            succeed(*arguments, cwd=folder)
        case "fastformer", _:
            succeed(*arguments, cwd=folder)
        case "pytest", _:
            check_options(arguments, help_of_pytest())
            assert all((ROOT / name).exists() for name in arguments if re.match(r"(tests|benchmarks)\b", name))
        case "python", ["-m", "benchmarks.host"]:
            # In a process, because it compiles kernels, which the interpreter of the other tests does not.
            ran = python("-m", "benchmarks.host", "--only", "embedding", TRITON_INTERPRET=None)
            assert "\nembedding, and backward" in ran.stdout, ran.stderr
        case "python", ["-m", module, *options]:
            check_options(options, help_of(module))
        case "pip", ["install", *names]:
            check_extras(names)
        case "make", _:
            makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
            assert all(re.search(rf"^{re.escape(name)}:", makefile, re.M) for name in arguments)
        case "python3", ["-m", "venv", ".venv"]:
            pass
        case "pre-commit", ["install"]:
            assert (ROOT / ".pre-commit-config.yaml").is_file()
        case _:
            pytest.fail(f"no rule for {command}")


def train(arguments: list[str], folder: Path) -> None:
    """Train as the page says, with a small model; a new run takes the place of the one the reader has not."""
    if "--resume" in arguments:
        small = RESUMED
    else:
        # `small` has steps; without a budget, the reader's command is refused.
        assert {"--minutes", "--steps", "--epochs", "--config"} & set(arguments), arguments
        shutil.rmtree(folder / arguments[arguments.index("--run") + 1], ignore_errors=True)
        kinds = {"lm": SMALL_LANGUAGE, "classify": SMALL_CLASSIFIER}
        small = FINE_TUNED if "--from" in arguments else kinds.get(arguments[1], SMALL_TRANSLATION)
        if "--train-source" in arguments and "--valid-source" not in arguments:
            small += " --valid-size 9 --test-size 9"
    with pytest.MonkeyPatch.context() as patch:
        # The learning curve and the measured speed take half of such a training; tests of the command line have both.
        patch.setattr("fastformer.apps.plots.save", lambda figure, path: None)
        patch.setattr("fastformer.apps.runs.run.targets_per_second", lambda *arguments: 10_000.0)
        succeed(*arguments, *small.split(), cwd=folder)


def check_options(words: list[str], help_text: str) -> None:
    options = {word.partition("=")[0] for word in words if word.startswith("--")}
    assert {option for option in options if not re.search(rf"(?<![\w-]){option}(?![\w-])", help_text)} == set()


@functools.cache
def help_of_pytest() -> str:
    return python("-m", "pytest", "tests", "benchmarks", "--help").stdout


def help_of(module: str) -> str:
    """Return what `python -m MODULE --help` prints, run in this process."""
    printed = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(printed), warnings.catch_warnings(action="ignore"):
        patch.setattr(sys, "argv", [module, "--help"])
        with pytest.raises(SystemExit):
            runpy.run_module(module, run_name="__main__")
    return printed.getvalue()


def check_extras(words: list[str]) -> None:
    with (ROOT / "pyproject.toml").open("rb") as file:
        extras = tomllib.load(file)["project"]["optional-dependencies"]
    asked = {extra for word in words for extra in re.findall(r"(?:fastformer|\.)\[([\w,]+)\]", word)}
    assert {extra for extra in ",".join(asked).split(",") if extra} <= set(extras)


@pytest.mark.parametrize("path", [pytest.param(path, id=str(path.relative_to(ROOT))) for path in DOCUMENTS])
def test_every_block_says_what_it_is(path: Path) -> None:
    """And so has a rule: what is no program is named as text."""
    markdown = path.read_text(encoding="utf-8")
    actual = blocks(markdown)
    assert {block.language for block in actual} <= LANGUAGES
    assert len(re.findall(r"^(```|:::)", markdown, re.M)) == 2 * len(actual)


@pytest.mark.parametrize("path", [pytest.param(path, id=str(path.relative_to(ROOT))) for path in LINKING])
def test_every_link_leads_somewhere(path: Path) -> None:
    """To a file of the repository, and in a document to a heading it has; addresses are looked at only."""
    for link in links(path.read_text(encoding="utf-8")):
        if re.match(r"[a-z]+:", link):
            assert re.fullmatch(r"https://[\w.-]+\.[a-z]+(/\S*)?", link), link
            continue
        name, _, anchor = link.partition("#")
        target = (path.parent / name).resolve() if name else path
        assert target.exists(), f"{link}: there is no {target}"
        assert target.is_relative_to(ROOT), link
        if anchor and anchor not in TARGETS:
            assert anchor in anchors(target.read_text(encoding="utf-8")), link


@pytest.mark.parametrize("path", [pytest.param(path, id=str(path.relative_to(ROOT))) for path in LINKING])
def test_every_file_that_is_named_exists(path: Path) -> None:
    """Between backticks, from the root of the repository on; `*` stands for some names."""
    text = path.read_text(encoding="utf-8")
    folders = "|".join(sorted(entry.name for entry in ROOT.iterdir() if entry.is_dir() and entry.name[0] != "."))
    for name in re.findall(rf"`((?:{folders})/[\w*./-]+\.\w+)`", text):
        if "OP" not in name:  # which stands for any
            assert list(ROOT.glob(name.replace("...", "**"))), name


def test_every_page_that_code_names_exists() -> None:
    for path in [*(ROOT / "fastformer").rglob("*.py"), *(ROOT / "kernels").rglob("*.py")]:
        for name in re.findall(r"\bdocs/[\w/-]+\.md", path.read_text(encoding="utf-8")):
            assert (ROOT / name).is_file(), f"{path}: {name}"


def test_the_design_names_every_package() -> None:
    named = set(re.findall(r"(\w+)/", (ROOT / "DESIGN.md").read_text("utf-8")))
    package = ROOT / "fastformer"
    folders = {
        path.name for top in (package, package / "apps") for path in top.iterdir() if (path / "__init__.py").exists()
    }
    assert folders <= named


def test_the_readme_is_short() -> None:
    """150 lines with the table of one machine, which `benchmarks.report` writes; tables of others may come."""
    before, _, rest = (ROOT / "README.md").read_text(encoding="utf-8").partition(BEGIN)
    assert len((before + rest.partition(END)[2]).splitlines()) <= 120


def test_every_promise_names_tests_that_exist() -> None:
    """A name without a folder is of the folder that its cell names; every row of the table names a test."""
    rows = re.findall(
        r"^\| (?!\*\*|promise|what|---)([^|]*) \| ([^|]*) \|", (ROOT / "docs/promises.md").read_text(), re.M
    )
    assert [row[0].partition(".")[0] for row in rows[:13]] == [str(number) for number in range(1, 14)]
    for promise, cell in rows:
        names = re.findall(r"`([\w/]+(?:\.py)?)`", cell)
        folders = [ROOT, *(ROOT / name for name in names if (ROOT / name).is_dir())]
        files = [name for name in names if name.endswith(".py")]
        assert len(names) > 0, promise
        assert all(any((folder / name).is_file() for folder in folders) for name in files), (promise, files)
