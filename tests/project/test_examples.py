"""The examples run, reach what they promise, and the notebook is the script."""

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest
import torch

from fastformer.apps.text import english

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def example(name: str) -> ModuleType:
    """An example as a module; examples/ is no package."""
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_words_are_tagged_by_the_grammar_of_numbers():
    tagging = example("token_classification")
    words = tagging.split(342_071)
    assert words == ["three", "hundred", "forty", "-", "two", "thousand", "seventy", "-", "one"]
    assert tagging.tags(words) == [5, 6, 4, -100, 3, 6, 1, -100, 0]
    assert tagging.tags(tagging.split(13_012)) == [4, 6, 1]
    names = {english(n): n for n in range(100) if "-" not in english(n)}
    for number in tagging.draw_numbers(400, seed=3):
        words = tagging.split(number)
        tagged = zip(words, tagging.tags(words), strict=True)
        digits = [(names[word], tag) for word, tag in tagged if word in names]
        # A word of the tens is its value already; the others are digits of their power of ten.
        total = sum(n * 10**tag // (10 if tag % 3 == 1 else 1) for n, tag in digits)
        assert total == number
        assert all(word in names or word in ("hundred", "thousand", "-") for word in words)


@pytest.mark.parametrize("name", ["token_classification", "sequence_classification"])
def test_classifiers_learn(name, tmp_path, capsys):
    result = example(name).main(tmp_path / "run", count=2000, epochs=2, d_model=32)
    assert result >= 0.9
    assert f"{100 * result:.2f} %" in capsys.readouterr().out


@pytest.mark.slow
def test_the_notebook_is_what_the_script_generates_and_its_cells_run(capsys):
    """In order, in one namespace, as Jupyter does; the cells assert that their numbers are the model's."""
    notebook = example("notebook")
    script = (EXAMPLES / "walkthrough.py").read_text(encoding="utf-8")
    written = (EXAMPLES / "walkthrough.ipynb").read_text(encoding="utf-8")
    assert written == notebook.text_of(script), "run `make notebook`"
    cells = json.loads(written)["cells"]
    names: dict = {"__name__": "__main__"}
    try:
        for cell in cells:
            if cell["cell_type"] == "code":
                exec(compile("".join(cell["source"]), cell["id"], "exec"), names)
    finally:
        torch.set_printoptions(profile="default")  # the walk-through sets its own
    printed = capsys.readouterr().out
    assert names["written"] == names["french"].encode(names["held_out"].target[0])  # it has learned to translate
    for shown in ("after the padding mask", "after the look-ahead mask", "-inf", "log V", "<eos>"):
        assert shown in printed
