# Images of ludic, built in a clone by docker, podman or buildah: `docker build --target light --tag ludic:light .`
#   light  queries, checks, compares and keeps roots, also in S3 buckets; no PyTorch
#   train  samples and trains on CPUs
#   cuda   samples with vLLM and trains on NVIDIA GPUs. Nobody has built or run it.
# docs/launch.md says how they run.

FROM python:3.11-slim AS base
RUN python3 -m venv /opt/ludic && useradd --create-home --uid 1000 ludic && install --directory --owner ludic /runs
ENV PATH=/opt/ludic/bin:$PATH PYTHONUNBUFFERED=1
WORKDIR /src
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY docs/coming_from.toml docs/
COPY schemas schemas
COPY ludic ludic

# The user's roots are below /runs: mount a folder there, or name buckets.
FROM base AS light
RUN pip install --no-cache-dir --constraint constraints.txt '.[s3]'
USER ludic
WORKDIR /runs
ENTRYPOINT ["ludic"]

# PyTorch of the default index brings 3 GB for CUDA; that of its own index for CPUs does not.
FROM base AS train
ARG TORCH="--extra-index-url https://download.pytorch.org/whl/cpu"
RUN pip install --no-cache-dir --constraint constraints.txt $TORCH '.[s3,train]'
USER ludic
WORKDIR /runs
ENTRYPOINT ["ludic"]

# vLLM pins PyTorch, and PyTorch brings CUDA, so the host needs NVIDIA's driver and container toolkit alone. Triton
# compiles its kernels with a C compiler. constraints.txt pins the versions of CPUs, so it is left out.
FROM base AS cuda
RUN apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
RUN pip install --no-cache-dir vllm==0.32.0 && pip install --no-cache-dir '.[s3,train]'
USER ludic
WORKDIR /runs
ENTRYPOINT ["ludic"]
