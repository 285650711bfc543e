"""Shared memory inside a node, TCP between nodes."""

import socket

import torch.distributed as dist
from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator


class NodeAwareCpuCommunicator(CpuCommunicator):
    """Refuses the shared-memory path for groups that span nodes.

    Under Ray all ranks carry the same shared-memory name, so the CPU communicator would take it between
    nodes too and die. The hook is a private method: it holds for the vLLM version that the lab pins.
    """

    def _all_group_ranks_share_shm_group_name(self) -> bool:
        if not super()._all_group_ranks_share_shm_group_name():
            return False
        hosts = [None] * dist.get_world_size(self.cpu_group)
        dist.all_gather_object(hosts, socket.gethostname(), group=self.cpu_group)
        return len(set(hosts)) == 1
