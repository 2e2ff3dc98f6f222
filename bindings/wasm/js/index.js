// ruvllm: language models in the page or in Node, on a worker of their own. Types and their documentation: index.d.ts.

import { sharesMemory, startWorker, usualThreads } from "./host.js";

/** An error of the engine; `code` says which kind, see index.d.ts. */
export class RuvllmError extends Error {
    constructor(code, message) {
        super(message);
        this.name = "RuvllmError";
        this.code = code;
    }
}

function checkText(what, text) {
    if (typeof text !== "string") throw new RuvllmError("OptionsError", `${what} has to be a text, not ${typeof text}`);
    return text;
}

function checkBytes(what, bytes) {
    if (bytes instanceof ArrayBuffer) return new Uint8Array(bytes);
    if (!(bytes instanceof Uint8Array)) throw new RuvllmError("OptionsError", `${what} has to be a Uint8Array`);
    return bytes;
}

function checkNumber(what, number) {
    if (typeof number !== "number") throw new RuvllmError("OptionsError", `${what} has to be a number, not ${typeof number}`);
    return number;
}

const closed = (what) => new RuvllmError("ClosedError", `the ${what} was closed`);

/** The worker of one model, and the calls it has not answered. */
class Connection {
    #worker;
    #calls = new Map();
    #nextId = 1;
    /** Why it ended. */
    #end = null;
    /** On which its threads tell that they stopped. */
    #alarm = null;

    /** Starts the worker; `stop` ends that, too, at any moment. */
    async start() {
        const ready = new Promise((resolve, reject) => this.#calls.set(0, { resolve, reject }));
        // Told below, once the worker is there.
        ready.catch(() => {});
        const worker = await startWorker(
            new URL("./worker.js", import.meta.url),
            (message) => this.#receive(message),
            (reason) => this.stop(new RuvllmError("EngineError", `the worker stopped: ${reason}`)),
        ).catch((error) => {
            throw new RuvllmError("EngineError", `the worker cannot be started: ${error.message}`);
        });
        if (this.#end) worker.stop();
        else this.#worker = worker;
        await ready;
        this.#worker.release();
    }

    #receive(message) {
        const id = message.ready ? 0 : message.id;
        const call = this.#calls.get(id);
        if (!call) return;
        if (message.progress) {
            // An exception in the caller's function is the caller's: it ends the loading.
            try {
                call.onProgress?.(message.progress);
            } catch (error) {
                this.stop(error);
            }
            return;
        }
        this.#calls.delete(id);
        if (this.#calls.size === 0) this.#worker?.release();
        if (message.error) {
            const error = new RuvllmError(message.error.name, message.error.message);
            call.reject(error);
            if (message.error.fatal) this.stop(error);
        } else call.resolve(message.value);
    }

    /** Asks the worker; `onProgress` is told how far it is. */
    call(method, args, onProgress) {
        if (this.#end) return Promise.reject(this.#end.reason);
        return new Promise((resolve, reject) => {
            const id = this.#nextId++;
            this.#calls.set(id, { resolve, reject, onProgress });
            this.#worker.keep();
            try {
                this.#worker.post({ id, method, args });
            } catch (error) {
                this.#calls.delete(id);
                if (this.#calls.size === 0) this.#worker.release();
                reject(new RuvllmError("OptionsError", `an argument cannot be sent to the worker: ${error.message}`));
            }
        });
    }

    /** A name by which the worker's threads end it, which waits for them. */
    alarm() {
        const name = `ruvllm-${crypto.randomUUID()}`;
        this.#alarm = new BroadcastChannel(name);
        this.#alarm.onmessage = ({ data }) => this.stop(new RuvllmError("EngineError", `a thread of the engine stopped: ${data}`));
        this.#alarm.unref?.();
        return name;
    }

    /** Ends the worker, which gives its memory back; calls under way fail. */
    stop(reason) {
        if (this.#end) return;
        this.#end = { reason };
        this.#worker?.stop();
        this.#alarm?.close();
        for (const { reject } of this.#calls.values()) reject(reason);
        this.#calls.clear();
    }

    get isClosed() {
        return this.#end !== null;
    }
}

/** Sessions that nobody holds any more are freed. */
const forgotten = new FinalizationRegistry(({ connection, number }) => {
    if (!connection.isClosed) connection.call("free", [number]).catch(() => {});
});

const page = typeof document === "undefined" ? undefined : document.baseURI;

export class Model {
    #connection;

    constructor(connection, info) {
        this.#connection = connection;
        this.info = Object.freeze(info);
    }

    static async open(source, { signal, onProgress, threads, ...options } = {}) {
        signal?.throwIfAborted();
        if (threads !== undefined && !(Number.isInteger(threads) && threads >= 1)) {
            throw new RuvllmError("OptionsError", `threads has to be a whole number from 1 on, not ${threads}`);
        }
        if (threads > 1 && !sharesMemory) {
            const headers = "Cross-Origin-Opener-Policy: same-origin and Cross-Origin-Embedder-Policy: require-corp";
            throw new RuvllmError("OptionsError", `threads share memory, which pages may that are served with ${headers}`);
        }
        const isAsked = threads !== undefined;
        threads ??= await usualThreads();
        if (source instanceof ArrayBuffer) source = new Uint8Array(source);
        if (source instanceof URL) source = source.href;
        if (typeof source === "string" && page) source = new URL(source, page).href;
        if (!(typeof source === "string" || source instanceof Uint8Array || source instanceof Blob)) {
            throw new RuvllmError("OptionsError", "a model comes from an address, a File, a Blob or a Uint8Array");
        }
        // The worker is this model's alone: ending it ends whatever it is at, the loading of the module as well.
        const connection = new Connection();
        const abort = () => connection.stop(signal.reason);
        signal?.addEventListener("abort", abort);
        try {
            await connection.start();
            const helpers = { threads, isAsked, alarm: threads > 1 ? connection.alarm() : null };
            const info = await connection.call("open", [source, options, helpers], onProgress);
            signal?.throwIfAborted();
            return new Model(connection, info);
        } catch (error) {
            connection.stop(closed("model"));
            throw error;
        } finally {
            signal?.removeEventListener("abort", abort);
        }
    }

    async tokenize(text) {
        return this.#connection.call("tokenize", [checkText("the text", text)]);
    }

    async detokenize(tokens) {
        return this.#connection.call("detokenize", [Uint32Array.from(tokens)]);
    }

    async embed(texts) {
        const all = [texts].flat().map((text) => checkText("a text", text));
        const vectors = await this.#connection.call("embed", [all]);
        return typeof texts === "string" ? vectors[0] : vectors;
    }

    async session(options = {}) {
        return new Session(this.#connection, await this.#connection.call("session", [options]));
    }

    memory() {
        return this.#connection.call("memory", []);
    }

    close() {
        this.#connection.stop(closed("model"));
    }

    [Symbol.dispose ?? Symbol.for("Symbol.dispose")]() {
        this.close();
    }
}

export class Session {
    #connection;
    #number;
    #freed = false;
    /** What became of the last answer. */
    result = null;

    constructor(connection, number) {
        this.#connection = connection;
        this.#number = number;
        forgotten.register(this, { connection, number }, this);
    }

    #call(method, ...args) {
        if (this.#freed) return Promise.reject(closed("session"));
        return this.#connection.call(method, [this.#number, ...args]);
    }

    generate(prompt, options = {}) {
        return this.#answer({ prompt }, options);
    }

    chat(messages, options = {}) {
        // The time of day for templates that ask for it, on the user's clock.
        const now = new Date(Date.now() - new Date().getTimezoneOffset() * 60_000).toISOString().slice(0, 19);
        return this.#answer({ messages, now }, options);
    }

    async *#answer(prompt, { signal, ...options }) {
        signal?.throwIfAborted();
        const seed = options.seed ?? crypto.getRandomValues(new Uint32Array(1))[0];
        this.result = null;
        await this.#call("begin", { ...options, ...prompt, seed });
        const start = performance.now();
        let first;
        const result = (status) => {
            const [now, begun] = [performance.now(), first ?? performance.now()];
            return { ...status, prompt_ms: begun - start, completion_ms: now - begun };
        };
        try {
            for (;;) {
                signal?.throwIfAborted();
                const { text, status } = await this.#call("next");
                if (text !== "" && first === undefined) first = performance.now();
                if (status) {
                    this.result = result(status);
                    return this.result;
                }
                if (text !== "") yield text;
            }
        } finally {
            // Left early: by `break`, a signal, or an error, which is the one to be told.
            if (!this.result && !this.#freed && !this.#connection.isClosed) {
                await this.#call("end").then((status) => (this.result = result(status)), () => {});
            }
        }
    }

    save() {
        return this.#call("save");
    }

    async load(bytes) {
        return this.#call("load", checkBytes("a saved session", bytes));
    }

    clear() {
        return this.#call("clear");
    }

    async attach(adapter, { scale = 1 } = {}) {
        return this.#call("attach", checkBytes("an adapter", adapter), checkNumber("scale", scale));
    }

    async detach(adapter) {
        return this.#call("detach", checkNumber("an adapter", adapter));
    }

    async learn(text) {
        return this.#call("learn", checkText("the text", text));
    }

    async free() {
        if (this.#freed) return;
        this.#freed = true;
        forgotten.unregister(this);
        if (!this.#connection.isClosed) await this.#connection.call("free", [this.#number]);
    }

    async [Symbol.asyncDispose ?? Symbol.for("Symbol.asyncDispose")]() {
        await this.free();
    }
}
