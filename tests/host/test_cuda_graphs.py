"""What captures CUDA graphs: its calls, in order; that CUDA takes them is tested on a GPU."""

import warnings
from contextlib import nullcontext

import pytest
import torch

from fastformer.host import cuda_graphs
from tests.support.recorded_steps import TapeRecorder


class FakeCuda:
    """What `CudaRecorder` asks of torch.cuda, written down in order."""

    def __init__(self, monkeypatch):
        self.log, self.streams, self.fails_at_end = [], [], False
        fake = self

        class Stream:
            def __init__(self, index):
                self.name = f"side {len(fake.streams)}"
                fake.streams.append(self)

            def wait_stream(self, other):
                fake.log.append(f"{self.name} waits for {other.name}")

        class Graph:
            def capture_begin(self, pool, capture_error_mode):
                self.handle = pool
                fake.log.append(f"begin in {pool}, {capture_error_mode}")

            def capture_end(self):
                fake.log.append("end")
                if fake.fails_at_end:
                    raise RuntimeError("the end cannot be captured")

            def pool(self):
                return self.handle

            def replay(self):
                fake.log.append("replay")

        class Generator:
            def clone_state(self):
                return "state"

            def graphsafe_set_state(self, state):
                fake.log.append(f"generator gets {state}")

        handles = iter(range(100))
        current = Stream(0)
        current.name = "current"
        fakes = {
            "Stream": Stream,
            "CUDAGraph": Graph,
            "stream": lambda stream: nullcontext(),
            "current_stream": lambda index: current,
            "graph_pool_handle": lambda: f"pool {next(handles)}",
            "default_generators": {0: Generator()},
        }
        for name, value in fakes.items():
            monkeypatch.setattr(torch.cuda, name, value)
        for name in ("_cuda_endAllocateToPool", "_cuda_releasePool"):
            call = lambda index, pool, name=name: self.log.append(f"{name} {index} {pool}")  # noqa: E731
            monkeypatch.setattr(torch._C, name, call, raising=False)
        monkeypatch.setattr(cuda_graphs, "_idle", {})


class TestCudaRecorder:
    device = torch.device("cuda", 0)

    def test_captures_share_a_pool_as_long_as_one_recorder_has_it(self, monkeypatch):
        cuda = FakeCuda(monkeypatch)
        recorder, other = cuda_graphs.recorder(self.device, True), cuda_graphs.recorder(self.device, True)
        for each in (recorder, recorder, other):
            assert each.capture(lambda: cuda.log.append("step") or torch.ones(1)).output == 1
        begins = [line for line in cuda.log if line.startswith("begin")]
        assert begins == [f"begin in pool {i}, thread_local" for i in (0, 0, 1)]
        assert cuda.log[:5] == ["side 1 waits for current", begins[0], "step", "end", "current waits for side 1"]
        resources = recorder.resources
        del recorder, each
        again = cuda_graphs.recorder(self.device, True)
        assert again.resources is resources
        assert cuda_graphs.recorder(self.device, True).resources is not resources

    @pytest.mark.parametrize("keeps", [True, False])
    def test_memory_stays_for_the_next_recorder_with_the_option(self, monkeypatch, keeps):
        FakeCuda(monkeypatch)
        recorder = cuda_graphs.recorder(self.device, keeps)
        recorder.capture(lambda: None)
        resources = recorder.resources
        assert resources.last is not None
        del recorder
        assert (resources.last is not None) == keeps
        assert cuda_graphs.recorder(self.device, True).resources is resources

    @pytest.mark.parametrize("fails", ["the step", "the end"])
    def test_a_capture_that_fails_cleans_up_and_says_why(self, monkeypatch, fails):
        def step():
            if fails == "the step":
                raise RuntimeError("the step cannot be captured")
            return torch.ones(1)

        cuda = FakeCuda(monkeypatch)
        recorder = cuda_graphs.recorder(self.device, True)
        recorder.capture(lambda: torch.ones(1))
        cuda.fails_at_end, before = True, recorder.failures
        cuda.log.clear()
        with pytest.raises(RuntimeError, match=f"{fails} cannot be captured"):
            recorder.capture(step)
        assert cuda.log[2:] == [
            "end",
            "generator gets state",
            "_cuda_endAllocateToPool 0 pool 0",
            "_cuda_releasePool 0 pool 0",
            "current waits for side 1",
        ]
        assert recorder.resources.last is None  # its memory is free once no graph is left
        assert recorder.failures == cuda_graphs.recorder(self.device, True).failures == before + 1


class TestCaptureOrWarn:
    def test_a_capture(self):
        x = torch.zeros(1)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            recorded = cuda_graphs.capture_or_warn(TapeRecorder(), lambda: x.add_(1), "all")
        assert x == 0
        assert recorded.output is x
        recorded.replay()
        assert x == 1

    def test_a_failure_is_a_warning_of_one_line_with_its_reason(self):
        with pytest.warns(RuntimeWarning, match="^all goes on without CUDA graphs, .*not captured: operation not"):
            assert cuda_graphs.capture_or_warn(TapeRecorder(), lambda: torch.ones(1).item(), "all") is None

    def test_what_is_no_failure_of_a_capture_is_raised(self):
        class Broken(TapeRecorder):
            def capture(self, step):
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            cuda_graphs.capture_or_warn(Broken(), lambda: None, "all")


def test_only_cuda_devices_have_a_recorder():
    assert cuda_graphs.recorder(torch.device("cpu"), True) is None
