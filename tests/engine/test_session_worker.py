# SPDX-License-Identifier: Apache-2.0
"""Workers report about sessions with each step's output, whether it is ready at once or later."""

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput

from vllm_cascade.engine.session_worker import SessionWorker
from vllm_cascade.sessions.session import Report


class Later(AsyncModelRunnerOutput):
    """An output whose tokens arrive later, as both of vLLM's model runners return them."""

    def __init__(self, output: ModelRunnerOutput) -> None:
        self.output = output

    def get_output(self) -> ModelRunnerOutput:
        self.output.sampled_token_ids = [[7]]
        return self.output

    def get_kv_connector_output(self) -> Any:
        """Asked for by vLLM 0.33 where ``get_output`` fails."""
        return "salvaged"


class Runner:
    """vLLM's worker, which returns one output a step."""

    outputs: list[Any]

    def sample_tokens(self, grammar_output: Any) -> Any:
        return self.outputs.pop(0)


class Worker(SessionWorker, Runner):
    """A worker with sessions of which the threads finish something in some steps."""

    def __init__(self, outputs: list[Any], reports: list[Report]) -> None:
        self.outputs = outputs
        self._sessions = SimpleNamespace(take_report=lambda: reports.pop(0))  # type: ignore


@pytest.mark.parametrize("later", [False, True])
def test_each_report_leaves_once_with_its_step(later: bool) -> None:
    """Also where a second step begins before the first one's output is asked for."""
    plain = [ModelRunnerOutput(req_ids=["a"], req_id_to_index={"a": 0}) for _ in range(3)]
    reports = [Report(saved=["x"]), Report(), Report(saved=["y"])]
    worker = Worker([Later(one) if later else one for one in plain], reports)
    steps = [worker.sample_tokens(None) for _ in range(3)]
    assert all(isinstance(step, AsyncModelRunnerOutput) is later for step in steps)
    assert not later or {step.get_kv_connector_output() for step in steps} == {"salvaged"}
    done = [step.get_output() if later else step for step in steps]
    assert [one.req_ids for one in done] == [["a"]] * 3
    assert [one.sampled_token_ids for one in done] == [[[7]] if later else []] * 3
    found = [getattr(one, "kv_sessions", None) for one in done]
    assert [one and one.saved for one in found] == [["x"], None, ["y"]]
    assert not any(hasattr(one, "kv_sessions") for one in plain), "vLLM may return one for all"
