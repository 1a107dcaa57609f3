"""Scores with several references, bootstrap intervals and paired bootstrap are sacrebleu's."""

import shutil

import pytest
from sacrebleu.metrics import BLEU, CHRF, TER

from fastformer.apps.text.scores import compare_translations, score_translations
from tests.apps.cli.test_streaming import runs  # noqa: F401
from tests.support.command_line import fastformer

REFERENCES = [f"the {i} cat sat on mat {i % 3}" for i in range(40)]
OTHERS = [f"a {i} cat was on mat {i % 3}" for i in range(40)]
NEAR = [line.replace("sat", "was") if i % 2 else line for i, line in enumerate(REFERENCES)]
FAR = [line.replace("cat", "dog") for line in NEAR]


def test_several_references_and_intervals():
    scores = score_translations(NEAR, REFERENCES, more_references=[OTHERS], bootstrap=100)
    for name, metric in (("bleu", BLEU()), ("chrf", CHRF()), ("ter", TER())):
        expected = metric.corpus_score(NEAR, [REFERENCES, OTHERS], n_bootstrap=100)
        assert getattr(scores, name) == expected.score
        assert scores.intervals[name] > 0
        assert getattr(scores, f"{name}_signature") == str(metric.get_signature())
    assert scores.bleu > score_translations(NEAR, REFERENCES).bleu
    assert f"BLEU {scores.bleu:.2f} ± {scores.intervals['bleu']:.2f} (nrefs:2|bs:100|" in str(scores)
    with pytest.raises(ValueError, match="39 translations and 40 references"):
        score_translations(NEAR, REFERENCES, more_references=[OTHERS[1:]])


def test_a_worse_system_differs_by_more_than_chance_and_an_equal_one_does_not():
    results = {
        (each.metric, each.system): each
        for each in compare_translations({"near": NEAR, "far": FAR, "same": NEAR}, REFERENCES, bootstrap=200)
    }
    assert {metric for metric, _ in results} == {"BLEU", "chrF2", "TER"}
    for metric in ("BLEU", "chrF2", "TER"):
        assert results[metric, "near"].p_value is None
        assert results[metric, "far"].p_value < 0.05
        assert results[metric, "same"].p_value > 0.5
    assert results["BLEU", "near"].score == score_translations(NEAR, REFERENCES).bleu


def test_the_commands(runs, tmp_path):  # noqa: F811
    lines = (runs / "lines").read_text().splitlines()
    for name in ("source", "first", "second"):
        (tmp_path / name).write_text("".join(f"{line}\n" for line in lines))
    options = ["--run", str(runs / "translation"), "--source", "source", "--device", "cpu", "--max-length", "4"]
    targets = ["--target", "first", "--target", "second"]
    done = fastformer("evaluate", *options, *targets, "--bootstrap", "20", cwd=tmp_path)
    assert "TER" in done.stdout
    assert "(nrefs:2|bs:20|" in done.stdout, done.stderr
    (tmp_path / "second").write_text("one line\n")
    done = fastformer("evaluate", *options, *targets, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (
        2,
        "error: second has 1 lines for 40 pairs; several references need files of equal length without empty lines\n",
    )
    done = fastformer("compare", str(runs / "translation"), str(runs / "language"), "--bootstrap", "9", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (2, "error: --bootstrap compares at least two translation runs\n")


def test_compare_translates_the_test_data_of_the_first_run(tmp_path):
    train = "--train-size 60 --valid-size 5 --test-size 8 --steps 2 --device cpu --threads 1 --d-model 16 --heads 2"
    small = f"{train} --feed-forward 16 --encoder-layers 1 --decoder-layers 1 --vocabulary 60 --bleu-sentences 2"
    assert fastformer("train", *small.split(), "--run", "a", cwd=tmp_path).returncode == 0
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    done = fastformer("compare", "a", "b", "--bootstrap", "10", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines() if line.startswith(("BLEU", "chrF2", "TER"))]
    assert [row[-1] for row in rows] == ["a", "b"] * 3
    assert [row[2:4] for row in rows[1::2]] == [["p", "="]] * 3
