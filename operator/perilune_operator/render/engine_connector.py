"""vLLM's MooncakeConnector for use inside MultiConnector, loaded by engines as `kv_connector_module_path`.

vLLM 0.32's MultiConnector requires Prometheus metrics of every connector that reports how transfers went, and
MooncakeConnector reports without having such metrics: the first hand-off that succeeds would end the engine.
This one does not report. Only vLLM itself is imported, because the file is mounted into engines alone.
"""

from vllm.distributed.kv_transfer.kv_connector.v1.mooncake import (  # type: ignore[import-not-found]
    mooncake_connector,
)


class MooncakeConnector(mooncake_connector.MooncakeConnector):  # type: ignore[misc]
    def get_kv_connector_stats(self) -> None:
        """Report nothing."""
