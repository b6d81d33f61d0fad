# The image of engines, of the containers that fetch models for them, and of the node cache. The build context is a
# folder with one wheel, the lock files and the program that lists what is installed; a source archive beside them is
# ignored. Not `dist`, which may hold a compiled wheel as well (`make wheel`):
#   pip wheel --no-deps --wheel-dir dist/images . && cp images/*.lock images/sbom.py dist/images
#   docker build -f images/engine.Dockerfile -t argosy-engine dist/images
# BASE: name it with its digest (python:3.13-slim@sha256:...) for an image that can be built again.
# INSTALL_TORCH=0 leaves out torch, and xgrammar which needs it, for clusters that mount them from a volume (PYTHONPATH)
# to keep images small.
# PIP_ARGS goes to pip when it installs the dependencies: an index of your own, say. It takes no other files than those
# of the lock: for CPU builds of torch write a lock of them first (make locks LOCK_ARGS='--torch-backend cpu').
# BUILD_KERNELS=0 leaves out the CPU kernels, for images that only meet GPUs or a base without apt: CPUs then compute
# with torch.
# INSTALL_GCC=0 leaves out the C compiler, for images that only meet CPUs or a base without apt: GPUs then compute with
# torch.
# VERSION, REVISION, CREATED and SOURCE are labels of the image.
#
# Triton compiles on the machine that it runs on. It keeps the result in ~/.triton/cache (TRITON_CACHE_DIR), so under a
# read-only root filesystem /home/argosy is a volume, as the operator renders it.
ARG BASE=docker.io/library/python:3.13-slim

# The kernels for every instruction set: a running container has no compiler.
FROM ${BASE} AS kernels
ARG BUILD_KERNELS=1
COPY argosy-*.whl /dist/
RUN mkdir /kernels && if [ "${BUILD_KERNELS}" = 1 ]; then \
    { command -v g++ || { apt-get update -q && apt-get install -qy --no-install-recommends g++; }; } \
 && python3 -m zipfile -e /dist/argosy-*.whl /src && cd /src \
 && python3 -m argosy_engine.native.build --output /kernels; fi

FROM ${BASE}
ARG INSTALL_GCC=1
# With the headers of libc, for the launcher that Triton builds.
RUN if [ "${INSTALL_GCC}" = 1 ] && ! command -v gcc; then \
    apt-get update -q && apt-get install -qy --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*; fi \
 && mkdir -p /home/argosy && chown 10001:0 /home/argosy && chmod 0770 /home/argosy
ARG INSTALL_TORCH=1
ARG PIP_ARGS=
COPY engine.lock engine-without-torch.lock /tmp/locks/
RUN python3 -m venv /opt/venv \
 && if [ "${INSTALL_TORCH}" = 1 ]; then lock=engine.lock; else lock=engine-without-torch.lock; fi \
 && /opt/venv/bin/pip install --no-cache-dir --disable-pip-version-check --require-hashes --only-binary :all: ${PIP_ARGS} -r /tmp/locks/${lock} \
 && rm -r /tmp/locks
COPY argosy-*.whl sbom.py /tmp/argosy/
RUN /opt/venv/bin/pip install --no-cache-dir --disable-pip-version-check --no-deps --no-index /tmp/argosy/argosy-*.whl \
 && /opt/venv/bin/pip check \
 && /opt/venv/bin/python /tmp/argosy/sbom.py /usr/share/sbom/argosy.cdx.json \
 && rm -rf /tmp/argosy
COPY --from=kernels /kernels /tmp/kernels
RUN cp -r /tmp/kernels "$(/opt/venv/bin/python -c 'from argosy_engine.native.build import PREBUILT; print(PREBUILT)')" \
 && rm -rf /tmp/kernels
ENV HOME=/home/argosy PATH=/opt/venv/bin:/usr/local/bin:/usr/bin:/bin PYTHONUNBUFFERED=1 PYTHONSAFEPATH=1
# A number, because the kubelet cannot tell whether a name is root.
USER 10001:10001
ENTRYPOINT ["/opt/venv/bin/argosy"]
# Last, because another value makes the layers after it anew.
ARG BASE
ARG VERSION=
ARG REVISION=
ARG CREATED=
ARG SOURCE=
LABEL org.opencontainers.image.title="argosy-engine" \
      org.opencontainers.image.description="Inference engine of Argosy, behind an OpenAI endpoint" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.created="${CREATED}" \
      org.opencontainers.image.source="${SOURCE}" \
      org.opencontainers.image.base.name="${BASE}"
