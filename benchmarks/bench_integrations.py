"""Models of Hugging Face transformers with our attention, against the same with their `sdpa`; on a GPU.

Forward and backward of the mean square of the hidden states of real positions; bf16, dropout as configured (0.1 for
BERT and GPT-2, none for Llama), 32 sequences of up to 512 tokens, 45 % padding, on the left for the decoders. Only the
attention leaves the padding out; their other layers work on it on both sides. On a CPU a small BERT in fp32.
"""

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks.competitors.known import require
from benchmarks.harness.race import Contender, Memory, Race, flat_gradients

pytestmark = pytest.mark.gpu

VOCABULARY = 8000
# Width, layers and heads; sequences, and the longest of them.
BASE, TINY = ((768, 12, 12), (32, 512)), ((32, 2, 2), (3, 20))
SIZES = {"quick": BASE, "full": BASE, "quick-cpu": ((256, 2, 4), (8, 256))}
TOLERANCES = {
    torch.bfloat16: {"output": 2e-2, "gradients": 5e-2},  # of 12 layers
    torch.float32: {"output": 1e-5, "gradients": 1e-4},  # of 2, whose GELU has no kink
}
ROUNDS = {"cpu": 3, "cuda": 10}
GOALS = {"BERT": 1.2, "GPT-2": 1.2, "Llama": 1.2}
IDS = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def _config(model: str, width: int, layers: int, heads: int) -> Any:
    import transformers

    if model == "GPT-2":
        return transformers.GPT2Config(**IDS, n_embd=width, n_layer=layers, n_head=heads)
    shared = {**IDS, "hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": heads}
    kind = transformers.BertConfig if model == "BERT" else transformers.LlamaConfig
    return kind(**shared, intermediate_size=4 * width)


def _mask(left: bool, sequences: int, longest: int, device: torch.device) -> Tensor:
    """int64 `[B, S]`, 1 at real positions; lengths spread evenly from a tenth of the longest to it."""
    lengths = torch.linspace(longest / 10, longest, sequences).round().long()[:, None]
    steps = torch.arange(longest)
    return (steps >= longest - lengths if left else steps < lengths).long().to(device)


@pytest.mark.parametrize("competitor", ["sdpa"])
@pytest.mark.parametrize(
    ("size", "model"),
    [
        ("quick", "BERT"),
        ("full", "GPT-2"),
        ("full", "Llama"),
        pytest.param("quick-cpu", "BERT", marks=pytest.mark.cpu),
    ],
)
def bench_transformers(race: Race, size: str, model: str, competitor: str) -> None:
    require("transformers", race.device)
    import transformers

    import fastformer
    import fastformer.integrations.transformers  # registers the attention

    transformers.utils.logging.set_verbosity_error()
    (width, layers, heads), (sequences, longest) = TINY if race.tiny else SIZES[size]
    dtype = torch.float32 if race.device.type == "cpu" else torch.bfloat16
    tolerances = TOLERANCES[race.dtype]
    config = _config(model, width, layers, heads)
    theirs: nn.Module = transformers.AutoModel.from_config(config, attn_implementation="sdpa")
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
        race.gate("loss", ours_loss, step(theirs), tolerances["output"])
        a, b = (flat_gradients(net.parameters()) for net in (ours, theirs))
        race.gate("gradients", a, b, tolerances["gradients"])
    nets = [net.train() for net in (ours, theirs)]
    tokens = int(mask.sum())
    race.note(padding_share=1 - tokens / mask.numel())
    race(
        f"{model}, {sequences} x {longest}, training step",
        Contender("fastformer", lambda: step(ours), tokens),
        Contender("transformers, sdpa", lambda: step(theirs), tokens),
        rounds=ROUNDS[race.device.type],
        goal=None if size == "quick-cpu" else GOALS[model],
        **race.memory(*(Memory(partial(loss, net), net.parameters(), partial(step, net)) for net in nets)),
    )
