# Compiles a kernel source to PTX with NVRTC; scripts/build-kernels calls it.
#   nvrtc.py LIBRARY SOURCE OPTION...     writes the PTX, without comments and idle space, to stdout
import ctypes
import os
import re
import sys

library, source = sys.argv[1:3]
options = [option.encode() for option in sys.argv[3:]]
nvrtc = ctypes.CDLL(library)


def text(program, name):
    """What `nvrtcGet<name>` gives."""
    size = ctypes.c_size_t()
    assert getattr(nvrtc, f"nvrtcGet{name}Size")(program, ctypes.byref(size)) == 0
    buffer = ctypes.create_string_buffer(size.value)
    assert getattr(nvrtc, f"nvrtcGet{name}")(program, buffer) == 0
    return buffer.value.decode()


program = ctypes.c_void_p()
with open(source, "rb") as file:
    code = file.read()
name = os.path.basename(source).encode()
assert nvrtc.nvrtcCreateProgram(ctypes.byref(program), code, name, 0, None, None) == 0
status = nvrtc.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options))
log = text(program, "ProgramLog").strip()
if log:
    print(log, file=sys.stderr)
if status != 0:
    sys.exit(1)
for line in text(program, "PTX").splitlines():
    line = re.sub(r"//.*", "", line)
    line = re.sub(r"\s*([,;])\s*", r"\1", re.sub(r"\s+", " ", line.strip()))
    # NVRTC's own constants, which nothing uses, have names that vary.
    if line and "nv6target" not in line:
        print(line)
