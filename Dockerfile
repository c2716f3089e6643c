# SPDX-License-Identifier: Apache-2.0
#
#   docker build --target cpu  -t vllm-cascade:0.1.0-cpu .
#   docker build --target cuda -t vllm-cascade:0.1.0-cuda .
#   docker run --rm -p 8000:8000 -v ~/.cache:/root/.cache vllm-cascade:0.1.0-cpu \
#       MODEL --kv-policy sink --kv-budget 2048 --kv-recall 8 --gpu-memory-utilization 0.5

FROM python:3.12-slim-bookworm AS wheel
WORKDIR /src
COPY setup.py pyproject.toml README.md LICENSE ./
COPY vllm_cascade vllm_cascade
COPY kernels kernels
COPY patches patches
RUN python -m pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM vllm/vllm-openai:v0.32.0 AS cuda
COPY --from=wheel /wheels /wheels
RUN python3 -m pip install --no-cache-dir --no-deps xxhash==4.1.0 /wheels/*.whl

FROM python:3.12-slim-bookworm AS cpu
# g++ compiles attention at the first start; the libraries are OpenMP's and NUMA's.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ libgomp1 libnuma1 \
    && rm -rf /var/lib/apt/lists/*
COPY requirements/cpu-torch.txt requirements/cpu.txt /requirements/
COPY tools/vllm_metadata /vllm_metadata
RUN python -m pip install --no-cache-dir --no-deps \
        --index-url https://download.pytorch.org/whl/cpu -r /requirements/cpu-torch.txt \
    && python -m pip install --no-cache-dir --no-deps -r /requirements/cpu.txt \
    && python -m pip install --no-cache-dir --no-deps /vllm_metadata
COPY --from=wheel /wheels /wheels
RUN python -m pip install --no-cache-dir --no-deps /wheels/*.whl
EXPOSE 8000
ENTRYPOINT ["vllm", "serve"]
