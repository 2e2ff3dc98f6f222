// What differs between Node and browsers: workers, and files by path.

export const isNode = typeof process !== "undefined" && Boolean(process.versions?.node) && !process.versions.electron?.renderer;

/** Whether workers can share memory: in Node, and in pages that are isolated by their headers (COOP and COEP). */
export const sharesMemory = isNode || globalThis.crossOriginIsolated === true;

/** Threads of a model by default: half of what the host counts, where two of these may be one core. */
export async function usualThreads() {
    if (!sharesMemory) return 1;
    const n = isNode ? (await import("node:os")).availableParallelism() : navigator.hardwareConcurrency;
    return n > 2 ? Math.ceil(n / 2) : n;
}

/**
 * A worker that runs the script at `url`. `receive` gets its messages, `fail` what stopped it. In Node a worker at rest does
 * not keep the process alive.
 */
export async function startWorker(url, receive, fail) {
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

/** The module at `url`, compiled. */
export async function compiled(url) {
    if (isNode) return WebAssembly.compile(await (await import("node:fs/promises")).readFile(url));
    const response = await fetch(url);
    if (!response.ok) throw new Error(`${url}: ${response.status} ${response.statusText}`);
    // A server that calls it something else than application/wasm.
    return WebAssembly.compileStreaming(response.clone()).catch(async () => WebAssembly.compile(await response.arrayBuffer()));
}
