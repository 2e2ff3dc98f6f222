// node wasi.mjs PROGRAM.wasm ARGUMENTS: runs a program built for wasm32-wasip1, with this process's environment; it
// sees the working folder, the repository, and the folder of reference data.
import { readFileSync } from "node:fs";
import { WASI } from "node:wasi";

const [program, ...args] = process.argv.slice(2);
const folders = [process.cwd(), process.env.RUVLLM_CONFORMANCE].filter(Boolean);
const wasi = new WASI({
    version: "preview1",
    args: [program, ...args],
    env: process.env,
    preopens: Object.fromEntries([[".", "."], ...folders.map((folder) => [folder, folder])]),
});
const module = await WebAssembly.compile(readFileSync(program));
process.exit(wasi.start(await WebAssembly.instantiate(module, wasi.getImportObject())));
