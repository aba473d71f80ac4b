# A node, small: no torch, no compiler, its own user.
FROM python:3.11-slim AS build
COPY pyproject.toml README.md LICENSE /src/
COPY kvstore /src/kvstore
COPY connector /src/connector
COPY gpu /src/gpu
RUN python3 -m venv /opt/kvstore && /opt/kvstore/bin/pip install --no-cache-dir /src

FROM python:3.11-slim
RUN useradd --uid 1000 --create-home kvstore \
 && install -d -o kvstore -g kvstore -m 0700 /run/kvstore /var/lib/kvstore
COPY --from=build /opt/kvstore /opt/kvstore
ENV PATH=/opt/kvstore/bin:$PATH \
    KVSTORE_SOCKET=/run/kvstore/kvstore.sock \
    KVSTORE_ARENA_DIR=/run/kvstore/arena \
    KVSTORE_DISK=/var/lib/kvstore
USER kvstore
VOLUME /var/lib/kvstore
HEALTHCHECK --interval=5s --timeout=5s --start-period=60s --retries=3 CMD ["kvstore", "status"]
ENTRYPOINT ["kvstore"]
CMD ["serve"]
