"""`tested.json` says what is: a part of the survey of transformers' text models, and what the record must have."""

import json
from collections import Counter

import pytest

pytest.importorskip("transformers")

import transformers

from tests.integrations import survey

RECORD = json.loads(survey.RECORD.read_text(encoding="utf-8"))
# One of each outcome, rule of positions and kind of layer; `make survey` has all types.
PART = (
    "albert", "bart", "bert", "bloom", "gemma4_text", "git", "gpt_oss", "llama", "m2m_100", "mamba", "minimax",
    "modernbert", "mpnet", "opt", "qwen3_moe", "switch_transformers", "umt5",
)  # fmt: skip


@pytest.mark.skipif(transformers.__version__ != RECORD["transformers"], reason="the record is of another transformers")
@pytest.mark.parametrize("name", PART)
def test_a_surveyed_type_gives_its_record(name):
    assert survey.outcome(name) == RECORD["types"][name]


def test_the_record_holds_every_type():
    if transformers.__version__ == RECORD["transformers"]:
        assert sorted(RECORD["types"]) == survey.types()
    actual = Counter(its["outcome"] for its in RECORD["types"].values())
    assert set(actual) == {"packed", "padded", "refused", "no attention", "not built"}
    assert actual["packed"] >= 100
    for name, its in RECORD["types"].items():
        assert bool(its.get("packed")) == (its["outcome"] == "packed"), name
        assert its["outcome"] == "packed" or its["reason"], name


def test_the_page_says_what_the_record_says():
    assert survey.PAGE.read_text(encoding="utf-8") == survey.page(RECORD)


def test_the_survey_finds_wrong_numbers(monkeypatch):
    """The survey sees tokens that are packed in the wrong order."""
    from fastformer.integrations.transformers import entry

    monkeypatch.setattr(entry, "to_tokens", lambda *args, to_tokens=entry.to_tokens: to_tokens(*args).roll(1, 1))
    actual = survey.of_padded_batches("llama")
    assert actual["outcome"] == "padded"
    assert "outputs differs by" in actual["reason"]


def test_the_survey_raises_for_wrong_attention(monkeypatch):
    from fastformer import functional

    attention = functional.attention
    monkeypatch.setattr(functional, "attention", lambda *args, **settings: attention(*args, **settings) * 1.001)
    with pytest.raises(AssertionError, match="bert, attention alone, right: outputs differs"):
        survey.outcome("bert")
