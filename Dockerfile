# bankfull on a CPU. Nothing of a model is in the image unless MODEL names one; what is fetched later lies in a volume.
#   docker build -t bankfull .
#   docker run --rm -p 127.0.0.1:8000:8000 -e BANKFULL_API_KEY=... -v bankfull-models:/models bankfull
ARG PYTHON_VERSION=3.12

FROM python:${PYTHON_VERSION}-slim-bookworm AS build
SHELL ["/bin/bash", "-euo", "pipefail", "-c"]
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*
ENV PATH=/opt/bankfull/bin:$PATH \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PIP_NO_CACHE_DIR=1
RUN python -m venv /opt/bankfull

# A step of its own, and the first one: it is by far the largest, and changes least. TORCH_INDEX is the address of an
# index of CPU-only builds, as torch's own installation page names it; an image for CPUs must not carry CUDA along.
ARG TORCH=torch==2.13.0
ARG TORCH_INDEX=
# hadolint ignore=DL3013
RUN pip install ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} "$TORCH" \
    && python -c "import sys, torch; sys.exit(torch.version.cuda and 'This torch is built for CUDA; give --build-arg TORCH_INDEX=ADDRESS of an index of CPU-only builds.')"

WORKDIR /source
COPY pyproject.toml CMakeLists.txt README.md LICENSE ./
COPY csrc csrc
COPY bankfull bankfull
COPY heads heads
# Kernels are built for every instruction set and chosen at run time: the image runs on other machines, too.
# hadolint ignore=DL3013
RUN BANKFULL_REQUIRE_NATIVE=1 pip wheel --no-deps --wheel-dir /wheel . ./heads \
    && wheel=$(echo /wheel/bankfull-*.whl) \
    && pip install "${wheel}[serve,hub]" /wheel/bankfull_smollm2_heads-*.whl \
    && torch=$(python -c "import torch; print(torch.__path__[0])") \
    && rm -rf "$torch/test" "$torch/include" "$torch"/bin/*[tT]est*

FROM python:${PYTHON_VERSION}-slim-bookworm
LABEL org.opencontainers.image.title="bankfull" \
      org.opencontainers.image.licenses="Apache-2.0"
RUN useradd --system --uid 10001 --home-dir /data --shell /usr/sbin/nologin bankfull \
    && install -d -o bankfull -g bankfull /models /data
COPY --from=build /opt/bankfull /opt/bankfull
ENV PATH=/opt/bankfull/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    BANKFULL_CACHE=/models/bankfull \
    HF_HOME=/models/hub \
    BANKFULL_DATA=/data
USER 10001
WORKDIR /data
# A model to bake in: a short name or a hub id. A new volume at /models begins with what is there.
ARG MODEL=
RUN if [ -n "$MODEL" ]; then bankfull pull "$MODEL"; fi
VOLUME ["/models", "/data"]
EXPOSE 8000
# /ready needs no key. The first start may fetch a model.
HEALTHCHECK --interval=10s --timeout=5s --start-period=10m --retries=3 \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/ready', timeout=4)"]
ENTRYPOINT ["bankfull"]
# Every address of the container, which others reach only where a port is published. The server wants keys for that:
# BANKFULL_API_KEY, or --api-key-file.
CMD ["serve", "--host", "0.0.0.0", "--port", "8000"]
