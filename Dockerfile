# The server, as README.md starts it, and nginx for config/nginx. No key and no checkpoint is in the image.
#   docker build -t gr00t-torchserve .
#   docker run --gpus all -p 8080:8080 -v gr00t-run:/app/.run -v /models/n17:/models/n17:ro gr00t-torchserve \
#     --checkpoint /models/n17
# The keys are then in /app/.run/key_file.json, in the volume gr00t-run. Management is on the container's loopback only.
FROM python:3.12-slim

# gcc and libc6-dev: on a GPU, Triton compiles what launches its kernels.
RUN apt-get update && apt-get install -y --no-install-recommends nginx-light gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/* && nginx -t

WORKDIR /app
COPY requirements.txt .
RUN pip install --no-cache-dir -r requirements.txt
# ./scripts/launch then installs nothing
ENV GR00T_PYTHON=/usr/local/bin/python

COPY config.properties ./
COPY config config
COPY handler handler
# Without tests/, so ./scripts/test, soak and bench_faults run in a checkout only.
COPY scripts scripts

# .run holds the model store, the keys and the logs.
RUN useradd --uid 10001 --create-home gr00t && mkdir .run && chown gr00t .run
USER 10001
VOLUME /app/.run
EXPOSE 8080 8082 8083

# Loading a large checkpoint takes minutes: startupTimeout is 900 s.
HEALTHCHECK --interval=10s --timeout=5s --start-period=900s \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8083/ready', timeout=4)"]
ENTRYPOINT ["./scripts/serve", "--host", "0.0.0.0", "--ready-port", "8083"]
