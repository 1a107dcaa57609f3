"""Figures show what was given, labelled and without overlap, and attention maps are the weights of torch's layers."""

import itertools
from pathlib import Path

import pytest
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.text import Text

from fastformer.apps.classification.model import SequenceClassifier, TokenClassifier
from fastformer.apps.language.sampling import TextGenerator
from fastformer.apps.plots import figure as figure_module
from fastformer.apps.plots import plot_attention, plot_history, plot_positions
from fastformer.apps.plots.attention_maps import attend_ids
from fastformer.apps.text import WordTokenizer
from fastformer.apps.translation.run import load_translator
from fastformer.apps.translation.search import SearchOptions
from tests.support import single_stack, translation_task
from tests.support.language_task import random_model
from tests.support.python import python
from tests.support.single_stack import TorchTwin
from tests.support.translation_task import weights_of

KINDS = ("encoder", "decoder", "cross")
TRAIN = [{"kind": "train", "step": step, "epoch": 1, "seconds": 1.0, "loss": 5.0 / step, "lr": 0.1} for step in (1, 2)]
VALIDATION = [
    {"kind": "validation", "step": 2, "epoch": 1, "loss": 3.0, "perplexity": 20.0, "bleu": 11.0, "exact": 0.5},
    {"kind": "validation", "step": 4, "epoch": 2, "loss": 2.0, "perplexity": 7.4, "bleu": 22.0, "exact": 0.75},
]


def tokens(count: int, word: str = "Wort") -> list[str]:
    return [f"▁{word}{i}" for i in range(count)]


def renderer_of(figure):
    """The renderer, after the layout was computed as for a PNG."""
    figure.dpi = figure_module.DPI
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return canvas.get_renderer()


def check_texts(figure) -> None:
    """The edge of the figure cuts no text, and no label of an axis overlaps its neighbour."""
    renderer, frame = renderer_of(figure), figure.bbox
    hidden = set()  # labels of ticks that lie beyond the ends of their axis, and are not drawn
    for axis in (axis for axes in figure.axes for axis in (axes.xaxis, axes.yaxis)):
        low, high = sorted(axis.get_view_interval())
        ticks = [*axis.get_major_ticks(), *axis.get_minor_ticks()]
        hidden |= {label for tick in ticks if not low <= tick.get_loc() <= high for label in (tick.label1, tick.label2)}
        labels = [label for label in axis.get_ticklabels() if label.get_text() and label not in hidden]
        boxes = [label.get_window_extent(renderer) for label in labels]
        assert not any(one.overlaps(other) for one, other in itertools.pairwise(boxes))
    texts = [text for text in figure.findobj(Text) if text.get_visible() and text.get_text() and text not in hidden]
    boxes = [(text.get_text(), text.get_window_extent(renderer)) for text in texts]
    assert not [text for text, box in boxes if box.x0 < 0 or box.y0 < 0 or box.x1 > frame.x1 or box.y1 > frame.y1]


def images_of(figure) -> list[torch.Tensor]:
    return [torch.from_numpy(axes.images[0].get_array().filled()) for axes in figure.axes if axes.get_images()]


def labels_of(axis) -> list[str]:
    return [label.get_text() for label in axis.get_ticklabels()]


def test_history_has_a_panel_for_every_value_and_a_line_for_every_run():
    figure = plot_history({"$5 or $6": [*TRAIN, *VALIDATION], "_large": TRAIN})  # a formula, a hidden name
    labels = [axes.get_ylabel() for axes in figure.axes]
    assert labels == [
        "loss (mean, in nats)", "validation perplexity", "validation BLEU (percent)", "validation exact",
    ]  # fmt: skip
    assert {axes.get_xlabel() for axes in figure.axes} == {"optimiser step"}
    loss, perplexity, bleu, _ = figure.axes
    lines = [line.get_xydata().tolist() for line in loss.lines]
    assert lines == [[[1, 5], [2, 2.5]], [[2, 3], [4, 2]], [[1, 5], [2, 2.5]]]
    assert len({line.get_color() for line in loss.lines}) == 2
    assert perplexity.get_yscale() == "log"
    assert list(bleu.lines[0].get_ydata()) == [11.0, 22.0]
    names = figure.legends[0].get_texts()
    assert [name.get_text() for name in names] == ["train: $5 or $6", "validation: $5 or $6", "train: _large"]
    assert not any(name.get_parse_math() for name in names)
    with pytest.raises(ValueError, match="nothing to plot"):
        plot_history({"run": []})


@pytest.mark.parametrize(
    ("panels", "target", "source", "word"),
    [
        *(((), 1, 1, "Wort"), ((), 12, 15, "Wort"), ((), 8, 300, "Wort"), ((), 4, 60, "Donaudampfschifffahrt")),
        *(((1,), 3, 2, "Wort"), ((5,), 4, 6, "Wort"), ((8,), 30, 4, "Donaudampfschifffahrt")),
        *(((3, 1), 5, 4, "Donaudampfschifffahrt"), ((2, 9), 3, 3, "Wort")),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (((2, 2), 40, 40, "x"), ((16,), 40, 40, "x"))),
    ],
)
def test_attention_maps_show_the_weights_under_readable_tokens(panels, target, source, word):
    """A panel for each map, on one scale, its name above it; only the outer ones have tokens, all of 40 and fewer."""
    weights = torch.rand(*panels, target, source, dtype=torch.bfloat16, requires_grad=True)
    title = "a title that is longer than a narrow map is wide"
    figure = plot_attention(weights, tokens(source, word), tokens(target, word), title, ("looked at", "looking"))
    check_texts(figure)
    drawn = [axes for axes in figure.axes if axes.get_images()]
    assert torch.equal(torch.stack(images_of(figure)), weights.detach().float().view(-1, target, source))
    assert {axes.images[0].get_clim() for axes in drawn} == {(0.0, 1.0)}
    names = [
        ", ".join(f"{name} {i + 1}" for name, i in zip(("layer", "head")[2 - len(panels) :], index, strict=True))
        for index in itertools.product(*map(range, panels))
    ]
    assert [axes.get_title() for axes in drawn] == names
    assert (figure.get_supxlabel(), figure.get_supylabel()) == ("looked at", "looking")
    for count, axis in ((source, drawn[-1].xaxis), (target, drawn[0].yaxis)):
        shown = labels_of(axis)
        stride = -(-count // len(shown))
        assert shown == [x if len(x) <= 24 else f"{x[:23]}…" for x in tokens(count, word)[::stride]]
        assert stride == 1 or count > 40 or len(drawn) == 8
    assert len(panels) < 2 or panels[-1] == 1 or not labels_of(drawn[1].yaxis)


@pytest.mark.parametrize("shape", [(3,), (2, 3), (1, 2, 3), (0, 3, 2), (1, 1, 1, 3, 2)])
def test_weights_that_do_not_fit_the_tokens_are_refused(shape):
    with pytest.raises(ValueError, match=r"with \[T, S\] = \[3, 2\] for these tokens and no dimension of size 0, not"):
        plot_attention(torch.rand(shape), tokens(2), tokens(3))


def test_tokens_are_text_and_never_formulas_and_long_ones_are_cut():
    odd = ["$5", "x" * 80, "a_b^c$", "▁été", "ﬁ_$", ""]
    figure = plot_attention(torch.rand(1, len(odd)), odd, ["→"], "costs\n$5 or $6")
    check_texts(figure)
    assert labels_of(figure.axes[0].xaxis) == ["$5", "x" * 23 + "…", *odd[2:]]
    assert figure.get_suptitle().replace("\n", " ") == "costs $5 or $6"
    titles = [figure._suptitle, *figure.axes[0].xaxis.get_ticklabels()]
    assert not any(text.get_parse_math() for text in titles)


def test_a_title_has_at_most_three_lines():
    figure = plot_attention(torch.rand(1, 2, 8, 8), tokens(8), tokens(8), "word " * 400)
    lines = figure.get_suptitle().splitlines()
    assert len(lines) == 3
    assert lines[-1].endswith("word …")


def test_letters_that_no_font_has_give_one_line(tmp_path, caplog):
    figure = plot_attention(torch.rand(1, 2), ["\U0010e123", "\U0010e124"], ["→"])  # for private use
    figure_module.save(figure, tmp_path / "maps.png")
    assert [record.getMessage() for record in caplog.records] == [
        f"{tmp_path / 'maps.png'}: no installed font has all letters, so boxes stand for some; Noto Sans CJK has more"
    ]


def test_positions_show_values_and_their_cosine_similarity():
    encoding = torch.randn(7, 4)
    figure = plot_positions(encoding, "learned positions")
    values, similarity = images_of(figure)
    assert torch.equal(values, encoding)
    torch.testing.assert_close(similarity, torch.cosine_similarity(encoding[:, None], encoding[None], dim=-1))
    with pytest.raises(ValueError, match=r"encoding has shape \[4\]; it must be \[T, D\]"):
        plot_positions(torch.randn(4))


@pytest.mark.slow
def test_figures_leave_pyplot_alone_and_importing_draws_nothing(tmp_path):
    code = (
        "import sys, torch, fastformer.apps.plots as p; assert 'matplotlib' not in sys.modules; "
        f"p.save(p.plot_attention(torch.ones(1, 1), ['a'], ['b']), {str(tmp_path / 'deep' / 'figure.png')!r}); "
        "assert 'matplotlib.pyplot' not in sys.modules"
    )
    run = python("-c", code)
    assert run.returncode == 0, run.stderr
    assert (tmp_path / "deep" / "figure.png").read_bytes().startswith(b"\x89PNG\r\n")
    with pytest.raises(ValueError, match=r"must end in \.png"):
        figure_module.save(None, tmp_path / "figure.pdf")


VARIANTS = {
    "pre-norm": {},
    "post-norm": {"norm_first": False, "final_norm": False},
    "learned": {"positions": "learned", "max_positions": 8},
}
IDS = [2, 5, 9, 16, 5]
TOKENS = ["<bos>", "the", "cat", "sat", "the"]


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("kind", [None, TokenClassifier, SequenceClassifier], ids=str)
def test_attention_maps_of_language_models_and_classifiers_are_those_of_torchs_layers(variant, kind):
    options = VARIANTS[variant]
    model = single_stack.random_model(kind, 3, **options) if kind else random_model(3, **options)
    twin = TorchTwin(model.config, *[kind] * (kind is not None)).copy(model)
    maps = attend_ids(model, IDS, TOKENS)
    expected = torch.stack(weights_of(twin, torch.tensor([IDS]), torch.tensor([len(IDS)])))
    torch.testing.assert_close(maps.weights, expected, atol=1e-5, rtol=1e-5)
    assert not maps.weights.requires_grad


def words(context: int = 8, first_id: int | None = None) -> TextGenerator:
    tokenizer = WordTokenizer.from_lines(["the cat sat on a mat"])
    return TextGenerator(random_model(1, vocabulary=tokenizer.size), tokenizer, context, first_id=first_id)


def test_a_text_is_read_as_a_prompt_is():
    generator = words()
    generator.model.train()
    generator.model.decoder.layers[0].dropout1.p = 0.9
    maps = generator.attend("the cat\nsat")
    assert maps.keys == maps.queries == ["<bos>", "the", "cat", "<eos>", "sat"]
    [ids] = generator.encode(["the cat\nsat"])
    assert torch.equal(maps.weights, generator.model.attention_maps(torch.tensor(ids)))
    assert generator.attend("").keys == ["<bos>"]
    assert words(first_id=3).attend("on").keys == ["<eos>", "on"]
    assert words(context=3).attend("the cat sat on a mat").keys == ["on", "a", "mat"]


def test_the_figure_of_attention_maps_has_the_chosen_layers_and_heads():
    maps = words().attend("the cat sat")
    for choice, expected, title in (
        ((), list(maps.weights[1]), "attention, layer 2: the cat sat"),
        ((1, 3), [maps.weights[0, 2]], "attention, layer 1, head 3: the cat sat"),
        (("all", "mean"), list(maps.weights.mean(1)), "attention, all layers, mean of 3 heads: the cat sat"),
    ):
        figure = maps.figure(*choice)
        assert all(torch.equal(one, other) for one, other in zip(images_of(figure), expected, strict=True))
        assert figure.get_suptitle().replace("\n", " ") == title
        assert (figure.get_supxlabel(), figure.get_supylabel()) == ("token looked at", "token")
    assert [axes.get_title() for axes in figure.axes if axes.get_images()] == ["layer 1", "layer 2"]
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == ["<bos>", "the", "cat", "sat"]
    title = attend_ids(random_model(0), IDS, TOKENS).figure(1, 1).get_suptitle()
    assert title.replace("\n", " ") == "attention, layer 1, head 1: <bos> the cat sat the"
    with pytest.raises(ValueError, match="layer must be 1 to 2 or all, not 3"):
        maps.figure(3)


def test_the_maps_of_a_sentence_carry_its_tokens_and_its_weights(runs: Path) -> None:
    translator = load_translator(runs / "translation")
    encoder, decoder, cross = (translator.attend("w1 w2", kind=kind) for kind in KINDS)
    assert cross.title[1] == f"w1 w2 -> {translator.translate(['w1 w2'], SearchOptions())[0]}"
    source, target = translator.source_tokenizer, translator.target_tokenizer
    ids = [*source.encode("w1 w2"), source.eos_id]
    assert cross.keys == encoder.queries == source.pieces(ids)
    assert (cross.keys[-1], decoder.keys[0], decoder.queries[-1]) == ("<eos>", "<bos>", "<eos>")
    assert decoder.keys[1:] == decoder.queries[:-1] == cross.queries[:-1]
    attended = {kind: translator.attend("w1 w2", "w3 w4 w5", kind) for kind in KINDS}
    assert attended["cross"].queries == ["w3", "w4", "w5", "<eos>"]
    read = torch.tensor([target.bos_id, *target.encode("w3 w4 w5")])
    expected = translator.model.attention_maps(torch.tensor(ids), read)
    assert all(torch.equal(attended[kind].weights, expected[kind]) for kind in KINDS)
    assert translator.attend("w1", "").queries == ["<eos>"]


def test_wrong_arguments_of_attention_maps():
    model, pairs, ids = random_model(0), translation_task.random_model(0), torch.tensor(IDS)
    with pytest.raises(ValueError, match=r"ids must be \[T\], one sequence, not \[1, 5\]"):
        model.attention_maps(ids[None])
    with pytest.raises(ValueError, match=r"target_in must be \[T\], one sequence, not \[1, 5\]"):
        pairs.attention_maps(ids, ids[None])
    with pytest.raises(ValueError, match="a sequence of 5 is longer than max_length, 2"):
        attend_ids(random_model(0, positions="learned", max_positions=2), IDS, TOKENS)
    for given, tokens in (([], []), ([4], []), ([4], ["a", "b"])):
        with pytest.raises(ValueError, match=f"equally many and at least one, not {len(given)} and {len(tokens)}"):
            attend_ids(model, given, tokens)
