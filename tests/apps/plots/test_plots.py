"""Figures: what is drawn is what was given, labelled, without overlap, and without pyplot's global state."""

import itertools
import weakref

import pytest
import torch

pytest.importorskip("matplotlib", reason="plots need matplotlib")

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.text import Text

from fastformer.apps.plots import figure as figure_module
from fastformer.apps.plots import (
    plot_attention,
    plot_attention_heads,
    plot_attention_layers,
    plot_history,
    plot_positions,
    save,
)
from tests.support.python import python

TRAIN = [{"kind": "train", "step": step, "epoch": 1, "seconds": 1.0, "loss": 5.0 / step, "lr": 0.1} for step in (1, 2)]
VALIDATION = [
    {"kind": "validation", "step": 2, "epoch": 1, "loss": 3.0, "perplexity": 20.0, "bleu": 11.0, "exact": 0.5},
    {"kind": "validation", "step": 4, "epoch": 2, "loss": 2.0, "perplexity": 7.4, "bleu": 22.0, "exact": 0.75},
]


def tokens(count: int, word: str = "Wort") -> list[str]:
    return [f"▁{word}{i}" for i in range(count)]


RENDERERS = weakref.WeakKeyDictionary()


def drawn(figure):
    """The renderer, after the layout was computed as for a PNG, once a figure."""
    if figure not in RENDERERS:
        figure.dpi = figure_module.DPI
        canvas = FigureCanvasAgg(figure)
        canvas.draw()
        RENDERERS[figure] = canvas.get_renderer()
    return RENDERERS[figure]


def labels_overlap(figure) -> bool:
    renderer = drawn(figure)
    for axis in (axis for axes in figure.axes for axis in (axes.xaxis, axes.yaxis)):
        boxes = [label.get_window_extent(renderer) for label in axis.get_ticklabels() if label.get_text()]
        if any(one.overlaps(other) for one, other in itertools.pairwise(boxes)):
            return True
    return False


def cut_off(figure) -> list[str]:
    """Every text that the edge of the figure cuts: titles, names, tokens, numbers, legends."""
    renderer, frame = drawn(figure), figure.bbox
    hidden = set()  # labels of ticks that lie beyond the ends of their axis, and are not drawn
    for axis in (axis for axes in figure.axes for axis in (axes.xaxis, axes.yaxis)):
        low, high = sorted(axis.get_view_interval())
        ticks = [*axis.get_major_ticks(), *axis.get_minor_ticks()]
        hidden |= {label for tick in ticks if not low <= tick.get_loc() <= high for label in (tick.label1, tick.label2)}
    texts = [text for text in figure.findobj(Text) if text.get_visible() and text.get_text() and text not in hidden]
    boxes = [(text.get_text(), text.get_window_extent(renderer)) for text in texts]
    return [text for text, box in boxes if box.x0 < 0 or box.y0 < 0 or box.x1 > frame.x1 or box.y1 > frame.y1]


def test_history_has_a_panel_for_every_value_and_a_line_for_every_run():
    figure = plot_history({"small": [*TRAIN, *VALIDATION], "large": TRAIN})
    labels = [axes.get_ylabel() for axes in figure.axes]
    assert labels == [
        "loss (nats per token)", "validation perplexity", "validation BLEU (percent)", "validation exact",
    ]  # fmt: skip
    assert {axes.get_xlabel() for axes in figure.axes} == {"optimiser step"}
    loss, perplexity, bleu, _ = figure.axes
    lines = {line.get_label(): (list(line.get_xdata()), list(line.get_ydata())) for line in loss.lines}
    assert lines == {
        "small, training": ([1, 2], [5.0, 2.5]),
        "small, validation": ([2, 4], [3.0, 2.0]),
        "large, training": ([1, 2], [5.0, 2.5]),
    }
    assert perplexity.get_yscale() == "log"
    assert list(bleu.lines[0].get_ydata()) == [11.0, 22.0]
    assert len({line.get_color() for line in loss.lines}) == 2
    assert not cut_off(figure)


def test_several_runs_share_one_legend_whatever_their_names_are():
    """A name that begins with _ would be hidden, one with $ be a formula; the end of a long path tells runs apart."""
    names = ["_base", "$5 or $6", "runs/" + "long/" * 20 + "one", "日本", "b", "c", "d", "e"]
    figure = plot_history({name: [*TRAIN, *VALIDATION] for name in names})
    (legend,) = figure.legends
    shown = [text.get_text() for text in legend.get_texts()]
    assert shown[:2] == [" _base", r"\$5 or \$6"]
    assert shown[2].startswith("…")
    assert shown[2].endswith("long/one")
    assert len(shown[2]) == 48
    assert shown[4:] == ["b", "c", "d", "e", "thin: training", "points: validation"]
    renderer = drawn(figure)
    box = legend.get_window_extent(renderer)
    assert all(not axes.get_tightbbox(renderer).overlaps(box) for axes in figure.axes)
    assert 0 <= box.x0 < box.x1 <= figure.bbox.x1
    looks = [(line.get_color(), line.get_marker()) for line in figure.axes[0].lines if "validation" in line.get_label()]
    assert len(set(looks)) == len(names)


@pytest.mark.parametrize("perplexities", [(20.0, 7.4), (900.0, 80.0), (1.03, 1.001), (3.0, 3.0)])
def test_the_axis_of_perplexity_has_numbers(perplexities):
    records = [{"kind": "validation", "step": i, "loss": 1.0, "perplexity": x} for i, x in enumerate(perplexities)]
    axes = plot_history({"run": records}).figure.axes[1]
    drawn(axes.figure)
    low, high = axes.get_ylim()
    inside = [x for x, label in zip(axes.get_yticks(), axes.get_yticklabels(), strict=True) if low <= x <= high]
    assert len(inside) >= 2
    assert all("$" not in label.get_text() for label in axes.get_yticklabels())


def test_history_of_one_run_without_validation():
    figure = plot_history({"run": TRAIN})
    (axes,) = figure.axes
    assert [line.get_label() for line in axes.lines] == ["training"]


@pytest.mark.parametrize("value", ["soon", [1], None, {}])
def test_what_is_no_number_is_not_drawn(value):
    """A word would be a place of its own on the axis."""
    records = [{"kind": kind, "step": step, "loss": 1.0} for kind in ("train", "validation") for step in (1, 2)]
    drawn = plot_history({"run": [*records, {"kind": "train", "step": 3, "loss": value}]})
    lines = [line.get_xydata().tolist() for line in drawn.axes[0].lines]
    assert lines == [[[1.0, 1.0], [2.0, 1.0]]] * 2


def test_history_of_very_many_values_shows_the_first(caplog):
    """1,000 of them, 20 KB of a stranger's file, took minutes and gigabytes."""
    named = {f"v{number}": 1.0 for number in range(1000)}
    figure = plot_history({"run": [*TRAIN, {"kind": "validation", "step": 1, **named}]})
    assert len(figure.axes) == 48
    assert figure.axes[0].get_ylabel() == "loss (nats per token)"
    assert "953 values are not drawn" in caplog.text


def test_history_without_values_is_an_error():
    with pytest.raises(ValueError, match="nothing to plot"):
        plot_history({"run": []})


@pytest.mark.parametrize(("target", "source"), [(1, 1), (3, 2), (12, 15), (8, 300)])
def test_attention_map_shows_the_weights_under_readable_tokens(target, source):
    weights = torch.rand(target, source, dtype=torch.bfloat16, requires_grad=True)
    figure = plot_attention(weights, tokens(source), tokens(target), "a title that is longer than a narrow map is wide")
    axes = figure.axes[0]
    image = torch.from_numpy(axes.images[0].get_array().filled())
    assert torch.equal(image, weights.detach().float())
    assert (figure.get_supxlabel(), figure.get_supylabel()) == ("source token", "target token")
    shown = [label.get_text() for label in axes.get_xticklabels()]
    stride = -(-source // len(shown))
    assert shown == tokens(source)[::stride]
    assert stride == 1 or source > 100
    assert not labels_overlap(figure)
    assert not cut_off(figure)


@pytest.mark.parametrize("heads", [1, 2, 5, 8])
def test_every_head_has_a_map_on_one_scale_and_only_outer_maps_have_tokens(heads):
    weights = torch.rand(heads, 4, 6)
    figure = plot_attention_heads(weights, tokens(6), tokens(4), "layer 1")
    panels = [axes for axes in figure.axes if axes.get_title()]
    assert [axes.get_title() for axes in panels] == [f"head {head + 1}" for head in range(heads)]
    for axes, expected in zip(panels, weights, strict=True):
        assert torch.equal(torch.from_numpy(axes.images[0].get_array().filled()), expected)
        assert axes.images[0].get_clim() == (0.0, 1.0)
    assert not labels_overlap(figure)
    bottom = {round(axes.get_position().x0, 3): axes for axes in panels}
    assert all([label.get_text() for label in axes.get_xticklabels()] == tokens(6) for axes in bottom.values())
    assert [label.get_text() for label in panels[0].get_yticklabels()] == tokens(4)
    assert heads == 1 or not panels[1].get_yticklabels()
    assert not cut_off(figure)


@pytest.mark.slow
@pytest.mark.parametrize(("layers", "heads", "length"), [(1, 1, 3), (2, 9, 3), (2, 2, 40), (5, 0, 6)])
def test_every_layer_has_a_row_of_panels_or_one_panel(layers, heads, length):
    shape = (layers, heads, length, length) if heads else (layers, length, length)
    weights = torch.rand(shape)
    names = ("looked at", "looking")
    figure = plot_attention_layers(weights, tokens(length), tokens(length), "all layers", names)
    panels = [axes for axes in figure.axes if axes.get_title()]
    wanted = [
        f"layer {i + 1}, head {j + 1}" if heads else f"layer {i + 1}" for i in range(layers) for j in range(heads or 1)
    ]
    assert [axes.get_title() for axes in panels] == wanted
    for axes, expected in zip(panels, weights.flatten(0, -3), strict=True):
        assert torch.equal(torch.from_numpy(axes.images[0].get_array().filled()), expected)
    assert (figure.get_supxlabel(), figure.get_supylabel()) == names
    assert not labels_overlap(figure)
    assert not cut_off(figure)
    titles = [axes.title.get_window_extent() for axes in panels]
    assert not any(one.overlaps(other) for one, other in itertools.pairwise(titles))


LENGTHS = [(1, 1), (3, 2), (5, 4), (30, 4), (4, 60)]


@pytest.mark.parametrize("word", [pytest.param("x", marks=pytest.mark.long), "Donaudampfschifffahrtsgesellschaft"])
@pytest.mark.parametrize(("target", "source"), LENGTHS)
@pytest.mark.parametrize("shape", [(), (1,), (8,), (3, 1), (2, 4)], ids=str)
def test_no_text_of_an_attention_map_is_cut_off(shape, target, source, word):
    """One head or the mean of all, the heads of a layer, all layers; one more number on the colour bar once cut it."""
    draw = (plot_attention, plot_attention_heads, plot_attention_layers)[len(shape)]
    figure = draw(torch.rand(*shape, target, source), tokens(source, word), tokens(target, word), "layer 1: a -> b")
    assert not cut_off(figure)
    assert {text.get_text() for text in figure.findobj(Text)} >= {"attention weight", "0.0", "1.0"}


@pytest.mark.parametrize("scale", [1e-9, 0.0, 0.1234, 12.0, 123456.0])
@pytest.mark.parametrize("length", [1, 7, 512])
def test_no_text_of_positions_is_cut_off(scale, length):
    assert not cut_off(plot_positions(scale * torch.randn(length, 2 * min(length, 64)), "positions " * 20))


@pytest.mark.parametrize("scale", [1e-6, 3.3, 1e9])
@pytest.mark.parametrize("steps", [1, 98765])
@pytest.mark.parametrize("runs", [1, 3])
def test_no_text_of_learning_curves_is_cut_off(scale, steps, runs):
    names = ("loss", "perplexity", "bleu", "a rather long name of a value")
    records = [
        {"kind": kind, "step": (i + 1) * steps, **dict.fromkeys(names, (1 + i) * scale)}
        for i in range(4)
        for kind in ("train", "validation")
    ]
    assert not cut_off(plot_history({f"runs/number{i}": records for i in range(runs)}))


@pytest.mark.slow
@pytest.mark.parametrize("heads", [2, 16])
def test_forty_tokens_all_have_their_label(heads):
    figure = plot_attention_heads(torch.rand(heads, 40, 40), tokens(40, "x"), tokens(40, "x"), "t " * 300)
    last = [axes for axes in figure.axes if axes.get_title()][-1]
    assert [label.get_text() for label in last.get_xticklabels()] == tokens(40, "x")
    assert not labels_overlap(figure)
    assert not cut_off(figure)


@pytest.mark.parametrize(
    ("function", "shape", "message"),
    [
        (plot_attention, (2, 3), r"weights has shape \[2, 3\]; the tokens ask for \[3, 2\]"),
        (plot_attention, (1, 3, 2), r"weights has shape \[1, 3, 2\]; the tokens ask for \[3, 2\]"),
        (plot_attention_heads, (3, 2), r"weights has shape \[3, 2\]; the tokens ask for \[H, 3, 2\]"),
        (plot_attention_layers, (3, 2), r"weights has shape \[3, 2\]; the tokens ask for \[L, 3, 2\]"),
        (plot_attention_layers, (1, 2, 3, 3), r"weights has shape \[1, 2, 3, 3\]; the tokens ask for \[L, H, 3, 2\]"),
        (plot_attention_heads, (0, 3, 2), r"weights has shape \[0, 3, 2\]; the tokens ask for \[H, 3, 2\]"),
    ],
)
def test_weights_that_do_not_fit_the_tokens_are_refused(function, shape, message):
    with pytest.raises(ValueError, match=message):
        function(torch.rand(shape), tokens(2), tokens(3))


def test_tokens_are_text_and_never_formulas_and_long_ones_are_cut():
    figure = plot_attention(torch.rand(1, 3), ["$5", "x" * 80, "a_b^c$"], ["$$"], "costs $5 or $6")
    drawn(figure)  # a broken formula would raise here
    shown = [label.get_text() for label in figure.axes[0].get_xticklabels()]
    assert shown == [r"\$5", "x" * 23 + "…", r"a_b^c\$"]


def test_characters_that_no_font_has_are_shown_by_their_numbers():
    """matplotlib would draw boxes, and warn, which is an error here; a line end would break the row of labels."""
    odd = ["日本", "👍", "\n", "a\tb", " ", "\x00", "▁été", "ﬁ_$", ""]
    figure = plot_attention(torch.rand(1, len(odd)), odd, ["→"], "日 costs\n$5")
    drawn(figure)
    shown = [label.get_text() for label in figure.axes[0].get_xticklabels()]
    assert shown == ["U+65E5 U+672C", "U+1F44D", r"\n", r"a\tb", "␣", "U+0000", "▁été", r"ﬁ_\$", ""]
    assert figure.get_suptitle() == "U+65E5 costs\\n\\$5"
    assert not labels_overlap(figure)


def test_installed_fonts_draw_what_the_first_cannot(monkeypatch):
    """A second family is asked for characters of its own; DejaVu Sans Mono stands in for one with Chinese."""
    figure_module._fonts.cache_clear(), figure_module._characters.cache_clear()
    monkeypatch.setattr(figure_module, "_FONTS", ("STIXNonUnicode", "No Such Font", "DejaVu Sans"))
    try:
        assert figure_module.font_families() == ["STIXNonUnicode", "DejaVu Sans"]
        assert figure_module.visible("é日") == "éU+65E5"
        drawn(plot_attention(torch.rand(1, 1), ["é"], ["x"], "été"))
    finally:
        figure_module._fonts.cache_clear(), figure_module._characters.cache_clear()


def test_positions_show_values_and_their_cosine_similarity():
    encoding = torch.randn(7, 4)
    figure = plot_positions(encoding, "learned positions")
    values, similarity = (torch.from_numpy(axes.images[0].get_array().filled()) for axes in figure.axes[:2])
    assert torch.equal(values, encoding)
    expected = torch.cosine_similarity(encoding[:, None], encoding[None], dim=-1)
    torch.testing.assert_close(similarity, expected)
    assert not cut_off(figure)
    with pytest.raises(ValueError, match=r"encoding has shape \[4\]; it must be \[T, D\]"):
        plot_positions(torch.randn(4))


def test_of_many_positions_every_nth_is_drawn_at_its_place():
    """All of 60,000, each beside each, would take 14 GB before they are drawn."""
    encoding = torch.randn(5000, 3)
    left, right = plot_positions(encoding).axes[:2]
    assert left.images[0].get_extent() == [-0.5, 2.5, 4999.5, -0.5]
    assert right.images[0].get_extent() == [-0.5, 4999.5, 4999.5, -0.5]
    assert torch.equal(torch.from_numpy(left.images[0].get_array().filled()), encoding[::3])
    assert right.images[0].get_array().shape == (1667, 1667)
    assert plot_positions(encoding[:7]).axes[1].images[0].get_extent() == [-0.5, 6.5, 6.5, -0.5]


def test_save_makes_folders_and_a_png(tmp_path):
    path = save(plot_positions(torch.zeros(2, 2)), tmp_path / "deep" / "figure.png")
    assert path.read_bytes().startswith(b"\x89PNG\r\n")


@pytest.mark.slow
def test_figures_leave_pyplot_alone_and_importing_draws_nothing():
    code = (
        "import sys, torch, fastformer.apps.plots as p; assert 'matplotlib' not in sys.modules; "
        "p.plot_attention(torch.ones(1, 1), ['a'], ['b']); assert 'matplotlib.pyplot' not in sys.modules"
    )
    run = python("-c", code)
    assert run.returncode == 0, run.stderr
