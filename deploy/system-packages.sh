#!/bin/sh
# Installs the Debian packages that some tests use, when run as root on Debian or Ubuntu; else says which.
#   ip (iproute2): the emulated network; chromium: the chat page; curl: the endpoint; cc (gcc): the fast CPU layers.
set -eu
missing=""
command -v ip >/dev/null 2>&1 || missing="$missing iproute2"
command -v chromium >/dev/null 2>&1 || missing="$missing chromium"
command -v curl >/dev/null 2>&1 || missing="$missing curl"
command -v cc >/dev/null 2>&1 || missing="$missing gcc libc6-dev"
[ -n "$missing" ] || exit 0
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
    echo "Installing$missing"
    apt-get update -qq
    # shellcheck disable=SC2086 - a list of words
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $missing >/dev/null
else
    echo "Some tests need programs that are not here; install the packages:$missing" >&2
fi
