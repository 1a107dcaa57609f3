"""The library as Hugging Face's `kernels` package loads it: under another name, beside the installed one or without."""

import ast
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

from fastformer.integrations import kernel_hub
from fastformer.integrations.kernel_hub import VARIANT, relative_imports, write

THEIRS = importlib.util.find_spec("kernels")
LOADERS = {
    # What `kernels` does: the package under its id, from where it lies.
    "importlib": """
metadata = json.loads((variant / "metadata.json").read_text())
spec = importlib.util.spec_from_file_location(metadata["id"], variant / "__init__.py")
library = importlib.util.module_from_spec(spec)
sys.modules[metadata["id"]] = library
spec.loader.exec_module(library)
""",
    "kernels": """
import kernels
library = kernels.get_local_kernel(variant.parents[1], trust_remote_code=True)
""",
}
HEAD = """
import importlib, importlib.util, json, pathlib, sys
import torch
import torch.nn.functional as F
from torch import nn

def assert_close(found, expected):  # fp32, some hundred terms of the largest
    assert (found - expected).abs().max() < 2.0**-23 * 256 * expected.abs().max()

"""
WITHOUT_IT = """
sys.modules["fastformer"] = sys.modules["fastformer_kernels"] = None  # an import of either raises
"""
BESIDE_IT = """
del sys.modules["fastformer"], sys.modules["fastformer_kernels"]
import fastformer
with fastformer.backend("triton"):
    assert_close(fastformer.functional.layer_norm(q, (16,)), F.layer_norm(q, (16,)))
    assert_close(compiled(x), F.layer_norm(x, (16,)))
"""
USE = """
model = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True), 2)
x, padding = torch.randn(2, 5, 16), torch.arange(5) >= torch.tensor([[5], [3]])
expected = model(x, src_key_padding_mask=padding)
library.convert(model)
assert type(model).__module__ == library.__name__ + ".nn.stacks", type(model)
assert_close(model(x, src_key_padding_mask=padding)[~padding], expected[~padding])

q = torch.randn(1, 2, 5, 16, requires_grad=True)
expected = F.scaled_dot_product_attention(q, q, q, is_causal=True)
dq = torch.autograd.grad(expected.square().sum(), q)[0]
with library.backend("triton"):
    found = library.functional.attention(q, q, q, causal=True)
    assert_close(found, expected)
    assert_close(torch.autograd.grad(found.square().sum(), q)[0], dq)
    compiled = torch.compile(lambda x: library.functional.layer_norm(x, (16,)), backend="aot_eager", fullgraph=True)
    assert_close(compiled(x), F.layer_norm(x, (16,)))
launchers = importlib.import_module(library.__name__ + ".host.autograd_function").LAUNCHERS
assert all(hasattr(getattr(torch.ops, library.__name__), name) for name in launchers) and len(launchers) > 20
"""


@pytest.fixture(scope="module")
def variant(tmp_path_factory):
    return write(tmp_path_factory.mktemp("hub"))


@pytest.mark.parametrize("loader", LOADERS)
@pytest.mark.slow
def test_loads_and_computes_without_the_installed_package_and_beside_it(loader, variant, tmp_path, monkeypatch):
    if loader == "kernels" and (THEIRS is None or THEIRS.origin is None):  # a folder of that name is none of theirs
        pytest.skip("needs Hugging Face's kernels package (make kernel-hub)")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, map(os.path.abspath, sys.path))))
    program = "".join((HEAD, f"variant = pathlib.Path({str(variant)!r})", WITHOUT_IT, LOADERS[loader], USE, BESIDE_IT))
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_imports_nothing_of_fastformer_by_name(variant):
    files = sorted(variant.rglob("*.py"))
    assert len(files) > 80
    assert not (variant / "apps").exists()
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            names = [name.name for name in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
            assert not [name for name in names if name.startswith("fastformer")], (file, node.lineno)


def test_a_hub_folder_that_cannot_be_written_is_refused(variant, tmp_path, capsys):
    with pytest.raises(ValueError, match=r"a\.py:1: `import fastformer\.nn` cannot be relative"):
        relative_imports("import fastformer.nn\n", Path("a.py"))
    with pytest.raises(ValueError, match="version must be at least 1, not 0"):
        write(tmp_path, version=0)
    assert not (tmp_path / VARIANT).exists()
    before = sorted(variant.rglob("*"))
    with pytest.raises(SystemExit) as stopped:
        kernel_hub.main([str(variant.parents[1])])
    assert stopped.value.code == 2
    assert "File exists" in capsys.readouterr().err
    assert sorted(variant.rglob("*")) == before
