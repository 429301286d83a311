"""CuPy: version, unique id, and the error of a communicator without a GPU."""

from cupy.cuda import nccl

from served import print_mapped

print("CuPy NCCL", nccl.get_version(), "built for", nccl.get_build_version())
print("id", len(nccl.get_unique_id()))
try:
    nccl.NcclCommunicator(1, nccl.get_unique_id(), 0).destroy()
    print("made")
except nccl.NcclError as error:
    print(error)
print_mapped()
