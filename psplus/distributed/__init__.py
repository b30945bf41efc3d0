"""The process group: ``torch.distributed.init_process_group("psplus")``.

A complete c10d backend. CPU tensors travel through shared memory between the ranks of a host, and
through Gloo when ranks are on several; CUDA tensors through NCCL.
"""

from psplus.distributed.creator import create

__all__ = ["create"]
