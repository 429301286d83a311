"""PyTorch: the version of NCCL that it was given, and what it says to a call that cannot be."""

import torch

from served import print_mapped

print("PyTorch", torch.__version__, "NCCL", ".".join(map(str, torch.cuda.nccl.version())))
print("distributed", torch.distributed.is_nccl_available(), len(torch.cuda.nccl.unique_id()))
try:
    torch.cuda.nccl.init_rank(1, torch.cuda.nccl.unique_id(), 0)
except Exception as error:
    print(type(error).__name__)
print_mapped()
