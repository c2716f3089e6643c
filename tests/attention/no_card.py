# SPDX-License-Identifier: Apache-2.0
"""Triton's launcher for an H100 on a machine without a card.

Everything that a launch does on the host runs: Triton binds and specialises the arguments, looks
for the compiled kernel, and its C launcher collects the parameters. Two things are replaced. A
kernel is not compiled when it is first launched, and the driver's library is a stub whose
``cuLaunchKernelEx`` and ``cuLaunchKernel`` count, note what they are given if asked to, and return.
Import this before vLLM, which looks for Triton's driver when it is imported. ``TRITON_INTERPRET``
must not be set.
"""

import ctypes
import itertools
import os
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

STUB = """
#include <stddef.h>
#include <string.h>
typedef int R;
typedef unsigned long long W;
enum { FUNCTIONS = 1024, ARGUMENTS = 128, NOTES = 1 << 20 };
static long launched, noted = -1;
static W notes[NOTES];
static int sizes[FUNCTIONS][ARGUMENTS]; /* bytes of a function's arguments, then 0 */
static R fails;
long launches(void) { return launched; }
void describe(long f, int n, const int *bytes) { memcpy(sizes[f], bytes, n * sizeof(int)); }
void fail(R error) { fails = error; }
void begin_notes(void) { noted = 0; }
long end_notes(W **at) { long n = noted; *at = notes; noted = -1; return n; }
static R launch(const unsigned *c, void *stream, void *f, void **p)
{
  launched++;
  if (noted >= 0 && noted < NOTES - 2 * ARGUMENTS) {
    long place = noted++;
    notes[noted++] = (size_t)f;
    for (int i = 0; i < 7; i++) notes[noted++] = c[i];
    notes[noted++] = (size_t)stream;
    for (int i = 0; sizes[(size_t)f][i]; i++) {
      notes[noted] = 0;
      memcpy(notes + noted++, p[i], sizes[(size_t)f][i]);
    }
    notes[place] = noted - place;
  }
  return fails;
}
/* Begins with the grid, the block and the shared memory. */
typedef struct { unsigned c[7]; void *stream; void *attributes; unsigned num; } Config;
R cuLaunchKernelEx(const Config *c, void *f, void **p, void **e)
{ return launch(c->c, c->stream, f, p); }
R cuLaunchKernel(void *f, unsigned x, unsigned y, unsigned z, unsigned bx, unsigned by,
                 unsigned bz, unsigned shared, void *stream, void **p, void **e)
{ unsigned c[7] = {x, y, z, bx, by, bz, shared}; return launch(c, stream, f, p); }
R cuPointerGetAttribute(void *out, int which, unsigned long long at)
{ *(unsigned long long *)out = at; return 0; }
R cuCtxGetCurrent(void **c) { *c = &launched; return 0; }
R cuCtxSetCurrent(void *c) { return 0; }
R cuCtxGetLimit(size_t *v, int l) { return 0; }
R cuCtxSetLimit(int l, size_t v) { return 0; }
R cuDeviceGet(int *d, int n) { *d = 0; return 0; }
R cuDeviceGetAttribute(int *v, int a, int d) { *v = 0; return 0; }
R cuDevicePrimaryCtxRetain(void **c, int d) { *c = &launched; return 0; }
R cuDriverGetVersion(int *v) { *v = 12080; return 0; }
R cuFuncGetAttribute(int *v, int a, void *f) { *v = 0; return 0; }
R cuFuncSetAttribute(void *f, int a, int v) { return 0; }
R cuFuncSetCacheConfig(void *f, int c) { return 0; }
R cuGetErrorString(int e, const char **s) { *s = "stub"; return 0; }
R cuModuleGetFunction(void **f, void *m, const char *n) { return 0; }
R cuModuleLoadData(void **m, const void *i) { return 0; }
R cuOccupancyMaxActiveClusters(int *n, void *f, const void *c) { return 0; }
R cuTensorMapEncodeTiled(void) { return 0; }
R cuTensorMapEncodeIm2col(void) { return 0; }
"""
_library: ctypes.CDLL | None = None
_functions = itertools.count(1)


SIZES = {"i1": 1, "i32": 4, "i64": 8, "fp32": 4}
"""Bytes of arguments by type; pointers have 8."""
names: dict[int, str] = {}
"""Of kernels, by function."""


def library() -> ctypes.CDLL:
    """The stub."""
    assert _library is not None, "pretend() comes first"
    return _library


def launched_by(run: Callable[[], Any]) -> list[tuple[Any, ...]]:
    """What the driver was given for each launch: name, grid, block, shared memory, stream, and the
    bytes of all arguments."""
    notes, found, place = ctypes.POINTER(ctypes.c_uint64)(), [], 0
    library().begin_notes()
    try:
        run()
    finally:
        end = library().end_notes(ctypes.byref(notes))
    while place < end:
        function, *rest = notes[place + 1 : place + notes[place]]
        found.append((names[function], function, *rest))
        place += notes[place]
    return found


def launches() -> int:
    """Kernels launched so far in this process."""
    return int(library().launches())


def pretend() -> None:
    """From here on this process launches Triton's kernels as on an H100, and none runs."""
    global _library
    if _library is not None:
        return
    folder = Path(tempfile.mkdtemp(prefix="no-card-"))
    (folder / "cuda.c").write_text(STUB)
    library = folder / "libcuda.so.1"
    command = ["cc", "-O2", "-shared", "-fPIC", "-w", "-Wl,-soname,libcuda.so.1", "-o", library]
    subprocess.run([*command, folder / "cuda.c"], check=True)
    _library = ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    os.environ |= {"TRITON_LIBCUDA_PATH": str(folder), "TRITON_CACHE_DIR": str(folder / "cache")}

    import triton
    from triton.backends import backends
    from triton.backends.nvidia.driver import CudaDriver
    from triton.runtime.jit import JITFunction

    assert not triton.knobs.runtime.interpret, "unset TRITON_INTERPRET"
    # vLLM asks for a driver, and its package for CPUs for a Triton of CPUs.
    of_cpus = SimpleNamespace(supports_target=lambda _: False)
    active = SimpleNamespace(is_active=lambda: True)
    backends["cpu"] = SimpleNamespace(driver=active, compiler=of_cpus)
    torch.cuda.get_device_capability = lambda *_: (9, 0)
    torch.cuda.current_device = lambda: 0
    driver = CudaDriver()
    driver.get_current_device, driver.get_current_stream = (lambda: 0), (lambda _: 0)
    triton.runtime.driver.set_active(driver)
    JITFunction._do_compile = _not_compiled


def _not_compiled(
    self: Any,
    key: Any,
    signature: Any,
    device: Any,
    constexprs: Any,
    options: Any,
    attrs: Any,
    warmup: Any,
) -> Any:
    """A kernel as Triton's compiler returns it, with a real launcher and no code."""
    from triton.backends.nvidia.driver import CudaLauncher
    from triton.compiler import ASTSource, CompiledKernel

    source = ASTSource(self, signature, constexprs, attrs)
    nothing = dict.fromkeys(("global_scratch_size", "profile_scratch_size"), 0)
    aligned = dict.fromkeys(("global_scratch_align", "profile_scratch_align"), 1)
    flags = {"launch_cooperative_grid": False, "launch_pdl": False, "num_ctas": 1}
    kernel = CompiledKernel.__new__(CompiledKernel)
    kernel.src, kernel.name, kernel.module = source, self.__name__, object()
    kernel.function = next(_functions)
    names[kernel.function] = kernel.name
    types = [kind for kind in signature.values() if kind != "constexpr"]
    bytes_of = [SIZES.get(kind, 8) for kind in types] + [8, 8, 0]  # Triton's scratch memory, an end
    library().describe(kernel.function, len(bytes_of), (ctypes.c_int * len(bytes_of))(*bytes_of))
    kernel.packed_metadata = (options.num_warps, 1, 0)
    kernel.metadata = SimpleNamespace(num_warps=options.num_warps, num_ctas=1, shared=0)
    kernel._run = CudaLauncher(source, SimpleNamespace(**nothing, **aligned, **flags))
    self.device_caches[device][0][key] = kernel
    return kernel
