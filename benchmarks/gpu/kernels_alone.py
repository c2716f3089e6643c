# SPDX-License-Identifier: Apache-2.0
"""The folder ``kernels/`` as a package of its own, where there is no vLLM to import.

``import vllm_cascade`` imports vLLM, and the bare name ``kernels`` belongs to a package on PyPI.
"""

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

NAME = "cascade_kernels"
INSTALLED = "vllm_cascade.kernels"


def load(module: str) -> ModuleType:
    """``kernels.<module>`` under the name ``cascade_kernels.<module>``.

    A process that has the plugin gets the plugin's own module: a kernel that is loaded twice
    registers its operators twice, and the first ones are then freed while others hold them.
    """
    if INSTALLED in sys.modules:
        return importlib.import_module(f"{INSTALLED}.{module}")
    if NAME not in sys.modules:
        folder = Path(__file__).resolve().parents[2] / "kernels"
        spec = importlib.util.spec_from_file_location(
            NAME, folder / "__init__.py", submodule_search_locations=[str(folder)]
        )
        assert spec is not None and spec.loader is not None, folder
        package = importlib.util.module_from_spec(spec)
        sys.modules[NAME] = package
        spec.loader.exec_module(package)
    return importlib.import_module(f"{NAME}.{module}")
