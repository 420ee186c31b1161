# moe_jax with JAX's CUDA libraries. The driver comes from the host: docker run --gpus all (NVIDIA's container toolkit).
#   docker build --tag moe-jax .                              CUDA 13, driver 580 or newer
#   docker build --build-arg EXTRAS=cuda12,chat,hub .         CUDA 12, driver 525 or newer
#   docker build --build-arg EXTRAS=chat,hub .                CPU only
ARG BASE=python:3.12-slim
FROM ${BASE}
ARG EXTRAS=cuda13,chat,hub
# what the NVIDIA runtime mounts; ignored without it
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility

WORKDIR /src
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY moe_jax moe_jax
COPY pallas_kernels pallas_kernels
COPY torch_bridge torch_bridge
RUN python3 -m venv /opt/moe-jax \
    && /opt/moe-jax/bin/python -m pip install --no-cache-dir --constraint constraints.txt ".[${EXTRAS}]" \
    && rm -rf /src/* \
    && useradd --create-home --uid 10001 user
ENV PATH=/opt/moe-jax/bin:$PATH
USER user
WORKDIR /home/user
ENTRYPOINT ["moe-jax"]
CMD ["doctor"]
