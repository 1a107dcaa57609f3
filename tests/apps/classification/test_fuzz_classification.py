"""Generated bad input for classifiers: labelled files, texts to label, and damaged run folders; see `tests.fuzz`."""

from pathlib import Path
from random import Random

import pytest

pytest.importorskip("typer", reason="the command line needs the extra `apps`")

from fastformer.apps.classification import read_labelled
from fastformer.apps.classification.corpus import split_labelled
from fastformer.apps.text import TextError, read_lines
from tests.apps.classification.test_classification_run import LINES, TRAIN
from tests.fuzz import fuzz
from tests.fuzz.fuzz_commands import run

pytestmark = pytest.mark.filterwarnings("ignore")
EARLIER = b"earlier\n"


def labelled(random: Random) -> bytes:
    """Lines of labels, tabs and texts, of which some are odd, missing or damaged."""
    lines = []
    for _ in range(random.randrange(9)):
        label = random.choice(("a", "b", "animal", "plant")) if random.random() < 0.95 else fuzz.text(random, 3)
        text = fuzz.text(random, 5, odd=0.1)
        text = text if random.random() < 0.1 else text.replace("\n", " ").replace("\0", "")
        lines.append(label + ("\t" if random.random() < 0.95 else " ") + text)
    content = "\n".join([*LINES[: random.choice((0, 60))], *lines, ""])
    data = content.encode("utf-8", "replace") if random.random() < 0.6 else fuzz.encoded(random, content)
    return fuzz.damaged(random, data) if random.random() < 0.2 else data


def test_labelled_files(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    path, read = tmp_path / "text", 0
    for number in range(request.config.getoption("--fuzz")):
        random = Random(number)
        path.write_bytes(labelled(random))
        labels = random.choice((None, None, None, ("a", "b"), ("animal", "plant", "tool", "a", "b")))
        found = fuzz.attempt(lambda labels=labels: read_labelled(path, labels), (TextError,), number)
        if found is not None:
            read += 1
            assert all(found.texts), number
            assert not any("\n" in x for x in (*found.texts, *found.labels)), number
            assert len(found) + found.dropped == len(read_lines(path)), number
            fuzz.attempt(lambda found=found: split_labelled(found, 0.2), (TextError,), number)
    assert read > 20


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fuzz_classification")
    (folder / "text.tsv").write_text("\n".join(LINES) + "\n")
    assert run([*TRAIN.split(), "--steps", "2", "--validate-every", "2", "--run", "run"], folder, 0).returncode == 0
    return folder


@pytest.mark.slow
def test_commands(home: Path, request: pytest.FixtureRequest) -> None:
    """Texts and labelled files of any content, and a run of which a file is damaged: done, or one line why not."""
    before = {path: path.read_bytes() for path in (home / "run").rglob("*") if path.is_file()}
    done = 0
    for number in range(request.config.getoption("--fuzz") // 10):
        random = Random(number)
        content = labelled(random)
        (home / "in").write_bytes(content)
        (home / "out").write_bytes(EARLIER)
        if random.random() < 0.4:
            path = random.choice([path for path in before if path.suffix not in (".png", ".csv")])
            path.write_bytes(random.choice((fuzz.damaged(random, before[path]), b"", b"{}", b"[data]\nlabels = [3]\n")))
        command = random.choice(
            (
                "classify --run run --input in --output out --device cpu",
                "classify --run run --probabilities --output out --device cpu",
                "evaluate --run run --source in --device cpu",
                "plot attention --run run --text cat --output out.png --device cpu",
                "export --run run --format safetensors --to exported",
                f"{TRAIN} --steps 1 --run new".replace("text.tsv", "in"),
                "train classify --run run --resume --steps 3 --device cpu",
                "info --run run",
            )
        )
        result = run(command.split(), home, number, content if "probabilities" in command else b"")
        done += result.returncode == 0
        out = (home / "out").read_bytes()
        if command.startswith("classify") and result.returncode == 0:
            lines = read_lines(home / "in") if content.removeprefix(b"\xef\xbb\xbf") else []
            assert out.count(b"\n") == len(lines), f"input {number}: {command}"
        else:
            assert out == EARLIER, f"input {number}: {command}"
        for path in (home / "run").rglob("*"):
            if path.is_file() and path not in before:
                path.unlink()
        for path, data in before.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        for folder in ("new", "exported"):
            for path in sorted((home / folder).rglob("*"), reverse=True):
                path.rmdir() if path.is_dir() else path.unlink()
    assert done > 5
