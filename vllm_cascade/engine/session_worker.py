# SPDX-License-Identifier: Apache-2.0
"""A worker's sessions: opened with its pages, served before every step, reported after it."""

from copy import copy
from typing import TYPE_CHECKING, Any, ClassVar

from torch.distributed import PrefixStore
from torch.distributed.distributed_c10d import _get_default_store
from vllm.config import ParallelConfig
from vllm.utils.network_utils import get_loopback_ip
from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput

from vllm_cascade.cache.layout import page_pools
from vllm_cascade.engine.devices import Device
from vllm_cascade.recall.stores import UnitStores
from vllm_cascade.sessions.ranks import Ranks, outcome_store
from vllm_cascade.sessions.session import Report
from vllm_cascade.sessions.settings import SessionSettings
from vllm_cascade.sessions.tiers import WorkerSessions

if TYPE_CHECKING:
    from vllm.v1.worker.gpu_worker import Worker as _Base
else:
    _Base = object


def session_ranks(rank: int, parallel: ParallelConfig) -> Ranks:
    """A worker's place among those that keep an engine's sessions.

    The rank whose outputs vLLM sends to the scheduler collects: the last stage's first.
    """
    world = parallel.world_size
    if world == 1:
        return Ranks()
    shared = PrefixStore(f"kv_sessions/{parallel.data_parallel_index}", _get_default_store())
    collects = rank == world - parallel.tensor_parallel_size
    store = outcome_store(shared, rank, collects, get_loopback_ip())
    return Ranks(rank, world, store, collects)


class WithReport(AsyncModelRunnerOutput):
    """A step's output that comes later, and then has a report.

    Model Runner V2 returns such outputs for all steps with tokens, also without asynchronous
    scheduling.
    """

    def __init__(self, later: Any, report: Report) -> None:
        self._later, self._report = later, report

    def get_output(self) -> ModelRunnerOutput:
        output = copy(self._later.get_output())
        output.kv_sessions = self._report
        return output

    def get_kv_connector_output(self) -> Any:
        """What vLLM 0.33 asks for where ``get_output`` fails."""
        return self._later.get_kv_connector_output()


class SessionWorker(_Base):
    """Mixin for vLLM's workers: what sessions need of them.

    Attributes:
        device_entry: the device; each device's worker sets it.
    """

    device_entry: ClassVar[Device]
    _sessions: WorkerSessions | None = None
    _stores: UnitStores | None = None

    def _open_sessions(self) -> None:
        """Keep sessions, if the engine does. Called once, when pages and stores exist."""
        settings = SessionSettings.of(self.vllm_config.additional_config)
        if settings is not None:
            folder = settings.folder(self.parallel_config.data_parallel_index)
            ranks = session_ranks(self.rank, self.parallel_config)
            if folder is not None and ranks.world > 1:
                ranks.check_folder(folder)
            copies = self.device_entry.session_copies(page_pools(self.model_runner.kv_caches))
            self._sessions = WorkerSessions(copies, folder, self._stores, ranks)

    def _serve_sessions(self, output: SchedulerOutput) -> None:
        """Execute the scheduler's commands. Nothing has followed ``output`` yet."""
        if self._sessions is not None:
            self._sessions.execute(getattr(output, "sessions", ()))
            if not output.total_num_scheduled_tokens:
                self._sessions.idle()

    def sample_tokens(self, grammar_output: GrammarOutput | None) -> Any:
        return self._with_report(super().sample_tokens(grammar_output))

    def _with_report(self, output: Any) -> Any:
        """A step's output with what the threads of sessions finished, if there is any."""
        is_later = isinstance(output, AsyncModelRunnerOutput)
        if self._sessions is None or not (is_later or isinstance(output, ModelRunnerOutput)):
            return output
        report = self._sessions.take_report()
        if report and is_later:
            return WithReport(output, report)
        if report:
            output = copy(output)  # vLLM returns one object for all steps without tokens
            output.kv_sessions = report
        return output

    def shutdown(self) -> None:
        if self._sessions is not None:
            self._sessions.close()
        super().shutdown()
