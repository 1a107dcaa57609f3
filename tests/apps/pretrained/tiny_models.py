"""Tiny models of transformers with random weights, all biases and norms included, so that none may go missing.

And a folder as those of OPUS-MT are: a Marian model, and tokenizers of its own text.
"""

import io
import json
from pathlib import Path
from typing import Any

import sentencepiece
import torch

from fastformer.apps.text import ParallelCorpus

V, D, H, LENGTH = 37, 16, 4, 24
_SIZES = {
    "vocab_size": V,
    "hidden_size": D,
    "num_hidden_layers": 2,
    "num_attention_heads": H,
    "intermediate_size": 24,
}
_LLAMA = {
    **_SIZES,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 1,
    "bos_token_id": 2,
    "eos_token_id": 3,
}
_BERT = {**_SIZES, "max_position_embeddings": 32}
_MARIAN = {
    "vocab_size": V,
    "d_model": D,
    "encoder_layers": 2,
    "decoder_layers": 3,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24,
    "encoder_attention_heads": H,
    "decoder_attention_heads": H,
    "activation_function": "swish",
    "scale_embedding": True,
    "pad_token_id": V - 1,
    "decoder_start_token_id": V - 1,
    "eos_token_id": 0,
    "max_position_embeddings": 40,
}
_GPT2 = {"vocab_size": V, "n_embd": D, "n_layer": 2, "n_head": H, "n_positions": 32, "bos_token_id": 2}
_GPT2 |= {"eos_token_id": 2}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 100.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
_SLIDING = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 0}

# name -> class and settings of its configuration
ALL: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2LMHeadModel", _GPT2),
    "gpt2 untied": ("GPT2LMHeadModel", {**_GPT2, "tie_word_embeddings": False, "n_inner": 20}),
    "llama": ("LlamaForCausalLM", _LLAMA),
    "llama tied, biases": (
        "LlamaForCausalLM",
        {**_LLAMA, "tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
    ),
    "llama scaled as 3": ("LlamaForCausalLM", {**_LLAMA, "rope_parameters": LLAMA3}),
    "llama stretched": (
        "LlamaForCausalLM",
        {**_LLAMA, "rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}},
    ),
    "llama with gelu": ("LlamaForCausalLM", {**_LLAMA, "hidden_act": "gelu"}),
    "qwen2": ("Qwen2ForCausalLM", _LLAMA),
    "qwen2 window": ("Qwen2ForCausalLM", {**_LLAMA, **_SLIDING}),
    "qwen3": ("Qwen3ForCausalLM", {**_LLAMA, "head_dim": 6}),
    "mistral": ("MistralForCausalLM", {**_LLAMA, "sliding_window": None}),
    "mistral window": ("MistralForCausalLM", {**_LLAMA, "sliding_window": 5}),
    "bert": ("BertModel", _BERT),
    "bert tokens": ("BertForTokenClassification", {**_BERT, "num_labels": 3}),
    "bert sequences": ("BertForSequenceClassification", {**_BERT, "num_labels": 3}),
    "marian": ("MarianMTModel", _MARIAN),
    "marian, two vocabularies": (
        "MarianMTModel",
        {**_MARIAN, "share_encoder_decoder_embeddings": False, "decoder_vocab_size": V - 4}
        | {"pad_token_id": 30, "decoder_start_token_id": 30, "scale_embedding": False},
    ),
}


def build(name: str, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """A model in evaluation mode; no weight is 0 or 1, so that each shows."""
    import transformers

    kind, settings = ALL[name]
    made = getattr(transformers, kind)
    torch.manual_seed(1)
    model = made(made.config_class(**{**settings, **changes})).eval()
    frozen = {id(p) for p in model.parameters() if not p.requires_grad}
    with torch.no_grad():
        for x in (p for p in model.parameters() if id(p) not in frozen):
            x.add_(torch.randn_like(x) * 0.25)
        if hasattr(model, "final_logits_bias"):
            model.final_logits_bias.normal_()
    return model.to(dtype)


def batch(lengths: list[int], vocabulary: int = V - 7, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids padded at the end, and the attention mask of transformers; no special ids inside."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(4, vocabulary, (len(lengths), max(lengths)), generator=generator)
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    return ids.masked_fill(~mask, 1), mask.long()


CODE = ">>fra<<"


def write_marian_folder(folder: Path, corpus: ParallelCorpus) -> None:
    """Write it; ids are no sentencepiece's, and both sides have pieces that the other has not."""
    import transformers

    folder.mkdir(exist_ok=True)
    both = [
        *_pieces_of(corpus.target, folder / "target.spm", 60),
        *_pieces_of(corpus.source, folder / "source.spm", 50),
    ]
    words = ["</s>", "<unk>", CODE, *sorted({*both} - {"<unk>", "</s>"}), "<pad>"]
    (folder / "vocab.json").write_text(json.dumps({word: i for i, word in enumerate(words)}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"source_lang": "eng", "target_lang": "fra"}))
    sizes = {f"{side}_{name}": n for side in ("encoder", "decoder") for name, n in (("layers", 1), ("ffn_dim", 64))}
    heads = {f"{side}_attention_heads": 4 for side in ("encoder", "decoder")}
    pad = len(words) - 1
    config = transformers.MarianConfig(
        vocab_size=len(words), d_model=32, activation_function="swish", scale_embedding=True, pad_token_id=pad,
        decoder_start_token_id=pad, eos_token_id=0, max_position_embeddings=128, dropout=0.1, **sizes, **heads,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.MarianMTModel(config).eval()
    with torch.no_grad():
        for x in (p for p in model.parameters() if p.requires_grad):
            x.add_(torch.randn_like(x) * 0.3)
    model.save_pretrained(folder)


def _pieces_of(lines: list[str], path: Path, size: int) -> list[str]:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_writer=model, vocab_size=size, model_type="unigram",
        bos_id=-1, unk_id=0, eos_id=1, pad_id=-1, minloglevel=2, hard_vocab_limit=False,
    )  # fmt: skip
    path.write_bytes(model.getvalue())
    processor = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    return [processor.id_to_piece(i) for i in range(processor.get_piece_size())]
