#!/bin/sh
# Installs the servers that the tests take from the system, where it may: PostgreSQL and RabbitMQ by apt, as root.
# Where it may not, the tests that need them are skipped, each with one clear line.
set -eu
missing=""
ls /usr/lib/postgresql/*/bin/postgres >/dev/null 2>&1 || missing="$missing postgresql"
ls /usr/lib/rabbitmq/lib/rabbitmq_server-*/sbin/rabbitmq-server >/dev/null 2>&1 || missing="$missing rabbitmq-server"
[ -n "$missing" ] || exit 0
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null 2>&1; then
    echo "note: not installed and not installable here:$missing (needs root and apt-get)"
    exit 0
fi
echo "installing$missing"
export DEBIAN_FRONTEND=noninteractive
# The tests start private servers; the package's own shall not run.
policy=/usr/sbin/policy-rc.d
if [ ! -e "$policy" ]; then
    printf '#!/bin/sh\nexit 101\n' >"$policy"
    chmod 755 "$policy"
    trap 'rm -f "$policy"' EXIT
fi
# shellcheck disable=SC2086  # a list of names
if ! { apt-get update -qq && apt-get install -y -qq --no-install-recommends $missing >/dev/null; } </dev/null; then
    echo "note: apt-get could not install$missing"
fi
