#!/usr/bin/env bash
# The report on a machine that ssh reaches: sends this commit, measures there whether or not the connection holds, and
# brings the records back. Once more after a broken connection, it follows what runs, or goes on where it was.
#
#   cloud/ssh.sh HOST                     make report
#   cloud/ssh.sh HOST make report FULL=1
#   cloud/ssh.sh HOST .venv/bin/flashlab sweep run --ray local
set -euo pipefail
if (($# == 0)) || [[ $1 == -* ]]; then
    echo "usage: cloud/ssh.sh HOST [COMMAND...]" >&2
    exit 2
fi
host=$1
shift
if (($# == 0)); then
    set -- make report
fi
cd "$(dirname "$0")/.."
commit=$(git rev-parse HEAD)

# Quoted for the shell there: nothing of a value is read as a command.
command=(env)
for name in FLASHLAB_UPLOAD FLASHLAB_INSTANCE FLASHLAB_USD_PER_GPU_HOUR; do
    if [[ -n ${!name:-} ]]; then
        command+=("$name=${!name}")
    fi
done
command+=(cloud/run.sh "$@")
quoted=$(printf '%q ' "${command[@]}")

# shellcheck disable=SC2029 # what is quoted here is meant to be
git bundle create --quiet - HEAD | ssh "$host" "set -e
    cat > flashlab.bundle
    [ -d flashlab ] || git clone --quiet flashlab.bundle flashlab
    [ \"\$(git -C flashlab rev-parse HEAD)\" = $commit ] ||
        { git -C flashlab fetch --quiet ../flashlab.bundle HEAD && git -C flashlab checkout --quiet $commit; }"

# One at a time, by the lock; its status outlives the connection.
status=0
# shellcheck disable=SC2029
ssh "$host" "cd flashlab && mkdir -p build
    if flock --nonblock build/cloud.lock true; then
        rm -f build/cloud.status; : > build/cloud.log
        setsid flock build/cloud.lock sh -c $(printf '%q' "$quoted"'; echo $? > build/cloud.status') \
            >> build/cloud.log 2>&1 < /dev/null &
        sleep 1
    fi
    tail -n +1 -f build/cloud.log & follow=\$!
    flock build/cloud.lock true
    sleep 1; kill \$follow
    exit \"\$(cat build/cloud.status)\"" || status=$?

into=build/collected/$host
mkdir -p "$into"
ssh "$host" "tar -C flashlab/data -cf - ." | tar -C "$into" -xf -
echo "records of $host are in $into"
exit "$status"
