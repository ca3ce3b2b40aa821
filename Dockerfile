# docker build -t flat-rl .                                                    a CPU: the demo, the tests' scripts
# docker build -t flat-rl:cuda --build-arg FOR=cuda .                          NVIDIA GPUs, with vLLM; the host needs the driver alone
# docker run --rm --shm-size 8g -v $PWD/runs:/work/runs flat-rl train_sync     --gpus all for the second
# The full image of Python, because vLLM's kernels are compiled where they run. The ring buffer is in /dev/shm: hence --shm-size.
FROM python:3.11

ARG FOR=cpu
WORKDIR /opt/flat-rl
COPY requirements.txt requirements-cuda.txt ./
RUN if [ "$FOR" = cuda ]; then pip install --no-cache-dir -r requirements-cuda.txt; \
    else pip install --no-cache-dir -r requirements.txt --extra-index-url https://download.pytorch.org/whl/cpu; fi
COPY . .
RUN pip install --no-cache-dir --no-deps .

WORKDIR /work
ENTRYPOINT ["flat-rl"]
