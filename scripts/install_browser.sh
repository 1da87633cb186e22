#!/bin/sh
# Makes Chromium available to the browser tests. Installs Debian's package where that is possible (root and apt-get),
# says nothing when a browser is there already, and otherwise says why there is none: the browser tests then skip.
# Under CI=true a missing browser is a failure, because a skipped test there would pass for a proof.
set -u

have_browser() { command -v chromium >/dev/null 2>&1; }

# Prints the reason and leaves: success for a person at a desk, failure in CI.
without_browser() {
    echo "no Chromium: $1; the browser tests cannot run" >&2
    [ "${CI:-}" = "true" ] && exit 1
    exit 0
}

have_browser && exit 0
command -v apt-get >/dev/null 2>&1 || without_browser "apt-get is not on this machine, install Chromium by hand"
[ "$(id -u)" = "0" ] || without_browser "installing needs root, run: sudo apt-get install chromium"

echo "installing Chromium for the browser tests (about 400 MB on disk, a minute or two)"
log=$(mktemp)
trap 'rm -f "$log"' EXIT
export DEBIAN_FRONTEND=noninteractive
# A font comes along: without one every letter of a screenshot is an empty box.
if ! { apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium fonts-liberation; } >"$log" 2>&1; then
    tail -n 5 "$log" >&2
    without_browser "apt-get could not install it (its last lines are above)"
fi
have_browser || without_browser "the package was installed but left no 'chromium' on the PATH"
