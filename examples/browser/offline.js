// The service worker: keeps the page's own files. The network comes first, so that a new version is seen at once.
const NAME = "ruvllm-page";
const FILES = [
    "./", "style.css", "app.js", "ruvllm/index.js", "ruvllm/host.js", "ruvllm/source.js", "ruvllm/worker.js",
    "ruvllm/ruvllm_js.js", "ruvllm/ruvllm_js_bg.wasm",
];

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
                return response;
            },
            async (error) => {
                const kept = await caches.match(request, { ignoreSearch: true });
                if (kept) return kept;
                throw error;
            },
        ),
    );
});
