#!/bin/bash
# Gets a Cloud TPU VM by a queued resource, trains on it and deletes it: bash tpu_vm.sh, in a clone of tfdist
#
# Change:
#   - `name`, which no other queued resource of the zone has; `where`, with --project=ID if it is not gcloud's own;
#   - the slice. Runtime versions: tpu-ubuntu2204-base for v2 to v4, v2-alpha-tpuv5-lite for v5litepod,
#     v2-alpha-tpuv5 for v5p, v2-alpha-tpuv6e for v6e;
#   - `request`: without --spot a VM costs more and is not taken away; add --network or --service-account;
#   - `arguments`, with a run directory in a bucket, as the VM's disk is deleted with it;
#   - `environment`: what the VM exports before the training. A secret comes from Google's Secret Manager.
#
# A slice of several hosts, such as v4-32: set has_several_hosts=yes, and for runtime_version an image whose hosts run
# TensorFlow's server, such as tpu-vm-tf-2.20.0-pod-pjrt. One process trains, on the first host. See docs/tpu.md.

name=digits
where=(--zone=us-west4-a)
accelerator=v5litepod-8
runtime_version=v2-alpha-tpuv5-lite
has_several_hosts=no
request=(--spot --valid-until-duration=6h) # given up when it was not granted by then
max_restarts=3                             # after failures; a VM that was taken away does not count where the run saved
arguments=(--gin_file=configs/experiments/digits.gin --run_dir=gs://bucket/digits)
environment='true' # or 'export A=1 && B="$(gcloud secrets versions access latest --secret=b)" && export B'

set -uo pipefail
install="sudo add-apt-repository --yes ppa:deadsnakes/ppa && sudo apt-get install --yes python3.11 python3.11-venv"
install+=" && mkdir -p tfdist && tar -xzf tfdist.tar.gz -C tfdist && cd tfdist && python3.11 -m venv .venv"
install+=" && .venv/bin/pip install --quiet -e '.[tpu,gcs,examples]'"
worker=all
variables=
if [[ $has_several_hosts == yes ]]; then
    worker=0
    variables="env TPU_NAME=$name TPU_LOAD_LIBRARY=0 "
    install+=" google-api-python-client oauth2client" # by which TensorFlow finds a TPU by its name
fi
train="cd tfdist && $environment && exec $variables.venv/bin/python -m tfdist.main ${arguments[*]@Q}"
archive="$(mktemp --suffix=.tar.gz)"
created=

# Deletes only what this script created: the name may be somebody else's.
delete() {
    [[ -z "$created" ]] || gcloud compute tpus queued-resources delete "$name" "${where[@]}" --force --quiet
    created=
}

on_vm() { gcloud compute tpus tpu-vm ssh "$name" "${where[@]}" --worker="$worker" --quiet --command="$1"; }

create() {
    gcloud compute tpus queued-resources create "$name" "${where[@]}" --node-id="$name" \
        --accelerator-type="$accelerator" --runtime-version="$runtime_version" "${request[@]}" || return 1
    created=yes
    local state=
    until [[ "$state" == ACTIVE ]]; do # granted when there is capacity
        state="$(gcloud compute tpus queued-resources describe "$name" "${where[@]}" \
            --format='value(state.state)')" || return 1
        case "$state" in
            FAILED | SUSPENDED | SUSPENDING)
                echo "the queued resource $name is $state" >&2
                return 1
                ;;
            ACTIVE) ;;
            *) sleep "${POLL_SECONDS:-30}" ;;
        esac
    done
    tar -czf "$archive" --exclude='./.git' --exclude='./.venv*' --exclude='./.env*' --exclude='./runs' --exclude='./data' . ||
        return 1
    gcloud compute tpus tpu-vm scp "$archive" "$name:tfdist.tar.gz" "${where[@]}" --worker="$worker" --quiet || return 1
    on_vm "$install" || return 1
}

trap 'delete; rm -f "$archive"' EXIT
trap 'exit 130' INT # gcloud takes Ctrl-C, and would end as after a failure
failures=0
while true; do
    status=0
    create || status=$?
    if ((status == 0)); then
        on_vm "$train" || status=$?
    fi
    case $status in
        0 | 2 | 3) break ;; # done, a mistake of the user's, or the training diverged: again would be the same
        143) ;;             # asked to stop, and saved: that is no failure
        *) ((++failures > max_restarts)) && break ;;
    esac
    # A spot VM that was taken away leaves a queued resource that is suspended: a new one takes its place.
    echo "ended with status $status: starting again" >&2
    delete
done
exit "$status"
