# Shared by the commands in this folder: system packages, the Python environment, the build.
# Sourced, not run.
#
#   PSPLUS_TORCH_SPEC  what pip installs for torch when the environment has none that is supported
#                      (default: torch==2.13.0; where pip's default build of torch is one for CUDA
#                      and you want the CPU build, name that here)
#   PYTHON             the interpreter that makes .venv (default: python3)
#   MAX_JOBS           compile jobs at a time (default: all cores)

set -euo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$ROOT"
JOBS=${MAX_JOBS:-$(nproc)}
# Clones and work trees share what ccache holds.
export CCACHE_BASEDIR=$ROOT CCACHE_NOHASHDIR=1
# What ccache asks for where headers are precompiled; ours take nothing from the time or a macro.
export CCACHE_SLOPPINESS=pch_defines,time_macros

BUILD_PACKAGES=(g++ libfmt-dev libspdlog-dev)
TEST_PACKAGES=("${BUILD_PACKAGES[@]}" libgtest-dev libgmock-dev)

say() { printf '\n== %s\n' "$*"; }
die() {
  printf 'psplus: %s\n' "$*" >&2
  exit 1
}

# need_packages PACKAGE...: installs the Debian packages that are missing when we are root; else
# says which command does.
need_packages() {
  command -v dpkg >/dev/null || return 0 # no Debian: CMake names what it misses
  local missing=() package
  for package in "$@"; do
    dpkg -s "$package" >/dev/null 2>&1 || missing+=("$package")
  done
  [ ${#missing[@]} -eq 0 ] && return 0
  if [ "$(id -u)" -ne 0 ]; then
    die "system packages are missing; install them and run this again:
    sudo apt-get update && sudo apt-get install -y ${missing[*]}"
  fi
  say "installing system packages: ${missing[*]}"
  apt-get update -qq
  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" \
    >/dev/null
}

# Whether "$1" is a Python that has a torch psplus can be built against.
has_supported_torch() {
  "$1" - 2>/dev/null <<'PYTHON'
import sys
import torch
sys.exit(".".join(torch.__version__.split(".")[:2]) not in ("2.13", "2.14"))
PYTHON
}

# use_python REQUIREMENT...: puts an environment with torch and the requirements first on PATH: the
# active one if it has a supported torch, else .venv, which is made when it is not there.
use_python() {
  # Before anything is downloaded: a user who is not root must install them first.
  need_packages "${BUILD_PACKAGES[@]}"
  local active=${VIRTUAL_ENV:-${CONDA_PREFIX:-}}
  if [ -n "$active" ] && has_supported_torch "$active/bin/python"; then
    ENVIRONMENT=$active
  else
    ENVIRONMENT=$ROOT/.venv
    local python=${PYTHON:-python3}
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
      die "$python is older than 3.10; set PYTHON to a newer one"
    if [ ! -x "$ENVIRONMENT/bin/pip" ]; then
      "$python" -c 'import ensurepip' 2>/dev/null || need_packages python3-venv
      say "making the virtual environment .venv"
      "$python" -m venv "$ENVIRONMENT"
    fi
  fi
  export PATH=$ENVIRONMENT/bin:$PATH
  export VIRTUAL_ENV=$ENVIRONMENT
  if ! has_supported_torch python; then
    local spec=${PSPLUS_TORCH_SPEC:-torch==2.13.0}
    say "installing $spec"
    python -m pip install -q "$spec"
  fi
  local wanted=("setuptools>=77" wheel "cmake>=3.22" ninja numpy safetensors rich click cloudpickle
    "$@")
  local stamp=$ENVIRONMENT/.psplus-requirements
  touch "$stamp"
  if [ -n "$(comm -23 <(printf '%s\n' "${wanted[@]}" | sort -u) "$stamp")" ]; then
    say "installing Python packages"
    # What an earlier command asked for stays asked for, so that commands can take turns quickly.
    mapfile -t -O "${#wanted[@]}" wanted <"$stamp"
    python -m pip install -q "${wanted[@]}"
    printf '%s\n' "${wanted[@]}" | sort -u >"$stamp"
  fi
}

# Everything that the compiled parts depend on, as one hash.
build_inputs() {
  {
    find csrc cmake CMakeLists.txt setup.py pyproject.toml psplus/_version.py -type f -print0 |
      sort -z | xargs -0 sha256sum
    python -c 'import sys, torch; print(sys.executable, torch.__version__)'
    echo "${PSPLUS_WERROR:-}"
  } | sha256sum
}

# build_package: psplus in the environment, in editable mode; nothing when nothing has changed.
build_package() {
  python -c 'import sysconfig, os; h = os.path.join(sysconfig.get_path("include"), "Python.h")
raise SystemExit(not os.path.exists(h))' || need_packages python3-dev
  local stamp=$ENVIRONMENT/.psplus-build inputs
  inputs=$(build_inputs)
  if [ "$(cat "$stamp" 2>/dev/null)" = "$inputs" ] && [ -x psplus/bin/psplus-server ]; then
    return 0
  fi
  say "building psplus (minutes the first time)"
  local log=$ENVIRONMENT/psplus-build.log
  if ! MAX_JOBS=$JOBS python -m pip install -v --no-build-isolation --no-deps -e . >"$log" 2>&1; then
    tail -n 40 "$log" >&2
    die "the build failed; all of its output is in ${log#"$ROOT"/}"
  fi
  echo "$inputs" >"$stamp"
}

# build_cpp FOLDER CMAKE_ARGUMENT...: the C++ tree without Python; of it $TARGETS, if set.
build_cpp() {
  local tree=$1
  shift
  cmake -S . -B "$tree" -G Ninja "$@" >"$tree.log" 2>&1 || {
    cat "$tree.log" >&2
    die "CMake could not configure $tree"
  }
  cmake --build "$tree" --parallel "$JOBS" --target ${TARGETS:-all} >"$tree.log" 2>&1 || {
    grep -E 'error|FAILED' -A 5 "$tree.log" | head -n 60 >&2
    die "building $tree failed; all of its output is in $tree.log"
  }
}
