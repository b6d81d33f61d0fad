# The operator's image. The build context is a folder with one wheel; a source archive beside it is ignored. Not `dist`,
# which may hold a compiled wheel as well (`make wheel`):
#   pip wheel --no-deps --wheel-dir dist/images .
#   docker build -f images/operator.Dockerfile -t argosy-operator dist/images
ARG BASE=docker.io/library/python:3.13-slim
FROM ${BASE}
COPY argosy-*.whl /dist/
RUN python3 -m venv /opt/venv \
 && wheel=$(ls /dist/argosy-*.whl) \
 && /opt/venv/bin/pip install --no-cache-dir --disable-pip-version-check "${wheel}[operator]" \
 && rm -rf /dist
ENV PATH=/opt/venv/bin:/usr/local/bin:/usr/bin:/bin PYTHONUNBUFFERED=1 PYTHONSAFEPATH=1
# A number, because the kubelet cannot tell whether a name is root.
USER 10001:10001
ENTRYPOINT ["/opt/venv/bin/argosy"]
