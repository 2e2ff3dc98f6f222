# The server in an image of one static program: docker build -t ruvllm .
#   docker run --rm -p 8080:8080 ruvllm                                                        the model inside it
#   docker run --rm -p 8080:8080 -v "$PWD:/models:ro" ruvllm -m /models/model.gguf             a model of yours
# Threads and memory follow the limits of the container.
FROM rust:1-alpine AS build
# A compiler of C for ring, which TLS of downloads uses.
RUN apk add --no-cache gcc musl-dev
WORKDIR /source
COPY . .
RUN cargo build --locked --release --package ruvllm-cli \
    && mkdir -p /image/cache /image/tmp \
    && cp target/release/ruvllm /image/ruvllm \
    && cp /etc/ssl/certs/ca-certificates.crt /image/ca-certificates.crt

FROM scratch
COPY --from=build /image/ruvllm /ruvllm
COPY --from=build /image/ca-certificates.crt /etc/ssl/certs/ca-certificates.crt
COPY --from=build --chown=65532:65532 /image/cache /cache
COPY --from=build --chown=65532:65532 /image/tmp /tmp
# Nobody in particular, who owns nothing but /cache and /tmp.
USER 65532:65532
ENV HOME=/cache XDG_CACHE_HOME=/cache
# All addresses: the container's network is the border.
ENV LLAMA_ARG_HOST=0.0.0.0
EXPOSE 8080
# There is no shell and no curl: the program asks itself.
HEALTHCHECK --interval=30s --timeout=5s --start-period=60s CMD ["/ruvllm", "health"]
ENTRYPOINT ["/ruvllm", "serve"]
