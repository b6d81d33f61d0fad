# The router's image. The build context is a folder that holds the wheel and nothing else:
#   pip wheel --no-deps --wheel-dir dist . && docker build -f images/router.Dockerfile -t argosy-router dist
# COMPILE=0 leaves out the machine code of its hot modules, for a base without apt: a short request then takes twice the CPU.
ARG BASE=docker.io/library/python:3.13-slim

FROM ${BASE} AS compiled
ARG COMPILE=1
COPY argosy-*.whl /dist/
RUN mkdir /compiled && if [ "${COMPILE}" = 1 ]; then \
    apt-get update -q && apt-get install -qy --no-install-recommends gcc libc6-dev \
 && python3 -m venv /venv \
 && /venv/bin/pip install --no-cache-dir --disable-pip-version-check "$(ls /dist/argosy-*.whl)[router,compile]" \
 && /venv/bin/python -m argosy_router.compile /compiled; fi

FROM ${BASE}
COPY argosy-*.whl /dist/
RUN python3 -m venv /opt/venv \
 && wheel=$(ls /dist/argosy-*.whl) \
 && /opt/venv/bin/pip install --no-cache-dir --disable-pip-version-check "${wheel}[router,otlp]" \
 && rm -rf /dist
COPY --from=compiled /compiled /tmp/compiled
RUN cp -r /tmp/compiled/. "$(/opt/venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')" \
 && rm -rf /tmp/compiled
ENV PATH=/opt/venv/bin:/usr/local/bin:/usr/bin:/bin PYTHONUNBUFFERED=1 PYTHONSAFEPATH=1
# A number, because the kubelet cannot tell whether a name is root.
USER 10001:10001
ENTRYPOINT ["/opt/venv/bin/argosy"]
