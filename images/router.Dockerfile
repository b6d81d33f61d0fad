# The router's image. The build context is a folder with one wheel, the source archive, the lock files and the program
# that lists what is installed. Not `dist`, which may hold a compiled wheel as well (`make wheel`):
#   python -m build --outdir dist/images . && cp images/*.lock images/sbom.py dist/images
#   docker build -f images/router.Dockerfile -t argosy-router dist/images
# BASE: name it with its digest (python:3.13-slim@sha256:...) for an image that can be built again.
# PIP_ARGS goes to pip when it installs the dependencies: an index of your own, say.
# COMPILE=0 leaves out the machine code of its hot modules, for a base without apt: a short request then takes more than
# twice the CPU. It needs no source archive.
# VERSION, REVISION, CREATED and SOURCE are labels of the image.
ARG BASE=docker.io/library/python:3.13-slim

# A wheel that is compiled for the base's own interpreter.
FROM ${BASE} AS wheel
ARG COMPILE=1
COPY argosy-* /dist/
RUN mkdir /wheel && if [ "${COMPILE}" = 1 ]; then \
    if ! ls /dist/argosy-*.tar.gz >/dev/null; then echo 'build the source archive too (python -m build), or set COMPILE=0' >&2; exit 1; fi \
 && apt-get update -q && apt-get install -qy --no-install-recommends gcc libc6-dev \
 && python3 -m venv /venv \
 && ARGOSY_COMPILE=1 /venv/bin/pip wheel --no-cache-dir --disable-pip-version-check --no-deps --wheel-dir /wheel /dist/argosy-*.tar.gz; \
    else cp /dist/argosy-*.whl /wheel; fi

FROM ${BASE}
ARG PIP_ARGS=
COPY router.lock /tmp/router.lock
RUN python3 -m venv /opt/venv \
 && /opt/venv/bin/pip install --no-cache-dir --disable-pip-version-check --require-hashes --only-binary :all: ${PIP_ARGS} -r /tmp/router.lock \
 && rm /tmp/router.lock
COPY --from=wheel /wheel /tmp/argosy
COPY sbom.py /tmp/argosy/
RUN /opt/venv/bin/pip install --no-cache-dir --disable-pip-version-check --no-deps --no-index /tmp/argosy/argosy-*.whl \
 && /opt/venv/bin/pip check \
 && /opt/venv/bin/python /tmp/argosy/sbom.py /usr/share/sbom/argosy.cdx.json \
 && rm -rf /tmp/argosy
ENV PATH=/opt/venv/bin:/usr/local/bin:/usr/bin:/bin PYTHONUNBUFFERED=1 PYTHONSAFEPATH=1
# A number, because the kubelet cannot tell whether a name is root.
USER 10001:10001
ENTRYPOINT ["/opt/venv/bin/argosy"]
# Last, because another value makes the layers after it anew.
ARG BASE
ARG VERSION=
ARG REVISION=
ARG CREATED=
ARG SOURCE=
LABEL org.opencontainers.image.title="argosy-router" \
      org.opencontainers.image.description="Router of Argosy, one OpenAI endpoint for fleets of inference engines" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.created="${CREATED}" \
      org.opencontainers.image.source="${SOURCE}" \
      org.opencontainers.image.base.name="${BASE}"
