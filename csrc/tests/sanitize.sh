#!/usr/bin/env bash
# Runs Python tests over an extension that is built with the address and undefined-behaviour sanitizers (GCC's):
#
#     csrc/tests/sanitize.sh PYTHON TEST...
#
# PYTHON is an interpreter that can build and test the package. The build lies in build/sanitize, apart from any other.
set -euo pipefail
cd "$(dirname "$0")/../.."
python=$1
shift
compiler=${CXX:-g++}
place=build/sanitize

# An environment with the packages of PYTHON, but without what its .pth files do: an editable installation would win.
"$python" -m venv --clear --without-pip "$place/python"
packages=$("$place/python/bin/python" -c "import sysconfig; print(sysconfig.get_path('purelib'))")
"$python" -c "import sys; print(*(p for p in sys.path if p.endswith('site-packages')), sep='\n')" > "$packages/shared.pth"
BANKFULL_REQUIRE_NATIVE=1 "$python" -m pip install --quiet --no-build-isolation --no-deps --target "$packages" . \
    --config-settings build-dir="$place/module" --config-settings cmake.define.BANKFULL_SANITIZE=address,undefined

# The sanitizer must come before everything else, and finds the C++ library's functions only where that is there too.
export LD_PRELOAD="$("$compiler" -print-file-name=libasan.so) $("$compiler" -print-file-name=libstdc++.so.6)"
# The interpreter frees little when it ends. An extension's types come from the interpreter, so vptr cannot be checked.
# To find uses after a return, frames are moved to where they may lie on too small a multiple for vectors of 64 bytes (mended
# in LLVM's library in 2025, llvm/llvm-project#152819); GCC looks for them unasked since version 13.
export ASAN_OPTIONS=detect_leaks=0:detect_stack_use_after_return=0 UBSAN_OPTIONS=print_stacktrace=1 PYTHONMALLOC=malloc PYTHONSAFEPATH=1
# -P (for children, too) and append: the package is the one that was built, not the source tree.
"$place/python/bin/python" -P -c "import sys; from bankfull import _native; sys.exit(not _native.__file__.startswith(sys.prefix))"
exec "$place/python/bin/python" -P -m pytest -q -n 0 --timeout 1800 --import-mode append "$@"
