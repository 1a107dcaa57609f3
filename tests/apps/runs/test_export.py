"""Exported models compute what ours do: in CTranslate2 itself, and read back from safetensors."""

import json

import pytest
import torch
from torch import Tensor, nn

from fastformer.apps.export import export_ctranslate2, export_safetensors, load_safetensors
from fastformer.apps.language.model import LanguageConfig, LanguageModel
from fastformer.apps.text import WordTokenizer
from fastformer.apps.text.tokenizer import SpecialIds
from fastformer.apps.train import CheckpointError
from fastformer.apps.translation.model import TranslationConfig, TranslationModel
from fastformer.apps.translation.search import SearchOptions
from fastformer.apps.translation.translator import Translator
from tests.support.command_line import fastformer, save_run, succeed

SENTENCES = ["a b c d", "e", "b b a f g", "unknown h a"]
# Other ids and names than CTranslate2's defaults.
IDS = SpecialIds(unk_id=4, pad_id=0, bos_id=3, eos_id=1)
TOKENIZERS = [WordTokenizer.from_lines(["a b c d e f g h"] * 2, special_ids=ids) for ids in (IDS, SpecialIds())]
SIZES = {"d_model": 16, "heads": 2, "feed_forward": 24, "dropout": 0.0}
VARIANTS = {
    "pre-norm": {},
    "post-norm, gelu": {"norm_first": False, "activation": "gelu"},
    "post-norm without a final norm": {"norm_first": False, "final_norm": False},
    "pre-norm without a final norm": {"final_norm": False},
    "learned positions": {"positions": "learned", "max_positions": 40},
    "no bias, another epsilon": {"bias": False, "norm_eps": 0.1},
    "not tied, not scaled, output bias": {"embeddings": "separate", "scale_embeddings": False, "output_bias": True},
    "no positions": {"positions": "none"},
    "sines before cosines": {"positions": "sinusoidal_halves"},
    "rms norms": {"norm": "rms", "norm_eps": 0.1},
    "rms norms after": {"norm": "rms", "norm_first": False, "activation": "silu"},
    "gelu by tanh": {"activation": "gelu_tanh"},
    "geglu": {"activation": "geglu"},
    "swiglu without bias": {"activation": "swiglu", "bias": False},
    "reglu": {"activation": "reglu"},
    "rotary": {"positions": "rotary", "rotary_theta": 50.0},
    "rotary, a share, slowed": {"positions": "rotary", "rotary_share": 0.5, "rotary_scaling": 3.0},
    "grouped queries": {"heads": 4, "kv_heads": 2},
    "one head of keys": {"kv_heads": 1},
    "head size": {"head_size": 12},
    "no bias of queries": {"qkv_bias": False},
}
DECODERS = VARIANTS | {"norms of queries and keys": {"qk_norm": True, "norm_eps": 1e-6}}
NOT_THERE = {
    "window": {"window": 4},
    "softcap": {"softcap": 20.0},
    "sinks": {"sinks": True},
    "positions alibi": {"positions": "alibi"},
    "positions relative": {"positions": "relative"},
    "rotary_original": {"positions": "rotary", "rotary_scaling": 5.0, "rotary_original": 30},
    "qk_norm and norm_eps other than 1e-06": {"qk_norm": True},
}


def randomised(model: nn.Module) -> nn.Module:
    """Norms and biases are random too, and logits far apart, so that a swapped tensor shows."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.add_(0.3 * torch.randn_like(parameter))
            elif "embedding" in name or "output" in name:
                parameter.mul_(3)
    return model.eval()


def translation_model(**changes) -> TranslationModel:
    torch.manual_seed(1)
    source, target = TOKENIZERS
    ids = {name: getattr(target, name) for name in ("pad_id", "bos_id", "eos_id")}
    sizes = {**SIZES, "encoder_layers": 2, "decoder_layers": 1}
    return randomised(TranslationModel(TranslationConfig(source.size, target.size, **{**sizes, **ids, **changes})))


def language_model(**changes) -> LanguageModel:
    torch.manual_seed(2)
    tokenizer = TOKENIZERS[0]
    ids = {name: getattr(tokenizer, name) for name in ("pad_id", "bos_id", "eos_id")}
    return randomised(LanguageModel(LanguageConfig(tokenizer.size, layers=2, **{**SIZES, **ids, **changes})))


def exact(values: Tensor) -> dict:
    return {"rtol": 1e-4, "atol": 1e-4 * float(values.abs().max())}


@pytest.mark.parametrize("variant", VARIANTS)
def test_ctranslate2_translates_and_scores_the_same(tmp_path, variant):
    """tests/apps/translation/test_translation.py compares the beam search, on a model that has learned something."""
    ctranslate2 = pytest.importorskip("ctranslate2")
    model = translation_model(**VARIANTS[variant])
    source, target = TOKENIZERS
    export_ctranslate2(tmp_path / "model", model, TOKENIZERS)
    theirs = ctranslate2.Translator(str(tmp_path / "model"))
    pieces = [source.pieces(source.encode(sentence)) for sentence in SENTENCES]
    ids = {piece: i for i, piece in enumerate(target.words)}
    never = [[target.words[i]] for i in (target.pad_id, target.bos_id)]
    limits = {"max_decoding_length": 8, "min_decoding_length": 0}
    greedy = theirs.translate_batch(pieces, beam_size=1, suppress_sequences=never, **limits)
    translator = Translator(model, *TOKENIZERS)
    texts = [target.decode(ids[piece] for piece in result.hypotheses[0]) for result in greedy]
    assert texts == translator.translate(SENTENCES, SearchOptions(beam=1, max_length=8, max_ratio=9))
    # Log probabilities of given targets: the whole forward pass.
    texts = ["a h g", "b", "c d e e f a", "unknown"]
    scores = theirs.score_batch(pieces, [target.pieces(target.encode(text)) for text in texts])
    expected = torch.tensor([log_p for log_p, _ in translator.score(SENTENCES, texts)])
    torch.testing.assert_close(torch.tensor([sum(score.log_probs) for score in scores]), expected, **exact(expected))


@pytest.mark.parametrize("variant", DECODERS)
def test_ctranslate2_scores_a_language_model_the_same(tmp_path, variant):
    ctranslate2 = pytest.importorskip("ctranslate2")
    model, tokenizer = language_model(**DECODERS[variant]), TOKENIZERS[0]
    export_ctranslate2(tmp_path / "model", model, [tokenizer])
    theirs = ctranslate2.Generator(str(tmp_path / "model"))
    for sentence in ("a b c d e", "h g a a"):
        ids = [tokenizer.bos_id, *tokenizer.encode(sentence), tokenizer.eos_id]
        (score,) = theirs.score_batch([tokenizer.pieces(ids)])
        hidden = model(torch.tensor(ids[:-1]), torch.tensor([len(ids) - 1]))
        expected = model.logits(hidden).log_softmax(-1)[range(len(ids) - 1), ids[1:]].detach()
        torch.testing.assert_close(torch.tensor(score.log_probs), expected, **exact(expected))


def test_what_ctranslate2_has_not_is_refused(tmp_path):
    pytest.importorskip("ctranslate2")
    for words, changes in NOT_THERE.items():
        with pytest.raises(ValueError, match=f"CTranslate2 has no layers with {words}$"):
            export_ctranslate2(tmp_path / "model", language_model(**changes), TOKENIZERS[:1])
    with pytest.raises(ValueError, match="CTranslate2 has no cross-attention with qk_norm"):
        export_ctranslate2(tmp_path / "model", translation_model(qk_norm=True, norm_eps=1e-6), TOKENIZERS)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("make", [translation_model, language_model])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_safetensors_come_back(tmp_path, make, dtype):
    model = make().to(getattr(torch, dtype))
    tokenizers = TOKENIZERS if make is translation_model else TOKENIZERS[:1]
    export_safetensors(tmp_path / "model", model, tokenizers)
    loaded = load_safetensors(tmp_path / "model")
    assert loaded.config == model.config
    expected = model.state_dict()
    for name, tensor in loaded.state_dict().items():
        assert torch.equal(tensor, expected[name]), name
    assert not loaded.training
    assert (tmp_path / "model" / "model.safetensors").stat().st_size < 1.2 * sum(
        p.numel() * p.element_size() for p in model.parameters()
    ) + 20_000


@pytest.mark.parametrize("make", [translation_model, language_model])
def test_a_run_is_exported(tmp_path, make):
    model = make()
    tokenizers, data = (
        (TOKENIZERS, {"max_length": 9}) if make is translation_model else (TOKENIZERS[:1], {"context": 9})
    )
    save_run(tmp_path / "run", model, *tokenizers, **data)
    done = fastformer("export", "--run", "run", "--format", "safetensors", "--to", "s", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "s: config.json, model.safetensors, tokenizer\n"), done.stderr
    exported = load_safetensors(tmp_path / "s").state_dict()
    assert all(torch.equal(exported[name], weight) for name, weight in model.state_dict().items())
    ctranslate2 = pytest.importorskip("ctranslate2")
    succeed("export", "--run", "run", "--quantization", "int8", "--to", "c", cwd=tmp_path)
    assert ctranslate2.contains_model(str(tmp_path / "c"))


def test_mistakes_leave_nothing_behind(tmp_path, monkeypatch):
    model = translation_model()
    (tmp_path / "current").mkdir()
    monkeypatch.chdir(tmp_path / "current")
    with pytest.raises(FileExistsError, match="current is the folder that you are in, and would be replaced"):
        export_safetensors(".", model, TOKENIZERS)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("x")
    for export in (export_safetensors, export_ctranslate2):
        with pytest.raises(FileExistsError, match="full exists already; choose another folder"):
            export(tmp_path / "full", model, TOKENIZERS)
    with pytest.raises(ValueError, match=r"quantization must be one of int8, .* not 'int4'"):
        export_ctranslate2(tmp_path / "x", model, TOKENIZERS, "int4")
    with pytest.raises(ValueError, match="tokenizers"):
        export_safetensors(tmp_path / "x", model, TOKENIZERS[:1])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["current", "full"]


def test_damaged_exports_are_refused_by_name(tmp_path):
    with pytest.raises(CheckpointError, match="holds no exported model"):
        load_safetensors(tmp_path)
    export_safetensors(tmp_path / "model", language_model(), TOKENIZERS[:1])
    config = tmp_path / "model" / "config.json"
    content = json.loads(config.read_text())
    config.write_text(json.dumps({**content, "data": 3}))
    with pytest.raises(CheckpointError, match="holds no exported model, or its"):
        load_safetensors(tmp_path / "model")
    config.write_text(json.dumps({**content, "kind": "vision"}))
    with pytest.raises(CheckpointError, match=r"config\.json is not that of an exported model"):
        load_safetensors(tmp_path / "model")
    config.write_text(json.dumps({**content, "model": {**content["model"], "layers": 1}}))
    with pytest.raises(CheckpointError, match="which this model does not have"):
        load_safetensors(tmp_path / "model")
