"""`fastformer serve`: answers belong to their requests, limits hold, errors are JSON, and the server ends cleanly."""

import contextlib
import json
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import pytest

pytest.importorskip("typer", reason="the command line needs the extra `apps`")
uvicorn = pytest.importorskip("uvicorn", reason="serving needs the extra `serve`")

from fastformer.apps.cli.commands import application_function
from fastformer.apps.cli.serve import listen
from fastformer.apps.serve.api import application
from fastformer.apps.translation.search import SearchOptions
from tests.apps.conftest import LINES
from tests.support.command_line import fastformer


def endpoint(folder):
    """The endpoint of a run, its settings and the function that computes."""
    return application_function(folder, "serve_run", {})(folder, "best", "cpu")


@contextlib.contextmanager
def served(name, *of):
    """The address of a server in this process."""
    with listen("127.0.0.1", 0) as listener:
        config = uvicorn.Config(application(name, *of, "127.0.0.1"), log_config=None, timeout_graceful_shutdown=2)
        server = uvicorn.Server(config)
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
        return error.code, error.read().decode()


def post(address, path, **body):
    status, text = request(address, path, body)
    assert status == 200, text
    return json.loads(text)


def test_20_clients_get_the_answers_to_their_own_texts(runs):
    """Computed one at a time."""
    action, settings, translate = endpoint(runs / "translation")
    running = []

    def alone(text, options):
        running.append(text)
        assert len(running) == 1
        result = translate(text, options)
        running.pop()
        return result

    with served("run", action, settings, alone) as address, ThreadPoolExecutor(20) as clients:
        texts = [(LINES[i % len(LINES)], 1 + i % 3) for i in range(20)]
        answers = list(clients.map(lambda each: post(address, "/api/translate", text=each[0], beam=each[1]), texts))
    assert answers == [translate(text, SearchOptions(beam=beam, max_length=512)) for text, beam in texts]


def test_a_seed_gives_the_same_continuation(runs):
    with served("run", *endpoint(runs / "language")) as address:
        settings = {"text": LINES[3], "seed": 5, "max_new_tokens": 12}
        assert post(address, "/api/generate", **settings) == post(address, "/api/generate", **settings)


def test_labels_are_sorted_by_probability(runs):
    with served("run", *endpoint(runs / "classification")) as address:
        labels = post(address, "/api/classify", text=LINES[1])["labels"]
    assert {each["label"] for each in labels} == {"x", "y", "z"}
    probabilities = [each["probability"] for each in labels]
    assert probabilities == sorted(probabilities, reverse=True)
    assert sum(probabilities) == pytest.approx(1, abs=3e-4)  # each of 4 digits


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        ({"text": 5}, 400, "text must be a text, not 5"),
        ({}, 400, "text must be given"),
        ({"text": "w1", "beem": 2}, 400, "did you mean 'beam'"),
        ({"text": "w1", "beam": 99}, 400, "beam must be at most 16, not 99"),
        ({"text": "w1", "max_length": 513}, 400, "max_length must be at most 512"),
        ({"text": "w1", "beam": 1, "n_best": 1}, 400, "n_best has an effect only with a beam above 1"),
        ({"text": "w" * 5001}, 413, "5,001 characters; at most 5,000"),
        (b'{"text": "\\ud800"}', 400, "text"),
        (b"{", 400, "not JSON"),
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
    with served("run", *endpoint(runs / "translation")) as address:
        yield address


def test_other_paths_hosts_and_content_types_are_refused(translation):
    assert request(translation, "/api/generate", {})[1] == (
        '{"error":"there is no /api/generate; this model has POST /api/translate"}'
    )
    assert request(translation, "/api/translate", b"{}", **{"Content-Type": "text/plain"})[0] == 415
    assert request(translation, "/api/model", Host="example.com")[0] == 400
    assert request(translation, "/")[1].startswith("<!doctype html>")


def test_a_failing_model_is_an_error(runs):
    action, settings, _ = endpoint(runs / "classification")

    def compute(text, options):
        raise RuntimeError("a bug")

    with served("run", action, settings, compute) as address:
        status, text = request(address, "/api/classify", {"text": "w1"})
    assert (status, json.loads(text)) == (500, {"error": "the model failed; the server's log has the reason"})


def test_ctrl_c_ends_the_command_and_a_used_port_is_one_line(runs):
    command = [sys.executable, "-m", "fastformer", "serve", "--run", "translation", "--port", "0"]
    process = subprocess.Popen(command, cwd=runs, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    line = process.stdout.readline()
    address = line.split()[3]
    assert line == f"Serving translation at {address} (Ctrl-C ends)\n"
    assert json.loads(request(address, "/api/model")[1])["action"] == "translate"
    second = fastformer("serve", "--run", "translation", "--port", address.rpartition(":")[2], cwd=runs)
    assert second.returncode == 2
    assert "cannot listen at 127.0.0.1" in second.stderr
    assert second.stderr.count("\n") == 1
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=60) == ("", "")
    assert process.returncode == 0
