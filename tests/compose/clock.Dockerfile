# A library that gives a process another clock.
FROM python:3.11-slim
RUN apt-get update -q && apt-get install -y -q --no-install-recommends libfaketime && rm -rf /var/lib/apt/lists/*
