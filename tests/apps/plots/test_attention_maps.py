"""Where a language model and a classifier look: the weights that torch's layers apply, under the right tokens."""

import pytest
import torch

from fastformer.apps.classification.model import SequenceClassifier, TokenClassifier
from fastformer.apps.language.sampling import TextGenerator
from fastformer.apps.plots.attention_maps import attend_ids
from fastformer.apps.text import WordTokenizer
from tests.support import single_stack, translation_task
from tests.support.language_task import random_model
from tests.support.single_stack import TorchTwin
from tests.support.translation_task import weights_of

VARIANTS = {
    "pre-norm": {},
    "post-norm": {"norm_first": False, "final_norm": False},
    "learned": {"positions": "learned", "max_positions": 8},
}
IDS = [2, 5, 9, 16, 5]
TOKENS = ["<bos>", "the", "cat", "sat", "the"]


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("kind", [None, TokenClassifier, SequenceClassifier], ids=str)
def test_of_one_sequence_are_those_of_torchs_layers(variant, kind):
    """Of a language model and of classifiers."""
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


def test_the_figure_has_the_chosen_layers_and_heads():
    pytest.importorskip("matplotlib", reason="plots need matplotlib")
    maps = words().attend("the cat sat")
    for choice, expected, title in (
        ((), list(maps.weights[1]), "attention, layer 2: the cat sat"),
        ((1, 3), [maps.weights[0, 2]], "attention, layer 1, head 3: the cat sat"),
        (("all", "mean"), list(maps.weights.mean(1)), "attention, all layers, mean of 3 heads: the cat sat"),
    ):
        figure = maps.figure(*choice)
        drawn = [torch.from_numpy(axes.images[0].get_array().filled()) for axes in figure.axes if axes.get_images()]
        assert all(torch.equal(one, other) for one, other in zip(drawn, expected, strict=True))
        assert figure.get_suptitle().replace("\n", " ") == title
        assert (figure.get_supxlabel(), figure.get_supylabel()) == ("token looked at", "token")
    assert [axes.get_title() for axes in figure.axes if axes.get_images()] == ["layer 1", "layer 2"]
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == ["<bos>", "the", "cat", "sat"]
    title = attend_ids(random_model(0), IDS, TOKENS).figure(1, 1).get_suptitle()
    assert title.replace("\n", " ") == "attention, layer 1, head 1: <bos> the cat sat the"
    with pytest.raises(ValueError, match="layer must be 1 to 2 or all, not 3"):
        maps.figure(3)


def test_wrong_arguments():
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
