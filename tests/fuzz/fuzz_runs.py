"""Run folders from strangers: what may stand in the place of each name, in and beside a whole run.

A fault says where it is, and whether a command that needs that name must refuse the run.
"""

import json
import shutil
import tomllib
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random

import torch

from fastformer.apps.train import Checkpoint, read_weights, write_weights
from fastformer.apps.train.checkpoint import META, OPTIMIZER, STATE, WEIGHTS, file_facts
from tests.fuzz import fuzz

LAST = "checkpoints/step-2"
# Names that a run folder may have and these do not.
ABSENT = (
    *(".config.toml", ".data.json", ".metrics.jsonl", ".metrics.csv", ".history.png", ".lock", "tensorboard"),
    *("checkpoints/.index.json", "checkpoints/average", "checkpoints/.new-step-3", "checkpoints/.old-step-1"),
    *("checkpoints/.swap-step-2", "checkpoints/.new-average", "checkpoints/step-9", "tokenizer/.tokenizer.json"),
    *("attention.png", "demo.txt", "checkpoints/.new-x", "notes\x1b[31m", "stray", "tokenizer/stray"),
)
SIZES = ("9223372036854775807", "9223372036854775808", "2147483648", "4611686018427387904", "1" + "0" * 9, "0", "-1")
# A run of so many steps is what was asked for.
ENDLESS = {"steps", "epochs", "minutes"}
CONTENT = ("empty", "cut", "noise", "missing", "damaged")
FOREIGN_DTYPES = (torch.int8, torch.bool, torch.int64, torch.uint64, torch.complex64, torch.float8_e4m3fn)


@dataclass(frozen=True)
class Fault:
    """`name`: of the file; `kind`; `certain`: whether a command that reads that name must refuse the run."""

    name: str
    kind: str
    certain: bool


@dataclass(frozen=True)
class Stranger:
    """A copy of a run with faults: its folder, and the run that it was."""

    run: Path
    original: Path

    def faults(self, random: Random, count: int) -> list[Fault]:
        """Put some in, and say which of them a later one has not put away."""
        put = [self._fault(random) for _ in range(count)]
        return [x for i, x in enumerate(put) if not any(f"{x.name}/".startswith(f"{y.name}/") for y in put[i + 1 :])]

    def _fault(self, random: Random) -> Fault:
        drawn = random.random()
        if drawn < 0.12:
            return self._state(random)
        if drawn < 0.24:
            return self._weights(random)
        if drawn < 0.36:
            return self._config(random)
        if drawn < 0.42:
            return self._tokenizer(random)
        name = random.choice(self._names())
        return self._content(random, name)

    def _names(self) -> list[str]:
        there = [str(path.relative_to(self.original)) for path in self.original.rglob("*")]
        return sorted([*there, *ABSENT])

    def _clear(self, name: str) -> Path | None:
        """Make the place free; None where an earlier fault has put something else than folders above it."""
        path = self.run / name
        if any(
            parent.is_symlink() or not parent.is_dir() for parent in path.parents if parent.is_relative_to(self.run)
        ):
            return None
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink(missing_ok=True)
        return path

    def _content(self, random: Random, name: str) -> Fault:
        original, kind = self.original / name, random.choice(CONTENT)
        data = original.read_bytes() if original.is_file() else b"{}"
        path = self._clear(name)
        if path is None or original.is_dir():
            return Fault(name, "hidden" if path is None else "missing", False)
        if kind == "damaged":
            whole = random.random() < 0.7 and name.endswith(".json")
            path.write_bytes(fuzz.changed_json(random, json.loads(data)) if whole else fuzz.damaged(random, data))
        elif kind != "missing":
            path.write_bytes(
                {"empty": b"", "cut": data[: random.randrange(len(data) + 1)], "noise": random.randbytes(200)}[kind]
            )
        return Fault(name, kind, False)

    def _rehash(self, name: str) -> None:
        """Have meta.json state what the file is now."""
        checkpoint = self.run / LAST
        meta = json.loads((checkpoint / META).read_text())
        meta["files"][name] = file_facts(checkpoint / name)
        (checkpoint / META).write_text(json.dumps(meta))

    def _untouched(self, *names: str) -> bool:
        """Whether no earlier fault is at a file or above it."""
        for name in names:
            path, data = self.run / name, (self.original / name).read_bytes()
            if not path.is_file() or path.stat().st_size != len(data) or path.read_bytes() != data:
                return False
        return True

    def _state(self, random: Random) -> Fault:
        name = random.choice((STATE, OPTIMIZER))
        path = self.run / LAST / name
        if not self._untouched(f"{LAST}/{name}", f"{LAST}/{META}"):
            return Fault(LAST, "hidden", False)
        if name == STATE:
            path.write_bytes(fuzz.changed_json(random, json.loads(path.read_bytes())))
        else:
            tensors = read_weights(path)
            changed = random.choice(sorted(tensors))
            x = tensors.pop(changed)
            found = {"dtype": x.to(random.choice(FOREIGN_DTYPES)), "shape": torch.stack([x, x]), "name": x}
            kind = random.choice(("missing", *found))
            if kind != "missing":
                tensors[changed if kind != "name" else "99." + changed] = found[kind]
            path.unlink()
            write_weights(path, tensors)
        self._rehash(name)
        return Fault(f"{LAST}/{name}", "foreign state", name == OPTIMIZER)

    def _weights(self, random: Random) -> Fault:
        path = self.run / LAST / WEIGHTS
        if not self._untouched(f"{LAST}/{WEIGHTS}", f"{LAST}/{META}"):
            return Fault(LAST, "hidden", False)
        weights = Checkpoint.open(path.parent).weights()  # tied ones twice
        name = random.choice(sorted(weights))
        x = weights.pop(name)
        kind = random.choice(("dtype", "shape", "huge shape", "number", "missing", "more", "bytes"))
        if kind == "bytes":
            path.write_bytes(fuzz.damaged(random, path.read_bytes()))
        else:
            found = {
                "dtype": x.to(random.choice(FOREIGN_DTYPES)),
                "shape": torch.cat([x, x]) if x.dim() == 1 or random.random() < 0.5 else x.reshape(-1),
                "huge shape": torch.zeros(0, 2**62 - 1),
                "number": torch.full_like(x, random.choice((float("nan"), float("inf"), float("-inf")))),
                "more": x,
            }
            if kind in found:
                weights[name] = found[kind]
            if kind == "more":
                weights["more"] = x.clone()
            path.unlink()
            write_weights(path, weights)
        self._rehash(WEIGHTS)
        return Fault(f"{LAST}/{WEIGHTS}", f"foreign weights: {kind}", kind != "bytes")

    def _tokenizer(self, random: Random) -> Fault:
        """One of another run: whole, but of other sizes or other ids."""
        name = random.choice(sorted(str(x.relative_to(self.original)) for x in self.original.rglob("tokenizer.json")))
        if not self._untouched(name):
            return Fault(name, "hidden", False)
        content = json.loads((self.original / name).read_text())
        words, ids = content["words"], content["special_ids"]
        kind = random.choice(("larger", "smaller", "other ids"))
        if kind == "larger":
            words += [f"more {i}" for i in range(random.choice((1, 1000)))]
        elif kind == "smaller":
            del words[random.randrange(len(ids), len(words)) :]
        else:
            one, other = random.sample(sorted(ids), 2)
            ids[one], ids[other] = ids[other], ids[one]
            words[ids[one]], words[ids[other]] = words[ids[other]], words[ids[one]]
        (self.run / name).write_text(json.dumps(content))
        # The ids that a model writes are those of its last tokenizer.
        certain = kind != "other ids" or "source" not in name
        return Fault(name, f"foreign tokenizer: {kind}", certain)

    def _config(self, random: Random) -> Fault:
        path = self.run / "config.toml"
        if not self._untouched("config.toml"):
            return Fault("config.toml", "hidden", False)
        lines = path.read_text().splitlines()
        for _ in range(random.randint(1, 3)):
            at = random.choice([i for i, line in enumerate(lines) if " = " in line])
            key = lines[at].split(" = ")[0]
            value = random.choice(SIZES) if random.random() < 0.5 else fuzz.toml_value(random)
            match random.randrange(6):
                case 0:
                    del lines[at]
                case 1:
                    lines.insert(at, f"{random.choice(('unknown', 'd_modle', key))} = {value}")
                case _ if key not in ENDLESS:
                    lines[at] = f"{key} = {value}"
                case _:
                    lines[at] = random.choice(("[model]", "[other]", "kind = 3", "version = 99"))
        path.write_text("\n".join(lines) + "\n", encoding="utf-8", errors="surrogatepass")
        meta = f"{LAST}/{META}"
        if random.random() < 0.4 and self._untouched(meta):  # a checkpoint that says the same
            with suppress(ValueError, KeyError):
                content = json.loads((self.original / meta).read_text())
                content["config"] |= tomllib.loads(path.read_text())["model"]
                (self.run / meta).write_text(json.dumps(content, default=str))
        return Fault("config.toml", "changed config", False)
