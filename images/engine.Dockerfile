# The image of engines, of the containers that fetch models for them, and of the node cache. The build context is a folder with one wheel; a source archive beside it is ignored. Not `dist`,
# which may hold a compiled wheel as well (`make wheel`):
#   pip wheel --no-deps --wheel-dir dist/images .
#   docker build -f images/engine.Dockerfile -t argosy-engine dist/images
# INSTALL_TORCH=0 leaves out torch, and xgrammar which needs it, for clusters that mount them from a volume (PYTHONPATH) to keep
# images small.
# PIP_ARGS goes to pip when it installs torch and the rest: an index of CPU builds, say.
# BUILD_KERNELS=0 leaves out the CPU kernels, for images that only meet GPUs or a base without apt: CPUs then compute with torch.
# INSTALL_GCC=0 leaves out the C compiler, for images that only meet CPUs or a base without apt: GPUs then compute with torch.
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

# The wheel's dependencies. Their layer is below the wheel's, and stays the same while they do.
FROM ${BASE} AS requirements
ARG INSTALL_TORCH=1
COPY argosy-*.whl /dist/
RUN python3 -m venv /opt/venv \
 && INSTALL_TORCH=${INSTALL_TORCH} PYTHONPATH=$(echo /dist/argosy-*.whl) /opt/venv/bin/python -c "import os; from importlib.metadata import requires; from pip._vendor.packaging.requirements import Requirement; needed = [r for r in map(Requirement, requires('argosy')) if r.marker is None or any(r.marker.evaluate({'extra': extra}) for extra in ('engine', 'fetch'))]; print('\n'.join(f'{r.name}{r.specifier}' for r in needed if r.name not in ('torch', 'xgrammar') or os.environ['INSTALL_TORCH'] == '1'))" > /dist/requirements.txt

FROM ${BASE}
ARG INSTALL_GCC=1
ARG PIP_ARGS=
# With the headers of libc, for the launcher that Triton builds.
RUN if [ "${INSTALL_GCC}" = 1 ] && ! command -v gcc; then \
    apt-get update -q && apt-get install -qy --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*; fi \
 && mkdir -p /home/argosy && chown 10001:0 /home/argosy && chmod 0770 /home/argosy
COPY --from=requirements /dist/requirements.txt /tmp/requirements.txt
RUN python3 -m venv /opt/venv \
 && /opt/venv/bin/pip install --no-cache-dir --disable-pip-version-check ${PIP_ARGS} -r /tmp/requirements.txt \
 && rm /tmp/requirements.txt
COPY argosy-*.whl /dist/
RUN /opt/venv/bin/pip install --no-cache-dir --disable-pip-version-check --no-deps --no-index /dist/argosy-*.whl && rm -rf /dist
COPY --from=kernels /kernels /tmp/kernels
RUN cp -r /tmp/kernels "$(/opt/venv/bin/python -c 'from argosy_engine.native.build import PREBUILT; print(PREBUILT)')" \
 && rm -rf /tmp/kernels
ENV HOME=/home/argosy PATH=/opt/venv/bin:/usr/local/bin:/usr/bin:/bin PYTHONUNBUFFERED=1 PYTHONSAFEPATH=1
# A number, because the kubelet cannot tell whether a name is root.
USER 10001:10001
ENTRYPOINT ["/opt/venv/bin/argosy"]
