# The router's image. The build context is a folder with one wheel and the source archive. Not `dist`, which may hold a
# compiled wheel as well (`make wheel`):
#   python -m build --outdir dist/images .
#   docker build -f images/router.Dockerfile -t argosy-router dist/images
# COMPILE=0 leaves out the machine code of its hot modules, for a base without apt: a short request then takes more than
# twice the CPU.
# It needs no source archive.
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
COPY --from=wheel /wheel /dist
RUN python3 -m venv /opt/venv \
 && wheel=$(ls /dist/argosy-*.whl) \
 && /opt/venv/bin/pip install --no-cache-dir --disable-pip-version-check "${wheel}[router,otlp,storage]" \
 && rm -rf /dist
ENV PATH=/opt/venv/bin:/usr/local/bin:/usr/bin:/bin PYTHONUNBUFFERED=1 PYTHONSAFEPATH=1
# A number, because the kubelet cannot tell whether a name is root.
USER 10001:10001
ENTRYPOINT ["/opt/venv/bin/argosy"]
