# Two images: the node, small (no torch, no pip, its own user), and `--target engine`, the reference engine with torch.
# `--target tests` is the latter with what runs the integration tests.
# --build-arg EXTRAS="proxy encryption": with what these need.
# What is installed changes seldom and comes first; sources come last.

# An image of nothing but wheels that pip shall prefer to an index, as torch's CPU build. By default there are none.
ARG WHEELS=scratch
FROM ${WHEELS} AS wheels

FROM python:3.11-slim AS base
RUN useradd --uid 1000 --create-home kvstore \
 && install -d -o kvstore -g kvstore -m 0700 /run/kvstore /var/lib/kvstore
ENV PATH=/opt/kvstore/bin:$PATH \
    KVSTORE_SOCKET=/run/kvstore/kvstore.sock \
    KVSTORE_ARENA_DIR=/run/kvstore/arena \
    KVSTORE_DISK=/var/lib/kvstore

FROM base AS dependencies
WORKDIR /src
COPY pyproject.toml constraints.txt ./
ARG EXTRAS=
RUN python3 -c "import tomllib; told = tomllib.load(open('pyproject.toml', 'rb')); project = told['project']; \
      extras = [each for name in '${EXTRAS}'.split() for each in project['optional-dependencies'][name]]; \
      print(*told['build-system']['requires'], *project['dependencies'], *extras, sep='\n')" > requirements.txt \
 && python3 -m venv /opt/kvstore && pip install --no-cache-dir -c constraints.txt -r requirements.txt

# The native core needs a compiler to be built, and no image keeps it. Where Debian's packages can't be had, it is done
# without: Python does the core's work then, and `kvstore doctor` says so.
FROM dependencies AS built
RUN headers=$(python3 -c "import os, sysconfig; print(os.path.exists(sysconfig.get_path('include') + '/Python.h'))"); \
    quickly="-o Acquire::Retries=1 -o Acquire::http::Timeout=30"; \
    apt-get $quickly update -qq && apt-get $quickly install -y -qq --no-install-recommends gcc libc6-dev \
      $([ "$headers" = True ] || echo python3-dev) || echo "no C compiler: the core is built without"
COPY . .
RUN pip wheel --no-cache-dir --no-deps --no-build-isolation --wheel-dir /wheel .

FROM dependencies AS package
RUN --mount=type=bind,from=built,source=/wheel,target=/wheel \
    pip install --no-cache-dir --no-deps /wheel/*.whl && pip uninstall --quiet --yes setuptools pip

FROM dependencies AS engine
ARG PIP_EXTRA_INDEX_URL=
RUN --mount=type=bind,from=wheels,target=/wheels \
    pip install --no-cache-dir -c constraints.txt --find-links /wheels torch
RUN --mount=type=bind,from=built,source=/wheel,target=/wheel \
    pip install --no-cache-dir --no-deps /wheel/*.whl
WORKDIR /
USER kvstore

FROM engine AS tests
USER root
COPY constraints.txt /
RUN pip install --no-cache-dir -c /constraints.txt pytest pytest-timeout
USER kvstore

FROM base
COPY --from=package /opt/kvstore /opt/kvstore
USER kvstore
VOLUME /var/lib/kvstore
# It takes a quarter of a second of a processor, and far longer beside an engine that has them all.
HEALTHCHECK --interval=10s --timeout=30s --start-period=60s --retries=3 CMD ["kvstore", "status"]
ENTRYPOINT ["kvstore"]
CMD ["serve"]
