# One image for every actor. VARIANT=cuda (default) runs on NVIDIA GPUs, VARIANT=cpu has no compiler in it.
#   docker build -t pagebus .                              docker run --gpus all -p 8000:8000 pagebus
#   docker build -t pagebus:cpu --build-arg VARIANT=cpu .  docker run -p 8000:8000 pagebus:cpu
# With --build-arg TORCH_INDEX=<PyTorch's index of CPU wheels> the cpu image is a fifth of the size.
# The cuda image holds the compiled kernels of the shipped model and of those in --build-arg MODELS="id id" (of each only
# config.json is fetched), for the GPUs in TARGETS: a start with the same options compiles nothing.
ARG PYTHON=3.12

FROM python:${PYTHON}-slim AS build
ARG VARIANT=cuda TORCH_INDEX=
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python -m venv /opt/pagebus
WORKDIR /src
COPY constraints.txt .
RUN case "$VARIANT" in cuda | cpu) ;; *) echo "VARIANT is cuda or cpu, not '$VARIANT'" >&2; exit 1 ;; esac; \
    /opt/pagebus/bin/pip install -c constraints.txt ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} torch
COPY pyproject.toml README.md LICENSE ./
COPY bus bus
COPY kernels kernels
COPY actors actors
COPY web web
RUN /opt/pagebus/bin/pip install -c constraints.txt '.[otel]'

FROM python:${PYTHON}-slim
ARG VARIANT=cuda
# redis-server: for `pagebus serve` in one container. gcc: for kernels that the image does not hold.
RUN apt-get update \
    && apt-get install -y --no-install-recommends redis-server \
       $(if [ "$VARIANT" = cuda ]; then echo gcc libc6-dev; fi) \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 10001 pagebus \
    && install -d -o pagebus -g pagebus /home/pagebus/.cache/huggingface /home/pagebus/.cache/triton /home/pagebus/files \
       /run/pagebus
COPY --from=build /opt/pagebus /opt/pagebus
ENV PATH=/opt/pagebus/bin:$PATH PYTHONUNBUFFERED=1 NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    TRITON_CACHE_DIR=/home/pagebus/.cache/triton \
    CUDA_CACHE_PATH=/home/pagebus/.cache/triton/cuda
USER pagebus
WORKDIR /home/pagebus
ARG MODELS= TARGETS="sm_80 sm_90"
RUN if [ "$VARIANT" = cuda ]; then \
        for model in "" $MODELS; do pagebus compile-kernels $model --target $TARGETS || exit 1; done; \
    fi
EXPOSE 8000
ENTRYPOINT ["pagebus"]
CMD ["serve", "--host", "0.0.0.0"]
