// A chat with the server that sent this page. Texts of models only ever become text nodes, never HTML.
"use strict";

const element = (id) => document.getElementById(id);
const [model, messages, error, status, form, prompt, send, stop, again, system, key, pictures, add, files] =
  ["model", "messages", "error", "status", "form", "prompt", "send", "stop", "again", "system", "key", "pictures", "add", "files"]
    .map(element);
const KEY = "ruvllm-api-key";

/** The conversation, as the API takes it. */
let conversation = [];
/** Ends the request that runs. */
let running = null;
/** Whether the model reads pictures. */
let seesPictures = false;
/** Those of the next message, as data URLs. */
let chosen = [];

/** A response that is as it should be; otherwise an error with the server's own words. */
async function ask(path, options = {}) {
  const headers = key.value ? { authorization: `Bearer ${key.value}` } : {};
  const response = await fetch(path, { ...options, headers: { "content-type": "application/json", ...headers } });
  if (response.ok) return response;
  const body = await response.json().catch(() => null);
  const wrong = new Error(body?.error?.message ?? `the server answered with status ${response.status}`);
  wrong.status = response.status;
  throw wrong;
}

function complain(wrong) {
  error.textContent = wrong.status ? wrong.message : `The server cannot be reached: ${wrong.message}`;
  error.hidden = false;
  if (wrong.status === 401) {
    element("settings").open = true;
    key.focus();
  }
}

/** The model and its adapters; asks again while the model is being loaded. */
async function listModels() {
  try {
    const { data } = await (await ask("v1/models")).json();
    const chosen = model.value;
    model.replaceChildren(...data.map(({ id }) => new Option(id, id, false, id === chosen)));
    // Of several models, one that is not loaded is when it is asked for.
    const isLoaded = data.find(({ id }) => id === model.value)?.status.value === "loaded";
    const props = isLoaded && await (await ask(`props?model=${encodeURIComponent(model.value)}`)).json();
    element("base").hidden = !props?.is_base_model;
    seesPictures = Boolean(props?.modalities?.vision);
    add.hidden = !seesPictures;
    error.hidden = true;
    status.textContent = "Ready.";
  } catch (wrong) {
    if (wrong.status !== 503) return complain(wrong);
    status.textContent = "The model is being loaded.";
    setTimeout(listModels, 1000);
  }
}

/** A message of the conversation on the page: where its text and the rest go. */
function show(role) {
  const make = (tag, of, text = "") => Object.assign(document.createElement(tag), { className: of, textContent: text });
  const item = make("li", role);
  const thoughts = make("details", "thinking");
  thoughts.hidden = true;
  thoughts.append(make("summary", "", "Reasoning"), make("div", "thoughts"));
  const [text, figures] = [make("div", "text"), make("p", "figures")];
  item.append(make("h2", "", role === "user" ? "You" : model.value || "Model"), thoughts, text, figures);
  messages.append(item);
  return { item, thoughts, text, figures };
}

/** Appends text, and keeps the end in sight of whoever was there. */
function append(node, text) {
  const atEnd = messages.scrollHeight - messages.scrollTop - messages.clientHeight < 40;
  node.append(text);
  if (atEnd) messages.scrollTop = messages.scrollHeight;
}

/** A picture on the page. */
function picture(url) {
  return Object.assign(document.createElement("img"), { src: url, alt: "Picture" });
}

/** Shows the pictures of the next message, each with a way to take it back. */
function showChosen() {
  pictures.hidden = chosen.length === 0;
  pictures.replaceChildren(...chosen.map((url, i) => {
    const remove = Object.assign(document.createElement("button"), { type: "button", textContent: "Remove" });
    remove.addEventListener("click", () => {
      chosen.splice(i, 1);
      showChosen();
    });
    const item = document.createElement("li");
    item.append(picture(url), remove);
    return item;
  }));
}

/** Takes files that were chosen, dropped or pasted into the next message. Whether there were pictures. */
async function take(list) {
  const images = [...list].filter((file) => file.type.startsWith("image/"));
  if (images.length === 0) return false;
  if (!seesPictures) {
    complain(Object.assign(new Error("This model reads text alone."), { status: 400 }));
    return true;
  }
  const read = (file) => new Promise((done, failed) => {
    const reader = new FileReader();
    reader.onload = () => done(reader.result);
    reader.onerror = () => failed(reader.error);
    reader.readAsDataURL(file);
  });
  try {
    chosen.push(...await Promise.all(images.map(read)));
    showChosen();
    status.textContent = `${chosen.length} ${chosen.length === 1 ? "picture" : "pictures"} in the next message.`;
  } catch (failure) {
    complain(Object.assign(new Error(`The picture cannot be read: ${failure.message}`), { status: 400 }));
  }
  return true;
}

/** The objects of a stream of events. */
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      const data = line.startsWith("data: ") ? line.slice(6).trim() : "";
      if (data && data !== "[DONE]") yield JSON.parse(data);
    }
  }
}

function figuresOf(usage, timings) {
  if (!usage || !timings) return "";
  const cached = usage.prompt_tokens_details?.cached_tokens ?? 0;
  return `${usage.completion_tokens} tokens at ${timings.predicted_per_second.toFixed(1)} tokens/s; ` +
    `prompt of ${usage.prompt_tokens} tokens, ${cached} of them from the cache`;
}

function settings() {
  const filled = [...document.querySelectorAll("[data-field]")].filter((input) => input.value !== "");
  return Object.fromEntries(filled.map((input) => [input.dataset.field, Number(input.value)]));
}

/** Asks for the next message of the conversation. */
async function answer() {
  const wrong = [...document.querySelectorAll("[data-field]")].find((input) => !input.checkValidity());
  if (wrong) {
    element("settings").open = true;
    return wrong.reportValidity();
  }
  running = new AbortController();
  error.hidden = true;
  update();
  status.textContent = "Answering …";
  // Nothing is read out before it is complete.
  messages.setAttribute("aria-busy", "true");
  const shown = show("assistant");
  const instructions = system.value ? [{ role: "system", content: system.value }] : [];
  let [text, usage, timings, reason] = ["", null, null, null];
  try {
    const response = await ask("v1/chat/completions", {
      method: "POST",
      signal: running.signal,
      body: JSON.stringify({
        model: model.value, messages: [...instructions, ...conversation], stream: true,
        stream_options: { include_usage: true }, ...settings(),
      }),
    });
    for await (const event of events(response)) {
      if (event.error) throw Object.assign(new Error(event.error.message), { status: event.error.code });
      const choice = event.choices?.[0];
      if (choice?.delta?.reasoning_content) {
        shown.thoughts.hidden = false;
        append(shown.thoughts.lastChild, choice.delta.reasoning_content);
      }
      if (choice?.delta?.content) {
        text += choice.delta.content;
        append(shown.text, choice.delta.content);
      }
      reason = choice?.finish_reason ?? reason;
      [usage, timings] = [event.usage ?? usage, event.timings ?? timings];
    }
    const cut = reason === "length" ? "Cut off: the limit of tokens was reached. " : "";
    shown.figures.textContent = cut + figuresOf(usage, timings);
    status.textContent = `Done. ${shown.figures.textContent}`;
  } catch (failure) {
    if (failure.name === "AbortError") {
      shown.figures.textContent = status.textContent = "Stopped.";
    } else {
      status.textContent = "";
      complain(failure);
    }
  }
  if (text || reason) {
    conversation.push({ role: "assistant", content: text });
  } else {
    // Without an answer the question goes back, as templates expect the two in turn.
    shown.item.remove();
    messages.lastChild.remove();
    const { content } = conversation.pop();
    const parts = typeof content === "string" ? [{ type: "text", text: content }] : content;
    prompt.value ||= parts.find(({ type }) => type === "text").text;
    if (chosen.length === 0) {
      chosen = parts.filter(({ type }) => type === "image_url").map(({ image_url }) => image_url.url);
      showChosen();
    }
  }
  running = null;
  messages.removeAttribute("aria-busy");
  update();
}

/** Which buttons do something. */
function update() {
  [send.disabled, stop.disabled] = [running !== null, running === null];
  again.disabled = running !== null || conversation.length === 0;
}

form.addEventListener("submit", (event) => {
  event.preventDefault();
  const text = prompt.value.trim();
  if (running || !text) return;
  const images = chosen.map((url) => ({ type: "image_url", image_url: { url } }));
  const content = images.length > 0 ? [...images, { type: "text", text }] : text;
  conversation.push({ role: "user", content });
  const shown = show("user").text;
  chosen.forEach((url) => append(shown, picture(url)));
  append(shown, text);
  prompt.value = "";
  chosen = [];
  showChosen();
  answer();
});

prompt.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    form.requestSubmit();
  }
});

prompt.addEventListener("paste", (event) => {
  const { files: pasted } = event.clipboardData;
  if ([...pasted].some((file) => file.type.startsWith("image/"))) {
    event.preventDefault();
    take(pasted);
  }
});

// A file that is dropped beside the field must not take the page's place.
document.addEventListener("dragover", (event) => event.preventDefault());
document.addEventListener("drop", (event) => {
  event.preventDefault();
  take(event.dataTransfer.files);
});

add.addEventListener("click", () => files.click());
files.addEventListener("change", async () => {
  await take(files.files);
  files.value = "";
  prompt.focus();
});

document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && running) running.abort();
});

stop.addEventListener("click", () => {
  running?.abort();
  prompt.focus();
});

again.addEventListener("click", () => {
  if (conversation.at(-1).role === "assistant") {
    conversation.pop();
    messages.lastChild.remove();
  }
  prompt.focus();
  answer();
});

element("new").addEventListener("click", async () => {
  running?.abort();
  // The end of what runs comes first.
  while (running) await new Promise((done) => setTimeout(done, 10));
  conversation = [];
  chosen = [];
  showChosen();
  messages.replaceChildren();
  error.hidden = true;
  status.textContent = "New chat.";
  update();
  prompt.focus();
});

model.addEventListener("change", listModels);

key.addEventListener("change", () => {
  sessionStorage.setItem(KEY, key.value);
  listModels();
});

key.value = sessionStorage.getItem(KEY) ?? "";
listModels();
