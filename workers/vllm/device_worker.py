"""vLLM's GPU worker in a fleet: `worker_cls="workers.vllm.device_worker.DeviceWorker"`.

For the V2 model runner with `enable_adaptive_verification`. It works without a fleet too, and then
learns as vLLM does.
"""

from vllm.v1.worker.gpu_worker import Worker

from workers.vllm.device_hooks import DeviceHooks


class DeviceWorker(DeviceHooks, Worker):
    """See `device_hooks`."""
