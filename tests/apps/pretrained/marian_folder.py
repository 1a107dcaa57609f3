"""A folder as those of OPUS-MT are: a tiny Marian model with random weights, and tokenizers of its own text."""

import io
import json
from pathlib import Path

import sentencepiece
import torch

from fastformer.apps.text import ParallelCorpus

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
