# tfdist with Horovod on NVIDIA GPUs (NCCL between GPUs, MPI or Gloo between processes), for an MPIJob or horovodrun.
#
#     docker build --file=docker/horovod-gpu.Dockerfile --tag=REGISTRY/tfdist-horovod:0.1.0 .
#
# The CUDA release is that of the TensorFlow wheel: python -c 'import tensorflow as tf; print(tf.sysconfig.get_build_info())'
FROM nvidia/cuda:12.5.1-cudnn-devel-ubuntu22.04

ENV DEBIAN_FRONTEND=noninteractive \
    PYTHONUNBUFFERED=1 \
    PIP_NO_CACHE_DIR=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PATH=/opt/venv/bin:$PATH

# The workers of an MPIJob are reached through ssh, whose keys its operator mounts.
RUN set -eu; \
    apt-get update; \
    apt-get install --yes --no-install-recommends \
        build-essential ca-certificates libopenmpi-dev openmpi-bin openssh-client openssh-server \
        software-properties-common; \
    add-apt-repository --yes ppa:deadsnakes/ppa; \
    apt-get install --yes --no-install-recommends python3.11 python3.11-dev python3.11-venv; \
    rm -rf /var/lib/apt/lists/*; \
    mkdir -p /run/sshd; \
    sed -i 's/[ #]*StrictHostKeyChecking .*/    StrictHostKeyChecking no/' /etc/ssh/ssh_config; \
    echo "    UserKnownHostsFile /dev/null" >>/etc/ssh/ssh_config; \
    sed -i 's/#*StrictModes .*/StrictModes no/' /etc/ssh/sshd_config; \
    python3.11 -m venv /opt/venv

WORKDIR /opt/tfdist
COPY pyproject.toml README.md LICENSE ./
COPY tfdist tfdist
COPY configs configs
COPY examples examples

RUN set -eu; \
    pip install --editable '.[examples,gcs,gpu,horovod,tables]'; \
    ldconfig /usr/local/cuda/targets/x86_64-linux/lib/stubs; \
    HOROVOD_GPU_OPERATIONS=NCCL HOROVOD_WITH_MPI=1 HOROVOD_CUDA_HOME=/usr/local/cuda \
        python -m tfdist.build_horovod; \
    ldconfig; \
    rm -rf "$HOME/.cache"; \
    python -m compileall -q tfdist

ENTRYPOINT []
CMD ["python", "-m", "tfdist.main", "--help"]
