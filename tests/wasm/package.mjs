// node --test package.mjs, in a project that has the package: what a user of it may rely on. RUVLLM_ROOT is the repository.
import assert from "node:assert/strict";
import { execFile } from "node:child_process";
import { cp, open, readdir, readFile, rm, writeFile } from "node:fs/promises";
import { createServer } from "node:http";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { test } from "node:test";
import { promisify } from "node:util";
import { Model, RuvllmError } from "ruvllm";

const root = process.env.RUVLLM_ROOT;
const path = join(root, "models/ruvllm-rust-6m-q8_0.gguf");
const [prompt, ...lines] = (await readFile(join(root, "tests/data/greedy.txt"), "utf8")).trimEnd().split("\n");
const expected = lines.join("\n");
const greedy = { temperature: 0, max_tokens: 32 };
const TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:";

const model = await Model.open(path);
test.after(() => model.close());

async function text(pieces) {
    let all = "";
    for await (const piece of pieces) all += piece;
    return all;
}

function fails(code, pattern = /./) {
    return (error) => {
        assert(error instanceof RuvllmError, `${error?.stack}`);
        assert.equal(error.code, code, error.message);
        assert.match(error.message, pattern);
        return true;
    };
}

test("the text of every other build, on both levels", async () => {
    assert.equal(model.info.level, "simd128");
    const times = {};
    for (const level of ["simd128", "scalar"]) {
        const other = await Model.open(await readFile(path), { level });
        const session = await other.session();
        assert.equal(await text(session.generate(prompt, greedy)), expected);
        assert.equal(session.result.finish_reason, "length");
        assert.equal(session.result.completion_tokens, 32);
        const long = await other.session();
        await text(long.generate("The borrow checker is a part of the compiler. ".repeat(20), greedy));
        const { prompt_tokens, prompt_ms, completion_ms } = long.result;
        times[level] = [prompt_tokens / prompt_ms, 31 / completion_ms];
        other.close();
    }
    const [fast, slow] = [times.simd128, times.scalar];
    for (const [i, name] of ["prompt", "answer"].entries()) {
        console.log(`${name}: ${(1000 * fast[i]).toFixed(0)} tokens/s, ${(fast[i] / slow[i]).toFixed(1)} times the scalar level`);
    }
});

test("threads change no text, and end with their model", async () => {
    const nThreads = async () => (await readdir("/proc/self/task")).length;
    /** Until the workers of closed models are gone. */
    const settled = async (most = 0) => {
        for (let last = -1, i = 0; i < 50; i++) {
            const n = await nThreads();
            if (n === last && n <= (most || n)) return n;
            last = n;
            await new Promise((resolve) => setTimeout(resolve, 200));
        }
        return nThreads();
    };
    const before = await settled();
    const saved = new Set();
    for (const threads of [1, 2, 4]) {
        const other = await Model.open(path, { threads });
        assert.equal(other.info.threads, threads);
        assert((await nThreads()) >= before + threads, `${threads} threads`);
        const session = await other.session();
        assert.equal(await text(session.generate(prompt, greedy)), expected);
        saved.add(Buffer.from(await session.save()).toString("base64"));
        other.close();
    }
    assert.equal(saved.size, 1);
    assert.equal(await settled(before), before);
    for (const threads of [0, 1.5, "2"]) await assert.rejects(Model.open(path, { threads }), fails("OptionsError", /threads/));
});

test("a thread that stops ends its model", async () => {
    const folder = new URL("./stopping/", import.meta.url);
    await cp(new URL("./node_modules/ruvllm/", import.meta.url), folder, { recursive: true });
    const helper = new URL("helper.js", folder);
    await writeFile(helper, (await readFile(helper, "utf8")).replace("help();", 'throw new Error("stopped");'));
    const stopping = await import(new URL("index.js", folder));
    const failure = await stopping.Model.open(path, { threads: 2 }).catch((error) => error);
    assert.equal(failure.code, "EngineError");
    assert.match(failure.message, /a thread of the engine stopped: stopped/);
});

test("what is wrong with a file is told", async () => {
    const bytes = await readFile(path);
    await assert.rejects(Model.open(bytes.subarray(0, bytes.length / 2)), fails("ModelError"));
    await assert.rejects(Model.open("/nowhere.gguf"), fails("FileError", /nowhere/));
    await assert.rejects(Model.open(7), fails("OptionsError"));
    await assert.rejects(Model.open(bytes, { levl: "simd128" }), fails("OptionsError", /levl/));
    await assert.rejects(Model.open(bytes, { level: "avx2" }), fails("OptionsError", /simd128/));
    const large = join(tmpdir(), `ruvllm-large-${process.pid}.gguf`);
    const file = await open(large, "w");
    await file.truncate(3 * 2 ** 30);
    await file.close();
    await assert.rejects(Model.open(large), fails("MemoryError", /ruvllm-large.*3221225472/));
    await rm(large);
});

/** Serves the bytes at addresses that break off after a million, and say of the rest what `answers` has for them. */
async function withServer(bytes, answers, work) {
    const opened = [];
    const server = createServer((request, response) => {
        opened.push(request);
        const name = request.url.slice(1);
        if (name === "hangs") return;
        if (!(name in answers)) return response.writeHead(404).end();
        const from = Number(/bytes=(\d+)-/.exec(request.headers.range ?? "")?.[1] ?? 0);
        const { status = 206, start = from, range, cuts = 1, ...headers } = from > 0 ? answers[name](from, request.headers) : {};
        const first = status === 206 ? start : 0;
        response.writeHead(from > 0 ? status : 200, {
            "content-length": bytes.length - first,
            etag: '"1"',
            ...(range && { "content-range": range }),
            ...headers,
        });
        if (name === "whole" || (from > 0 && from >= cuts * 1_000_000)) return response.end(bytes.subarray(first));
        response.write(bytes.subarray(first, first + 1_000_000), () => response.destroy());
    }).listen(0);
    try {
        await work((name) => `http://127.0.0.1:${server.address().port}/${name}`, opened);
    } finally {
        server.close();
        server.closeAllConnections();
    }
}

test("downloads: continued where it is the same file, cut, refused", async () => {
    const bytes = await readFile(path);
    const range = (from, total = bytes.length) => `bytes ${from}-${total - 1}/${total}`;
    const answers = {
        whole: () => ({}),
        ranges: (from) => ({ range: range(from), cuts: 3 }),
        // What a page may see of another origin's answer.
        hidden: () => ({}),
        unknown: (from) => ({ range: `bytes ${from}-${bytes.length - 1}/*` }),
        cut: () => ({ status: 200 }),
        elsewhere: (from) => ({ range: range(from - 1), start: from - 1 }),
        grown: (from) => ({ range: range(from, bytes.length + 1) }),
        tagged: (from) => ({ range: range(from), etag: '"2"' }),
        changed: (_, asked) => ({ status: asked["if-range"] === '"1"' ? 200 : 206, etag: '"2"' }),
    };
    await withServer(bytes, answers, async (at) => {
        const seen = [];
        const whole = await Model.open(at("whole"), { onProgress: (p) => seen.push(p) });
        assert.deepEqual(seen.at(-1), { loaded: bytes.length, total: bytes.length });
        whole.close();
        for (const name of ["ranges", "hidden", "unknown"]) {
            const other = await Model.open(at(name));
            assert.equal(await text((await other.session()).generate(prompt, greedy)), expected);
            other.close();
        }
        for (const name of ["cut", "elsewhere"]) {
            await assert.rejects(Model.open(at(name)), fails("FileError", /broke off after 1000000.*does not continue/));
        }
        for (const name of ["grown", "tagged", "changed"]) {
            await assert.rejects(Model.open(at(name)), fails("FileError", /broke off after 1000000.*another file/));
        }
        await assert.rejects(Model.open(at("missing")), fails("FileError", /404/));
        const onProgress = () => {
            throw new Error("mine");
        };
        await assert.rejects(Model.open(at("whole"), { onProgress }), /mine/);
        await assert.rejects(Model.open(tmpdir()), fails("FileError", /cannot be read/));
    });
});

test("a signal ends the loading at every moment", async () => {
    const open = (source, signal) => Model.open(source, { signal });
    await assert.rejects(open(path, AbortSignal.abort(new Error("enough"))), /enough/);
    await withServer(new Uint8Array(), {}, async (at, opened) => {
        const stop = new AbortController();
        const pending = open(at("hangs"), stop.signal);
        while (opened.length === 0) await new Promise((resolve) => setTimeout(resolve, 5));
        stop.abort();
        await assert.rejects(pending, { name: "AbortError" });
    });
    // While the worker starts, the module is loaded, the file is read, the model is made: all that takes 100 ms.
    for (let aborted = true, moment = 0; aborted; moment++) {
        const stop = new AbortController();
        const pending = open(path, stop.signal);
        for (let i = 0; i < moment % 8; i++) await null;
        if (moment > 7) await new Promise((resolve) => setTimeout(resolve, 4 * (moment - 8)));
        stop.abort(new Error(`moment ${moment}`));
        const end = await pending.then((other) => (other.close(), "opened"), (error) => error.message);
        aborted = end === `moment ${moment}`;
        assert(aborted || end === "opened", end);
        assert(aborted || moment > 8, "a model was opened at once");
    }
    const mine = await model.session();
    assert.equal(await text(mine.generate(prompt, greedy)), expected);
});

test("a signal at every token, a break, and what comes after", async () => {
    for (let n = 0; n < greedy.max_tokens; n++) {
        const session = await model.session();
        const stop = new AbortController();
        let seen = "";
        const run = async () => {
            if (n === 0) stop.abort();
            let i = 0;
            for await (const piece of session.generate(prompt, { ...greedy, signal: stop.signal })) {
                seen += piece;
                if (++i === n) stop.abort();
            }
        };
        await assert.rejects(run(), { name: "AbortError" });
        assert(expected.startsWith(seen) && seen.length < expected.length);
        await session.clear();
        assert.equal(await text(session.generate(prompt, greedy)), expected);
        await session.free();
    }
    const session = await model.session();
    for await (const _ of session.generate(prompt, greedy)) break;
    assert.equal(session.result.finish_reason, null);
    const other = session.generate(" and", greedy);
    await other.next();
    await assert.rejects(session.generate("x").next(), fails("SessionError", /generating/));
    await other.return();
    await session.free();
    await assert.rejects(session.save(), fails("ClosedError"));
    await assert.rejects(session.generate("x").next(), fails("ClosedError"));
    await session.free();
});

test("requests that are wrong", async () => {
    const session = await model.session({ n_ctx: 64 });
    const tries = [
        [session.generate("x", { max_token: 1 }), "OptionsError", /max_token/],
        [session.generate("x", { temperature: "hot" }), "OptionsError", /temperature/],
        [session.generate("x", { json_schema: { type: "nothing" } }), "GrammarError"],
        [session.generate("x", { grammar: "root ::= (" }), "GrammarError"],
        [session.chat([{ role: "user", content: "x" }], { chat_template: "{% for %}" }), "ChatError"],
        [session.chat([{ role: "user", content: "x" }], { chat_template: "{{ raise_exception('no') }}" }), "ChatError", /no/],
        [session.generate("word ".repeat(100)), "SessionError", /64/],
        [session.generate(() => 0), "OptionsError"],
    ];
    for (const [answer, code, pattern] of tries) await assert.rejects(text(answer), fails(code, pattern));
    await assert.rejects(model.session({ kv_type: "q1" }), fails("OptionsError", /q1/));
    await assert.rejects(session.load(new Uint8Array(100)), fails("SessionError"));
    await assert.rejects(session.attach(new Uint8Array(100)), fails("AdapterError"));
    await assert.rejects(session.detach(0), fails("AdapterError"));
    for (const wrong of [session.attach("x"), session.load(), session.learn(7), model.tokenize(), model.embed([7])]) {
        await assert.rejects(wrong, fails("OptionsError"));
    }
    // None of that did any harm.
    await session.clear();
    assert.equal(await text(session.generate(prompt, greedy)), expected);
});

test("chat, JSON Schema, tools", async () => {
    const session = await model.session();
    const messages = [{ role: "user", content: "What is a borrow?" }];
    const options = { ...greedy, chat_template: model.info.chat_template ?? TEMPLATE };
    const answer = await text(session.chat(messages, options));
    messages.push({ role: "assistant", content: answer }, { role: "user", content: "And a move?" });
    await text(session.chat(messages, options));
    assert(session.result.cached_tokens > 8, JSON.stringify(session.result));

    const schema = {
        type: "object",
        properties: { name: { type: "string", maxLength: 12 }, n: { type: "integer", minimum: 0, maximum: 99 } },
        required: ["name", "n"],
        additionalProperties: false,
    };
    const response_format = { type: "json_schema", json_schema: { schema } };
    const value = JSON.parse(await text(session.chat(messages, { ...options, max_tokens: 100, response_format })));
    assert.deepEqual(Object.keys(value), ["name", "n"]);
    assert(Number.isInteger(value.n) && value.name.length <= 12);

    const tools = [{ type: "function", function: { name: "seconds", parameters: schema } }];
    await text(session.chat(messages, { ...options, max_tokens: 200, tools, tool_choice: "required" }));
    assert.equal(session.result.finish_reason, "tool_calls");
    const [call] = session.result.tool_calls;
    assert.equal(call.function.name, "seconds");
    assert.deepEqual(Object.keys(JSON.parse(call.function.arguments)), ["name", "n"]);
});

test("saved sessions, embeddings, learning", async () => {
    const [first, second] = [await model.session(), await model.session()];
    const begun = await text(first.generate(prompt, { ...greedy, max_tokens: 16 }));
    await second.load(await first.save());
    const rest = await text(second.generate(" is", greedy));
    assert.equal(rest, await text(first.generate(" is", greedy)));
    assert.notEqual(begun, rest);

    const vectors = await model.embed(["A borrow ends.", "Traits are shared behaviour."]);
    for (const vector of vectors) assert(Math.abs(vector.reduce((sum, x) => sum + x * x, 0) - 1) < 1e-4);
    assert.deepEqual(await model.embed("A borrow ends."), vectors[0]);

    const page = "The gauge at Ossen Weir reads 1.84 m and rises. ".repeat(6);
    const learner = await model.session();
    const { base, learnt } = await learner.learn(page);
    assert(learnt <= base + Math.LN2);
    await learner.clear();
    const again = await learner.learn(page);
    assert(again.learnt < 0.5 * base, `${base} ${again.learnt}`);
    assert.match(await model.detokenize(await model.tokenize("let x = 1;")), /let x = 1;$/);
});

/** A LoRA adapter of rank 1 for the queries of the first layer, in GGUF: every element of A and B is `value`. */
function adapterOf(value, width = 256) {
    const number = (n, bytes) => {
        const buffer = Buffer.alloc(8);
        buffer.writeBigUInt64LE(BigInt(n));
        return buffer.subarray(0, bytes);
    };
    const string = (s) => Buffer.concat([number(Buffer.byteLength(s), 8), Buffer.from(s)]);
    const float = (x) => Buffer.from(Float32Array.of(x).buffer);
    const texts = { "general.type": "adapter", "general.architecture": "llama", "adapter.type": "lora" };
    const pairs = Object.entries(texts).map(([key, text]) => Buffer.concat([string(key), number(8, 4), string(text)]));
    pairs.push(Buffer.concat([string("adapter.lora.alpha"), number(6, 4), float(1)]));
    const shapes = { "blk.0.attn_q.weight.lora_a": [width, 1], "blk.0.attn_q.weight.lora_b": [1, width] };
    const tensors = Object.entries(shapes).map(([name, [n, m]], i) =>
        Buffer.concat([string(name), number(2, 4), number(n, 8), number(m, 8), number(0, 4), number(i * width * 4, 8)]),
    );
    const head = [Buffer.from("GGUF"), number(3, 4), number(tensors.length, 8), number(pairs.length, 8), ...pairs, ...tensors];
    const header = Buffer.concat(head);
    const padding = Buffer.alloc((32 - (header.length % 32)) % 32);
    return new Uint8Array(Buffer.concat([header, padding, ...Array.from({ length: 2 * width }, (_, i) => float(value * ((i * 7) % 11 - 5)))]));
}

test("adapters change the text, and go again", async () => {
    const session = await model.session();
    const answer = async () => {
        await session.clear();
        return text(session.generate(prompt, greedy));
    };
    const none = await session.attach(adapterOf(1), { scale: 0 });
    assert.equal(await answer(), expected);
    const some = await session.attach(adapterOf(1));
    assert.notEqual(await answer(), expected);
    await session.detach(some);
    assert.equal(await answer(), expected);
    await session.detach(none);
    await assert.rejects(session.detach(none), fails("AdapterError"));
});

test("stop texts end answers, of conversations, too", async () => {
    const session = await model.session();
    const options = { ...greedy, chat_template: TEMPLATE };
    const messages = [{ role: "user", content: "What is a borrow?" }];
    const whole = await text(session.chat(messages, options));
    const stop = whole.trim().slice(5, 9);
    const cut = await text(session.chat(messages, { ...options, stop }));
    assert.equal(cut, whole.slice(0, whole.indexOf(stop)));
    assert.equal(session.result.finish_reason, "stop");
    await session.clear();
    const end = expected.slice(7, 11);
    assert.equal(await text(session.generate(prompt, { ...greedy, stop: [end] })), expected.slice(0, expected.indexOf(end)));
});

test("a template that exhausts the engine harms no other model", async () => {
    const other = await Model.open(path);
    const session = await other.session();
    const options = { ...greedy, chat_template: "{{ " + "(".repeat(100_000) + "1" + ")".repeat(100_000) + " }}" };
    const refused = (error) => ["ChatError", "EngineError"].includes(error.code);
    await assert.rejects(text(session.chat([{ role: "user", content: "x" }], options)), refused);
    other.close();
    const mine = await model.session();
    assert.equal(await text(mine.generate(prompt, greedy)), expected);
});

test("freed sessions leave nothing", async () => {
    const use = async () => {
        const session = await model.session({ n_ctx: 128 });
        await session.generate(prompt, { ...greedy, max_tokens: 1 }).next();
        await session.free();
    };
    for (let i = 0; i < 50; i++) await use();
    const before = await model.memory();
    const n = process.env.RUVLLM_LONG ? 10_000 : 200;
    for (let i = 0; i < n; i++) await use();
    assert.equal(await model.memory(), before);
});

test("memory that cannot grow", async () => {
    const script = `
        import { Model } from "ruvllm";
        const [path, prompt] = process.argv.slice(2);
        const told = async (work) => {
            try {
                return await work();
            } catch (error) {
                return { name: error.name, code: error.code, message: error.message };
            }
        };
        const answers = async (model, n_ctx) => {
            const session = await model.session({ n_ctx });
            let text = "";
            for await (const piece of session.generate(prompt, { temperature: 0, max_tokens: 32 })) text += piece;
            await session.free();
            return text;
        };
        const model = await told(() => Model.open(path, { threads: 1 }));
        const steps = [model.code ? model : "opened"];
        if (!model.code) for (let i = 0; i < 2; i++) steps.push(await told(() => answers(model, 256)));
        console.log(JSON.stringify(steps));
        model.close?.();
    `;
    // A file, since what says that a text is a module is refused by workers; here, where the package is found.
    const program = new URL("./memory.mjs", import.meta.url).pathname;
    await writeFile(program, script);
    const run = promisify(execFile);
    const reached = new Set();
    for (const pages of [40, 150, 300]) {
        const args = [`--wasm-max-mem-pages=${pages}`, program, path, prompt];
        const { stdout } = await run(process.execPath, args, { timeout: 60_000 });
        const steps = JSON.parse(stdout);
        for (const step of steps) {
            if (typeof step === "string") continue;
            const codes = ["MemoryError", "ModelError", "SessionError", "EngineError"];
            assert(step.name === "RuvllmError" && codes.includes(step.code), `${pages} pages: ${JSON.stringify(step)}`);
            reached.add(step.code);
        }
        if (pages === 300) assert.deepEqual(steps, ["opened", expected, expected]);
        console.log(`${pages} pages: ${steps.map((step) => step.code ?? step.slice(0, 6)).join(", ")}`);
    }
    assert(reached.has("MemoryError"), [...reached].join());
});

test("a closed model, and one that stops, harm no other", async () => {
    const other = await Model.open(path);
    const session = await other.session();
    const pending = text(session.generate(prompt, greedy));
    other.close();
    await assert.rejects(pending, fails("ClosedError"));
    await assert.rejects(other.session(), fails("ClosedError"));
    await assert.rejects(session.clear(), fails("ClosedError"));
    const mine = await model.session();
    assert.equal(await text(mine.generate(prompt, greedy)), expected);
});
