"""BLEU by target language: the tokenizer, its signature wherever BLEU is shown, warnings and refusals."""

import importlib.util
import logging
import math
from pathlib import Path

import pytest

pytest.importorskip("sacrebleu", reason="scores need the extra `apps`")
pytest.importorskip("safetensors", reason="checkpoints need the extra `apps`")

from fastformer.apps.text import write_lines
from fastformer.apps.text.scores import bleu_tokenizer, check_bleu_tokenizer, score_translations
from fastformer.apps.train import TrainConfig, read_metrics
from fastformer.apps.translation.run import DataConfig, TranslationRun

# Sentences whose last character is replaced in the translation; in zh and char, a character is a word.
TEXTS = {
    "zh": "今天天气很好我们去公园散步吧",
    "ja": "今日は天気がいいので公園を散歩します",
    "ko": "오늘은날씨가좋아서우리는공원에갑니다",
    "th": "วนนอากาศดมากเราไปเดนเลนทสวนสาธารณะ",
}


def one_wrong_at_the_end(length: int) -> float:
    """BLEU of a translation of `length` words of which the last is wrong: (length - n) of (length - n + 1) n-grams."""
    return 100 * math.exp(sum(math.log((length - n) / (length - n + 1)) for n in range(1, 5)) / 4)


@pytest.mark.parametrize(
    ("language", "tokenizer"),
    [
        *(("zh", "zh"), ("zh-CN", "zh"), ("zho_Hans", "zh"), ("ja", "ja-mecab"), ("jpn_Jpan", "ja-mecab")),
        *(("ko", "ko-mecab"), ("th", "char"), ("tha_Thai", "char"), ("de", "13a"), ("", "13a"), ("zhuang", "13a")),
    ],
)
def test_the_target_language_chooses_the_tokenizer(language: str, tokenizer: str, tmp_path: Path) -> None:
    assert bleu_tokenizer(language) == tokenizer
    files = {"train_source": tmp_path / "s", "train_target": tmp_path / "t"}
    assert DataConfig(**files, target_language=language).tokenizer_for_bleu == tokenizer
    assert DataConfig(dataset="prepared", target=language).tokenizer_for_bleu == tokenizer
    assert DataConfig(**files, target_language=language, bleu_tokenizer="intl").tokenizer_for_bleu == "intl"


@pytest.mark.parametrize(("language", "tokenizer"), [("zh", "zh"), ("ja", "char"), ("ko", "char"), ("th", "char")])
def test_characters_are_counted_where_there_are_no_spaces(
    language: str, tokenizer: str, caplog: pytest.LogCaptureFixture
) -> None:
    reference = TEXTS[language]
    translation = reference[:-1] + "x"
    scores = score_translations([translation], [reference], tokenizer=tokenizer)
    assert scores.bleu == pytest.approx(one_wrong_at_the_end(len(reference)), rel=1e-12)
    assert f"tok:{tokenizer}" in scores.bleu_signature
    assert not caplog.messages
    with caplog.at_level(logging.WARNING, "fastformer"):
        assert score_translations([translation], [reference]).bleu == 0  # one word, and a wrong one
    assert ("its tokenizer 13a splits words at spaces" in caplog.text) == (language != "ko")  # Korean has spaces


@pytest.mark.parametrize(
    ("tokenizer", "extra", "module"), [("ja-mecab", "ja", "MeCab"), ("ko-mecab", "ko", "mecab_ko")]
)
def test_a_missing_package_is_named_before_any_work(
    tokenizer: str, extra: str, module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if importlib.util.find_spec(module) is not None:
        monkeypatch.setattr(f"sacrebleu.tokenizers.tokenizer_{extra}_mecab.MeCab", None)
    message = rf"tokenizer {tokenizer} needs MeCab: pip install 'sacrebleu\[{extra}\]'; or choose bleu_tokenizer char"
    with pytest.raises(ImportError, match=message):
        check_bleu_tokenizer(tokenizer)
    data = DataConfig(bleu_tokenizer=tokenizer)
    with pytest.raises(ImportError, match=message):
        TranslationRun.check(data, {}, TrainConfig(steps=1))


def test_training_states_the_signature_beside_bleu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pairs = [(f"pair {number}", TEXTS["zh"][number % 7 :]) for number in range(30)]
    write_lines(tmp_path / "s", [source for source, _ in pairs])
    write_lines(tmp_path / "t", [target for _, target in pairs])
    data = DataConfig(
        train_source=tmp_path / "s",
        train_target=tmp_path / "t",
        target_language="zh",
        tokenizer="char",
        valid_size=4,
        test_size=4,
    )
    small = {"d_model": 8, "heads": 1, "encoder_layers": 1, "decoder_layers": 1, "feed_forward": 8}
    train = TrainConfig(steps=1, batch_tokens=200, threads=1, metric="bleu")
    TranslationRun.create(tmp_path / "run", data, small, train).fit()
    (record,) = [each for each in read_metrics(tmp_path / "run") if "bleu" in each]
    assert "tok:zh" in record["bleu_signature"]
    shown = [line for line in capsys.readouterr().err.splitlines() if "bleu" in line]
    assert shown
    assert all(f"({record['bleu_signature']})" in line for line in shown)
    assert TranslationRun.open(tmp_path / "run").data == data
