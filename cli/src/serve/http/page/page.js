// A chat with the server that sent this page. Texts of models only ever become text nodes, never HTML.
"use strict";

const element = (id) => document.getElementById(id);
const [model, messages, error, status, form, prompt, send, stop, again, system, key] =
  ["model", "messages", "error", "status", "form", "prompt", "send", "stop", "again", "system", "key"].map(element);
const KEY = "ruvllm-api-key";

/** The conversation, as the API takes it. */
let conversation = [];
/** Ends the request that runs. */
let running = null;

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
    prompt.value ||= content;
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
  conversation.push({ role: "user", content: text });
  append(show("user").text, text);
  prompt.value = "";
  answer();
});

prompt.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    form.requestSubmit();
  }
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
  messages.replaceChildren();
  error.hidden = true;
  status.textContent = "New chat.";
  update();
  prompt.focus();
});

key.addEventListener("change", () => {
  sessionStorage.setItem(KEY, key.value);
  listModels();
});

key.value = sessionStorage.getItem(KEY) ?? "";
listModels();
