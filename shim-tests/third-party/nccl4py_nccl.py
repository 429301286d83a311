"""NVIDIA's nccl4py: version, unique id, errors of groups and of null handles."""

from nccl import core
from nccl.bindings import nccl

from served import print_mapped

print("nccl4py NCCL", core.get_version().libnccl.version)
print("id", len(bytes(core.get_unique_id().as_bytes)) if hasattr(core.get_unique_id(), "as_bytes") else "made")
nccl.group_start()
nccl.group_end()
for name, call in {"group_end": nccl.group_end, "comm_count": lambda: nccl.comm_count(0)}.items():
    try:
        call()
        print(name, "succeeds")
    except Exception as error:
        print(name, error)
print_mapped()
