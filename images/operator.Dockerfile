# The operator's image. The build context is a folder with one wheel, the lock files and the program that lists what is
# installed; a source archive beside them is ignored. Not `dist`, which may hold a compiled wheel as well (`make wheel`):
#   pip wheel --no-deps --wheel-dir dist/images . && cp images/*.lock images/sbom.py dist/images
#   docker build -f images/operator.Dockerfile -t argosy-operator dist/images
# BASE: name it with its digest (python:3.13-slim@sha256:...) for an image that can be built again.
# PIP_ARGS goes to pip when it installs the dependencies: an index of your own, say.
# VERSION, REVISION, CREATED and SOURCE are labels of the image.
ARG BASE=docker.io/library/python:3.13-slim
FROM ${BASE}
ARG PIP_ARGS=
COPY operator.lock /tmp/operator.lock
RUN python3 -m venv /opt/venv \
 && /opt/venv/bin/pip install --no-cache-dir --disable-pip-version-check --require-hashes --only-binary :all: ${PIP_ARGS} -r /tmp/operator.lock \
 && rm /tmp/operator.lock
COPY argosy-*.whl sbom.py /tmp/argosy/
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
LABEL org.opencontainers.image.title="argosy-operator" \
      org.opencontainers.image.description="Operator of Argosy, which keeps fleets of inference engines" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.created="${CREATED}" \
      org.opencontainers.image.source="${SOURCE}" \
      org.opencontainers.image.base.name="${BASE}"
