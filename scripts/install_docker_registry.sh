#!/usr/bin/env bash
# Puts Debian's docker-registry into a folder, for the tests of the OCI path. Needs no root: the
# package is unpacked, not installed. Where there is no apt, those tests are skipped and counted.
set -euo pipefail
into=$(realpath "${1:?usage: install_docker_registry.sh FOLDER}")

if command -v docker-registry > /dev/null || [ -x "$into/docker-registry" ]; then
  exit 0
fi
if ! command -v apt-get > /dev/null; then
  echo "no apt-get here: the tests of the OCI registry will be skipped" >&2
  exit 0
fi
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
chmod 755 "$work"
cd "$work"
fetch() { apt-get -qq -o APT::Sandbox::User=root download docker-registry; }
fetch || { apt-get -qq update && fetch; }
dpkg-deb -x docker-registry_*.deb unpacked
install -m 755 unpacked/usr/bin/docker-registry "$into/"
