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
export async function openSource(source) {
    if (source instanceof Uint8Array) {
        return { name: "the file", size: source.length, parts: slices(source.length, (from, to) => source.subarray(from, to)) };
    }
    if (source instanceof Blob) {
        const name = source.name ?? "the file";
        const read = async (from, to) => {
            try {
                return new Uint8Array(await source.slice(from, to).arrayBuffer());
            } catch (error) {
                throw new FileError(`${name} cannot be read: ${error.message}`);
            }
        };
        return { name, size: source.size, parts: slices(source.size, read) };
    }
    if (isNode && !/^(https?|blob|data):/.test(source)) return fromPath(source);
    return fromAddress(source);
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
    const failed = (error) => {
        throw new FileError(`${path} cannot be read: ${error.message}`);
    };
    const { size } = await file.stat().catch(failed);
    async function* parts() {
        try {
            for (let at = 0; at < size; ) {
                const part = new Uint8Array(Math.min(PART, size - at));
                const { bytesRead } = await file.read(part, 0, part.length, at).catch(failed);
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

/** What the answer to a request of all after `at` bytes says; null for what it, or what a page may see of it, lacks. */
function described({ status, headers }, at) {
    const number = (text) => (/^\d+$/.test(text ?? "") ? Number(text) : null);
    const [, first, all] = /^bytes (\d+)-\d+\/(\d+|\*)$/.exec(headers.get("content-range") ?? "") ?? [];
    // The length of what comes out, not of a compressed body.
    const length = headers.get("content-encoding") ? null : number(headers.get("content-length"));
    const from = status === 206 ? (number(first) ?? at) : 0;
    const total = number(all) ?? (length === null ? null : from + length);
    return { from, file: [total, headers.get("etag"), headers.get("last-modified")] };
}

async function fromAddress(url) {
    const get = async (headers) => {
        let response;
        try {
            response = await fetch(url, { headers });
        } catch (error) {
            throw new FileError(`${url} cannot be fetched: ${error.cause?.message ?? error.message}`);
        }
        if (!response.ok) throw new FileError(`${url}: ${response.status} ${response.statusText}`);
        return response;
    };
    let response = await get({});
    const { file } = described(response, 0);
    const [total, etag, modified] = file;
    const size = total ?? undefined;
    /** All after `at` bytes, of the version that these are of. */
    const rest = async (at) => {
        // A weak tag does not tell bytes apart.
        const version = etag?.startsWith('"') ? etag : modified;
        const response = await get({ Range: `bytes=${at}-`, ...(version && { "If-Range": version }) });
        const later = described(response, at);
        const same = file.every((value, i) => value === null || later.file[i] === null || value === later.file[i]);
        if (same && later.from === at) return response;
        await response.body?.cancel();
        const reason = !same ? "it is another file by now" : "the server does not continue downloads";
        throw new FileError(`${url} broke off after ${at} of ${size} bytes, and ${reason}`);
    };
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
                if (size === undefined) throw new FileError(`${url} broke off after ${at} bytes: ${error.message}`);
                reason = error.message;
            }
            if (++tries > TRIES) throw new FileError(`${url} broke off after ${at} of ${size} bytes: ${reason}`);
            response = await rest(at);
        }
    }
    return { name: url, size, parts: parts() };
}
