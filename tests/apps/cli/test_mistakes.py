"""A mistake gives one line and exit status 2, before data is read where settings alone show it, and changes nothing."""

import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

import fastformer as package
from fastformer.apps.classification import run as classification
from fastformer.apps.language import LanguageTrainConfig
from fastformer.apps.language import run as language
from fastformer.apps.train import TrainConfig
from fastformer.apps.translation import demo
from fastformer.apps.translation import run as translation
from fastformer.backend import BackendError
from tests.support.command_line import fastformer

SIZES = {"d_model": 8, "heads": 2, "feed_forward": 8}
FILES = {
    "two.txt": "a\nb\n", "three.txt": "a\nb\nc\n", "empty.txt": "", "blank.txt": "\n  \n\n", "cr.txt": "a\rb",
    "few.tsv": "a\tx\nb\ty\n", "tabless.tsv": "a\tx\nb x\n", "one.tsv": "a\tx\na\ty\n", "animals.tsv": "animal\tx\n",
    "typo.toml": "[model]\nd_modle = 3\n", "section.toml": "[modle]\n", "derived.toml": "[model]\npad_id = 3\n",
    "labels.toml": '[data]\nlabels = ["a", "b"]\n', "lm.toml": '[run]\nkind = "language"\n',
    "kind.toml": '[run]\nkind = "poetry"\n',
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(runs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of each kind with random weights (`tr`, `lm`, `cl`), and files."""
    folder = tmp_path_factory.mktemp("mistakes")
    for name, kind in (("tr", "translation"), ("lm", "language"), ("cl", "classification")):
        shutil.copytree(runs / kind, folder / name)
    for name, content in FILES.items():
        (folder / name).write_text(content)
    (folder / "bad.txt").write_bytes(b"fine\n\xff\xfe\n")
    return folder


NEW = "train --run new --steps 1"
PAIRS = f"{NEW} --train-source three.txt --train-target three.txt"
LM = "train lm --run new --steps 1"
WORDS = f"{LM} --train-text three.txt --tokenizer words"
CL = "train classify --run new --steps 1"
EARLY = [  # shown by the settings alone
    ("train --run new", "no end of training is set"),
    (f"{NEW} --metric blue", "metric must be one of loss, perplexity, bleu, chrf, not 'blue'"),
    (f"{NEW} --activation swish", "activation must be one of"),
    (f"{NEW} --d-model 16 --heads 3", "heads (3) must divide d_model (16)"),
    (f"{NEW} --d-model 64.0", "d_model must be a whole number, at least 1 and at most 2,147,483,647, not '64.0'"),
    (f"{NEW} --dropout 2", "dropout must be at least 0 and below 1, not 2.0"),
    (f"{NEW} --embeddings shared --no-joint", "embeddings 'shared' needs one joint vocabulary, but joint=False"),
    (f"{NEW} --positions learned --max-positions 9", "max_length (256) is beyond max_positions (9)"),
    (f"{NEW} --pad-id 2", "special ids must be four distinct integers"),
    (f"{NEW} --vocabulary 60 --eos-id 60", "eos_id must be at least 0 and below vocabulary (60), not 60"),
    (f"{NEW} --device meta", "device must be auto, cpu, cuda, cuda:N, mps or xpu, not 'meta'"),
    (f"{NEW} --device cpu --cuda-graphs", "cuda_graphs has an effect only with a CUDA device, not with a CPU"),
    (f"{NEW} --device cpu --parallel fsdp", "parallel has an effect only with several processes"),
    (f"{NEW} --batch-tokens 300 --batch-sentences 8", "batch_tokens has an effect only without batch_sentences"),
    (f"{PAIRS} --valid-source no.txt --valid-target two.txt", "no.txt: no such file in the current folder, "),
    (f"{PAIRS} --source en --dataset numbers", "dataset has an effect only without train_source; source has"),
    (f"{NEW} --config typo.toml", "did you mean 'd_model'?"),
    (f"{NEW} --config section.toml", "did you mean 'model'?"),
    (f"{NEW} --config derived.toml", "pad_id is set from the tokenizer"),
    (f"{NEW} --config no.toml", "no such configuration file"),
    (f"{NEW} --config lm.toml", "is for a language-model run; use `fastformer train lm`"),
    (f"{LM} --config kind.toml", "classification, not 'poetry'"),
    (f"{CL} --config labels.toml", "[data] labels is set from the training text; leave it out"),
    ("train --steps 1 --run two.txt", "two.txt is a file; a run needs a folder"),
    ("train --steps 1 --run tr", "tr holds a run already"),
    ("train --run tr --resume --heads 4", "takes its data and model from the run folder"),
    ("train --run nothing --resume --steps 9", "there is no folder nothing"),
    ("train --run lm --resume --steps 9", "lm is a language-model run, not a translation run: `fastformer generate`"),
    ("train --steps 9 lm --run new", "--steps must come after lm"),
    (f"{WORDS} --batch-tokens 64 --stream columns", "batch_tokens has an effect only with stream=documents, not with"),
    (f"{WORDS} --batch-tokens 64 --context 65", "batch_tokens (64) must be at least context (65)"),
    (
        f"{CL} --train-text few.tsv --valid-text few.tsv --test-text few.tsv --held-out 0.2",
        "held_out has an effect only with number words or a text file to split, not with text files",
    ),
    (f"{CL} --dataset reviews", "dataset must be numbers, unless train_text is given, not 'reviews'"),
]
LATE = [
    (f"{NEW} --target it", "fr, de"),
    (f"{NEW} --dataset missing", "missing"),
    (f"{NEW} --train-source three.txt --train-target two.txt", "has 3 lines but two.txt has 2"),
    (f"{NEW} --train-source bad.txt --train-target two.txt", "bad.txt:2: not valid UTF-8"),
    (f"{NEW} --train-source cr.txt --train-target two.txt", "its lines end with CR alone"),
    (f"{LM} --train-text empty.txt", "empty.txt: the file is empty"),
    (f"{WORDS} --document article", "needs titles"),
    (f"{CL} --train-text tabless.tsv", "tabless.tsv:2: no tab; a line is a label, a tab and a text"),
    (f"{CL} --train-text one.tsv", "one.tsv: every text has the label 'a'"),
    (f"{CL} --train-text few.tsv", "train: 2 different texts are too few"),
    (f"{CL} --train-text few.tsv --valid-text animals.tsv", "label 'animal' is not among those of training: a, b"),
    ("data multi31k --from .", "multi30k"),
    ("data multi30k --from nowhere", "nowhere"),
    ("translate --run . hello", ". is not a run folder: it has no config.toml"),
    ("translate --run tr --checkpoint newest hello", "best, last, average"),
    ("translate --run tr --beam 0 hello", "beam must be at least 1"),
    ("translate --run tr --beam 1000000 hello", "beam must be at least 1 and at most 1,000, not 1000000"),
    ("translate --run tr --beam 2 --n-best 3 hello", "n_best must be at least 1 and at most beam (2), not 3"),
    ("translate --run tr --beam 1 --length-penalty 0.5 a", "length_penalty has an effect only with a beam above 1"),
    (
        "score --run tr --source three.txt --target two.txt",
        "three.txt has 3 lines but two.txt has 2; they must",
    ),
    (
        "score --run tr --source blank.txt --target three.txt",
        "source 1 has 0 tokens, and this model scores sentences of 1 to",
    ),
    ("translate --run tr --sample --beam 2 a", "beam has an effect only with sample=False"),
    ("evaluate --run tr --n-best 2", "n_best has no effect here: the best translation is scored"),
    ("compare tr lm --bootstrap 9", "--bootstrap compares at least two translation runs"),
    ("translate --run tr --input two.txt seven", "give sentences or --input, not both"),
    ("translate --run tr --batch-size 2.0 hello", "batch_size must be a whole number, at least 1, not '2.0'"),
    ("evaluate --run tr --bleu-tokenizer flores200", "bleu_tokenizer must be one of 13a, intl, zh, ja-mecab, "),
    ("evaluate --run tr --split dev", "split must be one of test, valid"),
    ("evaluate --run tr --source three.txt", "--source and --target must be given together"),
    ("evaluate --run tr --split valid --source two.txt", "give --split or --source, not both"),
    ("evaluate --run lm --beam 3", "lm is a language-model run; --beam is not for it"),
    ("evaluate --run cl --source few.tsv", "few.tsv:1: label 'a' is not among those of training: x, y, z"),
    ("generate --run lm --temperature 0 --top-k 3 a", "top_k has an effect only with a temperature above 0"),
    ("generate --run lm --min-new-tokens 9 --max-new-tokens 8 a", "min_new_tokens must be at least 0 and at most"),
    ("generate --run lm --prompt-file empty.txt", "empty.txt: the file is empty"),
    ("classify --run cl --input two.txt hello", "give texts or --input, not both"),
    ("plot attention --run cl --source the", "cl is a classification run; give --text"),
    ("plot attention --run lm --text the --kind cross", "lm is a language-model run; --kind is not for it"),
    ("plot attention --run lm --text the --layer 2", "layer must be 1 to 1 or all, not 2"),
    ("plot attention --run tr --source the --kind self", "kind must be one of cross, encoder, decoder, not 'self'"),
    ("plot attention --run tr --source=", "source must hold at least one token, not ''"),
    ("plot attention --run nothing --output p.jpg", "p.jpg: the name of a figure must end in .png"),
    ("plot positions --length 9.0", "length must be a whole number, at least 1 and at most 2,048, not '9.0'"),
    ("plot history tr", "tr: no metrics yet, so there is nothing to draw"),
    ("export --run tr --to new --format onnx", "format must be one of ctranslate2, safetensors, not 'onnx'"),
    ("export --run tr --to new --format safetensors --quantization int8", "--quantization is not for format safetens"),
    ("export --run tr --to lm --format safetensors", "choose another folder"),
    ("export --run cl --to new", "CTranslate2 has no models like SequenceClassifier; export it as safetensors"),
]


@pytest.fixture
def unread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading data fails."""

    def read(*arguments: Any) -> None:
        raise AssertionError("data was read")

    for module in (translation, demo):
        monkeypatch.setattr(module, "read_corpora", read)
    monkeypatch.setattr(language, "read_text_corpora", read)
    monkeypatch.setattr(classification, "read_labelled_corpora", read)


def state(folder: Path) -> dict[Path, int]:
    """Return the times of all files and 0 for folders."""
    paths = (path for path in folder.rglob("*") if path.name != ".lock")
    return {path: path.stat().st_mtime_ns if path.is_file() else 0 for path in paths}


def check(folder: Path, command: str, message: str) -> None:
    before = state(folder)
    done = fastformer(*command.split(), cwd=folder)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert message in done.stderr
    assert done.stderr.startswith("error: ")
    assert state(folder) == before


@pytest.mark.parametrize(("command", "message"), EARLY, ids=[command for command, _ in EARLY])
@pytest.mark.usefixtures("unread")
def test_what_settings_show_is_refused_before_data_is_read(folder: Path, command: str, message: str) -> None:
    check(folder, command, message)


@pytest.mark.parametrize(("command", "message"), LATE, ids=[command for command, _ in LATE])
def test_a_mistake_gets_one_line_and_changes_nothing(folder: Path, command: str, message: str) -> None:
    check(folder, command, message)


@pytest.mark.parametrize("command", [NEW, LM, "demo --device cpu --run new"])
@pytest.mark.usefixtures("unread")
def test_a_backend_that_cannot_run_here_is_refused_before_data_is_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.setattr("fastformer.functional.choice._INTERPRETED", False)
    with package.backend("triton"):
        check(folder, command, "error: backend 'triton' was asked for, but attention needs")
    monkeypatch.setattr(sys.modules["fastformer.backend"].process, "backend", "foo")
    check(folder, command, "FASTFORMER_BACKEND is 'foo'; it must be one of auto, triton, reference")


@pytest.mark.usefixtures("unread", "triton_backend")
def test_a_head_that_kernels_cannot_take_is_refused_before_data_is_read(tmp_path: Path) -> None:
    model = {"d_model": 514, "heads": 2}
    with pytest.raises(BackendError, match="head sizes from 1 to 256, not 257"):
        translation.TranslationRun.create(tmp_path / "new", translation.DataConfig(), model, TrainConfig(steps=1))


@pytest.mark.usefixtures("unread")
def test_python_is_refused_as_early(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, data = tmp_path / "new", translation.DataConfig()
    create = translation.TranslationRun.create
    text = language.LanguageDataConfig()
    with pytest.raises(ValueError, match="batch_sentences is for translation"):
        language.LanguageRun.create(run, text, {}, LanguageTrainConfig(steps=1, batch_sentences=8))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"needs sacrebleu: pip install 'fastformer\[apps\]'"):
        create(run, data, SIZES, TrainConfig(steps=1))
    with pytest.raises(ImportError, match=r"needs tensorboard: pip install 'fastformer\[tensorboard\]'"):
        language.LanguageRun.create(run, text, {}, LanguageTrainConfig(steps=1, tensorboard=True))
    assert not run.exists()
