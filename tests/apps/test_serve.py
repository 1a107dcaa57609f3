"""`fastformer serve`: answers belong to their requests, limits hold, errors are JSON, and the server ends cleanly."""

import asyncio
import contextlib
import json
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import pytest

uvicorn = pytest.importorskip("uvicorn", reason="serving needs the extra `serve`")

from fastformer.apps.cli.commands import application_function, listen
from fastformer.apps.serve import api
from fastformer.apps.serve.worker import ModelWorker, QueueFullError
from fastformer.apps.translation.search import SearchOptions
from tests.apps.conftest import LINES
from tests.support.command_line import fastformer


def model_of(folder):
    return application_function(folder, "serve_run", {})(folder, "best", "cpu")


@contextlib.contextmanager
def served(model):
    """The address of a server in this process."""
    with listen("127.0.0.1", 0) as listener:
        application = api.Api(model, "run").application("127.0.0.1")
        server = uvicorn.Server(uvicorn.Config(application, log_config=None, timeout_graceful_shutdown=2))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()


def request(address, path, body=None, **headers):
    """The status and the body of an answer."""
    data = body if isinstance(body, bytes) else None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json", **headers}
    try:
        with urllib.request.urlopen(urllib.request.Request(address + path, data, headers), timeout=60) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def post(address, path, **body):
    status, text = request(address, path, body)
    assert status == 200, text
    return json.loads(text)


def test_100_clients_get_the_answers_to_their_own_texts(runs):
    model = model_of(runs / "translation")
    with served(model) as address, ThreadPoolExecutor(100) as clients:
        texts = [(LINES[i % len(LINES)], 1 + i % 3) for i in range(100)]
        answers = list(clients.map(lambda each: post(address, "/api/translate", text=each[0], beam=each[1]), texts))
    for (text, beam), answer in zip(texts, answers, strict=True):
        [expected] = model.compute([text], SearchOptions(beam=beam, max_length=512))
        assert [each["text"] for each in answer["translations"]] == [each["text"] for each in expected["translations"]]


def test_a_stream_is_the_text_that_the_seed_gives_alone(runs):
    with served(model_of(runs / "language")) as address:
        settings = {"text": LINES[3], "seed": 5, "max_new_tokens": 12}
        lines = request(address, "/api/generate", {**settings, "stream": True})[1].splitlines()
        *pieces, end = map(json.loads, lines)
        assert end == {"done": True}
        assert "".join(each["piece"] for each in pieces) == post(address, "/api/generate", **settings)["text"]


def test_labels_are_sorted_and_attention_rows_sum_to_one(runs):
    with served(model_of(runs / "classification")) as address:
        labels = post(address, "/api/classify", text=LINES[1])["labels"]
        attention = post(address, "/api/attention", text=LINES[1], layer=1, head=2)
    assert {each["label"] for each in labels} == {"x", "y", "z"}
    probabilities = [each["probability"] for each in labels]
    assert probabilities == sorted(probabilities, reverse=True)
    assert sum(probabilities) == pytest.approx(1, abs=3e-4)
    assert (attention["layers"], attention["heads"]) == (1, 2)
    for row in attention["weights"]:  # each of 4 digits
        assert sum(row) == pytest.approx(1, abs=5e-5 * len(row))


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        ({"text": 5}, 400, "text must be a text, not 5"),
        ({}, 400, "text must be given"),
        ({"text": "w1", "beem": 2}, 400, "did you mean 'beam'"),
        ({"text": "w1", "beam": 99}, 400, "beam must be at most 16, not 99"),
        ({"text": "w1", "max_length": 513}, 400, "max_length must be at most 512"),
        ({"text": "w1", "cuda_graphs": True}, 400, "cuda_graphs cannot be set by a request"),
        ({"text": "w1", "beam": 1, "n_best": 1}, 400, "n_best has an effect only with a beam above 1"),
        ({"text": "w1", "stream": True}, 400, "stream is for language models"),
        ({"text": "w" * 5001}, 413, "5,001 characters; at most 5,000"),
        (b'{"text": "\\ud800"}', 400, "text"),
        (b"{", 400, "not JSON"),
        (b"[" * 60_000, 400, "not JSON"),  # deeper than Python reads
        (b"[]", 400, "must be a JSON object"),
        (b" " * 80_000, 413, "larger than 70,000 bytes"),
    ],
)
def test_bad_requests_get_one_line_of_json(translation, body, status, message):
    got, text = request(translation, "/api/translate", body)
    error = json.loads(text)["error"]
    assert (got, "\n" in error) == (status, False)
    assert message in error


@pytest.fixture(scope="module")
def translation(runs):
    with served(model_of(runs / "translation")) as address:
        yield address


def test_other_paths_hosts_and_content_types_are_refused(translation):
    assert request(translation, "/api/generate", {})[1] == (
        '{"error":"there is no /api/generate; this model has POST /api/translate"}'
    )
    assert request(translation, "/api/translate", b"{}", **{"Content-Type": "text/plain"})[0] == 415
    assert request(translation, "/api/model", Host="example.com")[0] == 400
    assert request(translation, "/")[1].startswith("<!doctype html>")


def test_different_texts_with_equal_options_are_a_batch_and_only_the_bad_text_fails():
    """The first batch has one request, during which the others arrive."""
    batches, started, arrived = [], threading.Event(), threading.Event()

    def compute(texts, options):
        batches.append("".join(texts))
        started.set()
        arrived.wait()
        if "!" in texts:
            raise ValueError("a bad text")
        return [f"{options}{text}" for text in texts]

    async def work():
        worker = ModelWorker(compute, batch_size=3, queue_size=9)
        first = asyncio.create_task(worker.submit("f", 0))
        await asyncio.to_thread(started.wait)
        texts = [("a", 1), ("b", 2), ("!", 1), ("a", 1), ("gone", 1), ("c", 1), ("d", 1)]
        requests = [asyncio.create_task(worker.submit(*each)) for each in texts]
        await asyncio.sleep(0)  # all wait
        requests.pop(4).cancel()  # its place is free
        await asyncio.sleep(0)
        requests += [asyncio.create_task(worker.submit(text, 3)) for text in "ef"]
        await asyncio.sleep(0)
        try:
            with pytest.raises(QueueFullError, match="9 requests wait already"):
                await asyncio.wait_for(worker.submit("full", 3), timeout=20)
        finally:
            arrived.set()
        return await asyncio.gather(first, *requests, return_exceptions=True)

    results = [str(each) for each in asyncio.run(work())]
    assert results == ["0f", "1a", "2b", "a bad text", "1a", "1c", "1d", "3e", "3f"]
    assert batches == ["f", "a!", "a", "!", "b", "acd", "ef"]


def test_a_late_request_and_a_failing_model_are_errors(runs, monkeypatch):
    def compute(texts, options):
        if texts == ["w1"]:
            raise RuntimeError("a bug")
        time.sleep(0.5)
        return texts

    monkeypatch.setattr(api, "SECONDS", 0.2)
    with served(model_of(runs / "classification")._replace(compute=compute)) as address:
        failed, late = (request(address, "/api/classify", {"text": text}) for text in ("w1", "w2"))
    assert late == (504, '{"error":"no result after 0.2 s"}')
    assert failed[0] == 500
    assert "the server's log has the reason" in failed[1]


@pytest.mark.slow
def test_ctrl_c_ends_the_command_and_a_used_port_is_one_line(runs):
    command = [sys.executable, "-m", "fastformer", "serve", "--run", "translation", "--port", "0"]
    process = subprocess.Popen(command, cwd=runs, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    line = process.stdout.readline()
    address = line.split()[3]
    assert line == f"Serving translation at {address} (Ctrl-C ends)\n"
    model = json.loads(request(address, "/api/model")[1])
    assert model["action"] == "translate"
    assert "cuda_graphs" not in {each["name"] for each in model["settings"]}
    second = fastformer("serve", "--run", "translation", "--port", address.rpartition(":")[2], cwd=runs)
    assert second.returncode == 2
    where, reason = address.removeprefix("http://"), "Address already in use; choose another --port or --host"
    assert second.stderr == f"error: cannot listen at {where}: {reason}\n"
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=60) == ("", "")
    assert process.returncode == 0
