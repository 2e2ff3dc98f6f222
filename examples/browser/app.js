// The page: a model from a dropped file, a conversation with it.
import { Model } from "./ruvllm/index.js";

/** For models that bring no template. */
const PLAIN = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:";

const at = (id) => document.getElementById(id);
let model;
let session;
let stop;
let messages = [];

function show(ids, shown = true) {
    for (const id of ids) at(id).hidden = !shown;
}

function tell(error) {
    at("error").textContent = error?.message ?? "";
    show(["error"], Boolean(error));
}

const megabytes = (bytes) => `${(bytes / 2 ** 20).toFixed(0)} MiB`;

async function openFile(file) {
    tell();
    model?.close();
    show(["progress"]);
    at("status").textContent = `Reading ${file.name} …`;
    try {
        const onProgress = ({ loaded, total }) => (at("progress").value = loaded / total);
        model = await Model.open(file, { onProgress });
        session = await model.session();
    } catch (error) {
        at("status").textContent = "No model yet.";
        return tell(error);
    } finally {
        show(["progress"], false);
    }
    const { architecture, n_params, type, threads } = model.info;
    const weights = `${(n_params / 1e6).toFixed(0)} million weights`;
    at("status").textContent = `${file.name}: ${architecture}, ${weights}, ${type}, threads: ${threads}`;
    messages = [];
    at("talk").replaceChildren();
    show(["drop"], false);
    show(["talk", "ask", "other"]);
    at("text").focus();
}

/** A message at the end of the conversation. */
function add(role, text) {
    const item = document.createElement("li");
    item.className = role;
    item.textContent = text;
    at("talk").append(item);
    item.scrollIntoView({ block: "end" });
    return item;
}

async function ask(question) {
    messages.push({ role: "user", content: question });
    add("user", question);
    const item = add("assistant", "");
    stop = new AbortController();
    show(["send"], false);
    show(["stop"]);
    tell();
    let answer = "";
    try {
        const chat_template = model.info.chat_template ? undefined : PLAIN;
        // Several turns fit the context; the oldest ones go when it is full.
        const max_tokens = Math.floor(Math.min(model.info.n_ctx_train, 4096) / 3);
        const options = { signal: stop.signal, max_tokens, chat_template, stop: chat_template && ["\nuser:"] };
        while (messages.length > 1 && (await model.tokenize(messages.map((m) => m.content).join("\n"))).length > 1.8 * max_tokens) {
            messages.splice(0, 2);
        }
        for await (const piece of session.chat(messages, options)) {
            answer += piece;
            item.textContent = answer.trimStart();
            item.scrollIntoView({ block: "end" });
        }
    } catch (error) {
        if (!stop.signal.aborted) tell(error);
    } finally {
        messages.push({ role: "assistant", content: answer });
        show(["send"]);
        show(["stop"], false);
        await tellSpeed();
    }
}

async function tellSpeed() {
    const result = session.result;
    if (!result) return;
    const { completion_tokens: n, completion_ms, computed_tokens, prompt_ms } = result;
    const rate = (tokens, ms) => (ms > 0 ? (1000 * tokens / ms).toFixed(1) : "–");
    at("speed").textContent =
        `${rate(n - 1, completion_ms)} tokens/s, prompt ${rate(computed_tokens, prompt_ms)} tokens/s, ` +
        `${result.n_past} tokens in the context, ${megabytes(await model.memory())} of memory`;
}

at("file").addEventListener("change", (event) => event.target.files[0] && openFile(event.target.files[0]));
at("other").addEventListener("click", () => {
    stop?.abort();
    show(["talk", "ask", "other"], false);
    show(["drop"]);
});
at("stop").addEventListener("click", () => stop.abort());
at("ask").addEventListener("submit", (event) => {
    event.preventDefault();
    const question = at("text").value.trim();
    if (!question || at("send").hidden) return;
    at("text").value = "";
    void ask(question);
});
at("text").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        at("ask").requestSubmit();
    }
});
document.addEventListener("dragover", (event) => {
    event.preventDefault();
    at("drop").classList.add("over");
});
document.addEventListener("dragleave", () => at("drop").classList.remove("over"));
document.addEventListener("drop", (event) => {
    event.preventDefault();
    at("drop").classList.remove("over");
    const [file] = event.dataTransfer.files;
    if (file && !at("drop").hidden) void openFile(file);
});

navigator.serviceWorker?.register("offline.js").catch(() => {});
