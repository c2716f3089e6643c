# SPDX-License-Identifier: Apache-2.0
"""Kernels, one operation a file; ``tests/kernels/references.py`` has references in plain PyTorch.

Installed as ``vllm_cascade.kernels``. Nothing here imports vLLM.
"""

if __name__ == "kernels":
    # Python run from the repository's root finds this folder under its bare name, where
    # transformers looks for the PyPI package `kernels`. Make way for that package; where it isn't
    # installed, be what an empty folder would be. (Raising ImportError would break
    # `import transformers`, which imports whatever it finds under this name.)
    import os
    import sys
    from importlib.machinery import PathFinder
    from importlib.util import module_from_spec

    _root = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
    _spec = PathFinder.find_spec(
        __name__, [entry for entry in sys.path if os.path.realpath(entry) != _root]
    )
    if _spec is not None and _spec.loader is not None:
        sys.modules[__name__] = module_from_spec(_spec)  # what `import kernels` will return
        _spec.loader.exec_module(sys.modules[__name__])
    else:
        __path__ = []
        __spec__.submodule_search_locations = __path__
        __spec__.origin = None
        del __file__
