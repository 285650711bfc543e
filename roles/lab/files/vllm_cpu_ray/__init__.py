"""Test-only stand-in for GPUs: lets vLLM's Ray backend run on CPU. Never install it in production.

vLLM's CPU platform refuses Ray, because Ray schedules by accelerator. In the lab each Ray worker declares
GPUs that do not exist (`ray start --num-gpus N`); this platform asks Ray for them, and then computes on CPU.
It touches placement and the choice of transport only: scheduler, executor, workers, model code and server
are vLLM's own.

vLLM finds it through the entry point group `vllm.platform_plugins`. VLLM_TARGET_DEVICE must stay unset:
it forces the built-in platform.
"""


def register() -> str:
    """Return the platform class, by name, as vLLM's plugin interface wants it."""
    return "vllm_cpu_ray.platform.CpuRayPlatform"
