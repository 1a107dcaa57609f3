"""Generation by transformers and CTranslate2 with the weights of a fastformer model.

All generate a fixed number of tokens, because random weights do not end a text.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.harness.race import Race
from fastformer.apps.export import export_ctranslate2
from fastformer.apps.language.model import LanguageModel
from fastformer.apps.pretrained import to_transformers
from fastformer.apps.text import WordTokenizer
from fastformer.apps.translation.model import TranslationModel

NAMES = {
    TranslationModel: {"transformers": "transformers, Marian generate", "ctranslate2": "CTranslate2"},
    LanguageModel: {"transformers": "GPT-2 of transformers", "ctranslate2": "CTranslate2"},
}

Model = TranslationModel | LanguageModel
Generate = Callable[[], list[list[int]]]


def loader_of(
    competitor: str, model: Model, prompts: Sequence[Sequence[int]], beam: int, tokens: int, folder: Path
) -> Callable[[], Generate]:
    """Return a function that loads "transformers" or "ctranslate2", and returns its generation after each prompt.

    The conversion of the model, which is fastformer's, runs here; exceptions of the loader are the competitor's.
    Prompts are source sentences with eos, or beginnings of texts. Beam 1 is greedy search. `folder` is for files.
    """
    make = _transformers if competitor == "transformers" else _ctranslate2
    return make(model, prompts, beam, tokens, folder)


def _transformers(
    model: Model, prompts: Sequence[Sequence[int]], beam: int, tokens: int, folder: Path
) -> Callable[[], Generate]:
    c, device = model.config, model.output.weight.device
    longest = max(map(len, prompts))
    ids = torch.tensor([[*prompt, *[c.pad_id] * (longest - len(prompt))] for prompt in prompts], device=device)
    options: dict[str, Any] = {
        "do_sample": False,
        "min_new_tokens": tokens,
        "max_new_tokens": tokens,
        "pad_token_id": c.pad_id,
    }
    options |= {"num_beams": beam, "suppress_tokens": [c.pad_id, c.bos_id]}
    options |= {"length_penalty": 0.0} if beam > 1 else {}
    converted = to_transformers(model).eval()
    converted.generation_config.forced_eos_token_id = None
    start = 1 if isinstance(model, TranslationModel) else longest
    mask = (ids != c.pad_id).long()
    return lambda: lambda: converted.generate(input_ids=ids, attention_mask=mask, **options)[:, start:].tolist()


def _ctranslate2(
    model: Model, prompts: Sequence[Sequence[int]], beam: int, tokens: int, folder: Path
) -> Callable[[], Generate]:
    c, size = model.config, model.output.weight.shape[0]
    words = WordTokenizer.from_lines([f"w{i}" for i in range(size - 4)], splitting="whitespace")
    options: dict[str, Any] = {
        "beam_size": beam,
        "suppress_sequences": [[words.pieces([i])[0]] for i in (c.pad_id, c.bos_id)],
    }
    device = model.output.weight.device.type
    threads = {"inter_threads": 1, "intra_threads": 1}
    if isinstance(model, TranslationModel):
        export_ctranslate2(folder / "model", model, [words, words])
        pieces = [words.pieces(ids[:-1]) for ids in prompts]  # CTranslate2 adds the eos
        options |= {"max_decoding_length": tokens, "min_decoding_length": tokens, "length_penalty": 0.0}
    else:
        export_ctranslate2(folder / "model", model, [words])
        pieces = [words.pieces(ids) for ids in prompts]
        options |= {"max_length": tokens, "min_length": tokens, "sampling_topk": 1, "include_prompt_in_result": False}

    def load() -> Generate:
        import ctranslate2

        if isinstance(model, TranslationModel):
            translator = ctranslate2.Translator(str(folder / "model"), device=device, **threads)

            def translate() -> list[list[int]]:
                results = translator.translate_batch(pieces, **options)
                return [words.encode(" ".join(result.hypotheses[0])) for result in results]

            return translate
        generator = ctranslate2.Generator(str(folder / "model"), device=device, **threads)
        return lambda: [result.sequences_ids[0] for result in generator.generate_batch(pieces, **options)]

    return load


def gate_probabilities(race: Race, ours: Tensor, theirs: Tensor) -> None:
    """Require that both sides' texts are as probable to the model as the better one; ties may be won by other words."""
    best = torch.maximum(ours, theirs)
    race.gate("best log probability", ours, best, 1e-3)
    race.gate_theirs("log probability", theirs, best, 1e-3)


@torch.no_grad()
def vary_output(norm: object) -> None:
    """Set random signs in the last norm; else a model with tied random embeddings repeats its last token."""
    assert isinstance(norm, nn.LayerNorm)
    norm.weight.copy_(torch.randint(0, 2, norm.weight.shape) * 2 - 1)
