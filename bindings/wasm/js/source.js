// Files of models, part by part: from memory, from a File or Blob, from an address, from a path (Node).

import { isNode } from "./host.js";

/** Bytes read at a time. */
const PART = 8 << 20;
/** Attempts to go on with a download that broke off. */
const TRIES = 3;

export class FileError extends Error {
    name = "FileError";
}

/** The name of a file, its size (undefined if nobody knows) and its parts, an async iterator. */
export async function openSource(source, signal) {
    if (source instanceof Uint8Array) {
        return { name: "the file", size: source.length, parts: slices(source.length, (from, to) => source.subarray(from, to)) };
    }
    if (source instanceof Blob) {
        const read = async (from, to) => new Uint8Array(await source.slice(from, to).arrayBuffer());
        return { name: source.name ?? "the file", size: source.size, parts: slices(source.size, read) };
    }
    if (isNode && !/^(https?|blob|data):/.test(source)) return fromPath(source);
    return fromAddress(source, signal);
}

async function* slices(size, read) {
    for (let from = 0; from < size; from += PART) yield await read(from, Math.min(from + PART, size));
}

async function fromPath(path) {
    const { open } = await import("node:fs/promises");
    let file;
    try {
        file = await open(path.startsWith("file:") ? new URL(path) : path);
    } catch (error) {
        throw new FileError(`${path} cannot be opened: ${error.message}`);
    }
    const { size } = await file.stat();
    async function* parts() {
        try {
            for (let at = 0; at < size; ) {
                const part = new Uint8Array(Math.min(PART, size - at));
                const { bytesRead } = await file.read(part, 0, part.length, at);
                if (bytesRead === 0) throw new FileError(`${path} ends after ${at} of ${size} bytes`);
                at += bytesRead;
                yield part.subarray(0, bytesRead);
            }
        } finally {
            await file.close();
        }
    }
    return { name: path, size, parts: parts() };
}

async function fromAddress(url, signal) {
    const get = async (from, version) => {
        const headers = from > 0 ? { Range: `bytes=${from}-`, ...(version && { "If-Range": version }) } : {};
        let response;
        try {
            response = await fetch(url, { headers, signal });
        } catch (error) {
            if (signal?.aborted) throw error;
            throw new FileError(`${url} cannot be fetched: ${error.cause?.message ?? error.message}`);
        }
        if (!response.ok) throw new FileError(`${url}: ${response.status} ${response.statusText}`);
        if (from > 0 && response.status !== 206) {
            await response.body?.cancel();
            throw new FileError(`${url} broke off after ${from} bytes, and the server does not continue downloads`);
        }
        return response;
    };
    let response = await get(0);
    // The length of what comes out, not of a compressed body.
    const length = response.headers.get("content-encoding") ? null : response.headers.get("content-length");
    const size = length === null ? undefined : Number(length);
    const version = response.headers.get("etag") ?? response.headers.get("last-modified");
    async function* parts() {
        for (let at = 0, tries = 0; ; ) {
            let reason = "the connection closed";
            try {
                for (const reader = response.body.getReader(); ; ) {
                    const { done, value } = await reader.read();
                    if (done) break;
                    at += value.length;
                    yield value;
                }
                if (size === undefined || at >= size) return;
            } catch (error) {
                if (signal?.aborted) throw error;
                if (size === undefined) throw new FileError(`${url} broke off after ${at} bytes: ${error.message}`);
                reason = error.message;
            }
            if (++tries > TRIES) throw new FileError(`${url} broke off after ${at} of ${size} bytes: ${reason}`);
            response = await get(at, version);
        }
    }
    return { name: url, size, parts: parts() };
}
