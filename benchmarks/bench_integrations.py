"""Models of Hugging Face with fastformer, against the same with their `sdpa`.

Two ways: "attention" leaves the padding out in attention alone (`attn_implementation="fastformer"`), "layers" in all
layers (`padding_free`). A training step is forward and backward from random gradients of the hidden states of real
positions, with dropout as configured (0.1 but for Llama); inference is forward alone, without a cache. Padding is on
the left for Llama's attention, else on the right. On a GPU bf16, 12 layers; on a CPU fp32, 2 layers of BERT-base's
width (T5's encoder and Llama of the same).

`bench_sentence_transformers`, on a CPU: models of the size of all-MiniLM-L6-v2 with random weights, texts of 4 to 62
random words. Encoding and scoring sort texts by length and take 32 at a time; a training step has 32 unsorted texts.
"""

import copy
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn

from benchmarks.competitors.known import require
from benchmarks.competitors.models import race_models
from benchmarks.harness.race import Race

pytestmark = pytest.mark.gpu

Way = Literal["attention", "layers"]
Task = Literal["training step", "inference"]

VOCABULARY = 8000
# Width, layers and heads; sequences, and the longest of them.
BASE, TINY = ((768, 12, 12), (32, 512)), ((32, 2, 2), (3, 20))
SIZES = {
    "quick": BASE,
    "full": BASE,
    "quick-cpu": ((256, 2, 4), (8, 256)),
    "short-cpu": ((768, 2, 12), (16, 128)),
    "long-cpu": ((768, 2, 12), (8, 512)),
}
TOLERANCES = {torch.bfloat16: (2e-2, 5e-2), torch.float32: (1e-5, 1e-4)}  # of outputs and gradients
ROUNDS = {"cpu": 3, "cuda": 10}
# Of all layers on a CPU, by the share of padding.
GOALS = {"training step": {0.0: 0.97, 0.5: 1.8}, "inference": {0.0: 0.97, 0.5: 1.75}}
GPU_GOAL = 1.2
IDS = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
TEXTS, BATCH, WORDS = 192, 32, 2000  # of sentence-transformers


def _model(name: str, width: int, layers: int, heads: int) -> nn.Module:
    import transformers

    sdpa = {"attn_implementation": "sdpa"}
    if name == "T5":
        config: Any = transformers.T5Config(
            **IDS, d_model=width, num_layers=layers, num_heads=heads, d_kv=width // heads, d_ff=4 * width
        )
        return transformers.T5EncoderModel._from_config(config, **sdpa)
    shared = {**IDS, "hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": heads}
    kind = transformers.BertConfig if name == "BERT" else transformers.LlamaConfig
    config = kind(**shared, intermediate_size=4 * width)
    return transformers.AutoModel.from_config(config, **sdpa)


def _mask(left: bool, sequences: int, longest: int, share: float, device: torch.device) -> Tensor:
    """Return int64 `[B, S]`, 1 at real positions; lengths spread evenly to the longest, with this share of padding."""
    lengths = torch.linspace(longest * (1 - 2 * share), longest, sequences).round().long().clamp(min=1)[:, None]
    steps = torch.arange(longest)
    return (steps >= longest - lengths if left else steps < lengths).long().to(device)


def _behind_embeddings(net: nn.Module) -> Iterator[nn.Parameter]:
    """Return the parameters of the layers: BERT's embeddings have gradients so large that no others would count."""
    return (p for name, p in net.named_parameters() if "embed" not in name)


def _cases() -> list[Any]:
    on_gpu: list[Any] = [("quick", "BERT", "layers", 0.45, "training step")]
    on_gpu += [("full", *case, 0.45, "training step") for case in (("BERT", "attention"), ("Llama", "layers"))]
    on_cpu: list[Any] = [("quick-cpu", "BERT", "layers", 0.5, "training step")]
    shares: list[tuple[Way, float]] = [("layers", 0.0), ("layers", 0.1), ("layers", 0.5), ("attention", 0.5)]
    which = [(size, "BERT", *share) for size in ("short-cpu", "long-cpu") for share in shares]
    which += [("short-cpu", name, "layers", 0.5) for name in ("T5", "Llama")]
    on_cpu += [(*case, task) for case in which for task in ("training step", "inference")]
    return [*on_gpu, *(pytest.param(*case, marks=pytest.mark.cpu) for case in on_cpu)]


@pytest.mark.parametrize("competitor", ["sdpa"])
@pytest.mark.parametrize(("size", "model", "way", "share", "task"), _cases())
def bench_transformers(race: Race, size: str, model: str, way: Way, share: float, task: Task, competitor: str) -> None:
    require("transformers", race.device)
    import transformers

    import fastformer
    from fastformer.integrations.transformers import padding_free

    transformers.utils.logging.set_verbosity_error()
    (width, layers, heads), (sequences, longest) = TINY if race.tiny else SIZES[size]
    dtype = torch.float32 if race.device.type == "cpu" else torch.bfloat16
    original: nn.Module = _model(model, width, layers, heads).to(race.device, dtype)
    changed: Any = copy.deepcopy(original)
    if way == "layers":
        assert padding_free(changed).packed
    else:
        changed.set_attn_implementation("fastformer")
    mask = _mask(way == "attention" and model == "Llama", sequences, longest, share, race.device)
    ids = torch.randint(4, VOCABULARY, mask.shape, device=race.device)
    inputs = {"input_ids": ids, "attention_mask": mask, **({} if model in ("BERT", "T5") else {"use_cache": False})}

    def forward(net: nn.Module) -> Tensor:
        with fastformer.backend(race.backend):  # a fallback is an error
            return net(**inputs).last_hidden_state

    tolerance, gradient_tolerance = TOLERANCES[race.dtype]
    goal = GOALS[task].get(share) if way == "layers" and size != "quick-cpu" else None
    goal = goal if size.endswith("-cpu") else GPU_GOAL
    race_models(
        race,
        f"{model}, {sequences} x {longest}, {share:.0%} padding, {way}, {task}",
        {"fastformer": changed, "transformers, sdpa": original},
        forward,
        mask.bool(),
        trains=task == "training step",
        tolerance=tolerance,
        gradient_tolerance=gradient_tolerance,
        parameters=_behind_embeddings,
        rounds=ROUNDS[race.device.type],
        goal=goal,
    )


@pytest.mark.cpu
@pytest.mark.parametrize("competitor", ["sentence-transformers"])
@pytest.mark.parametrize(("size", "task"), [("usual", "encoding"), ("usual", "training step"), ("usual", "scoring")])
def bench_sentence_transformers(race: Race, size: str, task: str, competitor: str) -> None:
    require(competitor, race.device)
    import transformers
    from sentence_transformers import CrossEncoder, SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Pooling, Transformer

    from fastformer.integrations.transformers import padding_free

    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"word{index}" for index in range(WORDS))]
    lengths = torch.randint(4, 63, (TEXTS,)).tolist()
    texts = [" ".join(words[5 + index] for index in torch.randint(WORDS, (length,)).tolist()) for length in lengths]
    sizes = {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 1536}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "vocab.txt").write_text("\n".join(words), encoding="utf-8")
        transformers.BertTokenizer(str(Path(folder) / "vocab.txt")).save_pretrained(folder)
        config = transformers.BertConfig(vocab_size=len(words), num_labels=1, **sizes)
        transformers.BertForSequenceClassification(config).save_pretrained(folder)
        scorer, modules = CrossEncoder(folder, device="cpu"), [Transformer(folder), Pooling(384)]
    original: Any = scorer if task == "scoring" else SentenceTransformer(modules=modules, device="cpu")
    changed = copy.deepcopy(original)
    assert padding_free(changed).packed
    pairs = list(zip(texts[: TEXTS // 2], texts[TEXTS // 2 :], strict=True))
    options = {"batch_size": BATCH, "convert_to_tensor": True, "show_progress_bar": False}

    def forward(model: Any) -> Tensor:
        output: Tensor
        if task == "training step":
            output = model(dict(model.preprocess(texts[:BATCH])))["sentence_embedding"]
        else:
            output = model.predict(pairs, **options) if task == "scoring" else model.encode(texts, **options)
        return output

    real = torch.ones({"encoding": TEXTS, "training step": BATCH, "scoring": len(pairs)}[task], dtype=torch.bool)
    race_models(
        race,
        f"{type(original).__name__} of 6 layers, d384, {task}",
        {"fastformer": changed, "sentence-transformers": original},
        forward,
        real,
        trains=task == "training step",
        tolerance=1e-4,
        gradient_tolerance=1e-4,
        parameters=_behind_embeddings,
        per_token=False,
        rounds=5,
    )
