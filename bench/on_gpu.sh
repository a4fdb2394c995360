#!/bin/sh
# Everything that only a GPU can show, within ten minutes: `bench/on_gpu.sh FOLDER [OPTIONS]`; --help says more.
#   PYTHON (default python3) must have torch with CUDA and transformers. What else is missing, such as xxhash, kvikio or
#   pytest, is a row of each stage that needs it.
set -eu
here=$(cd "$(dirname "$0")/.." && pwd)
export PYTHONPATH="$here${PYTHONPATH:+:$PYTHONPATH}" HF_HUB_OFFLINE=1
# patches/ ships inside the package; where a copy of the tree has lost the link, it is made anew
[ -e "$here/hf_tiered_cache/patches" ] || ln -s ../patches "$here/hf_tiered_cache/patches"
exec "${PYTHON:-python3}" "$here/bench/on_gpu.py" run "$@"
