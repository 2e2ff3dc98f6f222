// node run.mjs MODULE.wasm MODEL.gguf EXPECTED.txt: what the model makes of the first line has to be the
// other lines, and a damaged model an error message; what is read twice has been learnt.
import { readFileSync } from "node:fs";
import { strict as assert } from "node:assert";

const [modulePath, modelPath, expectedPath] = process.argv.slice(2);
const { instance } = await WebAssembly.instantiate(readFileSync(modulePath), {});
const ruvllm = instance.exports;

// Views of the memory are made anew each time: growing it detaches the old ones.
function call(f, bytes, ...args) {
    const at = ruvllm.input(bytes.length);
    new Uint8Array(ruvllm.memory.buffer, at, bytes.length).set(bytes);
    const worked = f(...args) !== 0;
    const text = new Uint8Array(ruvllm.memory.buffer, ruvllm.output(), ruvllm.output_len());
    return { worked, text: new TextDecoder().decode(text) };
}

const model = readFileSync(modelPath);
const cut = call(ruvllm.open, model.subarray(0, model.length / 2));
assert(!cut.worked && cut.text.length > 0, "half a model was opened");
console.log(`half a model: ${cut.text}`);

const opened = call(ruvllm.open, model);
assert(opened.worked, opened.text);

const [prompt, ...lines] = readFileSync(expectedPath, "utf8").trimEnd().split("\n");
const generate = (n) => {
    const start = performance.now();
    const result = call(ruvllm.generate, new TextEncoder().encode(prompt), n);
    assert(result.worked, result.text);
    return { text: result.text, seconds: (performance.now() - start) / 1000 };
};
const one = generate(1);
const { text, seconds } = generate(32);
assert.equal(text, lines.join("\n"));
console.log(`${opened.text}: ${JSON.stringify(prompt + text)}`);
console.log(`${(31 / (seconds - one.seconds)).toFixed(1)} tokens/s`);

const learnt = call(ruvllm.learn, new TextEncoder().encode("The gauge at Ossen Weir reads 1.84 m and rises. ".repeat(6)));
assert(learnt.worked, learnt.text);
const [base, first, again, bytes] = learnt.text.split(" ").map(Number);
assert(bytes > 0 && first <= base + Math.LN2 && again < 0.5 * base, learnt.text);
console.log(`learnt: ${base.toFixed(1)} nats by the model, ${first.toFixed(1)} while learning, ${again.toFixed(1)} afterwards`);
