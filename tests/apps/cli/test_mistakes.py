"""A mistake gives one line and exit status 2, before data is read where settings alone show it, and changes nothing."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("typer", reason="the command line needs the extra `apps`")

import fastformer as package
from fastformer.apps.classification import ClassifierConfig, SequenceClassifier
from fastformer.apps.classification import run as classification
from fastformer.apps.language import LanguageConfig, LanguageModel, LanguageTrainConfig
from fastformer.apps.language import run as language
from fastformer.apps.text import WordTokenizer
from fastformer.apps.train import TrainConfig
from fastformer.apps.translation import TranslationConfig, TranslationModel, demo
from fastformer.apps.translation import run as translation
from fastformer.backend import BackendError
from tests.support.command_line import fastformer
from tests.support.run_folders import save_run

SIZES = {"d_model": 8, "heads": 2, "feed_forward": 8}
FILES = {
    "two.txt": "a\nb\n", "three.txt": "a\nb\nc\n", "empty.txt": "", "blank.txt": "\n  \n\n", "cr.txt": "a\rb",
    "few.tsv": "a\tx\nb\ty\n", "tabless.tsv": "a\tx\nb x\n", "one.tsv": "a\tx\na\ty\n", "animals.tsv": "animal\tx\n",
    "typo.toml": "[model]\nd_modle = 3\n", "section.toml": "[modle]\n", "tokens.toml": "[train]\nbatch_tokens = 300\n",
    "derived.toml": "[model]\npad_id = 3\n", "classes.toml": "[model]\nclasses = 3\n",
    "labels.toml": '[data]\nlabels = ["a", "b"]\n', "lm.toml": '[run]\nkind = "language"\n',
    "tr.toml": '[run]\nkind = "translation"\n', "kind.toml": '[run]\nkind = "poetry"\n',
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of each kind with random weights (`tr`, `lm`, `cl`), and files."""
    folder = tmp_path_factory.mktemp("mistakes")
    tokenizer = WordTokenizer.from_lines(["a b c the cat"])
    torch.manual_seed(0)
    layers: dict[str, Any] = {"encoder_layers": 1, "decoder_layers": 1, **SIZES}
    model = TranslationModel(TranslationConfig(tokenizer.size, tokenizer.size, **layers))
    save_run(folder / "tr", model, tokenizer, tokenizer, max_length=9)
    for name, positions in (("lm", "rotary"), ("learned", "learned")):
        config = LanguageConfig(tokenizer.size, layers=1, positions=positions, max_positions=9, **SIZES)  # type: ignore[arg-type]
        save_run(folder / name, LanguageModel(config), tokenizer, context=8)
    labels = ("animal", "plant", "tool")
    classifier = SequenceClassifier(ClassifierConfig(tokenizer.size, classes=3, layers=1, **SIZES))  # type: ignore[arg-type]
    save_run(folder / "cl", classifier, tokenizer, labels=labels, max_length=9)
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
    (f"{NEW} --metric bleu --bleu-sentences 0", "metric must be one of loss, perplexity, not 'bleu'"),
    (f"{NEW} --activation swish", "activation must be one of"),
    (f"{NEW} --d-model 16 --heads 3", "heads (3) must divide d_model (16)"),
    (f"{NEW} --d-model 64.0", "d_model must be a whole number, at least 1 and at most 2,147,483,647, not '64.0'"),
    (f"{NEW} --dropout 2", "dropout must be at least 0 and below 1, not 2.0"),
    (f"{NEW} --norm-eps 0", "norm_eps must be above 0, not 0.0"),
    (f"{NEW} --embeddings shared --no-joint", "embeddings 'shared' needs one joint vocabulary, but joint=False"),
    (f"{NEW} --positions learned --max-positions 9", "max_length (256) is beyond max_positions (9)"),
    (f"{NEW} --pad-id 2", "special ids must be four distinct integers"),
    (f"{NEW} --vocabulary 60 --eos-id 60", "eos_id must be at least 0 and below vocabulary (60), not 60"),
    (f"{NEW} --character-coverage 1.5", "coverage must be at least 0.98 and at most 1, not 1.5"),
    (f"{NEW} --device meta", "device must be auto, cpu, cuda, cuda:N, mps or xpu, not 'meta'"),
    (f"{NEW} --device cpu --cuda-graphs", "cuda_graphs has an effect only with a CUDA device, not with a CPU"),
    (f"{NEW} --device cpu --parallel fsdp", "parallel has an effect only with several processes"),
    (f"{NEW} --batch-tokens 300 --batch-sentences 8", "batch_tokens has an effect only without batch_sentences"),
    (f"{NEW} --config tokens.toml --batch-sentences 8", "batch_tokens has an effect only without batch_sentences"),
    (f"{NEW} --train-source two.txt", "train_source and train_target must be given together"),
    (f"{PAIRS} --valid-source no.txt --valid-target two.txt", "no.txt: no such file"),
    (f"{PAIRS} --source en --dataset numbers", "dataset has an effect only without train_source; source has"),
    (f"{NEW} --config typo.toml", "did you mean 'd_model'?"),
    (f"{NEW} --config section.toml", "did you mean 'model'?"),
    (f"{NEW} --config derived.toml", "pad_id is set from the tokenizer"),
    (f"{NEW} --config no.toml", "no such configuration file"),
    (f"{NEW} --config lm.toml", "is for a language-model run; use `fastformer train lm`"),
    (f"{LM} --config tr.toml", "is for a translation run; use `fastformer train`"),
    (f"{LM} --config kind.toml", "classification, not 'poetry'"),
    (f"{CL} --config classes.toml", "[model] classes is set from the labels; leave it out"),
    (f"{CL} --config labels.toml", "[data] labels is set from the training text; leave it out"),
    ("train --steps 1 --run two.txt", "two.txt is a file; a run needs a folder"),
    ("train --steps 1 --run two.txt/run", "two.txt is a file; a run needs a folder"),
    ("train --steps 1 --run tr", "tr holds a run already"),
    ("train --run tr --resume --heads 4", "takes its data and model from the run folder"),
    ("train --run nothing --resume --steps 9", "not a run folder"),
    ("train --run lm --resume --steps 9", "lm is a language-model run; use `fastformer generate`"),
    ("train lm --run tr --resume --steps 9", "tr is a translation run; use `fastformer translate`"),
    ("train --steps 9 lm --run new", "--steps must come after lm"),
    (f"{WORDS} --batch-sentences 4", "batch_sentences has an effect only with sentence pairs, not with running"),
    (f"{WORDS} --batch-tokens 64 --stream columns", "batch_tokens has an effect only with stream=documents, not with"),
    (f"{WORDS} --size 9", "size has an effect only with docstrings, not with a text file to split"),
    (f"{WORDS} --batch-tokens 64 --context 65", "batch_tokens (64) must be at least context (65)"),
    (f"{WORDS} --stream rows", "stream must be one of documents, columns, not 'rows'"),
    (f"{WORDS} --context 0", "context must be at least 1, not 0"),
    (f"{WORDS} --output-dropout 1", "output_dropout must be at least 0 and below 1, not 1.0"),
    (f"{LM} --valid-text two.txt", "valid_text and test_text need train_text"),
    (
        f"{CL} --train-text few.tsv --valid-text few.tsv --test-text few.tsv --held-out 0.2",
        "held_out has an effect only with number words or a text file to split, not with text files",
    ),
    (f"{CL} --dataset reviews", "dataset must be numbers, unless train_text is given, not 'reviews'"),
    (f"{CL} --batch-tokens 400", "batch_tokens has an effect only without batch_sentences"),
    (f"{CL} --batch-sentences 0", "batch_sentences must be at least 1, not 0"),
]
LATE = [
    (f"{NEW} --target it", "fr, de"),
    (f"{NEW} --dataset missing", "missing"),
    (f"{NEW} --train-source three.txt --train-target two.txt", "has 3 lines but two.txt has 2"),
    (f"{NEW} --train-source bad.txt --train-target two.txt", "bad.txt:2: not valid UTF-8"),
    (f"{NEW} --train-source cr.txt --train-target two.txt", "its lines end with CR alone"),
    (f"{LM} --train-text empty.txt", "empty.txt: the file is empty"),
    (f"{LM} --train-text blank.txt", "blank.txt: holds no word"),
    (f"{WORDS} --document article", "needs titles"),
    (f"{WORDS} --document file", "too few"),
    (f"{CL} --train-text tabless.tsv", "tabless.tsv:2: no tab; a line is a label, a tab and a text"),
    (f"{CL} --train-text one.tsv", "one.tsv: every text has the label 'a'"),
    (f"{CL} --train-text few.tsv", "train: 2 different texts are too few"),
    (f"{CL} --train-text few.tsv --valid-text animals.tsv", "label 'animal' is not among those of training: a, b"),
    ("demo --target it --run new", "fr, de"),
    ("data multi31k --from .", "multi30k"),
    ("data multi30k --from nowhere", "nowhere"),
    ("info --run nothing", "not a run folder"),
    ("translate --run nothing hello", "not a run folder"),
    ("translate --run lm hello", "lm is a language-model run; use `fastformer generate`"),
    ("translate --run tr --checkpoint newest hello", "best, last, average"),
    ("translate --run tr --beam 0 hello", "beam must be at least 1"),
    ("translate --run tr --beam 2 --n-best 3 hello", "n_best must be at least 1 and at most beam (2), not 3"),
    ("translate --run tr --beam 1 --length-penalty 0.5 a", "length_penalty has an effect only with a beam above 1"),
    ("translate --run tr --input no.txt", "no.txt"),
    (
        "score --run tr --source three.txt --target two.txt",
        "three.txt has 3 lines but two.txt has 2; they must",
    ),
    (
        "score --run tr --source blank.txt --target three.txt",
        "source 1 has 0 tokens; scored sentences must have 1",
    ),
    ("translate --run tr --sample --beam 2 a", "beam has an effect only with sample=False"),
    ("translate --run tr --top-p 0.9 a", "top_p has an effect only with sample=True"),
    ("compare tr lm --bootstrap 9", "--bootstrap compares at least two translation runs"),
    ("translate --run tr --input two.txt seven", "give sentences or --input, not both"),
    ("translate --run tr --batch-size 0 hello", "batch_size must be at least 1"),
    ("translate --run tr --batch-size 2.0 hello", "batch_size must be a whole number, at least 1, not '2.0'"),
    ("translate --run tr --device tpu a", "device must be auto, cpu, cuda, cuda:N, mps or xpu, not 'tpu'"),
    ("evaluate --run tr --bleu-tokenizer flores200", "bleu_tokenizer must be one of 13a, intl, zh, ja-mecab, "),
    ("evaluate --run tr --split dev", "split must be one of test, valid"),
    ("evaluate --run tr --source three.txt", "--source and --target must be given together"),
    ("evaluate --run tr --split valid --source two.txt", "give --split or --source, not both"),
    ("evaluate --run lm --beam 3", "lm is a language-model run; --beam is not for it"),
    ("evaluate --run cl --source few.tsv", "few.tsv:1: label 'a' is not among those of training: animal, plant, tool"),
    ("generate --run tr hello", "tr is a translation run; use `fastformer translate`"),
    ("generate --run lm --temperature 0 --top-k 3 a", "top_k has an effect only with a temperature above 0"),
    ("generate --run lm --temperature -1 a", "temperature must be at least 0, not -1.0"),
    ("generate --run lm --top-p 1.5 a", "top_p must be above 0 and at most 1, not 1.5"),
    ("generate --run lm --min-new-tokens 9 --max-new-tokens 8 a", "min_new_tokens must be at least 0 and at most"),
    ("generate --run lm --batch-size 0 a", "batch_size must be at least 1, not 0"),
    ("generate --run lm --prompt-file two.txt a", "give prompts or --prompt-file, not both"),
    ("generate --run lm --prompt-file empty.txt", "empty.txt: the file is empty"),
    ("generate --run lm --output nowhere/out.txt a", "nowhere: no such folder"),
    ("classify --run cl --input two.txt hello", "give texts or --input, not both"),
    ("classify --run cl --input two.txt --output two.txt", "two.txt is also read"),
    ("classify --run cl --input two.txt --output cl/config.toml", "is a file of the run cl"),
    ("plot attention --run cl --source the", "cl is a classification run; give --text"),
    ("plot attention --run tr", "tr is a translation run; give --source"),
    ("plot attention --run lm --text the --kind cross", "lm is a language-model run; --kind is not for it"),
    ("plot attention --run lm --text the --layer 2", "layer must be 1 to 1 or all, not 2"),
    ("plot attention --run lm --text the --layer last", "layer must be a number or all, not 'last'"),
    ("plot attention --run tr --source the --kind self", "kind must be one of cross, encoder, decoder, not 'self'"),
    ("plot attention --run tr --source the --head 3", "head must be 1 to 2 or all or mean, not 3"),
    ("plot attention --run tr --source=", "source must hold at least one token, not ''"),
    ("plot attention --run nothing --output p.jpg", "p.jpg: the name of a figure must end in .png"),
    ("plot positions --length 9.0", "length must be a whole number, at least 1 and at most 2,048, not '9.0'"),
    ("plot history tr", "tr: no metrics yet, so there is nothing to draw"),
    ("compare nothing", "nothing is not a run folder"),
    ("export --run tr --to new --format onnx", "format must be one of ctranslate2, safetensors, not 'onnx'"),
    ("export --run tr --to new --format safetensors --quantization int8", "--quantization is not for format safetens"),
    ("export --run tr --to new --quantization int3", "quantization must be one of"),
    ("export --run tr --to lm --format safetensors", "choose another folder"),
    ("export --run cl --to new", "CTranslate2 has no models like SequenceClassifier; export it as safetensors"),
]


@pytest.fixture
def unread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading data fails."""

    def read(*arguments: Any) -> None:
        raise AssertionError("data was read")

    for module, name in (
        (translation, "read_corpora"),
        (language, "read_text_corpora"),
        (classification, "read_labelled_corpora"),
        (demo, "read_corpora"),
    ):
        monkeypatch.setattr(module, name, read)


def check(folder: Path, command: str, message: str) -> None:
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.name != ".lock"}
    done = fastformer(*command.split(), cwd=folder)
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr
    assert done.stderr.startswith("error: ")
    assert len(done.stderr.strip().split("\n")) == 1
    after = {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.name != ".lock"}
    assert {path: time for path, time in after.items() if path.is_file()} == {
        p: t for p, t in before.items() if p.is_file()
    }
    assert after.keys() == before.keys()


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
    with pytest.raises(ValueError, match="metric must be one of loss, "):
        create(run, data, SIZES, TrainConfig(steps=1, metric="blue"))
    with pytest.raises(ValueError, match="device='cuda:77' cannot be used"):
        create(run, data, SIZES, TrainConfig(steps=1), "cuda:77")
    text = language.LanguageDataConfig()
    with pytest.raises(ValueError, match="batch_sentences is for translation"):
        language.LanguageRun.create(run, text, {}, LanguageTrainConfig(steps=1, batch_sentences=8))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"needs sacrebleu: pip install 'fastformer\[apps\]'"):
        create(run, data, SIZES, TrainConfig(steps=1))
    with pytest.raises(ImportError, match=r"needs tensorboard: pip install 'fastformer\[tensorboard\]'"):
        language.LanguageRun.create(run, text, {}, LanguageTrainConfig(steps=1, tensorboard=True))
    assert not run.exists()
