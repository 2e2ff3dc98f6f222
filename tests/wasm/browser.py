"""The npm package and `examples/browser` in a headless Chromium, online and offline.

    python3 tests/wasm/browser.py PACKAGE FOLDER

PACKAGE is a folder that `bindings/wasm/pack.sh` made; pictures go into FOLDER. Needs chromium and chromedriver.
"""

import contextlib
import functools
import http.server
import json
import os
import shutil
import sys
import tempfile
import threading

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path.insert(0, os.path.join(ROOT, "tests"))
from browser import Browser  # noqa: E402

MODEL = os.path.join(ROOT, "models", "ruvllm-rust-6m-q8_0.gguf")
# The likeliest continuation, on both levels, and the tokens of a second.
GENERATE = """
const done = arguments[arguments.length - 1];
const [options, prompt, file, n] = arguments;
(async () => {
    const { Model } = await import("./ruvllm/index.js");
    const model = await Model.open(file, options);
    const session = await model.session();
    let text = "";
    for await (const piece of session.generate(prompt, { temperature: 0, max_tokens: n })) text += piece;
    model.close();
    return { text, threads: model.info.threads, ...session.result };
})().then((value) => done(JSON.stringify(value)), (error) => done(JSON.stringify({ error: String(error) })));
"""


class Quiet(http.server.SimpleHTTPRequestHandler):
    headers_of_all = {}

    def end_headers(self):
        for name, value in self.headers_of_all.items():
            self.send_header(name, value)
        super().end_headers()

    def log_message(self, *args):
        pass


class Isolated(Quiet):
    headers_of_all = {"Cross-Origin-Opener-Policy": "same-origin", "Cross-Origin-Embedder-Policy": "require-corp"}


@contextlib.contextmanager
def serve(folder, handler=Quiet):
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(handler, directory=folder))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/"
    finally:
        server.shutdown()
        server.server_close()


def usual_threads():
    n = os.cpu_count()
    return -(-n // 2) if n > 2 else n


def run(browser, script, *args):
    value = json.loads(browser.call("POST", "/execute/async", {"script": script, "args": args}))
    assert "error" not in value, value
    return value


def cdp(browser, command, **params):
    browser.call("POST", "/goog/cdp/execute", {"cmd": command, "params": params})


def ask(browser, question):
    browser.type("#text", question + "\ue007")
    browser.wait("the answer", lambda: not browser.script("return document.getElementById('send').hidden"), 60)
    answer = browser.texts("#talk .assistant")[-1]
    assert answer.strip(), f"no answer to {question!r}: {browser.text('#error')!r}"
    assert "tokens/s" in browser.text("#speed"), browser.text("#speed")
    return answer


def converse(browser, pictures):
    browser.type("#file", MODEL)
    browser.wait("the model", lambda: browser.script("return !document.getElementById('ask').hidden"))
    assert "million weights" in browser.text("#status")
    first = ask(browser, "What is a borrow?")
    ask(browser, "And a move?")
    assert len(browser.texts("#talk li")) == 4
    for name, scheme, width in [("light", "light", 1000), ("dark", "dark", 1000), ("phone", "light", 360)]:
        cdp(browser, "Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        cdp(browser, "Emulation.setDeviceMetricsOverride", width=width, height=800, deviceScaleFactor=1, mobile=width < 500)
        too_wide = "return document.documentElement.scrollWidth > document.documentElement.clientWidth"
        assert not browser.script(too_wide), f"{name}: the page is wider than the window"
        browser.picture(os.path.join(pictures, f"{name}.png"))
    cdp(browser, "Emulation.clearDeviceMetricsOverride")
    return first, browser.text("#speed")


def main(package, pictures):
    os.makedirs(pictures, exist_ok=True)
    with open(os.path.join(ROOT, "tests", "data", "greedy.txt"), encoding="utf-8") as file:
        prompt, _, expected = file.read().rstrip("\n").partition("\n")
    with tempfile.TemporaryDirectory() as folder:
        site = os.path.join(folder, "site")
        shutil.copytree(os.path.join(ROOT, "examples", "browser"), site, ignore=shutil.ignore_patterns("ruvllm"))
        shutil.copytree(package, os.path.join(site, "ruvllm"))
        shutil.copy(MODEL, os.path.join(site, "model.gguf"))
        browser = Browser(os.path.join(folder, "profile"))
        try:
            with serve(site) as url:
                browser.call("POST", "/timeouts", {"script": 120_000})
                browser.call("POST", "/url", {"url": url})
                for level in ["simd128", "scalar"]:
                    result = run(browser, GENERATE, {"level": level}, prompt, "model.gguf", 32)
                    assert result["text"] == expected and result["threads"] == 1, (level, result)
                    print(f"{level}: {31_000 / result['completion_ms']:.0f} tokens/s")
                refused = json.loads(browser.call("POST", "/execute/async", {"script": GENERATE, "args": [{"threads": 2}, prompt, "model.gguf", 1]}))
                assert "Cross-Origin-Opener-Policy" in refused["error"], refused
                _, speed = converse(browser, pictures)
                print(f"the page: {speed}")
                kept = "return navigator.serviceWorker.ready.then(() => true)"
                assert browser.script(kept)
            # The server is gone.
            browser.call("POST", "/refresh")
            assert browser.text("h1") == "A model in this page"
            converse(browser, os.path.join(folder, ""))
            threads = browser.text("#status").rpartition(" ")[2]
            assert int(threads) == usual_threads(), threads
            print(f"offline: the page answers with {threads} threads")
            with serve(site, Isolated) as url:
                browser.call("POST", "/url", {"url": url})
                for threads in [1, 2, 3]:
                    result = run(browser, GENERATE, {"threads": threads}, prompt, "model.gguf", 32)
                    assert result["text"] == expected and result["threads"] == threads, (threads, result)
                    print(f"isolated, {threads} threads: {31_000 / result['completion_ms']:.0f} tokens/s")
            log = browser.call("POST", "/se/log", {"type": "browser"})
            severe = [entry for entry in log if entry["level"] == "SEVERE" and "ERR_CONNECTION_REFUSED" not in entry["message"]]
            assert not severe, severe
        finally:
            browser.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
