// The service worker: keeps the page's own files, and lets the page share memory among threads from its second visit on,
// whatever server it is on. The network comes first, so that a new version is seen at once.
const NAME = "ruvllm-page";
const FILES = [
    "./", "style.css", "app.js", "ruvllm/index.js", "ruvllm/host.js", "ruvllm/source.js", "ruvllm/worker.js",
    "ruvllm/ruvllm_js.js", "ruvllm/ruvllm_js_bg.wasm", "ruvllm/helper.js", "ruvllm/threads/ruvllm_js.js",
    "ruvllm/threads/ruvllm_js_bg.wasm",
];

/** The response with the headers of an isolated page. */
function isolated(response) {
    const headers = new Headers(response.headers);
    headers.set("Cross-Origin-Opener-Policy", "same-origin");
    headers.set("Cross-Origin-Embedder-Policy", "require-corp");
    return new Response(response.body, { status: response.status, statusText: response.statusText, headers });
}

self.addEventListener("install", (event) => event.waitUntil(caches.open(NAME).then((kept) => kept.addAll(FILES))));
self.addEventListener("activate", (event) => event.waitUntil(self.clients.claim()));
self.addEventListener("fetch", (event) => {
    const { request } = event;
    if (request.method !== "GET" || new URL(request.url).origin !== location.origin) return;
    event.respondWith(
        fetch(request).then(
            (response) => {
                if (response.ok) {
                    const copy = response.clone();
                    event.waitUntil(caches.open(NAME).then((kept) => kept.put(request, copy)));
                }
                return isolated(response);
            },
            async (error) => {
                const kept = await caches.match(request, { ignoreSearch: true });
                if (kept) return isolated(kept);
                throw error;
            },
        ),
    );
});
