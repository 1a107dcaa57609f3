"""docs/tutorials: the settings that their tables name exist, and their models are those of the tables."""

import dataclasses
import re

import pytest

from fastformer.apps.language import LanguageConfig, LanguageDataConfig, LanguageTrainConfig, SamplingOptions
from fastformer.apps.train import TrainConfig
from fastformer.apps.translation import DataConfig, SearchOptions, TranslationConfig
from tests.support.tutorial_models import PAGES

SETTINGS = {
    "translation": (DataConfig, TranslationConfig, TrainConfig, SearchOptions),
    "language": (LanguageDataConfig, LanguageConfig, LanguageTrainConfig, SamplingOptions),
}
NAMES = sorted(path.stem for path in PAGES.glob("*.md") if path.stem != "index")


def flags(page: str) -> list[tuple[str, list[str]]]:
    """The flags that a page's table of settings has between backticks, with their values."""
    text = (PAGES / f"{page}.md").read_text(encoding="utf-8")
    table = text.partition("## Settings")[2].partition("\n## ")[0]
    code = " ".join(found for row in re.findall(r"^\|.*\|$", table, re.M) for found in re.findall(r"`([^`]+)`", row))
    words = re.findall(r"\s*--([a-z-]+)((?: (?!--)[^\s]+)*)", code)
    return [(name, values.split()) for name, values in words]


@pytest.mark.parametrize("page", NAMES)
def test_the_tables_name_settings_that_exist(page):
    kind = "language" if page == "wikitext2" else "translation"
    fields = {field.name: field for config in SETTINGS[kind] for field in dataclasses.fields(config)}
    found = flags(page)
    assert len(found) >= 8
    for name, _ in found:
        plain = name.removeprefix("no-").replace("-", "_")
        if plain in ("checkpoint",):  # of evaluate
            continue
        assert plain in fields, name
        if name.startswith("no-"):
            assert fields[plain].type in (bool, "bool"), name


def test_what_the_tables_call_the_defaults():
    """The sizes of the paper."""
    sizes = TranslationConfig(10, 10)
    assert (sizes.encoder_layers, sizes.decoder_layers, sizes.d_model, sizes.heads) == (6, 6, 512, 8)
    assert (sizes.feed_forward, sizes.dropout, sizes.norm_first, sizes.final_norm) == (2048, 0.1, True, True)
    ids = DataConfig().special_ids
    assert (ids.unk_id, ids.pad_id, ids.bos_id, ids.eos_id) == (0, 1, 2, 3)
    assert round((sizes.d_model * TrainConfig(steps=1).warmup_steps) ** -0.5, 4) == 7e-4
