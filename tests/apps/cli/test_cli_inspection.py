"""`fastformer plot` and `fastformer compare` as a person uses them."""

from pathlib import Path

import pytest
import torch

pytest.importorskip("typer", reason="the command line needs the extra `apps`")
pytest.importorskip("matplotlib", reason="plots need matplotlib")


from fastformer.apps.translation.run import load_translator
from fastformer.apps.translation.search import SearchOptions
from fastformer.apps.translation.translator import attend
from tests.apps.cli.test_cli import TRAIN
from tests.apps.cli.test_cli_language import TEXT, TRAIN_LM
from tests.support.command_line import fastformer

PNG = b"\x89PNG\r\n"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with tiny trained runs: of subword pieces, of words, of a language model; and one that only began."""
    folder = tmp_path_factory.mktemp("inspection")
    for name, options in (("pieces", ""), ("words", "--tokenizer words --decoder-layers 2 --positions learned")):
        done = fastformer(*TRAIN.split(), *options.split(), "--run", name, cwd=folder)
        assert done.returncode == 0, done.stderr
    (folder / "text.txt").write_text("\n".join(TEXT) + "\n")
    done = fastformer(*TRAIN_LM.split(), "--positions", "learned", "--max-positions", "9", "--run", "lm", cwd=folder)
    assert done.returncode == 0, done.stderr
    (folder / "begun").mkdir()
    (folder / "begun" / "config.toml").write_text((folder / "pieces" / "config.toml").read_text())
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("run", ["pieces", "words"])
def test_the_maps_of_a_sentence_carry_its_tokens_and_its_weights(runs: Path, run: str) -> None:
    translator = load_translator(runs / run)
    found = attend(translator, "twelve thousand one")
    assert found.target == translator.translate(["twelve thousand one"], SearchOptions())[0]
    source, target = translator.source_tokenizer, translator.target_tokenizer
    ids = source.encode("twelve thousand one")
    cross, decoder = found.maps["cross"], found.maps["decoder"]
    assert cross.keys == found.maps["encoder"].queries == source.pieces([*ids, source.eos_id])
    assert (cross.keys[-1], decoder.keys[0], decoder.queries[-1]) == ("<eos>", "<bos>", "<eos>")
    assert decoder.keys[1:] == decoder.queries[:-1] == cross.queries[:-1]
    given = attend(translator, "twelve thousand one", "douze mille un")
    assert given.maps["cross"].queries == target.pieces([*target.encode("douze mille un"), target.eos_id])
    read = torch.tensor([target.bos_id, *target.encode("douze mille un")])
    expected = translator.model.attention_maps(torch.tensor([*ids, source.eos_id]), read)
    assert all(torch.equal(given.maps[kind].weights, expected[kind]) for kind in ("encoder", "decoder", "cross"))
    assert attend(translator, "one", "").maps["cross"].queries == ["<eos>"]


@pytest.mark.parametrize(
    "options",
    ["", "--kind encoder --layer 1 --head 2", "--layer all --head mean --target deux", "--kind decoder --layer all"],
)
def test_plot_attention_writes_a_picture(runs: Path, tmp_path: Path, options: str) -> None:
    command = ["plot", "attention", "--run", "pieces", "--source", "two", "--output", str(tmp_path / "deep" / "a.png")]
    done = fastformer(*command, *options.split(), cwd=runs)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "deep" / "a.png").read_bytes().startswith(PNG)
    assert done.stdout.startswith("two -> ")
    assert str(tmp_path / "deep" / "a.png") in done.stdout


@pytest.mark.parametrize("options", ["", "--layer all --head mean", "--layer 1 --head 2"])
def test_plot_attention_of_a_language_model(runs: Path, tmp_path: Path, options: str) -> None:
    command = ["plot", "attention", "--run", "lm", "--text", "the cat sees", "--output", str(tmp_path / "a.png")]
    done = fastformer(*command, *options.split(), cwd=runs)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "a.png").read_bytes().startswith(PNG)
    assert done.stdout == f"wrote {tmp_path / 'a.png'}\n"


def test_plot_positions_and_history_write_pictures(runs: Path, tmp_path: Path) -> None:
    for command in (
        "positions --d-model 7 --length 5",
        "history pieces",
        "history pieces begun words",
    ):
        done = fastformer("plot", *command.split(), "--output", str(tmp_path / "p.png"), cwd=runs)
        assert done.returncode == 0, done.stderr
        assert (tmp_path / "p.png").read_bytes().startswith(PNG)
        (tmp_path / "p.png").unlink()


def test_compare_prints_a_table(runs: Path) -> None:
    done = fastformer("compare", "pieces", "words", "begun", cwd=runs)
    assert done.returncode == 0, done.stderr
    rows = {line.strip().rsplit(maxsplit=3)[0]: line.split()[-3:] for line in done.stdout.splitlines()[1:] if line}
    assert done.stdout.splitlines()[0].split() == ["pieces", "words", "begun"]
    assert rows["steps"] == ["4", "4", "–"]
    assert rows["data.tokenizer"] == ["bpe", "words", "bpe"]
    for name in ("loss", "perplexity", "bleu"):
        assert float(rows[name][0]) >= 0
    assert "losses and perplexities do not compare" in done.stdout


@pytest.mark.parametrize(
    ("command", "name"),
    [("history pieces", "p.pdf"), ("positions", "p.svg"), ("attention --run pieces --source two", "p.PNG")],
)
def test_figures_have_the_format_of_their_name(runs, tmp_path, command, name):
    done = fastformer("plot", *command.split(), "--output", str(tmp_path / name), cwd=runs)
    assert done.returncode == 0, done.stderr
    begin = {"p.pdf": b"%PDF", "p.svg": b"<?xml", "p.PNG": b"\x89PNG"}[name]
    assert (tmp_path / name).read_bytes().startswith(begin)
