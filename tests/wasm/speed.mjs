// node speed.mjs [PROGRAM], in a project that has the package: tokens per second of processor time, by the levels of the
// package and by the level `avx2` of the program `ruvllm`, one thread each, in turns. RUVLLM_ROOT is the repository; Linux.
import { spawnSync } from "node:child_process";
import { readFileSync } from "node:fs";
import { join } from "node:path";
import { Model } from "ruvllm";

const [program] = process.argv.slice(2);
const path = process.env.RUVLLM_MODEL ?? join(process.env.RUVLLM_ROOT, "models/ruvllm-rust-6m-q8_0.gguf");
const [ROUNDS, REPEATS, ANSWER] = [7, 24, 128];
const LONG = "The borrow checker is a part of the compiler. ".repeat(REPEATS);
const SHORT = "The borrow checker";

/** Seconds of processor time of `work` in this process. */
async function seconds(work) {
    const before = process.cpuUsage();
    await work();
    const { user, system } = process.cpuUsage(before);
    return (user + system) / 1e6;
}

async function drain(pieces) {
    for await (const _ of pieces);
}

async function ofLevel(model) {
    const session = await model.session({ n_ctx: 512 });
    const options = { temperature: 0 };
    const prompt = await seconds(() => drain(session.generate(LONG, { ...options, max_tokens: 1 })));
    const n_prompt = session.result.prompt_tokens;
    await session.clear();
    await drain(session.generate(SHORT, { ...options, max_tokens: 1 }));
    const answer = await seconds(() => drain(session.generate(" is", { ...options, max_tokens: ANSWER })));
    const rates = [n_prompt / prompt, session.result.completion_tokens / answer];
    await session.free();
    return { rates, n_prompt };
}

/** Seconds of processor time of children that ended. */
function ofChildren() {
    const fields = readFileSync("/proc/self/stat", "utf8").split(") ")[1].split(" ");
    return (Number(fields[13]) + Number(fields[14])) / 100;
}

function ofProgram(prompt, n) {
    // Several times, as these times count in steps of 10 ms.
    const [repeats, before] = [8, ofChildren()];
    const args = ["-m", path, "-p", prompt, "-n", n, "-t", 1, "-c", 512, "--temp", 0, "--ignore-eos"];
    for (let i = 0; i < repeats; i++) {
        const { status, stderr } = spawnSync(program, args.map(String), { env: { ...process.env, RUVLLM_ARCH: "avx2" } });
        if (status !== 0) throw new Error(String(stderr));
    }
    return (ofChildren() - before) / repeats;
}

const models = {};
for (const level of ["simd128", "scalar"]) models[level] = await Model.open(path, { level });
// Compiled for good, before it counts.
for (const model of Object.values(models)) for (let i = 0; i < 3; i++) await ofLevel(model);
const rows = [];
for (let round = 0; round < ROUNDS; round++) {
    const simd = await ofLevel(models.simd128);
    const scalar = await ofLevel(models.scalar);
    const row = { simd128: simd.rates, scalar: scalar.rates };
    if (program) {
        const least = ofProgram(SHORT, 1);
        row.avx2 = [simd.n_prompt / (ofProgram(LONG, 1) - least), ANSWER / (ofProgram(SHORT, 1 + ANSWER) - least)];
    }
    rows.push(row);
    console.log(JSON.stringify(row));
}
const median = (numbers) => numbers.sort((a, b) => a - b)[numbers.length >> 1];
for (const [i, what] of ["prompt", "answer"].entries()) {
    const rates = Object.keys(rows[0]).map((name) => `${name} ${median(rows.map((row) => row[name][i])).toFixed(0)}`);
    const over = (name) => median(rows.map((row) => row.simd128[i] / row[name][i])).toFixed(2);
    const ratios = Object.keys(rows[0]).slice(1).map((name) => `${over(name)} × ${name}`);
    console.log(`${what}: ${rates.join(", ")} tokens/s; simd128 has ${ratios.join(", ")}`);
}
for (const model of Object.values(models)) model.close();
