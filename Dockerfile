# One image for every role of a run, from the repository's root: docker build -t rollstream:local .
ARG BASE=python:3.12-slim

FROM ${BASE} AS build
# Extras of rollstream in the image, and further packages such as s3fs for stores or a team's own environments.
ARG EXTRAS=learner,hf,chat,archive,sql,signatures
ARG PACKAGES=
# A mirror of the package index, or a team's own.
ARG PIP_INDEX_URL
ARG UV_DEFAULT_INDEX=${PIP_INDEX_URL}
WORKDIR /source
COPY requirements.txt requirements-uv.txt pyproject.toml README.md LICENSE ./
COPY src src
COPY consumers consumers
COPY infra infra
COPY pipeline pipeline
COPY producers producers
COPY recipes recipes
COPY topics topics
RUN python3 -m venv /tools && /tools/bin/pip install --quiet --no-cache-dir --require-hashes -r requirements-uv.txt
# Versions and digests come from the lock.
RUN python3 -m venv --without-pip /opt/rollstream && \
    /tools/bin/uv pip install --quiet --no-cache --python /opt/rollstream/bin/python --compile-bytecode \
        --constraint requirements.txt --build-constraint requirements.txt ".[${EXTRAS}]" ${PACKAGES}
RUN mkdir -p /home-of-runs/rollstream && chown 1000:1000 /home-of-runs/rollstream

FROM ${BASE}
COPY --from=build /opt/rollstream /opt/rollstream
COPY --from=build --chown=1000:1000 /home-of-runs/rollstream /var/lib/rollstream
ENV PATH=/opt/rollstream/bin:${PATH} HOME=/var/lib/rollstream PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
LABEL org.opencontainers.image.title=rollstream org.opencontainers.image.licenses=Apache-2.0
USER 1000:1000
WORKDIR /var/lib/rollstream
VOLUME /var/lib/rollstream
ENTRYPOINT ["/opt/rollstream/bin/rollstream"]
CMD ["--help"]
