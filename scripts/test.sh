#!/usr/bin/env bash
# Set up tox on a bare Python and run the tests:
#   bash scripts/test.sh                        all default environments, two at a time; -p N: N at a time
#   bash scripts/test.sh -e NAME,NAME           some environments
#   bash scripts/test.sh -e NAME -- -k resume   some tests: words after -- go to pytest, also without -e
#   bash scripts/test.sh --fast                 lint, types, the core's tests and a run of each torch app, in 2 minutes
#   bash scripts/test.sh --help                 this text, and the environments
# Run the tests of a change since the main branch or a REVISION:
#   bash scripts/test.sh --changed [REVISION] [-- WORDS]
scripts=$(dirname "$(readlink -f "${BASH_SOURCE[0]}" 2>/dev/null || echo "${BASH_SOURCE[0]}")") # also by a link
set -euo pipefail
CDPATH='' cd -- "$scripts/.."
packages=(tox==4.67.13 tox-uv==1.37.1 uv==0.13.9)
venv=.venvs/tox
# The programs of an environment name its path. tox does not reinstall a changed file of the same name.
stamp="${packages[*]} $PWD $(cksum vendor/samestep-*.whl 2>/dev/null || :)"

if [ "$(cat "$venv/samestep-stamp" 2>/dev/null)" != "$stamp" ]; then
  for python in python3.11 python3; do
    if "$python" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null; then
      break
    fi
    python=
  done
  if [ -z "$python" ]; then
    echo "error: the tests need Python 3.11 with the venv module (Debian: apt-get install python3.11-venv)" >&2
    exit 2
  fi
  echo "making $venv with ${packages[*]}"
  rm -rf "$venv" .tox
  "$python" -m venv "$venv"
  "$venv/bin/python" -m pip install --quiet --disable-pip-version-check "${packages[@]}"
  echo "$stamp" >"$venv/samestep-stamp"
fi
# uv installs the environments. It does not read pip's configuration, so pip's settings become variables of uv.
settings=$("$venv/bin/python" -m pip config list)
setting() { sed -nE "s/^[a-z:]+\.$1='(.*)'$/\1/p" <<<"$settings" | head -n 1; }
for pair in UV_INDEX_URL=index-url UV_EXTRA_INDEX_URL=extra-index-url UV_FIND_LINKS=find-links SSL_CERT_FILE=cert; do
  value=$(setting "${pair#*=}")
  if [ -n "$value" ] && [ -z "$(printenv "${pair%=*}")" ]; then
    export "${pair%=*}=$value"
  fi
done
export UV_INDEX_STRATEGY=unsafe-best-match  # as pip does: the best version of any index
case ${1:-} in
-h | --help | -l | --list)
  sed -n '2,/^set /s/^# //p' scripts/test.sh
  exec "$venv/bin/tox" list
  ;;
esac
if [ "${1:-}" = --fast ]; then
  set -- -e fast,fast-cifar "${@:2}"
fi
if [ "${1:-}" = --changed ]; then
  shift
  revision=
  if [[ ${1:--} != -* ]]; then
    revision=$1
    shift
  fi
  environments=$("$venv/bin/python" tools/changed.py "$revision")
  echo "the change needs: ${environments:-nothing}"
  case $environments in
  '') exit 0 ;;
  ALL) ;;
  *) set -- -e "$environments" "$@" ;;
  esac
fi
exec "$venv/bin/python" tools/run_tox.py "$@"
