"""`TrainConfig`: every hyperparameter of training; see `fastformer.apps.settings`."""

import os
import shutil

import torch

from fastformer.apps.settings import Pair, Settings, setting
from fastformer.apps.train.schedules import SCHEDULES

_ADAM = ("adamw", "adam")
_INDUCTOR = "inductor"
# More threads per processor only wait for each other, and each takes megabytes of stack.
_THREADS_A_PROCESSOR = 4


class TrainConfig(Settings):
    """Hyperparameters of a run. At least one of steps, epochs and minutes must be set; the first reached ends it."""

    optimizer: str = setting("adamw", "optimizer", choices=("adamw", "adam", "sgd"), fixed=True)
    lr: float = setting(1e-3, "peak learning rate", above=0)
    betas: Pair = setting(
        (0.9, 0.98), "Adam's decay rates of gradient and square, each at least 0 and below 1", only={"optimizer": _ADAM}
    )
    eps: float = setting(1e-9, "Adam's term that avoids division by zero", above=0, only={"optimizer": _ADAM})
    momentum: float = setting(0.9, "momentum of steps", at_least=0, below=1, only={"optimizer": "sgd"})
    weight_decay: float = setting(0.0, "weight decay of matrices (biases and norms have none)", at_least=0)
    schedule: str = setting("inverse_sqrt", "learning-rate schedule", choices=SCHEDULES, fixed=True)
    warmup_steps: int = setting(4000, "steps of linear rise to the peak learning rate", at_least=0)
    min_lr: float = setting(0.0, "lowest learning rate", at_least=0, at_most="lr", only={"schedule": SCHEDULES[1:]})
    plateau_factor: float = setting(0.5, "factor of one reduction", above=0, below=1, only={"schedule": "plateau"})
    plateau_patience: int = setting(
        2, "validations in a row without a lower loss that change nothing", at_least=0, only={"schedule": "plateau"}
    )
    plateau_divisor: float = setting(4.0, "divisor of one reduction", above=1, only={"schedule": "divide_on_plateau"})
    label_smoothing: float = setting(0.1, "probability mass spread over all words", at_least=0, below=1)
    clip_norm: float = setting(1.0, "largest gradient norm; 0: no clipping", at_least=0)
    accumulate: int = setting(1, "batches whose gradients make one step", at_least=1)
    steps: int | None = setting(None, "end after this many optimizer steps", at_least=1)
    epochs: int | None = setting(None, "end after this many passes over the data", at_least=1)
    minutes: float | None = setting(
        None,
        "end after this many minutes in all sessions, validations included; one of over a tenth scores fewer examples",
        above=0,
    )
    clock: str = setting(
        "wall",
        "clock of minutes: wall; or cpu, the time of the processor, for a busy machine",
        choices=("wall", "cpu"),
        fixed=True,
    )
    batch_tokens: int = setting(
        4096,
        "most tokens in a batch, on either side",
        at_least=1,
        only={"batch_sentences": None, "stream": "documents"},
        fixed=True,
    )
    batch_sentences: int | None = setting(
        None, "most sentences in a batch", at_least=1, only={"texts": "sentence pairs"}, fixed=True
    )
    validate_every: int | None = setting(None, "validate and save every n steps; unset: after each epoch", at_least=1)
    save_minutes: float = setting(5.0, "most minutes between two saves", above=0)
    metric: str = setting(
        "loss", "validation value that decides best weights and early stopping, such as bleu", fixed=True
    )
    patience: int | None = setting(
        None, "early stopping: end after this many validations without a better metric", at_least=1
    )
    keep: int = setting(3, "last checkpoints to keep, besides the best", at_least=1)
    average: int = setting(1, "average the last n checkpoints at the end; 1: no averaging", at_least=1, at_most="keep")
    seed: int = setting(1, "seed of every random generator", at_least=0, below=2**32, fixed=True)
    precision: str = setting(
        "fp32", "fp32, or autocast to bf16 or fp16 (the latter with loss scaling)", choices=("fp32", "bf16", "fp16")
    )
    cuda_graphs: bool | None = setting(
        None,
        "repeat steps as CUDA graphs, in fp32 or bf16; unset: on a CUDA GPU, where they apply",
        only={"hardware": "a CUDA device", "processes": "one process"},
    )
    compile: str | None = setting(
        None,
        "torch.compile the steps, with this compiler; eager and aot_eager only trace",
        choices=(_INDUCTOR, "aot_eager", "eager"),
    )
    checkpoint_activations: bool = setting(
        False, "save only the input of each layer, and compute the layer again in backward: less memory"
    )
    parallel: str = setting(
        "ddp",
        "under torchrun: ddp, each process holds the whole model; fsdp, each holds a part",
        choices=("ddp", "fsdp"),
        only={"processes": "several processes"},
    )
    threads: int | None = setting(None, "CPU threads; unset: torch's choice", at_least=1)
    log_every: int = setting(50, "steps between two records of loss and speed", at_least=1)
    tensorboard: bool = setting(False, "write TensorBoard event files too")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.cuda_graphs and (obstacle := self.graphs_obstacle()):
            raise ValueError(obstacle)
        if self.steps is None and self.epochs is None and self.minutes is None:
            raise ValueError("no end of training is set; give steps, epochs or minutes")

    def graphs_obstacle(self, processes: int = 1) -> str | None:
        """Return why CUDA graphs cannot repeat the steps of this many processes, or None if they can."""
        if self.precision == "fp16":
            return "cuda_graphs=True is for precision fp32 and bf16, not for fp16"
        for other, value in (("compile", self.compile), ("checkpoint_activations", self.checkpoint_activations)):
            if value:
                return f"cuda_graphs=True does not go together with {other}={value!r}; leave one of them out"
        return f"cuda_graphs=True is for one process, not for {processes}" if processes > 1 else None

    @property
    def end(self) -> str:
        """The limits that end a run, in words."""
        limits = (
            (self.steps, "step is made", "steps are made"),
            (self.epochs, "epoch is complete", "epochs are complete"),
            (self.minutes, "minute is spent", "minutes are spent"),
        )
        words = (f"{limit:,} {one if limit == 1 else many}" for limit, one, many in limits if limit)
        return f"until {' or '.join(words)}".replace(".0 ", " ")


def check_machine(config: TrainConfig, device: torch.device | str, world: int) -> None:
    """Raise ValueError for settings that this machine, or a run of `world` processes, cannot be trained with."""
    most = _THREADS_A_PROCESSOR * (os.cpu_count() or 1)
    if config.threads is not None and config.threads > most:  # torch crashes if it cannot start as many
        raise ValueError(
            f"threads must be at most {most} here, {_THREADS_A_PROCESSOR} a processor, not {config.threads}"
        )
    compiler = os.environ.get("CXX", "g++")
    if config.compile == _INDUCTOR and torch.device(device).type == "cpu" and shutil.which(compiler) is None:
        raise ValueError(
            f"compile={_INDUCTOR!r} needs a C++ compiler on a CPU, and {compiler!r} is not found; install one, name "
            "one in the environment variable CXX, or leave compile unset"
        )
    if config.cuda_graphs and (obstacle := config.graphs_obstacle(world)):
        raise ValueError(obstacle)
