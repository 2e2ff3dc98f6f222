// What differs between Node and browsers: workers, and files by path.

export const isNode = typeof process !== "undefined" && Boolean(process.versions?.node) && !process.versions.electron?.renderer;

/**
 * A worker that runs `worker.js`. `receive` gets its messages, `fail` what stopped it. In Node a worker at rest does not
 * keep the process alive.
 */
export async function startWorker(receive, fail) {
    const url = new URL("./worker.js", import.meta.url);
    if (!isNode) {
        const worker = new Worker(url, { type: "module", name: "ruvllm" });
        worker.addEventListener("message", (event) => receive(event.data));
        worker.addEventListener("error", (event) => fail(event.message || `${url} cannot be loaded`));
        return { post: (message) => worker.postMessage(message), stop: () => worker.terminate(), keep() {}, release() {} };
    }
    const threads = await import("node:worker_threads");
    const worker = new threads.Worker(url, { name: "ruvllm" });
    worker.on("message", receive);
    worker.on("error", (error) => fail(error.message));
    worker.on("exit", (code) => fail(`exit code ${code}`));
    return {
        post: (message) => worker.postMessage(message),
        stop: () => void worker.terminate(),
        keep: () => worker.ref(),
        release: () => worker.unref(),
    };
}

/** In a worker: the function that posts to the page, after `receive` was told to take its messages. */
export async function connect(receive) {
    if (!isNode) {
        self.addEventListener("message", (event) => receive(event.data));
        return (message) => self.postMessage(message);
    }
    const { parentPort } = await import("node:worker_threads");
    parentPort.on("message", receive);
    return (message) => parentPort.postMessage(message);
}

/** Bytes of the module beside this file, or a response that has them. */
export async function moduleBytes() {
    const url = new URL("./ruvllm_js_bg.wasm", import.meta.url);
    return isNode ? (await import("node:fs/promises")).readFile(url) : fetch(url);
}
