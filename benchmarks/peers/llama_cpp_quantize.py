"""Runs in an environment with llama-cpp-python, for `benchmarks/quantize.py`: llama.cpp quantizes a GGUF file
and prints time, peak memory and version as a line of JSON.

python llama_cpp_quantize.py INPUT OUTPUT TYPE THREADS
"""

import ctypes
import json
import os
import resource
import sys
import time
from importlib.metadata import version

import llama_cpp


def main(original: str, output: str, kind: str, threads: str) -> None:
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # the library prints there
    llama_cpp.llama_backend_init()
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{kind}")
    params.nthread = int(threads)
    start = time.monotonic()
    failed = llama_cpp.llama_model_quantize(original.encode(), output.encode(), ctypes.byref(params))
    if failed:
        raise SystemExit(f"llama.cpp gave {failed}")
    figures = {
        "seconds": time.monotonic() - start,
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "version": version("llama_cpp_python"),
    }
    print(json.dumps(figures), file=replies, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
