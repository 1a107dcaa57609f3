"""A vocabulary of bytes, as many sentencepiece models have, may decode to ends of lines: line n stays the nth line.

What is translated from a file goes beside it line by line; one more line, and every pair after it is a wrong one.
"""

import math
from pathlib import Path

import pytest
import torch

pytest.importorskip("typer", reason="the command line needs the extra `apps`")

from fastformer.apps.text import WordTokenizer
from fastformer.apps.translation.model import TranslationConfig, TranslationModel
from tests.support.command_line import fastformer
from tests.support.run_folders import save_run

WORDS = ["<unk>", "<pad>", "<bos>", "<eos>", "a", "b\r\nc"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a run that translates everything to the word with an end of a line in it, and two sentences."""
    folder = tmp_path_factory.mktemp("lines")
    tokenizer = WordTokenizer(WORDS, splitting="whitespace")
    sizes = {"d_model": 8, "heads": 2, "feed_forward": 8, "encoder_layers": 1, "decoder_layers": 1}
    settings = TranslationConfig(tokenizer.size, tokenizer.size, output_bias=True, **sizes)
    torch.manual_seed(0)
    model = TranslationModel(settings)
    with torch.no_grad():
        model.output.bias[5] = 50.0
    save_run(folder / "run", model, tokenizer, tokenizer, max_length=9)
    (folder / "source").write_text("a\na a\n")
    return folder


COMMANDS = {
    "translate": "translate --run run --input source --beam 1 --max-length 2 --device cpu",
    "evaluate": "evaluate --run run --source source --target source --beam 1 --max-length 2 --device cpu",
}


@pytest.mark.parametrize(
    ("command", "to_file"), [("translate", False), ("translate", True), ("evaluate", True)], ids=str
)
def test_each_sentence_gives_one_line(
    folder: Path, command: str, to_file: bool, caplog: pytest.LogCaptureFixture
) -> None:
    done = fastformer(*COMMANDS[command].split(), *(("--output", "out") if to_file else ()), cwd=folder)
    assert done.returncode == 0, done.stderr
    written = (folder / "out").read_bytes().decode() if to_file else done.stdout
    assert written == "b c b c\nb c b c\n"
    assert "2 lines had ends of lines within; they have spaces there" in caplog.text


def test_each_sentence_gives_n_best_lines(folder: Path) -> None:
    """An empty one has a single translation, and of one token there are four: three words and the end."""
    arguments = ("--run", "run", "--beam", "6", "--n-best", "6", "--max-length", "1", "--device", "cpu")
    texts, scored = (
        fastformer("translate", *arguments, *more, cwd=folder, stdin=b"a\n\na a\n") for more in ((), ("--scores",))
    )
    assert (texts.returncode, scored.returncode) == (0, 0), texts.stderr
    scores, same = zip(*(line.split("\t") for line in scored.stdout.splitlines()), strict=True)
    assert list(same) == texts.stdout.splitlines()
    found = [[float(x) for x in scores[first : first + 6]] for first in (0, 6, 12)]
    assert [sum(x > -math.inf for x in each) for each in found] == [4, 1, 4]
    assert all(each == sorted(each, reverse=True) for each in found)
