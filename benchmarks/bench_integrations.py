"""Models of Hugging Face transformers with our attention, against the same with their `sdpa`; on a GPU.

Forward and backward of the mean square of the hidden states of real positions; bf16, dropout as configured (0.1 for
BERT and GPT-2, none for Llama), 32 sequences of up to 512 tokens, 45 % padding, on the left for the decoders. Only the
attention leaves the padding out; their other layers work on it on both sides.
"""

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks.competitors import require
from benchmarks.race import Memory, Race, Side, flat_gradients

pytestmark = pytest.mark.gpu

SEQUENCES, LONGEST, VOCABULARY = 32, 512, 8000
TOLERANCE = {"output": 2e-2, "gradients": 5e-2}  # bf16, 12 layers
GOALS = {"BERT": 1.2, "GPT-2": 1.2, "Llama": 1.2}
BASE = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def _config(model: str, tiny: bool) -> Any:
    import transformers

    width, layers, heads = (32, 2, 2) if tiny else (768, 12, 12)
    if model == "GPT-2":
        return transformers.GPT2Config(**BASE, n_embd=width, n_layer=layers, n_head=heads)
    shared = {**BASE, "hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": heads}
    kind = transformers.BertConfig if model == "BERT" else transformers.LlamaConfig
    return kind(**shared, intermediate_size=4 * width)


def _mask(left: bool, sequences: int, longest: int, device: torch.device) -> Tensor:
    """int64 `[B, S]`, 1 at real positions; lengths spread evenly from a tenth of the longest to it."""
    lengths = torch.linspace(longest / 10, longest, sequences).round().long()[:, None]
    steps = torch.arange(longest)
    return (steps >= longest - lengths if left else steps < lengths).long().to(device)


@pytest.mark.parametrize("competitor", ["sdpa"])
@pytest.mark.parametrize("size_model", ["quick-BERT", "full-GPT-2", "full-Llama"])
def bench_transformers(race: Race, size_model: str, competitor: str) -> None:
    require("transformers", race.device)
    import transformers

    import fastformer
    import fastformer.integrations.transformers  # registers the attention

    transformers.utils.logging.set_verbosity_error()
    model = size_model.partition("-")[2]
    sequences, longest = (3, 20) if race.tiny else (SEQUENCES, LONGEST)
    dtype = torch.float32 if race.tiny else torch.bfloat16
    theirs: nn.Module = transformers.AutoModel.from_config(_config(model, race.tiny), attn_implementation="sdpa")
    theirs = theirs.to(race.device, dtype)
    ours: Any = copy.deepcopy(theirs)
    ours.set_attn_implementation("fastformer")
    mask = _mask(model != "BERT", sequences, longest, race.device)
    ids = torch.randint(4, VOCABULARY, mask.shape, device=race.device)

    def loss(net: nn.Module) -> Tensor:
        hidden = net(input_ids=ids, attention_mask=mask).last_hidden_state[mask.bool()]
        value: Tensor = hidden.float().square().mean()
        return value

    def step(net: nn.Module) -> Tensor:
        net.zero_grad(set_to_none=True)
        with fastformer.backend(race.backend):  # no fallback goes by unseen
            value = loss(net)
            value.backward()  # type: ignore[no-untyped-call]
        return value

    for net in (ours, theirs):
        net.eval()
    ours_loss = step(ours)
    with race.competitor():
        race.gate("loss", ours_loss, step(theirs), TOLERANCE["output"])
        a, b = (flat_gradients(net.parameters()) for net in (ours, theirs))
        race.gate("gradients", a, b, TOLERANCE["gradients"])
    nets = [net.train() for net in (ours, theirs)]
    tokens = int(mask.sum())
    race.note(padding_share=1 - tokens / mask.numel())
    race(
        f"{model}, {sequences} x {longest}, training step",
        Side("fastformer", lambda: step(ours), tokens),
        Side("transformers, sdpa", lambda: step(theirs), tokens),
        rounds=10,
        goal=GOALS[model],
        **race.memory(*(Memory(partial(loss, net), net.parameters(), partial(step, net)) for net in nets)),
    )
