# Images of ludic, built in a clone by docker, podman or buildah: `docker build --target light --tag ludic:light .`
#   light  queries, checks, compares and keeps roots, also in S3 buckets; no PyTorch
#   train  samples and trains on CPUs
#   cuda   samples with vLLM and trains on NVIDIA GPUs. Nobody has built or run it.
# docs/containers.md says how they run.

# What the images have besides the packages. Roots are below /runs: mount a folder there, or name a bucket.
FROM python:3.11-slim AS base
RUN useradd --create-home --uid 1000 ludic && install --directory --owner ludic /runs
ENV PATH=/opt/ludic/bin:$PATH PYTHONUNBUFFERED=1
USER ludic
WORKDIR /runs
ENTRYPOINT ["ludic"]

# Some packages have no wheels and need a C compiler: pycosat, of reasoning-gym.
FROM python:3.11-slim AS source
RUN apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
RUN python3 -m venv /opt/ludic
ENV PATH=/opt/ludic/bin:$PATH
WORKDIR /src
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY docs/coming_from.toml docs/
COPY schemas schemas
COPY ludic ludic

FROM source AS light-packages
RUN pip install --no-cache-dir --constraint constraints.txt '.[s3]'

FROM base AS light
COPY --from=light-packages /opt/ludic /opt/ludic

# The default index has PyTorch with CUDA, 3 GB; PyTorch's own index has it for CPUs alone.
FROM source AS train-packages
ARG TORCH="--extra-index-url https://download.pytorch.org/whl/cpu"
RUN pip install --no-cache-dir --constraint constraints.txt $TORCH '.[s3,train]'

FROM base AS train
COPY --from=train-packages /opt/ludic /opt/ludic

# vLLM pins PyTorch, and its packages bring CUDA: the host needs NVIDIA's driver and container toolkit alone.
# constraints.txt is left out, since it pins the versions of CPUs. Triton compiles with gcc while a run runs.
FROM source AS cuda-packages
RUN pip install --no-cache-dir vllm==0.32.0 && pip install --no-cache-dir '.[s3,train]'

FROM base AS cuda
USER root
RUN apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
USER ludic
COPY --from=cuda-packages /opt/ludic /opt/ludic
