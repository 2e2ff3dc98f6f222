"""The web page of `ruvllm serve` in a headless Chromium, as someone with a mouse, a keyboard or a screen reader uses it.

    python3 tests/browser.py target/release/ruvllm FOLDER

Needs chromium and chromedriver (Debian's packages chromium, chromium-driver). Writes pictures into FOLDER. WebDriver
(https://www.w3.org/TR/webdriver2/) is spoken with the standard library alone.
"""

import base64
import contextlib
import json
import os
import re
import struct
import subprocess
import sys
import tempfile
import time
import urllib.request

ELEMENT = "element-6066-11e4-a52e-4f735466cecf"
FLAGS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--window-size=1000,900",
]
ENTER, ESCAPE, TAB, SHIFT = "\ue007", "\ue00c", "\ue004", "\ue008"


def line_with(process, stream, pattern):
    """The group of the first line that matches."""
    for line in stream:
        if found := re.search(pattern, line):
            return found[1]
    raise SystemExit(f"{process.args[0]} ended without {pattern!r}")


class Browser:
    def __init__(self, profile):
        self.driver = subprocess.Popen(["chromedriver", "--port=0"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        port = line_with(self.driver, self.driver.stdout, r"started successfully on port (\d+)")
        self.url = f"http://127.0.0.1:{port}/session"
        options = {"args": [*FLAGS, f"--user-data-dir={profile}"]}
        wanted = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL", "performance": "ALL"}}
        self.session = self.call("POST", "", {"capabilities": {"alwaysMatch": wanted}})["sessionId"]
        self.url += f"/{self.session}"

    def call(self, method, path, body=None):
        data = None if method == "GET" else json.dumps(body or {}).encode()
        request = urllib.request.Request(self.url + path, data, {"content-type": "application/json"}, method=method)
        try:
            with urllib.request.urlopen(request, timeout=60) as response:
                return json.load(response)["value"]
        except urllib.error.HTTPError as error:
            raise RuntimeError(error.read().decode()) from None

    def close(self):
        with contextlib.suppress(Exception):
            self.call("DELETE", "")
        self.driver.terminate()
        self.driver.wait()

    def script(self, code, *args):
        return self.call("POST", "/execute/sync", {"script": code, "args": args})

    def find(self, css):
        return self.call("POST", "/element", {"using": "css selector", "value": css})[ELEMENT]

    def click(self, css):
        self.call("POST", f"/element/{self.find(css)}/click")

    def type(self, css, text):
        self.call("POST", f"/element/{self.find(css)}/value", {"text": text})

    def keys(self, *strokes):
        """Keys to whatever has the focus; a stroke is a key, or keys held together."""
        actions = []
        for stroke in strokes:
            actions += [{"type": "keyDown", "value": key} for key in stroke]
            actions += [{"type": "keyUp", "value": key} for key in reversed(stroke)]
        self.call("POST", "/actions", {"actions": [{"type": "key", "id": "keyboard", "actions": actions}]})

    def text(self, css):
        return self.script("return document.querySelector(arguments[0]).textContent", css)

    def texts(self, css):
        return self.script("return [...document.querySelectorAll(arguments[0])].map(e => e.textContent)", css)

    def focus(self):
        return self.script("return document.activeElement.id")

    def wait(self, what, condition, seconds=30):
        end = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > end:
                raise SystemExit(f"waited in vain till {what}: {self.text('#status')!r} {self.text('#error')!r}")
            time.sleep(0.02)

    def picture(self, path):
        with open(path, "wb") as file:
            file.write(base64.b64decode(self.call("GET", "/screenshot")))

    def cdp(self, command, **params):
        return self.call("POST", "/goog/cdp/execute", {"cmd": command, "params": params})

    def scheme(self, name):
        self.cdp("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": name}])

    def width(self, pixels):
        """A window of that width, narrower than a real one may be."""
        self.cdp("Emulation.setDeviceMetricsOverride", width=pixels, height=844, deviceScaleFactor=1, mobile=False)

    def tree(self):
        """Role and name of everything that a screen reader meets."""
        nodes = self.cdp("Accessibility.getFullAXTree")["nodes"]
        of = lambda node, key: node.get(key, {}).get("value", "")
        return [(of(node, "role"), of(node, "name")) for node in nodes if not node["ignored"]]


@contextlib.contextmanager
def serve(program, *flags):
    server = subprocess.Popen([program, "serve", "--port", "0", "--temp", "0", *flags], stderr=subprocess.PIPE, text=True)
    try:
        yield line_with(server, server.stderr, r"ready on (http://\S+)")
    finally:
        server.kill()
        server.wait()


def adapter(folder):
    """A LoRA adapter of the built-in model, of rank 1 and zeros, in GGUF 3 as llama.cpp reads it."""
    n_embd, text = 256, lambda text: struct.pack("<Q", len(text)) + text.encode()
    metadata = {"general.type": "adapter", "general.architecture": "llama", "adapter.type": "lora"}
    pairs = [text(key) + struct.pack("<I", 8) + text(value) for key, value in metadata.items()]
    pairs.append(text("adapter.lora.alpha") + struct.pack("<If", 6, 1.0))
    shapes = {"blk.0.attn_q.weight.lora_a": (n_embd, 1), "blk.0.attn_q.weight.lora_b": (1, n_embd)}
    tensors = [
        text(name) + struct.pack("<IQQIQ", 2, *shape, 0, i * n_embd * 4) for i, (name, shape) in enumerate(shapes.items())
    ]
    header = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(pairs)) + b"".join(pairs) + b"".join(tensors)
    path = os.path.join(folder, "rusty.gguf")
    with open(path, "wb") as file:
        file.write(header + bytes(-len(header) % 32) + bytes(2 * n_embd * 4))
    return path


def check(browser, address, pictures):
    picture = lambda name: browser.picture(os.path.join(pictures, f"{name}.png"))
    answers = lambda: browser.texts("#messages li.assistant .text")
    figures = lambda: browser.texts("#messages .figures")[-1]
    done = lambda: browser.script("return !document.getElementById('send').disabled")

    # Without the key the page says so, and leads to its field.
    browser.call("POST", "/url", {"url": address})
    browser.wait("the key is asked for", lambda: "key" in browser.text("#error") and browser.focus() == "key")
    picture("1-key")
    browser.type("#key", "secret" + TAB)
    browser.wait("the models are listed", lambda: browser.texts("#model option"))
    base, adapted = browser.texts("#model option")
    assert adapted == f"{base}:rusty", (base, adapted)

    # It begins with a hint, and tells what a setting is unless one is made.
    browser.wait("the page is ready", lambda: browser.text("#status") == "Ready.")
    assert "this server" in browser.text("#start") and browser.script("return document.getElementById('temperature').placeholder") == "0"
    browser.click("#start button")
    assert browser.script("return document.getElementById('prompt').value") == browser.text("#start button")
    browser.script("document.getElementById('prompt').value = ''")

    # With the keyboard alone: a question, its answer, the figures.
    browser.script("document.getElementById('prompt').focus()")
    browser.keys(*"What is", SHIFT + ENTER, *"a trait?")
    assert browser.script("return document.getElementById('prompt').value") == "What is\na trait?"
    browser.type("#max-tokens", "24")
    browser.script("document.getElementById('prompt').focus()")
    browser.keys(ENTER)
    browser.wait("the answer is there", lambda: "Done" in browser.text("#status"))
    assert re.search(r"\d+ tokens at \d+\.\d tokens/s; prompt of \d+ tokens, 0 of", figures()), figures()
    assert browser.texts("#messages li.user .text") == ["What is\na trait?"] and answers()[0], answers()
    picture("2-answer")

    # The same again: the same text, its prompt from the cache.
    first = answers()
    browser.click("#again")
    browser.wait("it was answered again", lambda: done() and "Done" in browser.text("#status"))
    assert answers() == first
    assert not re.search(r" 0 of them", figures()), figures()

    # A setting that makes no sense is not sent; one that does changes the answer.
    browser.type("#temperature", "9")
    browser.click("#again")
    assert done() and not browser.script("return document.getElementById('temperature').checkValidity()")
    browser.script("document.getElementById('temperature').value = ''")
    browser.type("#temperature", "1.5")
    browser.type("#seed", "3")
    browser.click("#again")
    browser.wait("it was answered warmly", lambda: done() and "Done" in browser.text("#status"))
    assert answers() != first

    # A long answer comes bit by bit, and ends where it is stopped: by Escape, by the button.
    for id in ["temperature", "seed", "max-tokens"]:
        browser.script("document.getElementById(arguments[0]).value = ''", id)
    for way in ["key", "button"]:
        browser.click("#new")
        browser.wait("the page is empty", lambda: browser.text("#status") == "New chat.")
        browser.type("#max-tokens", "30000")
        browser.type("#prompt", "Tell me about Rust, at length." + ENTER)
        browser.wait("text comes", lambda: answers() and answers()[0])
        assert not done() and browser.script("return document.getElementById('messages').ariaBusy") == "true"
        some = answers()[0]
        browser.wait("more text comes", lambda: len(answers()[0]) > len(some))
        if way == "key":
            browser.keys(ESCAPE)
        else:
            browser.click("#stop")
        browser.wait("it has stopped", done, 5)
        assert browser.text("#status") == "Stopped." and browser.focus() == "prompt", browser.text("#status")
        stopped = answers()[0]
        time.sleep(0.3)
        assert answers()[0] == stopped
        browser.script("document.getElementById('max-tokens').value = ''")
    headers = {"authorization": "Bearer secret"}
    with urllib.request.urlopen(urllib.request.Request(address + "/metrics", headers=headers)) as response:
        assert "llamacpp:requests_processing 0" in response.read().decode(), "the server goes on"

    # The adapter answers, under its name; what was said stays in the conversation.
    browser.click("#new")
    browser.wait("the page is empty", lambda: browser.text("#status") == "New chat.")
    browser.type("#max-tokens", "16")
    browser.script("const model = document.getElementById('model'); model.value = arguments[0]", adapted)
    browser.type("#prompt", "<b>What</b> is a slice?" + ENTER)
    browser.wait("the adapter answers", lambda: "Done" in browser.text("#status"))
    assert browser.texts("#messages h2") == ["You", adapted]
    assert browser.texts("#messages li.user .text") == ["<b>What</b> is a slice?"], "text is not HTML"
    browser.type("#prompt", "And a trait?" + ENTER)
    browser.wait("there are two answers", lambda: len(answers()) == 2 and "Done" in browser.text("#status"))
    picture("3-adapter")

    # A question that is edited takes the place of what followed; Escape leaves it.
    value = lambda: browser.script("return document.getElementById('prompt').value")
    edit = "#messages li.user:nth-child(3) .tools button:last-child"
    browser.click(edit)
    assert value() == "And a trait?" and browser.focus() == "prompt"
    browser.keys(ESCAPE)
    assert value() == "" and len(answers()) == 2
    browser.click(edit)
    browser.type("#prompt", " Or two?" + ENTER)
    browser.wait("it is answered in its place", lambda: len(answers()) == 2 and "Done" in browser.text("#status"))
    assert browser.texts("#messages li.user .text")[1] == "And a trait? Or two?"

    # What the server refuses is said in its words, and the question comes back.
    browser.script("document.getElementById('system').value = 'word '.repeat(20000)")
    browser.type("#prompt", "Too long" + ENTER)
    browser.wait("the refusal is there", lambda: "context" in browser.text("#error"))
    assert browser.script("return document.getElementById('prompt').value") == "Too long" and len(answers()) == 2
    picture("4-refusal")

    # A screen reader finds everything under a name; the keyboard reaches it all.
    tree = browser.tree()
    for part in [
        ("button", "Copy"), ("button", "Edit"), ("combobox", "Model"), ("log", "Conversation"), ("textbox", "Message"), ("button", "Send"), ("button", "Stop"),
        ("button", "New chat"), ("button", "Try again"), ("spinbutton", "Temperature"), ("textbox", "API key"), ("heading", "ruvllm"),
    ]:
        assert part in tree, f"{part} is not in {tree}"
    assert {"status", "alert"} <= {role for role, _ in tree}, tree
    nameless = [role for role, name in tree if role in ("textbox", "spinbutton", "button", "combobox", "link") and not name]
    assert not nameless, nameless
    assert browser.script("return document.getElementById('settings').open")
    browser.script("document.activeElement.blur()")
    reached = set()
    for _ in range(50):
        browser.keys(TAB)
        reached.add(browser.focus())
    expected = {"model", "new", "messages", "prompt", "send", "again", "system", "temperature", "top-k", "top-p", "min-p", "seed", "key"}
    assert expected <= reached, expected - reached

    # A narrow window scrolls up and down alone.
    browser.width(390)
    assert browser.script("return document.documentElement.scrollWidth <= innerWidth")
    picture("5-narrow-settings")
    browser.click("#settings summary")
    picture("5-narrow")
    browser.cdp("Emulation.clearDeviceMetricsOverride")
    # Chats outlive a reload, in the browser; the key does in this tab alone.
    before = answers()
    browser.call("POST", "/refresh")
    browser.wait("the models are listed", lambda: browser.texts("#model option"))
    assert answers() == before and browser.texts("#messages li.user .text")[0] == "<b>What</b> is a slice?"
    assert browser.script("return [Object.keys(localStorage), document.cookie]") == [["ruvllm-chats"], ""]
    assert "secret" not in browser.script("return localStorage.getItem('ruvllm-chats')")
    assert browser.script("return sessionStorage.getItem('ruvllm-api-key')") == "secret"
    titles = lambda: browser.texts("#chats li button:first-child")
    assert titles()[0] == "<b>What</b> is a slice?" and len(titles()) >= 2, titles()
    browser.click("#history summary")
    picture("6-chats")
    second = titles()[1]
    browser.click("#chats li:nth-child(2) button:first-child")
    browser.wait("the other chat is there", lambda: browser.texts("#messages li.user .text")[0] == second)
    browser.click("#history summary")
    n = len(titles())
    browser.click("#chats li:nth-child(2) button:last-child")
    assert len(titles()) == n - 1
    browser.wait("its place is empty", lambda: not answers())
    browser.click("#history summary")
    browser.click("#kept")
    assert browser.script("return Object.keys(localStorage)") == ["ruvllm-keeps-no-chats"] and titles() == []

    # Nothing was asked of others, and the browser has nothing to complain of.
    log = lambda kind: browser.call("POST", "/se/log", {"type": kind})
    sent = [json.loads(entry["message"])["message"] for entry in log("performance")]
    urls = {event["params"]["request"]["url"] for event in sent if event["method"] == "Network.requestWillBeSent"}
    # The browser's own first page has addresses of its own.
    elsewhere = [url for url in urls if not url.startswith((address, "data:", "chrome:"))]
    assert urls and not elsewhere, elsewhere
    # Refused requests are among its errors: one without the key, one too long.
    severe = [entry["message"] for entry in log("browser") if entry["level"] == "SEVERE"]
    errors = [message for message in severe if not re.search("status of 40[01]", message)]
    assert not errors, errors


MARKDOWN = """# What a *title* is

Some **bold text**, _italics_ and snake_case_names, `code <b>`, a [link](https://example.com/a?b=1), https://example.org/x.
A [bad one](javascript:alert(1)), <img src=x onerror="window.hacked = 1">, \\*no mark\\*, 2 * 3 * 4.

- one
- two
  - nested

3. third
4. fourth

> quoted

| a | b |
|---|---|
| 1 | **2** |

```html
<script>window.hacked = 2</script>
**raw**
```

<script>window.hacked = 3</script> ![picture](https://example.com/p.png) [data](data:text/html,hi)"""


def check_markdown(browser, address, pictures):
    """An answer of all kinds of marks, and of what must not be more than text: the server's grammar makes it."""
    browser.call("POST", "/url", {"url": address})
    browser.wait("the model is listed", lambda: browser.texts("#model option"))
    browser.type("#prompt", "Show me" + ENTER)
    browser.wait("the answer is there", lambda: "Done" in browser.text("#status"), 120)
    answer = "#messages li.assistant .text"
    count = lambda tag: len(browser.texts(f"{answer} {tag}"))
    for tag, n in {
        "h3": 1, "em": 2, "strong": 2, "ul": 2, "ol": 1, "li": 5, "blockquote": 1, "table": 1, "td": 2, "pre": 1, "code": 2,
        "script": 0, "img": 0, "b": 0,
    }.items():
        assert count(tag) == n, (tag, count(tag), n)
    links = browser.script("return [...document.querySelectorAll('.text a')].map(a => [a.href, a.textContent, a.rel])")
    assert links == [
        ["https://example.com/a?b=1", "link", "noopener noreferrer"], ["https://example.org/x", "https://example.org/x", "noopener noreferrer"],
        ["https://example.com/p.png", "picture", "noopener noreferrer"],
    ], links
    shown = browser.text(answer)
    for text in [
        "<img src=x onerror=", "<script>window.hacked = 3</script>", "javascript:alert(1)", "*no mark*", "2 * 3 * 4", "snake_case_names",
        "[data](data:text/html,hi)",
    ]:
        assert text in shown, (text, shown)
    assert browser.text(f"{answer} pre") == "<script>window.hacked = 2</script>\n**raw**"
    assert browser.script("return document.querySelector('.text ol').start") == 3
    assert browser.script("return window.hacked ?? null") is None
    # What is copied is the text as the model wrote it.
    browser.script("navigator.clipboard.writeText = async (text) => { window.copied = text; }")
    browser.click("#messages li.assistant .tools button")
    browser.wait("it is copied", lambda: browser.text("#status") == "Copied.")
    assert browser.script("return window.copied") == MARKDOWN
    browser.picture(os.path.join(pictures, "7-markdown-light.png"))
    browser.scheme("dark")
    browser.picture(os.path.join(pictures, "7-markdown-dark.png"))
    browser.width(390)
    assert browser.script("return document.documentElement.scrollWidth <= innerWidth")
    browser.picture(os.path.join(pictures, "7-markdown-narrow.png"))
    # Marks without an end, and in each other without one, take no time to speak of.
    browser.call("POST", "/timeouts", {"script": 20000})
    slow = browser.script("""
        return import("/markdown.js").then(({ Markdown }) => {
          const texts = ["*a ".repeat(6000), "[".repeat(19000), "> ".repeat(20000), "- ".repeat(20000) + "x", "`a``".repeat(5000), "**a_".repeat(4000), "|".repeat(100000)];
          return texts.map((text) => {
            const begin = performance.now();
            const element = document.createElement("div");
            new Markdown(element).show(text);
            return performance.now() - begin;
          });
        })""")
    assert max(slow) < 5000, slow


def main():
    program, pictures = sys.argv[1:]
    os.makedirs(pictures, exist_ok=True)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        rusty = adapter(folder)
        with serve(program, "-c", "32768", "--api-key", "secret", "--lora", rusty) as address:
            browser = Browser(os.path.join(folder, "profile"))
            try:
                check(browser, address, pictures)
            finally:
                browser.close()
        grammar = f"root ::= {json.dumps(MARKDOWN)}"
        with serve(program, "-c", "2048", "--grammar", grammar) as address:
            browser = Browser(os.path.join(folder, "another profile"))
            try:
                check_markdown(browser, address, pictures)
            finally:
                browser.close()
    print("the page works in", subprocess.run(["chromium", "--version"], capture_output=True, text=True).stdout.strip())


if __name__ == "__main__":
    main()
