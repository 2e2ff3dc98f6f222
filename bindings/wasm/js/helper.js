// A thread of the engine: the module again, on the memory of the worker that started this one.

import init, { help } from "./threads/ruvllm_js.js";
import { connect } from "./host.js";

const post = await connect(async ({ module, memory, alarm }) => {
    try {
        await init({ module_or_path: module, memory });
        post({ helps: true });
        help();
    } catch (error) {
        // The worker that started this one may wait for it, and hear nothing.
        new BroadcastChannel(alarm).postMessage(error.message);
    }
});
post({ ready: true });
