#!/bin/sh
# Everything that only a GPU can show: the GPU tests, then prefixes, selective re-prefill and passages. Prefixes on a
# 0.5B and a 7B shape in bf16, through each engine. Results go to the folder named by the first argument.
#   PYTHON (default python3) must have torch with CUDA, transformers and what pyproject.toml asks for; kvikio if it is to be measured.
set -u
cd "$(dirname "$0")/.."
out=${1:-bench/results}
python=${PYTHON:-python3}
mkdir -p "$out"
# patches/ ships inside the package; without an installation a link does the same
[ -e hf_tiered_cache/patches ] || "$python" -c "import hf_tiered_cache" 2>/dev/null || ln -s ../patches hf_tiered_cache/patches
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
"$python" -m pytest -q -p no:cacheprovider tests/gpu 2>&1 | tee "$out/gpu-tests.log" | tail -n 15
for engine in posix kvikio; do
    "$python" bench/prefix.py --device cuda --dtype bfloat16 --shape qwen2.5-0.5b --engine $engine \
        --prefixes 1024,4096,16384 --out "$out" --name "prefix-0.5b-gpu-$engine" 2>&1 | tail -n 30
    "$python" bench/prefix.py --device cuda --dtype bfloat16 --shape qwen2.5-7b --engine $engine \
        --host-memory 16GiB --device-memory 16GiB \
        --prefixes 1024,4096,16384 --out "$out" --name "prefix-7b-gpu-$engine" 2>&1 | tail -n 30
done
# selective re-prefill at the paper's scale: 7B, memory for a part of the KV, the real disk, and an SSD of 7.45 GB/s
for bandwidth in 0 7.45e9; do
    "$python" bench/reprefill.py --device cuda --dtype bfloat16 --shape qwen2.5-7b --prefixes 16 --tokens 8192 \
        --suffix 64 --device-memory 1GiB --host-memory 2GiB --bandwidth $bandwidth \
        --out "$out" --name "reprefill-7b-gpu-$bandwidth" 2>&1 | tail -n 40
done
# passages in a prompt, at the paper's ratio, from memory and from disks
"$python" bench/rag.py --device cuda --dtype bfloat16 --shape qwen2.5-7b --pool 24 --passages 12 --requests 10 \
    --device-memory 8GiB --out "$out" 2>&1 | tail -n 60
