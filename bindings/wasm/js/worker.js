// The worker: owns one module with one model and its sessions, and does what the messages of `index.js` say, one after
// the other. A message is `{ id, method, args }`, its answer `{ id, value }` or `{ id, error }`.

import { compiled, connect, startWorker } from "./host.js";
import { FileError, openSource } from "./source.js";

/** How long tokens are computed for before the page is told, if no text comes of them. */
const SLICE_MS = 30;
/** Bytes of the largest file. */
const LARGEST = 2 ** 31 - 1;

/** The module: with threads or without. */
let engine;
let memory;
let model;
let broken;
const sessions = new Map();
let nextSession = 1;

function sessionOf(number) {
    const session = sessions.get(number);
    if (!session) throw Object.assign(new Error("the session was freed"), { name: "ClosedError" });
    return session;
}

/** Loads the module for one thread. */
async function loadAlone() {
    engine = await import("./ruvllm_js.js");
    const module = await compiled(new URL("./ruvllm_js_bg.wasm", import.meta.url));
    ({ memory } = await engine.default({ module_or_path: module }));
}

/** Loads the module for `n` threads; those that stop tell the channel `alarm`. */
async function loadWithThreads(n, alarm) {
    const threaded = await import("./threads/ruvllm_js.js");
    const module = await compiled(new URL("./threads/ruvllm_js_bg.wasm", import.meta.url));
    ({ memory } = await threaded.default({ module_or_path: module }));
    const help = () =>
        new Promise((resolve, reject) => {
            const receive = async ({ ready }) => (ready ? (await worker).post({ module, memory, alarm }) : resolve());
            const worker = startWorker(new URL("./helper.js", import.meta.url), receive, (reason) => reject(new Error(reason)));
            worker.catch(reject);
        });
    await Promise.all(Array.from({ length: n - 1 }, help));
    threaded.start_threads(n - 1);
    engine = threaded;
}

/** Reads a file into the module's memory. */
async function read(source, id) {
    let bytes;
    try {
        const { name, size, parts } = await openSource(source);
        const held = [];
        if (size !== undefined) bytes = new engine.FileBytes(name, size);
        let loaded = 0;
        for await (const part of parts) {
            if (bytes) bytes.append(part);
            else held.push(part);
            loaded += part.length;
            // Without a length known before, the limit is seen on the way.
            if (!bytes && loaded > LARGEST) new engine.FileBytes(name, loaded);
            post({ id, progress: { loaded, total: size ?? null } });
        }
        if (!bytes) {
            bytes = new engine.FileBytes(name, loaded);
            for (const part of held) bytes.append(part);
        }
        if (size !== undefined && bytes.length < size) {
            throw new FileError(`${name} ends after ${bytes.length} of ${size} bytes`);
        }
        return bytes;
    } catch (error) {
        bytes?.free();
        throw error;
    }
}

const methods = {
    async open(source, options, { threads, isAsked, alarm }, id) {
        try {
            if (threads > 1) {
                await loadWithThreads(threads, alarm).catch((error) => {
                    // Where there is no room for shared memory, say.
                    if (isAsked) throw error;
                    threads = 1;
                });
            }
            if (threads === 1) await loadAlone();
        } catch (error) {
            throw Object.assign(new Error(`the module cannot be loaded: ${error.message}`), { name: "EngineError" });
        }
        const bytes = await read(source, id);
        model = engine.Model.open(bytes, JSON.stringify({ ...options, threads }));
        return JSON.parse(model.info());
    },
    tokenize: (text) => model.tokenize(text),
    detokenize: (tokens) => model.detokenize(tokens),
    embed: (texts) => model.embed(texts),
    memory: () => memory.buffer.byteLength,
    session(options) {
        sessions.set(nextSession, model.session(JSON.stringify(options)));
        return nextSession++;
    },
    free(number) {
        sessions.get(number)?.free();
        sessions.delete(number);
    },
    begin: (number, request) => sessionOf(number).begin(JSON.stringify(request)),
    next(number) {
        const session = sessionOf(number);
        for (const start = performance.now(); ; ) {
            const text = session.advance();
            if (text === undefined) return { text: "", status: JSON.parse(session.status()) };
            if (text !== "" || performance.now() - start > SLICE_MS) return { text };
        }
    },
    end(number) {
        const session = sessionOf(number);
        session.end();
        return JSON.parse(session.status());
    },
    save: (number) => sessionOf(number).save(),
    load: (number, bytes) => sessionOf(number).load(bytes),
    clear: (number) => sessionOf(number).clear(),
    attach: (number, bytes, scale) => sessionOf(number).attach(bytes, scale),
    detach: (number, adapter) => sessionOf(number).detach(adapter),
    learn: (number, text) => JSON.parse(sessionOf(number).learn(text)),
};

/** After an exception of the host's the module's memory is not to be trusted: everything else fails the same way. */
function breakWith(error) {
    let panic = "";
    try {
        panic = engine.last_panic();
    } catch {
        // Then the exception itself has to do.
    }
    broken = { name: "EngineError", message: `the engine stopped: ${panic || error.message}`, fatal: true };
    return broken;
}

async function answer({ id, method, args }) {
    if (broken) return { id, error: broken };
    try {
        return { id, value: await methods[method](...args, id) };
    } catch (error) {
        const fatal = error instanceof WebAssembly.RuntimeError || error instanceof RangeError;
        return { id, error: fatal ? breakWith(error) : { name: error.name ?? "Error", message: error.message ?? String(error) } };
    }
}

let queue = Promise.resolve();
const post = await connect((message) => {
    queue = queue.then(async () => post(await answer(message)));
});
post({ ready: true });
