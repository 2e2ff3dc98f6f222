#!/usr/bin/env bash
# Modules may import only from layers below their own:
#   quant, arch, team, cache, gguf, tokenizer, model, lora, gpu, exec, learn, train, sona, error, bench — and sample, grammar, chat
# beside them.
# Each module has its own errors; `error` is their sum, for programs and `bench`.
set -euo pipefail
cd "$(dirname "$0")/.."
fail=0
# module:modules it may use (besides itself)
rules="
error:quant gguf tokenizer sample grammar chat model exec learn sona lora
quant:
arch:quant
gguf:quant
sample:
chat:grammar tokenizer sample
tokenizer:gguf
grammar:tokenizer sample
model:quant arch gguf tokenizer
team:arch
gpu:quant arch gguf model cache lora
cache:arch team
lora:quant arch gguf tokenizer model
exec:quant arch gguf tokenizer model lora team cache sample gpu
learn:quant arch gguf tokenizer model lora exec
train:quant gguf model cache lora exec learn
sona:gguf model cache lora exec learn
bench:error quant arch gguf tokenizer model lora cache exec learn sample
"
modules="error quant arch gguf tokenizer sample grammar chat model team cache gpu exec learn train sona lora bench"
while IFS=: read -r module allowed; do
    [ -n "$module" ] || continue
    files=$(find src -path "src/$module/*" -name '*.rs' -o -path "src/$module.rs")
    [ -n "$files" ] || continue
    for other in $modules; do
        [ "$other" = "$module" ] && continue
        case " $allowed " in *" $other "*) continue ;; esac
        # Comments and documentation may mention whom they like.
        if grep -HnE "crate::$other\b" $files | grep -vE ':[0-9]+:\s*//'; then
            echo "src/$module must not use $other"
            fail=1
        fi
    done
done <<<"$rules"
# What the check above would not see: groups, and names that the root passes on.
if grep -rnE "use crate::\{|crate::(Model|Session|Sampler|Gguf|Tokenizer|Adapter)\b" src | grep -vE ':[0-9]+:\s*//' |
    grep -v "^src/lib\.rs"; then
    echo "name the module: crate::exec::Session"
    fail=1
fi
# Kernels are compiled once more for unit tests that reach them, a minute of a build: what opens models lies in `tests/it`.
if awk 'FNR == 1 { test = 0 } /#\[cfg\(test\)\]/ { test = 1 } test && /model::Model|Model::(open|from_gguf)|Arch::(detect|available|named)/ \
    { print FILENAME ":" FNR ": " $0 }' $(find src -name '*.rs') | grep .; then
    echo "unit tests take Arch::scalar(), and no models: move these to tests/it"
    fail=1
fi
exit $fail
