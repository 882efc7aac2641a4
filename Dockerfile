# Milestone 2.1 on the CPU:
#     docker build -t ece408_op . && docker run --rm ece408_op
#     docker run --rm ece408_op lab --help
FROM debian:12-slim AS build
RUN apt-get update \
    && apt-get install --yes --no-install-recommends ca-certificates g++ python3-venv
COPY . /src
RUN python3 -m venv /opt/ece408 \
    && /opt/ece408/bin/pip install --no-cache-dir '/src[cpu]'

FROM debian:12-slim
# MXNet loads the two libraries; the data set is Debian's. There is no compiler.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends \
        dataset-fashion-mnist libgomp1 libquadmath0 python3 \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home student
COPY --from=build /opt/ece408 /opt/ece408
ENV PATH=/opt/ece408/bin:$PATH
USER student
WORKDIR /home/student
ENTRYPOINT ["ece408"]
CMD ["m2.1", "1000"]
