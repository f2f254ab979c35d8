# One image for every actor. VARIANT=cuda (default) runs on NVIDIA GPUs, VARIANT=cpu has neither CUDA nor a compiler in it.
#   docker build -t pagebus:cuda .
#   docker build -t pagebus:cpu --build-arg VARIANT=cpu .
# The whole service in one container, on this machine only; it gets 45 s to end its answers when it is stopped:
#   docker run --init --stop-timeout 45 -p 127.0.0.1:8000:8000 --gpus all pagebus:cuda
#
# The cuda image holds the compiled kernels of the shipped model and of those in --build-arg MODELS="id id" (of each only
# config.json is fetched), for the GPUs in TARGETS: a start with the same options compiles nothing.
#
# Where PyTorch's index cannot be reached: TORCH_INDEX=<a copy of it>, or wheels in a folder of yours and
#   docker build --build-context wheels=FOLDER --build-arg TORCH_INDEX= ...
ARG PYTHON=3.12

FROM scratch AS wheels

FROM python:${PYTHON}-slim AS build
# TORCH_INDEX: one more index for torch. auto: PyTorch's of CPU wheels for VARIANT=cpu, else none.
ARG VARIANT=cuda TORCH_INDEX=auto
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python -m venv /opt/pagebus
WORKDIR /src
COPY constraints.txt .
# A CPU build is asked for by its name: where there is none, pip must not take one for CUDA in its place.
RUN --mount=from=wheels,target=/wheels \
    case "$VARIANT" in cuda | cpu) ;; *) echo "VARIANT is cuda or cpu, not '$VARIANT'" >&2; exit 1 ;; esac; \
    torch=torch==$(sed -n 's/^torch==//p' constraints.txt); \
    if [ "$VARIANT" = cpu ]; then torch="--no-deps $torch+cpu"; fi; \
    if [ "$TORCH_INDEX" = auto ]; then \
        if [ "$VARIANT" = cpu ]; then TORCH_INDEX=https://download.pytorch.org/whl/cpu; else TORCH_INDEX=; fi; \
    fi; \
    /opt/pagebus/bin/pip install -c constraints.txt --find-links /wheels \
        ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} $torch
# What it depends on, in a layer that other sources of ours leave as it is.
COPY pyproject.toml .
RUN /opt/pagebus/bin/python -c 'import tomllib; project = tomllib.load(open("pyproject.toml", "rb"))["project"]; \
        print(*project["dependencies"], *project["optional-dependencies"]["otel"], sep="\n")' >/tmp/needs.txt \
    && /opt/pagebus/bin/pip install -c constraints.txt -r /tmp/needs.txt
COPY README.md LICENSE ./
COPY bus bus
COPY kernels kernels
COPY actors actors
COPY web web
COPY pagebus pagebus
RUN /opt/pagebus/bin/pip install --no-deps . && /opt/pagebus/bin/pip check

FROM python:${PYTHON}-slim
ARG VARIANT=cuda
# redis-server: for `pagebus serve` in one container. gcc: for kernels that the image does not hold.
RUN apt-get update \
    && apt-get install -y --no-install-recommends redis-server \
       $(if [ "$VARIANT" = cuda ]; then echo gcc libc6-dev; fi) \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 10001 pagebus \
    && cd /home/pagebus \
    && install -d -o pagebus -g pagebus .cache .cache/huggingface .cache/triton files kernels /run/pagebus
COPY --from=build /opt/pagebus /opt/pagebus
ENV PATH=/opt/pagebus/bin:$PATH PYTHONUNBUFFERED=1 NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    TRITON_CACHE_DIR=/home/pagebus/.cache/triton \
    CUDA_CACHE_PATH=/home/pagebus/.cache/triton/cuda
USER pagebus
WORKDIR /home/pagebus
# Not in the cache, over which a volume may lie that is older than the image.
ENV PAGEBUS_KERNELS_DIR=/home/pagebus/kernels
ARG MODELS= TARGETS="sm_80 sm_90"
RUN if [ "$VARIANT" = cuda ]; then \
        for model in "" $MODELS; do \
            TRITON_CACHE_DIR=$PAGEBUS_KERNELS_DIR pagebus compile-kernels $model --target $TARGETS || exit 1; \
        done; \
    fi
EXPOSE 8000
ENTRYPOINT ["pagebus"]
CMD ["serve", "--host", "0.0.0.0"]
