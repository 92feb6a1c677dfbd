# tfdist for CPUs, NVIDIA GPUs or TPUs: one image for every worker.
#
#     docker build --tag=REGISTRY/tfdist:0.1.0 .                               # CPU
#     docker build --build-arg=ACCELERATOR=gpu --tag=REGISTRY/tfdist:0.1.0-gpu .
#     docker build --build-arg=ACCELERATOR=tpu --tag=REGISTRY/tfdist:0.1.0-tpu .
#     docker run --rm REGISTRY/tfdist:0.1.0 --gin_file=configs/experiments/digits.gin --run_dir=/tmp/digits
#
# Your own modules: COPY them beside configs/ in an image that is FROM this one.
FROM python:3.11-slim-bookworm

ARG ACCELERATOR=cpu
# More of pyproject.toml's extras, such as ray,tuner.
ARG EXTRAS=""

ENV PYTHONUNBUFFERED=1 \
    PIP_NO_CACHE_DIR=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1

WORKDIR /opt/tfdist
COPY pyproject.toml README.md LICENSE ./
COPY tfdist tfdist
COPY configs configs
COPY examples examples

RUN set -eu; \
    case "$ACCELERATOR" in \
        cpu | gpu | tpu) ;; \
        *) echo "ACCELERATOR is cpu, gpu or tpu; received '$ACCELERATOR'" >&2; exit 2 ;; \
    esac; \
    pip install --editable ".[$ACCELERATOR,examples,gcs,tables${EXTRAS:+,$EXTRAS}]"; \
    useradd --create-home --uid=1000 tfdist; \
    python -m compileall -q tfdist

USER 1000
ENTRYPOINT ["python", "-m", "tfdist.main"]
