#!/bin/sh
# Generates the protobuf code anew beside the committed one; differs = somebody forgot `make proto`.
# usage: proto_in_step.sh PYTHON FILE.proto...
set -eu
python=$1; shift
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT
"$python" -m grpc_tools.protoc -I. --plugin=protoc-gen-mypy="$(dirname "$python")/protoc-gen-mypy" \
    --python_out="$out" --mypy_out=readable_stubs,quiet:"$out" "$@"
for made in "$out"/protocol/*; do
    if ! cmp -s "$made" "protocol/$(basename "$made")"; then
        echo "protocol/$(basename "$made") is not what its .proto says: run \`make proto\`" >&2
        exit 1
    fi
done
