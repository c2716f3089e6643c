# SPDX-License-Identifier: Apache-2.0
"""Triton's launcher for an H100 on a machine without a card.

Everything that a launch does on the host runs: Triton binds and specialises the arguments, looks
for the compiled kernel, and its C launcher collects the parameters. Two things are replaced. A
kernel is not compiled when it is first launched, and the driver's library is a stub whose
``cuLaunchKernelEx`` counts and returns. Import this before vLLM, which looks for Triton's driver
when it is imported. ``TRITON_INTERPRET`` must not be set.
"""

import ctypes
import itertools
import os
import subprocess
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

STUB = """
#include <stddef.h>
typedef int R;
static long launched;
long launches(void) { return launched; }
R cuLaunchKernelEx(const void *c, void *f, void **p, void **e) { launched++; return 0; }
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


launched: list[tuple[Any, ...]] = []
"""What the C launcher was given, while ``noting``."""
noting = False


def launches() -> int:
    """Kernels launched so far in this process."""
    assert _library is not None, "pretend() comes first"
    return int(_library.launches())


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
    launch = driver.utils.launch

    def note(*args: Any) -> None:
        if noting:
            launched.append(args)
        launch(*args)

    driver.utils.launch = note
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
    kernel.packed_metadata = (options.num_warps, 1, 0)
    kernel._run = CudaLauncher(source, SimpleNamespace(**nothing, **aligned, **flags))
    self.device_caches[device][0][key] = kernel
    return kernel
