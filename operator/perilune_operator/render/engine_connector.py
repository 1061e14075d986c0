"""vLLM's MooncakeConnector without two faults of vLLM 0.32, loaded by engines as `kv_connector_module_path`.

- One message may ask for the KV of several requests. When the engine that gives ends after some of them have
  arrived, vLLM reports all of them as failed, also those that were answered since. Its scheduler asserts that
  it knows each of them, so the engine that takes ends too, once its patience is over (the timeout of aborted
  requests and a minute). Here what has arrived counts as done with, and cannot fail any more.
- MultiConnector requires Prometheus metrics of every connector that reports how transfers went, and
  MooncakeConnector reports without having such metrics: beside a store, the first hand-off that succeeds
  would end the engine. This one does not report.

Only vLLM itself is imported, because the file is mounted into engines alone.
"""

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.mooncake import (  # type: ignore[import-not-found]
    mooncake_connector,
)


class MooncakeConnector(mooncake_connector.MooncakeConnector):  # type: ignore[misc]
    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        if hasattr(self.connector_worker, "process_pulling_result"):
            _be_done_with_what_arrived(self.connector_worker)

    def get_kv_connector_stats(self) -> None:
        """Report nothing."""


def _be_done_with_what_arrived(worker: Any) -> None:
    """Have the worker mark each pull that has arrived as one whose failure was reported, since it reports
    none twice."""
    process = worker.process_pulling_result

    def processed(response: Any, pulls: Any) -> None:
        process(response, pulls)
        for request in response.ok_reqs or ():
            if pulls[request].pull_tasks_count == 0:
                pulls[request].failed = True

    worker.process_pulling_result = processed
