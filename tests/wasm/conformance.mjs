// node conformance.mjs PROGRAM, in a project that has the package: every model of RUVLLM_CONFORMANCE says the same in both modules as
// natively. Tiny models are close to even: rounding differs between levels, so the text may be that of any level.
import assert from "node:assert/strict";
import { execFileSync } from "node:child_process";
import { readdirSync } from "node:fs";
import { join } from "node:path";
import { Model } from "ruvllm";

const [prompt, max_tokens, n_ctx] = ["the cat", 12, 64];
// What no session of the package continues: texts that are denoised as a whole, and those behind an encoder.
const refused = /denoises whole texts|encoder has read nothing/;

function files(folder) {
    const entries = readdirSync(folder, { withFileTypes: true }).map((entry) => [join(folder, entry.name), entry.isDirectory()]);
    return entries.flatMap(([path, isFolder]) => (isFolder ? files(path) : path.endsWith(".gguf") ? [path] : []));
}

function native(path, level) {
    const args = ["-m", path, "-p", prompt, "-n", `${max_tokens}`, "-c", `${n_ctx}`, "--temp", "0", "--json"];
    try {
        const output = execFileSync(process.argv[2], args, { stdio: ["ignore", "pipe", "ignore"], env: { ...process.env, RUVLLM_ARCH: level } });
        return [JSON.parse(output).text];
    } catch {
        return []; // a file for another purpose, or a level that this CPU has not
    }
}

async function inModule(path, threads) {
    const model = await Model.open(path, { threads });
    try {
        let text = "";
        for await (const piece of (await model.session({ n_ctx })).generate(prompt, { temperature: 0, max_tokens })) text += piece;
        return text;
    } finally {
        model.close();
    }
}

let [n, nRefused] = [0, 0];
for (const path of ["models", "models2", "models3"].flatMap((name) => files(join(process.env.RUVLLM_CONFORMANCE, name)))) {
    const texts = ["scalar", "avx2", "avx512"].flatMap((level) => native(path, level));
    for (const threads of texts.length > 0 ? [1, 2] : []) {
        try {
            const text = await inModule(path, threads);
            assert(texts.includes(text), `${path}, ${threads} threads: ${JSON.stringify(text)}, natively ${JSON.stringify(texts)}`);
            n += 1;
        } catch (error) {
            if (!refused.test(error.message)) throw error;
            nRefused += 1;
        }
    }
}
assert(n > 200, `${n} texts only`);
console.log(`${n} texts are as natively, ${nRefused} models are refused by name`);
