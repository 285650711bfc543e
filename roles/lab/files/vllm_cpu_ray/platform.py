"""The CPU platform, with declared GPUs as Ray's scheduling slots."""

from vllm.platforms.cpu import CpuPlatform


class CpuRayPlatform(CpuPlatform):
    """vLLM's CPU platform; Ray may place its workers."""

    ray_device_key = "GPU"

    @classmethod
    def get_device_communicator_cls(cls) -> str:
        return "vllm_cpu_ray.communicator.NodeAwareCpuCommunicator"
