#!/usr/bin/env bash
# Other people's clients against `ruvllm serve`: bash tests/clients/run.sh PROGRAM FOLDER
# Installs them into FOLDER, in the versions of requirements*.txt and package.json: 9 GB, of which guidellm takes six.
set -euo pipefail
program=$(realpath "$1")
mkdir -p "$2"
folder=$(realpath "$2")
cd "$(dirname "$0")"

# They want different versions of what they have in common.
install() {
    [ -x "$folder/$1/bin/python" ] || python3 -m venv "$folder/$1"
    "$folder/$1/bin/pip" install --quiet --disable-pip-version-check --requirement "$2"
}
install venv requirements.txt
install frameworks requirements-frameworks.txt
install guidellm requirements-guidellm.txt
install aider requirements-aider.txt
cp package.json package-lock.json clients.mjs aisdk.mjs ollama_client.mjs "$folder"
# `npm ci` of npm 11.19 asks for packages of other systems, too, that a registry may not have; this takes the same versions.
npm install --silent --no-audit --no-fund --prefix "$folder"

servers=()
trap 'kill "${servers[@]}" 2>/dev/null || true; wait' EXIT
# Starts a server with these flags; its address is in `address`.
serve() {
    local log=$folder/log-${#servers[@]}
    "$program" serve --port 0 --temp 0 --api-key secret "$@" 2>"$log" &
    servers+=($!)
    for _ in $(seq 600); do
        address=$(sed -n 's/.* is ready on \(http:[^[:space:]]*\).*/\1/p' "$log")
        [ -z "$address" ] || return 0
        kill -0 "$!" || break
        sleep 0.1
    done
    cat "$log" >&2
    exit 1
}
serve -c 2048 --chat-template-file template.jinja
of_lists=$address
# Coding agents send 17,000 tokens; a small model ends no text by itself.
serve -c 65536 --parallel 4 --grammar 'root ::= [A-Za-z ,]{1,40}'
of_short_texts=$address
serve -c 2048
"$folder/venv/bin/python" clients.py "$address" "$of_lists"
(cd "$folder" && node clients.mjs "$address")
"$folder/venv/bin/python" ollama_client.py "$address" secret
(cd "$folder" && node ollama_client.mjs "$address" secret)
"$folder/venv/bin/python" proxy.py "$program"
"$folder/frameworks/bin/python" frameworks.py "$of_short_texts" ../../models/ruvllm-rust-6m-q8_0.gguf
(cd "$folder" && node aisdk.mjs "$of_short_texts")
python3 programs.py "$of_short_texts" "$folder"
python3 coding_agents.py "$of_short_texts" "$folder"
