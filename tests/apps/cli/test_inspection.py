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
from tests.support.command_line import fastformer


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with tiny trained runs of translation, of pieces and of words; and one that only began."""
    folder = tmp_path_factory.mktemp("inspection")
    for name, options in (("pieces", ""), ("words", "--tokenizer words --decoder-layers 2 --positions learned")):
        done = fastformer(*TRAIN.split(), *options.split(), "--run", name, cwd=folder)
        assert done.returncode == 0, done.stderr
    (folder / "begun").mkdir()
    (folder / "begun" / "config.toml").write_text((folder / "pieces" / "config.toml").read_text())
    return folder


@pytest.mark.parametrize("run", ["pieces", "words"])
def test_the_maps_of_a_sentence_carry_its_tokens_and_its_weights(trained: Path, run: str) -> None:
    translator = load_translator(trained / run)
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
    ("options", "begin"),
    [
        ("--run translation --source w1", "w1 -> "),
        ("--run translation --source w1 --kind encoder --layer 1 --head 2", "w1 -> "),
        ("--run translation --source w1 --layer all --head mean --target w2", "w1 -> w2"),
        ("--run language --text w1 --layer all", "wrote "),
        ("--run classification --text w1 --head mean", ""),
    ],
)
def test_plot_attention_writes_a_picture(runs: Path, tmp_path: Path, options: str, begin: str) -> None:
    done = fastformer("plot", "attention", *options.split(), "--output", str(tmp_path / "new" / "a.png"), cwd=runs)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(begin)
    assert done.stdout.endswith(f"wrote {tmp_path / 'new' / 'a.png'}\n")
    assert (tmp_path / "new" / "a.png").read_bytes().startswith(b"\x89PNG\r\n")


@pytest.mark.parametrize(
    ("command", "name", "begin"),
    [
        ("history pieces begun words", "p.pdf", b"%PDF"),
        ("history pieces", "p.PNG", b"\x89PNG"),
        ("positions --d-model 7 --length 5", "p.svg", b"<?xml"),
    ],
)
def test_figures_have_the_format_of_their_name(
    trained: Path, tmp_path: Path, command: str, name: str, begin: bytes
) -> None:
    done = fastformer("plot", *command.split(), "--output", str(tmp_path / name), cwd=trained)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / name).read_bytes().startswith(begin)


def test_compare_prints_a_table(trained: Path) -> None:
    done = fastformer("compare", "pieces", "words", "begun", cwd=trained)
    assert done.returncode == 0, done.stderr
    rows = {line.strip().rsplit(maxsplit=3)[0]: line.split()[-3:] for line in done.stdout.splitlines()[1:] if line}
    assert done.stdout.splitlines()[0].split() == ["pieces", "words", "begun"]
    assert rows["steps"] == ["4", "4", "–"]
    assert rows["data.tokenizer"] == ["bpe", "words", "bpe"]
    for name in ("loss", "perplexity", "bleu"):
        assert float(rows[name][0]) >= 0
    assert "losses and perplexities do not compare" in done.stdout
